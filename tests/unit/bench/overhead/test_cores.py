"""A core of its own for the process that is measured, and its others for everybody else."""

import os
import subprocess

from bench.overhead.field import own_core


def test_the_measured_process_has_a_core_that_no_other_uses() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        with own_core(os.getpid(), 0):
            assert os.sched_getaffinity(0) == cores
        return
    with (
        subprocess.Popen(["sleep", "60"]) as measured,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        try:
            with own_core(measured.pid, 1):
                (second,) = os.sched_getaffinity(measured.pid)
            with own_core(measured.pid, 0):
                (core,) = os.sched_getaffinity(measured.pid)
                assert os.sched_getaffinity(other.pid) == cores - {core}
                assert os.sched_getaffinity(0) == cores - {core}
                assert second != core
                started = subprocess.run(["nproc"], check=True, capture_output=True, text=True)
                assert int(started.stdout) == len(cores) - 1
            assert os.sched_getaffinity(measured.pid) == cores
            assert os.sched_getaffinity(other.pid) == cores
            assert os.sched_getaffinity(0) == cores
        finally:
            measured.kill()
            other.kill()
