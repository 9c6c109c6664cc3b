"""Requests of `bench scale`: conversations that share system prompts and grow by turns."""

import asyncio
import gc
import os
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import orjson

from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.entitlement import Entitlement
from gateway.records.tenancy import Row
from gateway.settings import parse
from gateway.wiring.models import served_model

# -- how `bench scale` measures: CPU of parts, the longest hold of an event loop, memory


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


SLOTS: Final = 128
"""Sequences a worker runs at once."""
_SENTENCE: Final = (
    "the river rose in the night and by morning the lower road was gone and nobody had seen "
    "the ferryman since the bells of the old town rang"
)
_APPS: Final = 40
_POOL: Final = " ".join(Random(7).choices(_SENTENCE.split(), k=4_000))


class ChatBodies:
    """Bodies of chats: 40 system prompts of 1.5 KB, up to eight turns of some 800 bytes."""

    def __init__(self, count: int, turns: int = 8) -> None:
        self._random = Random(0)
        self._last = turns
        self._turns = [(number, 0) for number in range(count)]
        self._next = count

    def body(self) -> bytes:
        """The next turn of one of them; one that is over is followed by a new one."""
        at = self._random.randrange(len(self._turns))
        number, turn = self._turns[at]
        told = [{"role": "system", "content": _text(number % _APPS, 1_500)}]
        for past in range(turn + 1):
            told.append({"role": "user", "content": f"{number} {_text(number + past, 300)}"})
            if past < turn:
                told.append({"role": "assistant", "content": _text(3 * number + past, 500)})
        if turn + 1 < self._last:
            self._turns[at] = (number, turn + 1)
        else:
            self._turns[at] = (self._next, 0)
            self._next += 1
        return orjson.dumps({"model": "m", "stream": True, "max_tokens": 512, "messages": told})


def _text(start: int, length: int) -> str:
    at = start * 37 % (len(_POOL) - length)
    return _POOL[at : at + length]


def fleet_text(policy: str, workers: int) -> str:
    """The configuration of one pool of so many workers."""
    urls = ", ".join(f'"http://w{number}:1"' for number in range(workers))
    return f"""version: 1
models:
  - name: m
    scheduling: {{policy: {policy}, shadow: false, queue_limit: 1000000}}
    pools:
      main: {{max_model_len: 32768, max_num_seqs: {SLOTS}, workers: [{urls}]}}
"""


def fleet_of(policy: str, workers: int) -> ModelRuntime:
    """The pool as the stages know it."""
    config = parse(fleet_text(policy, workers), "scale.yaml", {})
    return served_model(config, config.models[0])


def key_of(number: int) -> bytes:
    """The API key of an entitlement."""
    return b"sk-scale-%d" % number


def digest_of(number: int) -> bytes:
    """SHA-256 of that key."""
    return sha256(key_of(number)).digest()


def entitlements(count: int) -> Iterator[Entitlement]:
    """So many entitlements, elastic with a rate and a concurrency."""
    for number in range(count):
        yield Entitlement(
            name=f"entitlement-{number}",
            tenant=f"tenant-{number}",
            model="m",
            baseline=(4,),
            limit=1_000_000,
            tokens_per_s=1e9,
            created=number + 1,
        )


def entitlement_rows(count: int) -> Iterator[Row]:
    """The same as an administrator made them, with a key each."""
    for number, terms in enumerate(entitlements(count)):
        uid = f"e{number:015x}"
        fields = {
            "name": terms.name,
            "tenant": terms.tenant,
            "model": terms.model,
            "concurrency": sum(terms.baseline),
            "max_concurrency": terms.limit,
            "tokens_per_second": terms.tokens_per_s,
        }
        yield Row(
            kind="entitlement", name=terms.name, uid=uid, fields=fields, created=terms.created
        )
        digest = digest_of(number).hex()
        yield Row(
            kind="key",
            name=f"{terms.name}:{digest[:8]}",
            uid=f"o{number:015x}",
            of=uid,
            fields={"sha256": digest},
        )


def token_pool_of(slots: int) -> TokenPool:
    """A token pool that has room for so many sequences, and twice that to spare."""
    return TokenPool(
        Terms(slots=(3 * slots,), tokens_per_s=1e12, largest_tokens=32_768, mean_slo_ms=500.0)
    )


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a ladder: what is asked of one process."""

    workers: int = 4
    entitlements: int = 100
    active: int = 0
    """Entitlements that ask; 0 for all."""
    leases: int = 0
    requests: int = 2_000
    policy: str = "quartz"
