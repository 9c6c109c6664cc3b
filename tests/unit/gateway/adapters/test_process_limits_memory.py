"""Large blocks that are freed leave the process; a user's own settings stand."""

import os
import subprocess
import sys

import pytest

from gateway.adapters.process_limits import _SET_BY_USER, MAPPED_FROM_BYTES, give_back_large_blocks

HOLE = """
import sys
from pathlib import Path
from gateway.adapters.process_limits import give_back_large_blocks

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
