"""CompressRunner on worker processes: they cut prompts, never the event loop.

Rules:
- A caller waits at most `time_limit_s`, in the queue and in the worker together; then its result
  is `timeout`. A worker is killed only after spending that long on one task. Killing it for a
  task that waited in the queue would make an overload worse.
- A worker that dies fails only the task it was running. The task is not retried, because it may
  have killed the worker.
- Workers are replaced in the background. While none is ready, calls return `failed` at once and
  the request continues uncompressed.
- A cancelled caller frees its place; its result is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.ports import CompressResult, CompressTask
from gateway.workers.compression_child import Setup
from gateway.workers.compression_process import WorkerGone, WorkerProcess

_QUEUE_FULL: Final = CompressResult(reason="queue_full")
_TIMEOUT: Final = CompressResult(reason="timeout")
_FAILED: Final = CompressResult(reason="failed")
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0

_log = logging.getLogger("sluice.compress_workers")


class _Job(NamedTuple):
    """A task and the future of its result."""

    answer: asyncio.Future[CompressResult]
    task: CompressTask

    def settle(self, result: CompressResult) -> None:
        """Set the result, unless it was set or the caller was cancelled."""
        if not self.answer.done():
            self.answer.set_result(result)


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
        self._processes = processes
        self._time_limit_s = time_limit_s
        self._places = processes + queue
        self._tokenizers = dict.fromkeys(tokenizers)
        self._taken = 0
        self._waiting: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._workers: set[WorkerProcess] = set()
        self._lanes = BackgroundTasks()
        self.replaced = 0
        """Workers that died or were killed since the start."""

    @property
    def taken(self) -> int:
        """Calls that wait or run."""
        return self._taken

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ready workers, in no order."""
        return tuple(worker.pid for worker in self._workers)

    async def start(self) -> None:
        """Start the processes and wait until all are warm.

        Raises WorkerGone or OSError, after ending all of them.
        """
        starting = [asyncio.create_task(self._started()) for _ in range(self._processes)]
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            for task in starting:
                if not task.cancelled() and task.exception() is None:
                    await task.result().end()
            raise
        self._workers.update(workers)
        self._lanes.start(*map(self._lane, workers))

    async def compress(self, task: CompressTask) -> CompressResult:
        if self._taken >= self._places:
            return _QUEUE_FULL
        if not self._workers:
            return _FAILED
        if task.tokenizer is not None:
            self._tokenizers.setdefault(task.tokenizer)
        loop = asyncio.get_running_loop()
        job = _Job(loop.create_future(), task)
        timer = loop.call_later(self._time_limit_s, job.settle, _TIMEOUT)
        self._taken += 1
        self._waiting.append(job)
        self._wake.set()
        try:
            return await job.answer
        finally:
            self._taken -= 1
            timer.cancel()
            if job in self._waiting:  # not started: release the body
                self._waiting.remove(job)

    async def close(self) -> None:
        """End the processes; waiting calls return `failed`. Idempotent."""
        await self._lanes.close()
        while self._waiting:
            self._waiting.popleft().settle(_FAILED)

    async def _lane(self, worker: WorkerProcess) -> None:
        """Run one worker after another, for as long as the gateway runs."""
        while True:
            try:
                await self._serve(worker)
            finally:
                self._workers.discard(worker)
                await worker.end()
            self.replaced += 1
            worker = await self._replacement()
            self._workers.add(worker)

    async def _serve(self, worker: WorkerProcess) -> None:
        """Hand tasks to a worker until it dies or must be killed."""
        while True:
            while worker.alive and not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            if not worker.alive:
                _log.warning("compression worker %d died while it was idle", worker.pid)
                return
            job = self._waiting.popleft()
            if job.answer.done():
                continue
            try:
                answer = await worker.asked(
                    msgspec.msgpack.encode(job.task), limit_s=self._time_limit_s
                )
                result = msgspec.msgpack.decode(answer, type=CompressResult)
            except (TimeoutError, WorkerGone, msgspec.DecodeError) as error:
                late = isinstance(error, TimeoutError)
                why = "a prompt took too long" if late else str(error)
                _log.warning("compression worker %d is replaced: %s", worker.pid, why)
                self._workers.discard(worker)  # before settling: the caller may call again
                job.settle(_TIMEOUT if late else _FAILED)
                return
            except asyncio.CancelledError:
                job.settle(_FAILED)
                raise
            job.settle(result)

    async def _replacement(self) -> WorkerProcess:
        """Start a new worker; retries forever, with growing pauses."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._started()
            except (WorkerGone, OSError) as error:
                _log.error("no compression worker, next try in %g s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _started(self) -> WorkerProcess:
        setup = Setup(time_limit_s=self._time_limit_s, tokenizers=tuple(self._tokenizers))
        return await WorkerProcess.start(setup, self._wake)
