"""A new process of this program takes over from a running one, without a gap.

- The running process starts the new one with its own command line, so that the code and the
  configuration on disk are read anew, and goes on serving.
- A socket pair joins them. The new process says READY when it listens on the same ports. The
  running one then leaves the ports and drains. If the new process ends first, or is not ready
  within START_S, nothing changes. If it ends later, the running one takes the ports back.
- The new process sees the end of the pair when the old one has ended. One whose state belongs to
  one process at a time waits for that; connections wait meanwhile in the kernel.
"""

import logging
import signal
import socket
import subprocess
import sys
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Final

from gateway.wiring.listening import inherited, passed

PREDECESSOR: Final = "SLUICE_PREDECESSOR_FD"
"""Names file descriptors: the new process's end of the pair, then systemd's sockets, by commas."""
_OF_SYSTEMD: Final = frozenset({"WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"})
"""Variables that do not hold for the new process."""
_READY: Final = b"ready\n"
START_S: Final = 120.0
HELD_SIGNALS: Final = (
    frozenset() if sys.platform == "win32" else frozenset({signal.SIGHUP, signal.SIGUSR2})
)
"""Blocked from a process's first step until it handles them: by default they would end it."""

_log = logging.getLogger("sluice.upgrade")


def hold_signals(mask: Iterable[int] | None = None) -> Iterable[int]:
    """Have HELD_SIGNALS wait, or restore an earlier `mask`; returns the one before."""
    if sys.platform == "win32":
        return ()
    if mask is not None:
        return signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)


class Started:
    """Where this process comes from: sockets from systemd, and the process that it replaces."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        fds = [int(fd) for fd in environ.pop(PREDECESSOR, "").split(",") if fd]
        self.link = inherited(fds[0]) if fds else None
        """The pair's end towards the process that this one replaces; None if it replaces none."""
        self.sockets = [inherited(fd) for fd in fds[1:]] if fds else passed(environ)
        """Listening sockets that systemd holds."""

    def listening_on(self, port: int) -> list[socket.socket]:
        """Those of systemd's sockets that are on a port; for port 0 all of them."""
        return [sock for sock in self.sockets if port in {0, sock.getsockname()[1]}]

    def ready(self) -> None:
        """Tell the process that this one replaces to leave."""
        if self.link is not None:
            with suppress(OSError):  # it is gone
                self.link.send(_READY)

    async def alone(self, loop: AbstractEventLoop) -> None:
        """Wait until the process that this one replaces has ended."""
        if self.link is not None:
            with suppress(OSError):
                while await loop.sock_recv(self.link, 64):
                    pass


class Successor:
    """Starts the process that replaces this one."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        started: Started,
        environ: Mapping[str, str],
        leave: Callable[[int], None],
        take_back: Callable[[], None] | None = None,
    ) -> None:
        """`leave` is called with the new process's id once it listens.

        `take_back` is called when it ended after that, before this one; without, another starts.
        """
        self._loop = loop
        self._started = started
        self._environ = environ
        self._leave = leave
        self._take_back = take_back
        self._late: TimerHandle | None = None
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
        fds = [its.fileno(), *(sock.fileno() for sock in self._started.sockets)]
        environ = {k: v for k, v in self._environ.items() if k not in _OF_SYSTEMD}
        mask = hold_signals()
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
            hold_signals(mask)
            its.close()

    def end(self) -> None:
        """Say that this process has ended its work and closed its state.

        A new process that is not ready ends, too: this one was stopped for another reason.
        """
        if self._process is not None and not self._ready:
            self._process.terminate()
        self._forget()

    def _reported(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        try:
            said = link.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._ready = True
            self._wait_no_more()
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

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _forget(self) -> None:
        self._wait_no_more()
        if self._link is not None:
            self._loop.remove_reader(self._link)
            self._link.close()
        self._link = self._process = None
