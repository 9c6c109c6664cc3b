"""The limit of open files is raised as far as it may be; what is missing is told with the fix."""

import subprocess
import sys

import pytest

from gateway.adapters.process_limits import files_needed, shortage

RAISED = """
import resource, sys
from gateway.adapters.process_limits import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(needed), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "allowed", "then"),
    [
        (200, 900, 500, 500, 500),
        (200, 400, 500, 400, 400),
        (600, 900, 500, 500, 600),
    ],
)
def test_the_soft_limit_is_raised_towards_the_hard_one(
    soft: int, hard: int, needed: int, allowed: int, then: int
) -> None:
    command = [sys.executable, "-c", RAISED, str(soft), str(hard), str(needed)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert said.split() == [str(allowed), str(then), str(hard)]


def test_what_is_missing_is_told_with_a_number_that_would_do() -> None:
    assert shortage(10_000, 8, files_needed(10_000, 8)) is None
    said = shortage(10_000, 8, 4096)
    assert said is not None
    assert "may open 4096 files" in said
    assert f"ulimit -n {files_needed(10_000, 8)}" in said
    fits = int(said.split()[-1])
    assert shortage(fits, 8, 4096) is None
