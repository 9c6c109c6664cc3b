"""Processes that read large bodies and compress prompts, and the calls that wait for them.

- The worker is a new interpreter (exec), never a fork: uvloop and threads do not survive a fork.
  multiprocessing's spawn is not used either: it imports the gateway's main module again, leaves
  a resource tracker behind and passes on the gateway's whole environment. The child gets only the
  environment variables that an interpreter needs to start, and no secrets.
- Nothing here waits for a thread; the event loop owns the socket.
- A worker has one task at a time, and is killed after its time limit, never for time that a task
  spent in the queue: that would make an overload worse. A worker that dies fails only the task it
  was running, which is not tried again, because it may be the cause. Others replace it.
- Owners take turns by the time that their tasks took, no matter how many one of them has waiting.
- A cancelled caller frees its place; the result of a running task is dropped.
- Most large bodies take the first reading process a moment. One that may take longer, by the number
  of its values, is read by a second process, so that the others do not wait for it; one with far
  too many values is refused. Both processes start when they are needed.
- A prompt waits at most `time_limit_s`, in the queue and in the worker together; then its result is
  `timeout`. While no worker is ready, calls return `failed` at once and the request continues
  uncompressed.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, cast

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.errors import BadRequest, RateLimited, SluiceError, Unavailable
from gateway.ports import CompressResult, CompressTask
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts
from gateway.workers.child import (
    LENGTH_BYTES,
    MAX_MEMORY_BYTES,
    START_LIMIT_S,
    BodyTask,
    ReadResult,
    Setup,
)

_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
Program = Literal["compress", "read"]
_MEMORY: Final[Mapping[Program, Mapping[str, str]]] = {
    # By default glibc returns freed blocks of the size of a prompt's arrays at once, which costs
    # 260 page faults, a sixth of the time per prompt. This keeps at most 64 MiB.
    "compress": {
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    },
    # Gives back what a body took. Set explicitly, because otherwise glibc raises both with the
    # largest freed block.
    "read": {
        "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
        "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    },
}
_SLICE_BYTES: Final = 1 << 20
"""Most that is written at once: a socket that is emptied meanwhile would take 32 MiB in one call,
which holds up the loop for up to 90 ms.
"""
_REAP_LIMIT_S: Final = 5.0
_REAP_S: Final = 0.002
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_OWNERS: Final = 1024
"""Owners whose time is remembered while others wait; more are looked through."""


class WorkerGone(SluiceError):
    """The process died; the text gives the known reason."""


class NoWorker(WorkerGone):
    """No process could be started, or the pool is closed."""


class TooManyWait(Exception):
    """The queue is full; `own` when the owner's own share of it is used up."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own


class Job(NamedTuple):
    """A task that waits or runs, and the future of its result."""

    answer: asyncio.Future[bytes]
    frames: tuple[bytes, ...] = ()
    limit_s: float = 0.0

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, unless it has left."""
        if not self.answer.done():
            self.answer.set_exception(error)


class FairQueue:
    """Jobs by owner; each owner's are taken in order.

    The next job is that of the owner whose jobs took the least time. An owner that comes anew
    begins at the time of the latest one: nobody saves up turns by waiting.
    """

    def __init__(self, most_waiting: int = sys.maxsize) -> None:
        self._most: Final = most_waiting
        self._queues: dict[str, deque[Job]] = {}
        """By owner; among equals the first has the next turn."""
        self._used_s: dict[str, float] = {}
        """Time that an owner's jobs took, where that is more than `_level_s`."""
        self._level_s = 0.0
        """The time that the owner of the latest job had used before it."""
        self.waiting = 0

    def put(self, owner: str, job: Job) -> None:
        """Add a job. Raises TooManyWait.

        An owner may have as many waiting as there are free places left, and at least one.
        """
        mine = self._queues.get(owner)
        free = self._most - self.waiting
        if free <= 0 or (mine is not None and len(mine) >= free):
            raise TooManyWait(own=mine is not None)
        self._queues.setdefault(owner, deque()).append(job)
        self.waiting += 1

    def take(self) -> tuple[str, Job]:
        """Remove the next job; there is one."""
        owner = min(self._queues, key=self._time_of)
        self._level_s = self._time_of(owner)
        jobs = self._queues.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._queues[owner] = jobs  # behind the others
        self.waiting -= 1
        return owner, job

    def discard(self, owner: str, job: Job) -> None:
        """Remove a job that may still wait."""
        jobs = self._queues.get(owner, ())
        if jobs and job in jobs:
            jobs.remove(job)
            self.waiting -= 1
            if not jobs:
                del self._queues[owner]

    def charge(self, owner: str, took_s: float) -> None:
        """Count the time that a job took."""
        self._used_s[owner] = self._time_of(owner) + took_s
        if not self._queues:
            self._used_s.clear()
        elif len(self._used_s) > _OWNERS:
            self._used_s = {o: s for o, s in self._used_s.items() if s > self._level_s}

    def _time_of(self, owner: str) -> float:
        return max(self._level_s, self._used_s.get(owner, 0.0))


class WorkerPool:
    """Processes of one program. They start with `start`, or with the first call."""

    def __init__(
        self,
        program: Program,
        setup: Callable[[], Setup],
        *,
        processes: int = 1,
        most_waiting: int = sys.maxsize,
    ) -> None:
        """`setup` is asked for whenever a process starts."""
        self._program: Final[Program] = program
        self._setup = setup
        self._processes = processes
        self._queue = FairQueue(most_waiting)
        self._wake = asyncio.Event()
        """Set when a job comes or a process dies."""
        self._workers: set[WorkerProcess] = set()
        self._lanes = BackgroundTasks()
        self._runs = False
        self._log = logging.getLogger(f"sluice.workers.{program}")
        self.replaced = 0
        """Workers that died or were killed since the start."""

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
            await self.close()
            raise
        self._runs = True
        self._lanes.start(*map(self._lane, workers))

    async def ask(self, *frames: bytes, owner: str = "", limit_s: float) -> bytes:
        """The answer to a task.

        `limit_s` bounds its time in the process. Raises TooManyWait, NoWorker, and WorkerGone or
        TimeoutError where the task ended its process.
        """
        job = Job(asyncio.get_running_loop().create_future(), frames, limit_s)
        self._queue.put(owner, job)
        self._wake.set()
        if not self._runs:
            self._runs = True
            self._lanes.start(*(self._lane(None) for _ in range(self._processes)))
        try:
            return await job.answer
        finally:
            self._queue.discard(owner, job)

    async def close(self) -> None:
        """End the processes; waiting calls fail. Idempotent."""
        await self._lanes.close()
        self._runs = False
        while self._workers:
            await self._workers.pop().end()
        self._fail_waiting(NoWorker("the gateway ends"))

    def _fail_waiting(self, error: NoWorker) -> None:
        while self._queue.waiting:
            self._queue.take()[1].fail(error)

    async def _lane(self, worker: "WorkerProcess | None") -> None:
        """Run one process after another; hand tasks to each until it dies or must be killed."""
        while True:
            worker = worker or await self._replacement()
            try:
                while worker.alive:
                    if not self._queue.waiting:
                        self._wake.clear()
                        await self._wake.wait()
                        continue
                    owner, job = self._queue.take()
                    if job.answer.done():
                        continue
                    began_s = time.monotonic()
                    try:
                        answer = await worker.asked(*job.frames, limit_s=job.limit_s)
                    except (TimeoutError, WorkerGone) as error:
                        why = str(error) or "a task took too long"
                        self._log.warning("worker %d is replaced: %s", worker.pid, why)
                        self._workers.discard(worker)  # before failing: the caller may call again
                        job.fail(error)
                        break
                    except asyncio.CancelledError:
                        job.fail(NoWorker("the gateway ends"))
                        raise
                    finally:
                        self._queue.charge(owner, time.monotonic() - began_s)
                    if not job.answer.done():
                        job.answer.set_result(answer)
                else:
                    self._log.warning("worker %d died while it was idle", worker.pid)
            finally:
                self._workers.discard(worker)
                await worker.end()
            self.replaced += 1
            worker = None

    async def _replacement(self) -> "WorkerProcess":
        """Start a worker; retries forever, with growing pauses, and for a call if there is none.

        Calls fail meanwhile.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._started()
            except (WorkerGone, OSError) as error:
                self._log.error("no worker, next try in %g s: %s", pause_s, error)
                if not self._workers:
                    self._fail_waiting(NoWorker(str(error)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    while self._workers or not self._queue.waiting:
                        self._wake.clear()
                        await self._wake.wait()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _started(self) -> "WorkerProcess":
        worker = await WorkerProcess.start(self._program, self._setup(), self._wake)
        self._workers.add(worker)
        return worker


class WorkerProcess(asyncio.Protocol):
    """One process and the socket to it. It takes one task at a time."""

    def __init__(self, process: subprocess.Popen[bytes], lost: asyncio.Event) -> None:
        self._process = process
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._room = asyncio.Event()
        """Whether the socket takes more."""
        self._room.set()
        self.alive = True
        """Whether it can take tasks."""
        self.pid = process.pid

    @classmethod
    async def start(cls, program: Program, setup: Setup, lost: asyncio.Event) -> "WorkerProcess":
        """Start a process and wait until it is warm. Sets `lost` when it dies.

        Raises WorkerGone or OSError, after ending the process.
        """
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {**_ONE_THREAD, **_MEMORY[program]}
        # As in multiprocessing: the worker can import everything that the gateway can.
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603, ASYNC220 - a module of ours, by exec
                    # -P: do not import from the directory in which the gateway was started.
                    [sys.executable, "-P", "-m", "gateway.workers.child", program],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                )
        except BaseException:
            ours.close()
            raise
        worker = cls(process, lost)
        try:
            ours.settimeout(0)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
            await worker.asked(msgspec.msgpack.encode(setup), limit_s=START_LIMIT_S)
        except TimeoutError:
            await worker.end()
            raise WorkerGone(f"it was not ready within {START_LIMIT_S:g} s") from None
        except BaseException:
            if worker._transport is None:  # otherwise the transport closes it
                ours.close()
            await worker.end()
            raise
        return worker

    async def end(self) -> None:
        """Kill the process, which keeps no state, and wait until it has ended. Idempotent.

        A cancellation takes effect only then, so that no zombie stays.
        """
        self.alive = False
        if self._transport is not None:
            self._transport.abort()
        if self._process.poll() is None:
            self._process.kill()
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _REAP_LIMIT_S
        cancelled: asyncio.CancelledError | None = None
        # Polls, because a SIGCHLD handler would apply to the whole gateway process.
        while self._process.poll() is None and loop.time() < give_up_s:
            try:
                await asyncio.sleep(_REAP_S)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES])
        if len(self._buffer) >= max(end, LENGTH_BYTES):
            answer = bytes(self._buffer[LENGTH_BYTES:end])
            self._buffer.clear()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._gone())
        self._room.set()
        self._lost.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def asked(self, *frames: bytes, limit_s: float) -> bytes:
        """The answer to frames. After WorkerGone or TimeoutError the caller must call `end`."""
        if self._transport is None or not self.alive:
            raise self._gone()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        async with asyncio.timeout(limit_s):
            # Written separately: joining a large body with its length would copy it.
            for data in frames:
                self._transport.write(len(data).to_bytes(LENGTH_BYTES))
                view = memoryview(data)
                for start in range(0, len(view), _SLICE_BYTES):
                    if start:
                        await asyncio.sleep(0)
                    await self._room.wait()
                    if answer.done():  # it died
                        break
                    self._transport.write(view[start : start + _SLICE_BYTES])
            return await answer

    def _gone(self) -> WorkerGone:
        code = self._process.poll()
        return WorkerGone(
            "its pipe closed" if code is None else f"it ended with exit status {code}"
        )


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


class CompressWorkers(WorkerPool):
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
        self.taken = 0
        """Calls that wait or run."""
        super().__init__(
            "compress",
            lambda: Setup(time_limit_s=time_limit_s, tokenizers=tuple(self._tokenizers)),
            processes=processes,
        )

    async def compress(self, task: CompressTask) -> CompressResult:
        if self.taken >= self._places:
            return _QUEUE_FULL
        if not self.pids:
            return _FAILED
        if task.tokenizer is not None:
            self._tokenizers.setdefault(task.tokenizer)
        self.taken += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                about = msgspec.msgpack.encode(task)
                answer = await self.ask(about, limit_s=self._time_limit_s)
            return msgspec.msgpack.decode(answer, type=CompressResult)
        except TimeoutError:
            return _TIMEOUT
        except (WorkerGone, msgspec.DecodeError):
            return _FAILED
        finally:
            self.taken -= 1


def _unavailable(message: str) -> Unavailable:
    return Unavailable(f"{message} Try again shortly.", reason="reader_busy", retry_after_s=1.0)
