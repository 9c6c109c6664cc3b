"""Reads bodies that would hold the event loop for long, in processes of their own.

Rules:
- Most take the first process a moment. One that may take longer, by the number of its values, is
  read by a second process, so that the others do not wait for it; one with far too many values is
  refused. Both processes start when they are needed, and are restarted after they die or take too
  long; the body that was being read is refused, as it may be the cause.
- A process reads one body at a time. Tenants take turns by the time that their bodies took, no
  matter how many one of them has waiting. At most WAITING bodies wait for a process.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts
from gateway.workers.body_child import MAX_MEMORY_BYTES, BodyTask, ReadResult
from gateway.workers.compression_child import Setup
from gateway.workers.compression_process import GIVE_BACK_MEMORY, WorkerGone, WorkerProcess

TIME_LIMIT_S: Final = 10.0
"""Time limit for one body, in case that the processor is busy elsewhere or the process hangs."""
QUICK_US: Final = 150_000.0
MOST_US: Final = 1_000_000.0
"""What the two processes may take for one body, by an estimate from above."""
OVERRUN: Final = 5
"""Times that of the processor, and the process is ended: the estimate was wrong."""
WAITING: Final = 256
_OWNERS: Final = 1024
"""Owners whose time is remembered while others wait; more are looked through."""
_MODULE: Final = "gateway.workers.body_child"

_log = logging.getLogger("sluice.body_reader")
_decode = msgspec.msgpack.Decoder(ReadResult | None).decode


class BodyReader:
    """Reads bodies off the event loop; see `gateway.ports.BodyReads`."""

    def __init__(self, memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._processes = tuple(_Process(us, memory_bytes) for us in (QUICK_US, MOST_US))

    @property
    def pid(self) -> int | None:
        """Id of the first process, if it runs."""
        return self._processes[0].pid

    async def read(
        self, endpoint: Endpoint, body: bytes, owner: str, content_types: Sequence[bytes] = ()
    ) -> BodyFacts:
        for process in self._processes:
            result = await process.read(endpoint.path, body, owner, tuple(content_types))
            if result is not None:
                break
        else:
            raise BadRequest(
                "The request body has too many values. Send fewer in one request.",
                reason="too_complex",
            )
        if result.facts is None:
            raise BadRequest(
                result.message, reason=result.reason, code=result.code, param=result.param
            )
        view = memoryview(body)
        members = {
            name: msgspec.Raw(view[start:end]) for name, _, start, end in result.facts.places
        }
        return msgspec.structs.replace(result.facts, members=members)

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for process in self._processes:
            await process.close()


class _Process:
    """One process, which reads bodies of up to an estimated time."""

    def __init__(self, most_us: float, memory_bytes: int) -> None:
        self._most_us: Final = most_us
        self._memory_bytes: Final = memory_bytes
        self._worker: WorkerProcess | None = None
        self._turns = FairTurns(WAITING)

    @property
    def pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    async def read(
        self, path: str, body: bytes, owner: str, content_types: tuple[bytes, ...]
    ) -> ReadResult | None:
        """The facts or a refusal; None if reading the body may take longer than it may here."""
        limit_s = OVERRUN * self._most_us / 1e6
        task = BodyTask(path, self._most_us, limit_s, self._memory_bytes, content_types)
        try:
            async with self._turns.turn(owner):
                return await self._ask(task, body)
        except TooManyWait as full:
            if not full.own:
                raise _unavailable("Too many large requests are waiting to be read.") from None
            raise RateLimited(
                "Too many large requests of this tenant are waiting to be read. Send fewer at "
                "once.",
                reason="reader_busy",
                retry_after_s=1.0,
            ) from None

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    async def _ask(self, task: BodyTask, body: bytes) -> ReadResult | None:
        if self._worker is None or not self._worker.alive:
            await self.close()
            setup = Setup(time_limit_s=TIME_LIMIT_S)
            try:
                self._worker = await WorkerProcess.start(
                    setup, asyncio.Event(), _MODULE, GIVE_BACK_MEMORY
                )
            except (WorkerGone, OSError) as error:
                _log.error("no process to read large bodies: %s", error)
                raise _unavailable("Large requests cannot be read at the moment.") from None
        answered = False
        try:
            # Two frames: joining the body with its task would copy it.
            about = msgspec.msgpack.encode(task)
            answer = await self._worker.asked(about, body, limit_s=TIME_LIMIT_S)
            answered = True
        except (WorkerGone, TimeoutError) as error:
            _log.warning("a process that reads large bodies is replaced: %s", error)
            raise BadRequest(
                "The request body took too long to read. Send fewer values in one request.",
                reason="too_complex",
            ) from None
        finally:
            if not answered:  # cancelled, too: a late answer would be taken for the next
                await self.close()
        result: ReadResult | None = _decode(answer)
        return result


def _unavailable(message: str) -> Unavailable:
    return Unavailable(f"{message} Try again shortly.", reason="reader_busy", retry_after_s=1.0)


class TooManyWait(Exception):
    """The queue is full; `own` when the owner's own share of it is used up."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own


class FairTurns:
    """A lock that passes from owner to owner; each owner's waiters are served in order.

    The next turn goes to the waiting owner whose turns took the least time. An owner that comes
    anew begins at the time of the latest turn: nobody saves up turns by waiting.
    """

    def __init__(self, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: Final = most_waiting
        self._clock = clock
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by owner; among equals the first has the next turn."""
        self._used_s: dict[str, float] = {}
        """Time that an owner's turns took, where that is more than `_level_s`."""
        self._level_s = 0.0
        """The time that the owner of the latest turn had used before it."""
        self._waiting = 0
        self._taken = False

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Hold the lock. Raises TooManyWait.

        An owner may have as many waiters as there are free places left, and at least one.
        """
        if self._taken:
            await self._wait(owner)
        self._taken = True
        self._level_s = max(self._level_s, self._used_s.get(owner, 0.0))
        before_s = self._level_s - self._clock()
        try:
            yield
        finally:
            self._used_s[owner] = before_s + self._clock()
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        mine = self._queues.get(owner)
        free = self._most - self._waiting
        if free <= 0 or (mine is not None and len(mine) >= free):
            raise TooManyWait(own=mine is not None)
        if mine is None:
            mine = self._queues[owner] = deque()
        waiter = asyncio.get_running_loop().create_future()
        mine.append(waiter)
        self._waiting += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # got the turn but cannot use it
                self._pass_on()
            elif waiter in mine:  # otherwise `_pass_on` dropped it
                mine.remove(waiter)
                self._waiting -= 1
                if not mine:
                    del self._queues[owner]
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next waiter, if any."""
        self._taken = False
        if not self._queues:
            self._used_s.clear()
        elif len(self._used_s) > _OWNERS:
            self._used_s = {o: s for o, s in self._used_s.items() if s > self._level_s}
        while self._queues and not self._taken:
            owner = min(self._queues, key=self._time_of)
            waiting = self._queues.pop(owner)
            waiter = waiting.popleft()
            self._waiting -= 1
            if waiting:
                self._queues[owner] = waiting
            if not waiter.done():  # it may have been cancelled just now
                waiter.set_result(None)
                self._taken = True

    def _time_of(self, owner: str) -> float:
        return max(self._level_s, self._used_s.get(owner, 0.0))
