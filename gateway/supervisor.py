"""The parent of several worker processes: starts them, keeps what they share, ends with them.

- The configuration is loaded and checked once; the workers get it as it is.
- Connections are accepted here and handed over (`gateway.adapters.shared.handover`); listening
  begins when every worker serves.
- A worker that dies is started again, after a pause that grows. One that does not get ready at
  the start, or dies MOST_DEATHS times within DEATHS_WITHIN_S, ends the gateway.
- SIGTERM and SIGINT go to every worker, which drains; a second one too. SIGHUP does nothing.
"""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.adapters.shared.handover import Door, bound
from gateway.adapters.shared.hub import Hub, Session
from gateway.adapters.shared.seat import GIVE
from gateway.adapters.shared.wire import Message, Op
from gateway.errors import StateFailure
from gateway.kept import Kept
from gateway.serving import ignore_hangup, loop_factory
from gateway.serving import run as run_alone
from gateway.settings import Config

START_S: Final = 60.0
"""How long a worker may take to get ready."""
MOST_DEATHS: Final = 5
DEATHS_WITHIN_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 5.0
GRACE_S: Final = 10.0
"""Beyond the drain's own limit, until a worker that does not end is killed."""

_log = logging.getLogger("sluice.workers")
_LOGGERS: Final = ("", "httpx", "uvicorn.error", "sluice.audit")


def run(config: Config, *, on_ready: Callable[[int], None] | None = None) -> int:
    """Serve, in as many processes as configured; the exit status."""
    if config.server.workers == 1:
        return run_alone(config, on_ready=on_ready)
    if sys.platform == "win32":
        _log.error("server.workers: several need Unix sockets; use 1 here")
        return 2
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(Supervisor(config, on_ready).serve())
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1


class Supervisor:
    """The parent process."""

    def __init__(self, config: Config, on_ready: Callable[[int], None] | None) -> None:
        """`on_ready` is told the port when all workers serve."""
        self._config = config
        self._on_ready = on_ready
        self._packed = pickle.dumps(config)
        self.hash_seed = secrets.randbelow(1 << 32)
        """Of Python's keyed hash in every worker; unguessable, so nobody can make them collide."""
        self._workers = [Worker(index, self) for index in range(config.server.workers)]
        self.ending = asyncio.Event()
        self.failed = False

    async def serve(self) -> int:
        """Until a signal, or until the workers cannot be kept up. Raises OSError."""
        listeners = bound(self._config.server.host, self._config.server.port)
        self.door = Door(listeners)
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._signalled)
        ignore_hangup(loop)
        kept = Kept(self._config)
        try:
            async with kept.running() as self.hub:
                self._answer(self.hub)
                keeping = [asyncio.create_task(worker.keep()) for worker in self._workers]
                await self._open(listeners[0].getsockname()[1])
                await asyncio.gather(*keeping)
                await self.hub.close()
        finally:
            self.door.close()
        clean = all(worker.clean for worker in self._workers)
        return 0 if clean and not self.failed else 1

    def give_up(self, why: str) -> None:
        """End everything: it cannot be kept up."""
        if not self.ending.is_set():
            self.failed = True
            _log.error("%s", why)
            self._end()

    @property
    def packed_config(self) -> bytes:
        """The configuration as workers take it."""
        return self._packed

    @property
    def count(self) -> int:
        """Workers as configured."""
        return len(self._workers)

    async def _open(self, port: int) -> None:
        """Listen once every worker serves."""
        waits = [asyncio.ensure_future(worker.ready.wait()) for worker in self._workers]
        ending = asyncio.ensure_future(self.ending.wait())
        all_ready = asyncio.ensure_future(asyncio.wait(waits))
        await asyncio.wait(
            [all_ready, ending], timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not self.ending.is_set():
            if all(worker.ready.is_set() for worker in self._workers):
                self.door.listen()
                if self._on_ready is not None:
                    self._on_ready(port)
            else:
                self.give_up(f"not every worker process got ready within {START_S:g} s")
        for future in (*waits, ending, all_ready):
            future.cancel()

    def _answer(self, hub: Hub) -> None:
        hub.serves("ready", self._ready)
        hub.serves("leave", self._leave)
        hub.desk(Op.COUNTS, self._counts)
        self.door.ask_back = self._ask_back
        hub.when_gone(lambda session: self.door.remove(session.index))

    async def _ready(self, session: Session, _value: object) -> None:
        self._workers[session.index].serves(self.door)

    async def _leave(self, session: Session, _value: object) -> None:
        self.door.remove(session.index)

    def _counts(self, session: Session, message: Message) -> None:
        self.door.told(session.index, message[2], message[3])

    def _ask_back(self, index: int, count: int) -> None:
        session = self.hub.sessions.get(index)
        if session is not None:
            session.wire.send(Op.TELL, 0, GIVE, b"%d" % count)

    def _signalled(self) -> None:
        if self.ending.is_set():
            for worker in self._workers:
                worker.signal(signal.SIGTERM)
        else:
            _log.info("draining %d worker processes", len(self._workers))
            self._end()

    def _end(self) -> None:
        self.ending.set()
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        limit_s = self._config.server.drain_timeout_s + GRACE_S
        asyncio.get_running_loop().call_later(limit_s, self._kill)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGKILL)


class Worker:
    """One worker process, and its successors."""

    def __init__(self, index: int, supervisor: Supervisor) -> None:
        self.index = index
        self.ready = asyncio.Event()
        """Set once it serves; stays set for its successors."""
        self.clean = True
        """Whether it ended as it should."""
        self._supervisor = supervisor
        self._process: asyncio.subprocess.Process | None = None
        self._way: socket.socket | None = None
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)

    async def keep(self) -> None:
        """Run it, again and again, until all end."""
        ending = self._supervisor.ending
        while not ending.is_set():
            status = await self._run()
            if ending.is_set():
                self.clean = status in {0, -signal.SIGTERM}
                return
            self.clean = False
            _log.error("worker %d ended with status %d", self.index, status)
            if not self.ready.is_set():
                self._supervisor.give_up(f"worker {self.index} did not get ready; see its log")
                return
            pause_s = self._pause_s(time.monotonic())
            if pause_s is None:
                self._supervisor.give_up(
                    f"worker {self.index} died {MOST_DEATHS} times within {DEATHS_WITHIN_S:g} s"
                )
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), pause_s)
            self.clean = True

    def serves(self, door: Door) -> None:
        """It said that it is ready."""
        if self._way is not None:
            door.add(self.index, self._way)
            self._way = None
        if self.ready.is_set():
            _log.warning("worker %d serves again", self.index)
        self.ready.set()

    def signal(self, sig: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(sig)

    def _pause_s(self, now_s: float) -> float | None:
        """Until it is started again; None when it died too often."""
        self._deaths.append(now_s)
        recent = [at_s for at_s in self._deaths if now_s - at_s < DEATHS_WITHIN_S]
        if len(recent) == MOST_DEATHS:
            return None
        return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (2 * (len(recent) - 1)))

    async def _run(self) -> int:
        """Start it and wait for its end; its exit status."""
        link, link_end = socket.socketpair()
        way, way_end = socket.socketpair()
        place = {
            "index": self.index,
            "count": self._supervisor.count,
            "link_fd": link_end.fileno(),
            "way_fd": way_end.fileno(),
        }
        levels = {name: logging.getLogger(name or None).level for name in _LOGGERS}
        with link_end, way_end:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.child"),
                json.dumps({"place": place, "levels": levels}),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(link_end.fileno(), way_end.fileno()),
                # One key, so that digests of prompts mean the same in all of them.
                env={**os.environ, "PYTHONHASHSEED": str(self._supervisor.hash_seed)},
                start_new_session=True,  # Ctrl-C is for the parent, which passes it on
            )
        self._way = way
        self._supervisor.hub.attach(link, self.index)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._give(process)
        status = await process.wait()
        self._process = None
        if self._way is not None:
            self._way.close()
            self._way = None
        return status

    async def _give(self, process: asyncio.subprocess.Process) -> None:
        """Give it the configuration."""
        pipe = process.stdin
        if pipe is not None:
            pipe.write(self._supervisor.packed_config)
            await pipe.drain()
            pipe.close()
