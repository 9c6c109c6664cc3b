"""What is done with bodies in processes of their own: reading large ones, compressing prompts.

- Most large bodies take the first process a moment. One that may take longer, by the number of its
  values, is read by a second process, so that the others do not wait for it; one with far too many
  values is refused. Both processes start when they are needed. A body that ended its process is
  refused.
- A prompt waits at most `time_limit_s`, in the queue and in the worker together; then its result is
  `timeout`. While no worker is ready, calls return `failed` at once and the request continues
  uncompressed.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.ports import CompressResult, CompressTask
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts
from gateway.workers.child import MAX_MEMORY_BYTES, BodyTask, ReadResult, Setup
from gateway.workers.pool import NoWorker, TooManyWait, WorkerGone, WorkerPool

TIME_LIMIT_S: Final = 10.0
"""Time limit for one body, in case that the processor is busy elsewhere or the process hangs."""
QUICK_US: Final = 150_000.0
MOST_US: Final = 1_000_000.0
"""What the two processes may take for one body, by an estimate from above."""
OVERRUN: Final = 5
"""Times that of the processor, and the process is ended: the estimate was wrong."""
WAITING: Final = 256
_decode = msgspec.msgpack.Decoder(ReadResult | None).decode

_QUEUE_FULL: Final = CompressResult(reason="queue_full")
_TIMEOUT: Final = CompressResult(reason="timeout")
_FAILED: Final = CompressResult(reason="failed")


class BodyReader:
    """Reads large bodies off the event loop."""

    def __init__(self, memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._pools = {
            most_us: WorkerPool("read", Setup, most_waiting=WAITING)
            for most_us in (QUICK_US, MOST_US)
        }

    @property
    def pid(self) -> int | None:
        """Id of the first process, if it runs."""
        return next(iter(self._pools[QUICK_US].pids), None)

    async def read(
        self, endpoint: Endpoint, body: bytes, owner: str, content_types: Sequence[bytes] = ()
    ) -> BodyFacts:
        """Read a body's facts. Owners take turns. Raises Refusal."""
        for most_us, pool in self._pools.items():
            limit_s = OVERRUN * most_us / 1e6
            task = BodyTask(
                endpoint.path, most_us, limit_s, self._memory_bytes, tuple(content_types)
            )
            # Two frames: joining the body with its task would copy it.
            about = msgspec.msgpack.encode(task)
            try:
                answer = await pool.ask(about, body, owner=owner, limit_s=TIME_LIMIT_S)
            except TooManyWait as full:
                if not full.own:
                    raise _unavailable("Too many large requests are waiting to be read.") from None
                raise RateLimited(
                    "Too many large requests of this tenant are waiting to be read. Send fewer at "
                    "once.",
                    reason="reader_busy",
                    retry_after_s=1.0,
                ) from None
            except NoWorker:
                raise _unavailable("Large requests cannot be read at the moment.") from None
            except (WorkerGone, TimeoutError):
                raise BadRequest(
                    "The request body took too long to read. Send fewer values in one request.",
                    reason="too_complex",
                ) from None
            result: ReadResult | None = _decode(answer)
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
        for pool in self._pools.values():
            await pool.close()


class CompressWorkers:
    """Compresses in `processes` workers (at least 1), with `queue` places to wait in.

    `time_limit_s` (above 0) limits one call. `tokenizers` are loaded before the first task. Another
    tokenizer that a task names is loaded then, and by each later worker at its start.
    """

    def __init__(
        self,
        processes: int = 1,
        time_limit_s: float = 0.25,
        queue: int = 16,
        *,
        tokenizers: Sequence[str] = (),
    ) -> None:
        if processes < 1 or queue < 0 or not time_limit_s > 0:
            raise ValueError("processes must be 1 or more, queue 0 or more, the limit above 0")
        self._time_limit_s = time_limit_s
        self._places = processes + queue
        self._tokenizers = dict.fromkeys(tokenizers)
        self._pool = WorkerPool(
            "compress",
            lambda: Setup(time_limit_s=time_limit_s, tokenizers=tuple(self._tokenizers)),
            processes=processes,
        )
        self.start = self._pool.start
        self.close = self._pool.close
        self.taken = 0
        """Calls that wait or run."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ready workers, in no order."""
        return self._pool.pids

    @property
    def replaced(self) -> int:
        """Workers that died or were killed since the start."""
        return self._pool.replaced

    async def compress(self, task: CompressTask) -> CompressResult:
        if self.taken >= self._places:
            return _QUEUE_FULL
        if not self._pool.pids:
            return _FAILED
        if task.tokenizer is not None:
            self._tokenizers.setdefault(task.tokenizer)
        self.taken += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                answer = await self._pool.ask(
                    msgspec.msgpack.encode(task), limit_s=self._time_limit_s
                )
            return msgspec.msgpack.decode(answer, type=CompressResult)
        except TimeoutError:
            return _TIMEOUT
        except (WorkerGone, msgspec.DecodeError):
            return _FAILED
        finally:
            self.taken -= 1


def _unavailable(message: str) -> Unavailable:
    return Unavailable(f"{message} Try again shortly.", reason="reader_busy", retry_after_s=1.0)
