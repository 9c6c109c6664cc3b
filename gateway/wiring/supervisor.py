"""`serve --workers N`: N replicas on one port of this host, kept running.

- The supervisor loads, checks and follows the configuration file. Replicas get what it says, each
  with a management port of its own (`server.management_port` + 1 and on). They share all state on
  Redis, as replicas on several hosts do; no request passes through the supervisor.
- Each replica listens with SO_REUSEPORT. The supervisor binds the port, too, so that no other
  program takes it meanwhile. Where systemd holds the port, replicas share its sockets instead.
- A replica is this module as a program. It gets what it needs on standard input, so that the file
  is read and checked once and no secret is on disk, and reports on standard output when it listens.
- A replica that ends is restarted after a growing pause; one that is not ready within START_S is
  killed. The gateway ends if a replica does not get ready at the start, or dies MAX_DEATHS times
  within DEATHS_WITHIN_S.
- If the supervisor is killed, its replicas release their ports at once and drain. A new start
  therefore waits PORT_S for a port in use.
- SIGTERM and SIGINT, also repeated ones, are passed to every replica, which drains; SIGHUP, which
  reloads the configuration, to each once it serves.
- SIGUSR2 starts the program anew beside this one. When the new replicas serve, those of this one
  leave the ports and drain, and it ends with the last of them.
- `server.management_port` itself lists the replicas for Prometheus.
"""

import asyncio
import contextlib
import errno
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from gateway.background_task import BackgroundTasks
from gateway.control.management_port import replica_list
from gateway.settings import Config
from gateway.wiring.handover import READY as SERVES
from gateway.wiring.handover import STOPPING, Origin, Successor, on_signals, port_of
from gateway.wiring.reloading import LastGood
from gateway.wiring.serving import run as run_alone
from gateway.wiring.serving import until_done

START_S: Final = 60.0
"""How long a replica may take to get ready."""
PORT_S: Final = 5.0
"""How long a start waits for a port in use."""
PORT_EVERY_S: Final = 0.1
MAX_DEATHS: Final = 5
DEATHS_WITHIN_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
READY: Final = b"ready\n"
"""Line that a replica writes to standard output once it listens."""
GRACE_S: Final = 10.0
"""Time beyond the drain limit after which a replica that has not ended is killed."""

_log = logging.getLogger("sluice.replicas")
_LOGGERS: Final = ("", "httpx", "uvicorn.error", "sluice.audit")


def run(config: Config, *, on_ready: Callable[[int], None] | None = None) -> int:
    """Serve in the configured number of replicas; returns the exit status."""
    if config.server.workers == 1:
        return run_alone(config, on_ready=on_ready)
    return until_done(Supervisor(config, on_ready).serve())


class Supervisor:
    """The parent process."""

    def __init__(self, config: Config, on_ready: Callable[[int], None] | None) -> None:
        """`on_ready` is called with the port when all replicas serve."""
        self._config = config
        self._file = LastGood(config)
        self._on_ready = on_ready
        self._ready = False
        """Whether all replicas served once."""
        self._chores = BackgroundTasks()
        self.port = config.server.port
        self.origin = Origin(os.environ)
        self.replicas = [Replica(n + 1, self) for n in range(config.server.workers)]
        self.ending = asyncio.Event()
        self.failed = False

    async def serve(self) -> int:
        """Run until a signal, or until replicas keep failing. Raises OSError."""
        server, origin, loop = self._config.server, self.origin, asyncio.get_running_loop()
        unlist: Callable[[], None] | None = None

        def signalled() -> None:
            if self.ending.is_set():
                for replica in self.replicas:
                    replica.signal(signal.SIGTERM)
            else:
                _log.info("draining %d replicas", len(self.replicas))
                origin.service.say(STOPPING)
                self._end()

        def leave(pid: int) -> None:
            """Leave the ports to another supervisor and its replicas."""
            origin.service.replaced_by(pid)
            if unlist is not None:
                unlist()
            self._end(signal.SIGUSR2)

        def check_ready() -> None:
            if not self._ready:
                self.give_up(f"not every replica got ready within {START_S:g} s")

        held = await when_free(lambda: origin.open(server.host, server.port))
        try:
            self.port = port_of(held)
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, signalled)
            successor = Successor(origin, os.environ, leave)
            on_signals(reload=self.reload, upgrade=successor.start)
            sockets = await when_free(lambda: origin.open(server.host, server.management_port))
            self._chores.start(origin.service.live(), self._file.watch())
            async with replica_list(sockets, self.ports) as unlist:
                late = loop.call_later(START_S, check_ready)
                await asyncio.gather(*(replica.keep() for replica in self.replicas))
                late.cancel()
            successor.end()
            await self._chores.close()
        finally:
            for sock in held:
                sock.close()
        clean = all(replica.clean for replica in self.replicas)
        return 0 if clean and not self.failed else 1

    def give_up(self, why: str) -> None:
        """Log the reason and end all replicas."""
        if not self.ending.is_set():
            self.failed = True
            _log.error("%s", why)
            self._end()

    async def setup_of(self, index: int) -> "ReplicaSetup":
        """What a replica gets: the file's configuration, or its last good content, and so on."""
        await self._file.look()
        return ReplicaSetup(
            self._file.config.listening(port=self.port, management_port=self._management(index)),
            index,
            {name: logging.getLogger(name or None).level for name in _LOGGERS},
            [sock.fileno() for sock in self.origin.listening_on(self.port)],
            self.origin.succeeds,
        )

    def ports(self) -> list[int]:
        """Management ports of the replicas that are serving."""
        return [self._management(r.index) for r in self.replicas if r.serves]

    def replica_serves(self) -> None:
        """Say that the gateway is ready once every replica served."""
        ready = all(replica.ready for replica in self.replicas)
        if ready and not self._ready and not self.ending.is_set():
            self._ready = True
            self.origin.service.say(SERVES)
            self.origin.ready()
            if self._on_ready is not None:
                self._on_ready(self.port)

    def reload(self) -> None:
        """Have every replica reload the configuration."""
        self._chores.start(self._file.look())
        if self.ending.is_set():
            return
        if self._ready:
            self.origin.service.reloading()
        for replica in self.replicas:
            replica.reload()
        if self._ready:
            self.origin.service.say(SERVES)

    def _management(self, index: int) -> int:
        """Port of a replica's metrics and admin routes."""
        return self._config.server.management_port + index

    def _end(self, sig: signal.Signals = signal.SIGTERM) -> None:
        self.ending.set()
        loop, limit_s = asyncio.get_running_loop(), self._config.server.drain_timeout_s + GRACE_S
        for replica in self.replicas:
            replica.signal(sig)
            loop.call_later(limit_s, replica.signal, signal.SIGKILL)


async def when_free(bind: Callable[[], list[socket.socket]]) -> list[socket.socket]:
    """Bind a port once it is free. Raises OSError, also if it is in use for PORT_S."""
    end_s = time.monotonic() + PORT_S
    while True:
        try:
            return bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                raise
        await asyncio.sleep(PORT_EVERY_S)


def pause_after(deaths_s: Sequence[float]) -> float | None:
    """Pause before a restart, in seconds, after deaths at these times; None after too many."""
    recent = sum(deaths_s[-1] - at_s < DEATHS_WITHIN_S for at_s in deaths_s)
    if recent == MAX_DEATHS:
        return None
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (2 * (recent - 1)))


class Replica:
    """One replica's process, and the processes that replace it."""

    def __init__(self, index: int, supervisor: Supervisor) -> None:
        """`index` counts from 1."""
        self.index = index
        self.ready = False
        """Whether it ever served."""
        self.serves = False
        """Whether its current process got ready and has not ended."""
        self.clean = True
        """Whether it ended without an error."""
        self.supervisor = supervisor
        self._reload_due = False
        """Whether it has to reload the configuration once it serves."""
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Run and restart the process until the gateway ends."""
        ending, deaths_s = self.supervisor.ending, deque[float](maxlen=MAX_DEATHS)
        while not ending.is_set():
            status = await self.run()
            if ending.is_set():
                self.clean = status in {0, -signal.SIGTERM, -signal.SIGUSR2}
                return
            self.clean = False
            _log.error("replica %d ended with status %d", self.index, status)
            deaths_s.append(time.monotonic())
            if not self.ready:
                self.supervisor.give_up(f"replica {self.index} did not get ready; see its log")
            elif (pause_s := pause_after(deaths_s)) is None:
                self.supervisor.give_up(
                    f"replica {self.index} died {MAX_DEATHS} times within {DEATHS_WITHIN_S:g} s"
                )
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await ending.wait()
                self.clean = True

    def reload(self) -> None:
        """Have it reload the configuration, now or once it serves; SIGHUP would end it earlier."""
        self._reload_due = not self.serves
        if self.serves:
            self.signal(signal.SIGHUP)

    def signal(self, sig: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(sig)

    async def run(self) -> int:
        """Start the process and wait for its end; returns its exit status."""
        setup = await self.supervisor.setup_of(self.index)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.wiring.supervisor"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=setup.sockets,
                start_new_session=True,  # Ctrl-C is for the parent, which passes it on
            )
        except OSError as error:  # out of processes, memory or open files
            _log.error("replica %d cannot be started: %s", self.index, error)
            return 1

        def kill_late() -> None:
            if not self.serves:
                _log.error("replica %d did not get ready within %g s", self.index, START_S)
                self.signal(signal.SIGKILL)

        late = asyncio.get_running_loop().call_later(START_S, kill_late)
        if self.supervisor.ending.is_set():  # set during the start
            self.signal(signal.SIGTERM)
        stdin = cast("asyncio.StreamWriter", process.stdin)
        stdout = cast("asyncio.StreamReader", process.stdout)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # The pipe stays open: its end tells the replica that this process is gone.
            stdin.write(pickle.dumps(setup))
            await stdin.drain()
        while part := await stdout.read(4096):
            if READY in part:
                if self.ready:
                    _log.warning("replica %d serves again", self.index)
                self.serves = self.ready = True
                self.supervisor.replica_serves()
                if self._reload_due:
                    self.reload()
        status = await process.wait()
        late.cancel()
        self._process = None
        self.serves = False
        return status


class ReplicaSetup(NamedTuple):
    """What a replica gets of its supervisor."""

    config: Config
    number: int
    """Of the replica, from 1."""
    levels: dict[str, int]
    """Of loggers."""
    sockets: list[int]
    """Descriptors of listening sockets that systemd holds."""
    succeeds: bool


def replica() -> int:
    """Be a replica until SIGTERM, or until the supervisor is gone; returns the exit status."""
    try:
        # Trusted: it comes from our own supervisor over a private pipe.
        setup: ReplicaSetup = pickle.load(sys.stdin.buffer)  # noqa: S301
    except (EOFError, pickle.UnpicklingError):
        return 1  # the supervisor is gone
    for name, level in setup.levels.items():
        logging.getLogger(name or None).setLevel(level)
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s replica {setup.number} %(name)s: %(message)s"
    )

    def ready(_port: int) -> None:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    origin = Origin(
        {}, supervisor=sys.stdin.fileno(), sockets=setup.sockets, succeeds=setup.succeeds
    )
    return run_alone(setup.config, on_ready=ready, origin=origin, warns=setup.number == 1)


if __name__ == "__main__":
    sys.exit(replica())
