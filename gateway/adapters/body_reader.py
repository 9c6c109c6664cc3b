"""Large bodies are read in a process of their own: reading one holds an interpreter for long.

Rules:
- The process is started by the first such body, and anew after it died or took too long: that
  body is refused, for it may be what did it.
- One body at a time, in the order they came; at most WAITING wait.
"""

import asyncio
import logging
from typing import Final

import msgspec

from gateway.adapters.body_child import ReadResult
from gateway.adapters.compress_child import Setup
from gateway.adapters.compress_process import GIVE_BACK_MEMORY, WorkerGone, WorkerProcess
from gateway.domain import BodyFacts, Endpoint
from gateway.errors import BadRequest, Unavailable

TIME_LIMIT_S: Final = 10.0
"""For one body."""
WAITING: Final = 64
_MODULE: Final = "gateway.adapters.body_child"

_log = logging.getLogger("sluice.body_reader")
_decode = msgspec.msgpack.Decoder(ReadResult).decode


class BodyReader:
    """Reads bodies off the event loop; see `gateway.ports.BodyReads`."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._worker is None else self._worker.pid

    async def read(self, endpoint: Endpoint, body: bytes) -> BodyFacts:
        """See BodyReads."""
        if self._waiting >= WAITING:
            raise _unavailable("Too many large requests are waiting to be read.")
        self._waiting += 1
        try:
            async with self._turn:
                result = await self._ask(endpoint, body)
        finally:
            self._waiting -= 1
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

    async def _ask(self, endpoint: Endpoint, body: bytes) -> ReadResult:
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
            # Two frames: to put the body into one with its endpoint would copy it.
            name = endpoint.path.encode()
            answer = await self._worker.asked(name, body, limit_s=TIME_LIMIT_S)
            answered = True
        except (WorkerGone, TimeoutError) as error:
            _log.warning("the process that reads large bodies is replaced: %s", error)
            raise BadRequest(
                f"The request body could not be read within {TIME_LIMIT_S:g} s. Send fewer values.",
                reason="too_complex",
            ) from None
        finally:
            if not answered:  # cancelled, too: its answer would be taken for the next body's
                await self.close()
        return _decode(answer)


def _unavailable(message: str) -> Unavailable:
    return Unavailable(
        f"{message} Try again shortly.",
        reason="reader_busy",
        code="reader_busy",
        retry_after_s=1.0,
    )
