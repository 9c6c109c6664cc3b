"""Reads large bodies in a separate process, because reading one blocks the interpreter for long.

Rules:
- The first large body starts the process. It is restarted after it dies or takes too long; the
  body that it was reading is refused, as it may be the cause.
- The process reads one body at a time. Entitlements take turns, no matter how many bodies one of
  them has waiting. At most WAITING bodies wait.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.adapters.bodies.child import BodyTask, ReadResult
from gateway.adapters.bodies.fair_turns import FairTurns, TooManyWait
from gateway.adapters.compress.child import Setup
from gateway.adapters.compress.process import GIVE_BACK_MEMORY, WorkerGone, WorkerProcess
from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts

TIME_LIMIT_S: Final = 10.0
"""Time limit for one body."""
WAITING: Final = 256
_MODULE: Final = "gateway.adapters.bodies.child"

_log = logging.getLogger("sluice.body_reader")
_decode = msgspec.msgpack.Decoder(ReadResult).decode


class BodyReader:
    """Reads bodies off the event loop; see `gateway.ports.BodyReads`."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._turns = FairTurns(WAITING)

    @property
    def pid(self) -> int | None:
        """Process id, if the process runs."""
        return None if self._worker is None else self._worker.pid

    async def read(
        self, endpoint: Endpoint, body: bytes, owner: str, content_types: Sequence[bytes] = ()
    ) -> BodyFacts:
        """See BodyReads."""
        try:
            async with self._turns.turn(owner):
                result = await self._ask(BodyTask(endpoint.path, tuple(content_types)), body)
        except TooManyWait as full:
            raise _too_many(own=full.own) from None
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
        """End the process. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    async def _ask(self, task: BodyTask, body: bytes) -> ReadResult:
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
            _log.warning("the process that reads large bodies is replaced: %s", error)
            raise BadRequest(
                f"The request body could not be read within {TIME_LIMIT_S:g} s. Send fewer values.",
                reason="too_complex",
            ) from None
        finally:
            if not answered:  # cancelled, too: a late answer would be taken for the next
                await self.close()
        return _decode(answer)


def _too_many(*, own: bool) -> RateLimited | Unavailable:
    if not own:
        return _unavailable("Too many large requests are waiting to be read.")
    return RateLimited(
        "Too many large requests of this key are waiting to be read. Send fewer at once.",
        reason="reader_busy",
        code="reader_busy",
        retry_after_s=1.0,
    )


def _unavailable(message: str) -> Unavailable:
    return Unavailable(
        f"{message} Try again shortly.",
        reason="reader_busy",
        code="reader_busy",
        retry_after_s=1.0,
    )
