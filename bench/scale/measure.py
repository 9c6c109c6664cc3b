"""How `bench scale` measures: CPU of parts, the longest hold of an event loop, memory.

All times are CPU of this thread, so that other load on the machine has little effect.
"""

import asyncio
import gc
import os
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

clock_ns: Final = time.thread_time_ns


class Cpu:
    """Microseconds of CPU by part, one value a call; what a reading of the clock takes is off."""

    def __init__(self) -> None:
        self.parts: dict[str, array[float]] = {}
        self._reading_ns = min(_reading_ns() for _ in range(200))

    def add(self, part: str, begin_ns: int, end_ns: int) -> None:
        """Note what a call of a part took."""
        values = self.parts.get(part)
        if values is None:
            values = self.parts[part] = array("d")
        values.append(max(0, end_ns - begin_ns - self._reading_ns) / 1e3)

    def clear(self) -> None:
        """Forget what was noted: it was warm-up."""
        self.parts.clear()

    def mean_us(self, part: str) -> float:
        """Mean of a part; 0 where it was never called."""
        values = self.parts.get(part)
        return sum(values) / len(values) if values else 0.0

    def quantile_us(self, part: str, share: float) -> float:
        """A quantile of a part's calls; 0 where it was never called."""
        return quantile(self.parts.get(part, ()), share)


def quantile(values: Any, share: float) -> float:
    """The value that a share (0 to 1) of the values is not above; 0 without any."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def spent_us(call: Callable[[], object]) -> float:
    """CPU of one call."""
    begin_ns = clock_ns()
    call()
    return (clock_ns() - begin_ns) / 1e3


def least_us(call: Callable[[], object], times: int = 5) -> float:
    """CPU of a call: the least of several."""
    return min(spent_us(call) for _ in range(times))


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    work.close()
    raise RuntimeError("this coroutine was to wait for nothing")


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes how long each of its turns took; who waits, waits a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_ms: list[float] = []

    def _run_once(self) -> None:
        begin_ns = clock_ns()
        super()._run_once()  # type: ignore[misc]
        self.holds_ms.append((clock_ns() - begin_ns) / 1e6)


def watched(work: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[_T, float, float]:
    """Run in a loop of its own: the result, CPU ms of all threads, ms in the longest turn."""
    loop = WatchedLoop()
    try:
        begin_ns = time.process_time_ns()
        result = loop.run_until_complete(work())
        return result, (time.process_time_ns() - begin_ns) / 1e6, max(loop.holds_ms)
    finally:
        loop.close()


def calm() -> None:
    """The collector as a gateway sets it once it is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def pauses() -> Iterator[list[float]]:
    """Milliseconds of CPU that each run of the collector takes while the block runs."""
    found: list[float] = []
    began_ns = 0

    def told(phase: str, _: dict[str, int]) -> None:
        nonlocal began_ns
        if phase == "start":
            began_ns = clock_ns()
        else:
            found.append((clock_ns() - began_ns) / 1e6)

    gc.callbacks.append(told)
    try:
        yield found
    finally:
        gc.callbacks.remove(told)


def collection_ms() -> float:
    """CPU of a full collection: what a gateway would stand still for."""
    return spent_us(gc.collect) / 1e3


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _reading_ns() -> int:
    begin_ns = clock_ns()
    return clock_ns() - begin_ns
