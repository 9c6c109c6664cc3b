"""Where a process comes from, and which one follows it, without a gap.

- A process may come from systemd, which holds its sockets and hears how it is doing (sd_notify);
  from a process of this program that it replaces; or from a supervisor.
- On SIGUSR2 the running process starts a new one with its own command line, so that the code and
  the configuration on disk are read anew, and goes on serving.
- A socket pair joins them. The new process says READY when it listens on the same ports. The
  running one then leaves the ports and drains. If the new process ends first, or is not ready
  within START_S, nothing changes. If it ends later, the running one takes the ports back.
- The new process sees the end of the pair when the old one has ended. One whose state belongs to
  one process at a time waits for that; connections wait meanwhile in the kernel.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Final

from gateway.settings import Config
from gateway.settings.token_pools import managed
from gateway.store.backends import backend_of
from gateway.wiring.listening import BACKLOG, bound, inherited, passed, reserved

PREDECESSOR: Final = "SLUICE_PREDECESSOR_FD"
"""Names file descriptors: the new process's end of the pair, then systemd's sockets, by commas."""
_OF_SYSTEMD: Final = frozenset({"WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"})
"""Variables that do not hold for the new process."""
_LISTENS: Final = b"ready\n"
START_S: Final = 120.0
_HELD_SIGNALS: Final = (
    frozenset() if sys.platform == "win32" else frozenset({signal.SIGHUP, signal.SIGUSR2})
)
"""Blocked from a process's first step until it handles them: by default they would end it."""
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

_log = logging.getLogger("sluice.upgrade")


class ServiceManager:
    """The service manager that started this process; silent where there is none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ValueError for a WATCHDOG_USEC that is no number."""
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        given_us = int(environ.get("WATCHDOG_USEC", "0")) if meant else 0
        self.watchdog_s = given_us / 2e6
        """Seconds between two signs of life: half of what systemd allows; 0 for none."""

    def say(self, *states: str) -> None:
        """Send states such as READY. Never raises or waits: the service matters more."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
        ):
            sock.setblocking(False)  # noqa: FBT003
            sock.sendto("\n".join(states).encode(), self._address)

    def reloading(self) -> None:
        """A reload begins; READY ends it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.say("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def replaced_by(self, pid: int) -> None:
        """Another process is the service from now on."""
        self.say(f"MAINPID={pid}", READY)

    async def live(self) -> None:
        """Give signs of life as long as the event loop runs."""
        while self.watchdog_s:
            self.say("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s)


class Origin:
    """Where this process comes from, and the sockets that it got from there."""

    def __init__(
        self,
        environ: MutableMapping[str, str],
        *,
        supervisor: int | None = None,
        sockets: Iterable[int] = (),
        succeeds: bool = False,
    ) -> None:
        """A replica has an empty environment and the rest of its `supervisor`.

        `succeeds`: that one replaces another supervisor, whose replicas still have the ports.
        """
        fds = [int(fd) for fd in environ.pop(PREDECESSOR, "").split(",") if fd]
        self.link = inherited(fds.pop(0)) if fds else None
        """The pair's end towards the process that this one replaces; None if it replaces none."""
        self.sockets = [inherited(fd) for fd in (*fds, *sockets)]
        """Listening sockets that systemd holds."""
        if self.link is None:
            self.sockets += passed(environ)
        self.supervisor = supervisor
        """Descriptor of a pipe that reaches its end when the supervisor ends; None without one."""
        self.succeeds = succeeds or self.link is not None
        """Whether other processes still have the ports."""
        self.service = ServiceManager(environ)

    def listening_on(self, port: int) -> list[socket.socket]:
        """Those of systemd's sockets that are on a port; for port 0 all of them."""
        return [sock for sock in self.sockets if port in {0, sock.getsockname()[1]}]

    def open(self, host: str, port: int, *, shared: bool | None = None) -> list[socket.socket]:
        """Copies of systemd's sockets on a port, or new ones. Raises OSError.

        A new one is `shared` with processes that may have the port, or else reserves it for such.
        """
        found = [sock.dup() for sock in self.listening_on(port)]
        shared = self.succeeds if shared is None else shared
        return found or (bound(host, port, shared=True) if shared else reserved(host, port))

    def ready(self) -> None:
        """Tell the process that this one replaces to leave."""
        if self.link is not None:
            with contextlib.suppress(OSError):  # it is gone
                self.link.send(_LISTENS)

    async def wait_for_turn(self, config: Config, sockets: Iterable[socket.socket]) -> None:
        """If the state belongs to one process at a time, wait for the end of the one before.

        Connections that arrive meanwhile wait in the kernel.
        """
        backend = backend_of(config.state.address)
        limited = any(managed(config, model) for model in config.models)
        # Two processes at a time would share a file, or spend the same limits twice.
        for_one = backend == "sqlite" or (backend == "memory" and limited)
        if self.link is None or not for_one:
            return
        for sock in sockets:
            sock.listen(BACKLOG)
        self.ready()
        _log.info("waiting until the process before has drained")
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self.link, 64):
                pass


class Successor:
    """Starts the process that replaces this one."""

    def __init__(
        self,
        origin: Origin,
        environ: Mapping[str, str],
        leave: Callable[[int], None],
        take_back: Callable[[], None] | None = None,
    ) -> None:
        """`leave` is called with the new process's id once it listens.

        `take_back` is called when it ended after that, before this one; without, another starts.
        """
        self._loop = asyncio.get_running_loop()
        self._origin = origin
        self._environ = environ
        self._leave = leave
        self._take_back = take_back
        self._late: asyncio.TimerHandle | None = None
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start it, in place of one that is not ready yet."""
        if self._ready:
            _log.warning("an upgrade is under way already")
            return
        self._give_up("the new process is not ready: another one starts in its place")
        self._link, its = socket.socketpair()
        self._link.setblocking(False)  # noqa: FBT003
        fds = [its.fileno(), *(sock.fileno() for sock in self._origin.sockets)]
        environ = {k: v for k, v in self._environ.items() if k not in _OF_SYSTEMD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_SIGNALS)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this program itself
                [sys.executable, *sys.orig_argv[1:]],
                env={**environ, PREDECESSOR: ",".join(map(str, fds))},
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            _log.error("the new process cannot be started: %s", error)
            self._forget()
        else:
            _log.info("upgrading: process %d starts", self._process.pid)
            self._loop.add_reader(self._link, self._reported, self._link, self._process)
            late = f"the new process was not ready within {START_S:g} s; this one goes on"
            self._late = self._loop.call_later(START_S, self._give_up, late)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            its.close()

    def end(self) -> None:
        """Say that this process has ended its work and closed its state.

        A new process that is not ready ends, too: this one was stopped for another reason.
        """
        if self._process is not None and not self._ready:
            self._process.terminate()
        self._forget()

    def _reported(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """The new process says that it listens, or has ended."""
        try:
            said = link.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._ready = True
            if self._late is not None:
                self._late.cancel()
            _log.info("upgrading: process %d listens, this one leaves", process.pid)
            self._leave(process.pid)
            return
        was_ready, self._ready = self._ready, False
        self._loop.run_in_executor(None, process.wait)
        self._forget()
        if was_ready:
            _log.error("the new process %d has ended; this one still runs", process.pid)
            (self._take_back or self.start)()
        else:
            _log.error("the new process ended before it was ready; this one goes on")

    def _give_up(self, why: str) -> None:
        """Kill a process that is not ready, if there is one."""
        process = self._process
        if process is not None:
            _log.error("%s", why)
            self._forget()
            process.kill()
            self._loop.run_in_executor(None, process.wait)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._link is not None:
            self._loop.remove_reader(self._link)
            self._link.close()
        self._late = self._link = self._process = None


def on_signals(*, reload: Callable[[], None], upgrade: Callable[[], None]) -> None:
    """Reload on SIGHUP and upgrade on SIGUSR2, also on those that came during the start."""
    if sys.platform != "win32":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        loop.add_signal_handler(signal.SIGUSR2, upgrade)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_SIGNALS)
