"""The gateway's end of one worker process: start it, ask it, end it.

Rules:
- The worker is a new interpreter (exec), never a fork: uvloop and threads do not survive a fork.
  multiprocessing's spawn is not used either: it imports the gateway's main module again, leaves
  a resource tracker behind and passes on the gateway's whole environment.
- The child gets no secrets: only the environment variables that an interpreter needs to start.
- Nothing here waits for a thread; the event loop owns the socket.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from gateway.errors import SluiceError
from gateway.workers.compression_child import START_LIMIT_S, Setup, length_of, unframed

_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KEEP_MEMORY: Final[Mapping[str, str]] = {
    # By default glibc returns freed blocks of the size of a prompt's arrays at once, which costs
    # 260 page faults, a sixth of the time per prompt. This keeps at most 64 MiB.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
GIVE_BACK_MEMORY: Final[Mapping[str, str]] = {
    # Set explicitly, because otherwise glibc raises both with the largest freed block.
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
}
_SLICE_BYTES: Final = 1 << 20
"""Most that is written at once: a socket that is emptied meanwhile would take 32 MiB in one call,
which holds up the loop for up to 90 ms.
"""
_REAP_LIMIT_S: Final = 5.0
_REAP_S: Final = 0.002


class WorkerGone(SluiceError):
    """The process died or did not start; the text gives the known reason."""


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

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls,
        setup: Setup,
        lost: asyncio.Event,
        module: str = "gateway.workers.compression_child",
        memory: Mapping[str, str] = KEEP_MEMORY,
    ) -> "WorkerProcess":
        """Start a process that runs `module` and wait until it is warm. Sets `lost` when it dies.

        `memory`: environment variables that set when it returns freed memory. Raises WorkerGone
        or OSError, after ending the process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _popen(theirs, module, memory)
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
        reaping = asyncio.create_task(self._reaped())
        cancelled: asyncio.CancelledError | None = None
        while not reaping.done():
            try:
                await asyncio.shield(reaping)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        answer = unframed(self._buffer)
        if answer is not None:
            self._buffer.clear()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(WorkerGone(self._how_it_ended()))
        self._room.set()
        self._lost.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def asked(self, *frames: bytes, limit_s: float) -> bytes:
        """The answer to frames. After WorkerGone or TimeoutError the caller must call `end`."""
        if self._transport is None or not self.alive:
            raise WorkerGone(self._how_it_ended())
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        async with asyncio.timeout(limit_s):
            # Written separately: joining a large body with its length would copy it.
            for data in frames:
                self._transport.write(length_of(data))
                view = memoryview(data)
                for start in range(0, len(view), _SLICE_BYTES):
                    if start:
                        await asyncio.sleep(0)
                    await self._room.wait()
                    if answer.done():  # it died
                        break
                    self._transport.write(view[start : start + _SLICE_BYTES])
            return await answer

    async def _reaped(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _REAP_LIMIT_S
        # Polls, because a SIGCHLD handler would apply to the whole gateway process.
        while self._process.poll() is None and loop.time() < give_up_s:  # noqa: ASYNC110
            await asyncio.sleep(_REAP_S)

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        return "its pipe closed" if code is None else f"it ended with exit status {code}"


def _popen(pipe: socket.socket, module: str, memory: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {**_ONE_THREAD, **memory}
    # As in multiprocessing: the worker can import everything that the gateway can.
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(  # noqa: S603 - a module of ours
        # -P: do not import from the directory in which the gateway was started.
        [sys.executable, "-P", "-m", module],
        stdin=pipe.fileno(),
        stdout=subprocess.DEVNULL,
        env=environment,
    )
