"""The limit of open files is raised as far as it may be; what is missing is told with the fix."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.wiring import process_limits
from gateway.wiring.process_limits import (
    _SET_BY_USER,
    MAPPED_FROM_BYTES,
    PARTS,
    give_back_large_blocks,
    memory_limit,
    memory_shortage,
)

RAISED = """
import resource, sys
from gateway.wiring.process_limits import allow_open_files
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(connections, 8))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "then"),
    [(400, 900, 100, 464), (400, 440, 100, 440), (600, 900, 100, 600), (400, 440, 88, 440)],
)
def test_the_soft_limit_is_raised_towards_the_hard_one_and_what_is_missing_told(
    soft: int, hard: int, connections: int, then: int
) -> None:
    command = [sys.executable, "-c", RAISED, str(soft), str(hard), str(connections)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    said, limits = done.stdout.splitlines()
    assert limits.split() == [str(then), str(hard)]
    short = (hard, connections) == (440, 100)
    assert ("may open 440 files" in said and "ulimit -n 464" in said) == short
    assert said.endswith("gets 88" if short else "None")


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


def test_a_configuration_is_checked_where_the_system_has_no_such_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sluice check` takes the memory limit, on Windows, too."""
    monkeypatch.setitem(sys.modules, "resource", None)
    there = runpy.run_path(process_limits.__file__)
    assert there["memory_limit"](tmp_path) == sys.maxsize


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
