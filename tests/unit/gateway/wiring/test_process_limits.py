"""The limit of open files is raised as far as it may be; what is missing is told with the fix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.wiring.process_limits import (
    _SET_BY_USER,
    MAPPED_FROM_BYTES,
    PARTS,
    files_needed,
    give_back_large_blocks,
    memory_limit,
    memory_shortage,
    shortage,
)

RAISED = """
import resource, sys
from gateway.wiring.process_limits import allow_open_files
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


GIB = 1 << 30
VERSION_2 = {
    "proc/self/cgroup": "0::/system.slice/sluice.service\n",
    "sys/fs/cgroup/system.slice/memory.max": f"{3 * GIB}\n",
    "sys/fs/cgroup/system.slice/sluice.service/memory.max": "max\n",
}
CONTAINER_2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}
CONTAINER_1 = {
    "proc/self/cgroup": "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
}
NO_LIMIT = {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/memory.max": "max\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (VERSION_2, 3 * GIB),
        (CONTAINER_2, GIB),
        (CONTAINER_1, 2 * GIB),
        (NO_LIMIT, sys.maxsize),
        ({}, sys.maxsize),
    ],
)
def test_the_memory_limit_is_the_least_of_the_cgroups(
    files: dict[str, str], limit: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def test_a_limit_of_address_space_is_a_memory_limit() -> None:
    limited = 'ulimit -v 2097152 && exec "$0" -c \'from gateway.wiring.process_limits import *; '
    limited += "print(memory_limit())'"
    command = ["bash", "-c", limited, sys.executable]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert int(said) <= 2 * GIB


def test_bodies_may_hold_a_part_of_the_memory() -> None:
    assert memory_shortage(0, GIB) is memory_shortage(GIB // PARTS, GIB) is None
    said = memory_shortage(2 * GIB, GIB)
    assert said is not None
    assert "max_held_body_bytes is 2,147,483,648" in said
    assert "268,435,456 for bodies: leave it out" in said


HOLE = """
import sys
from pathlib import Path
from gateway.wiring.process_limits import give_back_large_blocks

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if sys.argv[1] == "set" and not give_back_large_blocks():
    sys.exit(3)
bytearray(b"x") * (24 << 20)  # what was freed once raises the size from which blocks are mapped
before = resident_mib()
table = bytearray(b"x") * (20 << 20)
behind = [bytes(1 << 12) for _ in range(2000)]  # so that the heap does not end with it
del table
print(resident_mib() - before - 2000 * 4096 / 2**20)
"""


def left_mib(how: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_USER}
    command = [sys.executable, "-c", HOLE, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_large_block_that_is_freed_leaves_no_hole() -> None:
    assert left_mib("set") < 2
    assert left_mib("as it is") > 10, "where this no longer holds, nothing need be set"


@pytest.mark.parametrize("name", _SET_BY_USER)
def test_what_the_user_set_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(MAPPED_FROM_BYTES))
    assert not give_back_large_blocks()
