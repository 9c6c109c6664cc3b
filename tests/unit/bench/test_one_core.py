import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.one_core import can_be_kept, on_one_core
from bench.overhead_tools import tree

pytestmark = pytest.mark.skipif(not can_be_kept(), reason="needs Linux and two cores")

TWO_THREADS_AND_A_CHILD = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"])
time.sleep(60)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS_AND_A_CHILD], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    for pid in reversed(tree(child.pid)):
        os.kill(pid, 9)
    child.wait()
    child.stdout.close()


def threads(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]


def test_all_of_a_tree_is_on_one_core_and_everybody_else_off_it(
    process: subprocess.Popen[bytes],
) -> None:
    cores = os.sched_getaffinity(0)
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with on_one_core([process.pid]):
            theirs = [thread for pid in tree(process.pid) for thread in threads(pid)]
            (core,) = os.sched_getaffinity(process.pid)
            assert len(theirs) >= 3
            assert all(os.sched_getaffinity(thread) == {core} for thread in theirs)
            assert os.sched_getaffinity(0) == os.sched_getaffinity(beside.pid) == cores - {core}
        assert all(os.sched_getaffinity(thread) == cores for thread in theirs)
        assert os.sched_getaffinity(0) == os.sched_getaffinity(beside.pid) == cores
    finally:
        beside.kill()
        beside.wait()


def test_a_bench_that_fails_gives_the_cores_back(process: subprocess.Popen[bytes]) -> None:
    cores = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), on_one_core([process.pid]):
        _ = 1 / 0
    assert os.sched_getaffinity(0) == os.sched_getaffinity(process.pid) == cores
