"""How the work of a parser grows with its input: measured, as a client would feel it."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

MOST_GROWTH = 2.2
"""Of the time, when the input doubles."""
_ROUNDS = 200
_LEAST_S = 0.0005

Input = TypeVar("Input")


def assert_linear(
    make: Callable[[int], Input],
    run: Callable[[Input], object],
    size: int = 1000,
    most: int = 1_000_000,
) -> None:
    """Check that `run(make(n))` takes at most MOST_GROWTH times longer for twice the `n`.

    From `size` on an `n` is looked for that takes long enough to be measured; what takes less
    at `most` passes. Processor time of this thread, the least of several runs each, so that
    other work does not count.
    """
    while _taken_s(run, given := make(size)) < _LEAST_S:
        if 2 * size > most:
            return
        size *= 2
    twice = make(2 * size)
    enabled = gc.isenabled()
    gc.disable()
    try:
        once_s = twice_s = float("inf")
        for _ in range(_ROUNDS):
            once_s = min(once_s, _taken_s(run, given))
            twice_s = min(twice_s, _taken_s(run, twice))
            if twice_s <= MOST_GROWTH * once_s and _ >= 2:
                return
    finally:
        if enabled:
            gc.enable()
    raise AssertionError(f"size {size}: {once_s:.4f} s, twice that: {twice_s:.4f} s")


def _taken_s(run: Callable[[Input], object], given: Input) -> float:
    start_s = time.thread_time()
    run(given)
    return time.thread_time() - start_s
