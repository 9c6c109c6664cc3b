"""How the work of a parser grows with its input: measured, as a client would feel it."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

MAX_GROWTH = 2.8
"""Of the time, each time that the input doubles: the mean of `_DOUBLINGS` of them.

Linear work takes 2, and up to 2.3 where the larger input leaves the processor's cache beside
busy neighbours; work that grows with the power 1.5 takes 2.83.
"""
_DOUBLINGS = 3
_ROUNDS = 200
_MIN_S = 0.0005

Input = TypeVar("Input")


def assert_linear(
    make: Callable[[int], Input],
    run: Callable[[Input], object],
    size: int = 1000,
    most: int = 1_000_000,
) -> None:
    """Check that `run(make(n))` takes at most MAX_GROWTH times longer for twice the `n`.

    From `size` on an `n` is looked for that takes long enough to be measured; what takes less
    at `most` passes. It is doubled once more and compared with an eighth of that. Processor
    time of this thread, the least of several runs each, so that other work does not count.
    """
    while _taken_s(run, make(size)) < _MIN_S:
        if 2 * size > most:
            return
        size *= 2
    small, large = make(2 * size // 2**_DOUBLINGS), make(2 * size)
    enabled = gc.isenabled()
    gc.disable()
    try:
        small_s = large_s = float("inf")
        for _ in range(_ROUNDS):
            small_s = min(small_s, _taken_s(run, small))
            large_s = min(large_s, _taken_s(run, large))
            if large_s <= MAX_GROWTH**_DOUBLINGS * small_s and _ >= 2:
                return
    finally:
        if enabled:
            gc.enable()
    raise AssertionError(
        f"size {2 * size // 2**_DOUBLINGS}: {small_s:.5f} s, {2 * size}: {large_s:.5f} s"
    )


def _taken_s(run: Callable[[Input], object], given: Input) -> float:
    start_s = time.thread_time()
    run(given)
    return time.thread_time() - start_s


def quickest_s(run: Callable[[], object]) -> float:
    """Processor time of the quickest of three runs: a collection of garbage may be in one."""
    took = []
    for _ in range(3):
        began_s = time.process_time()
        run()
        took.append(time.process_time() - began_s)
    return min(took)
