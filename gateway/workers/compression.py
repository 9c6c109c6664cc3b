"""CompressRunner on worker processes: they cut prompts, never the event loop.

A caller waits at most `time_limit_s`, in the queue and in the worker together; then its result is
`timeout`. While no worker is ready, calls return `failed` at once and the request continues
uncompressed.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.ports import CompressResult, CompressTask
from gateway.workers.child import Setup
from gateway.workers.pool import WorkerGone, WorkerPool

_QUEUE_FULL: Final = CompressResult(reason="queue_full")
_TIMEOUT: Final = CompressResult(reason="timeout")
_FAILED: Final = CompressResult(reason="failed")


class CompressWorkers:
    """CompressRunner with `processes` workers (at least 1) and `queue` places to wait in.

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
