"""Listening sockets, where a process has them from, and which process follows it, without a gap.

- Ports are bound before anything else starts, so that a used one is reported at once. Processes
  share a port through SO_REUSEPORT: each has its own listening socket, and the kernel distributes
  connections by a hash of their addresses.
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
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Final

from gateway.settings import Config
from gateway.settings.token_pools import managed
from gateway.store.backends import backend_of

BACKLOG: Final = 4096
"""Connections that may wait in the kernel at each socket."""
_FIRST_FD: Final = 3
"""The first file descriptor that systemd passes."""
PREDECESSOR: Final = "SLUICE_PREDECESSOR_FD"
"""Names file descriptors: the new process's end of the pair, then systemd's sockets, by commas."""
_OF_SYSTEMD: Final = frozenset({"WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"})
"""Variables that do not hold for the new process."""
_LISTENS: Final = b"ready\n"
START_S: Final = 120.0
_HELD_SIGNALS: Final = frozenset({signal.SIGHUP, signal.SIGUSR2})
"""Blocked from a process's first step until it handles them: by default they would end it."""
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

Ports = tuple[list[socket.socket], list[socket.socket]]
"""Those of clients, and of management; none where metrics have no port of their own."""
_log = logging.getLogger("sluice.upgrade")


def bound(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind a socket to every address of a host, without listening yet. Raises OSError.

    For port 0 the system chooses a port, the same for all addresses. With `shared`, other
    processes of the same user may also bind the port.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            sock = opened.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or (port_of(sockets) if sockets else 0)
            sock.bind((address[0], chosen, *address[2:]))
            sock.setblocking(False)  # noqa: FBT003
            sockets.append(sock)
        opened.pop_all()
    return sockets


def reserved(host: str, port: int) -> list[socket.socket]:
    """Sockets that reserve a port for replicas to share. Raises OSError, also if it is in use.

    They never listen, so they get no connections; other programs cannot take the port.
    """
    alone = bound(host, port)
    port = port_of(alone)
    for sock in alone:
        sock.close()
    return bound(host, port, shared=hasattr(socket, "SO_REUSEPORT"))


def port_of(sockets: Sequence[socket.socket]) -> int:
    """The port of bound sockets."""
    port: int = sockets[0].getsockname()[1]
    return port


def own_address(host: str, towards: str) -> str:
    """The address at which other machines reach a listener on `host`.

    For a wildcard host, this is the local address of the route to the host `towards` (nothing is
    sent), or the loopback address if there is no route.
    """
    if host not in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return host
    try:
        info = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*info[:3]) as sock:
            sock.connect(info[4])
            return str(sock.getsockname()[0])
    except OSError:
        return "127.0.0.1"


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
        self.link = _inherited(fds.pop(0)) if fds else None
        """The pair's end towards the process that this one replaces; None if it replaces none."""
        if self.link is None and environ.get("LISTEN_PID") == str(os.getpid()):  # sd_listen_fds
            fds += range(_FIRST_FD, _FIRST_FD + int(environ.get("LISTEN_FDS", "0")))
        inherited = [_inherited(fd) for fd in (*fds, *sockets)]
        self.sockets = [s for s in inherited if s.family in {socket.AF_INET, socket.AF_INET6}]
        """Listening sockets that systemd holds."""
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
        passed = [sock.dup() for sock in self.listening_on(port)]
        shared = self.succeeds if shared is None else shared
        return passed or (bound(host, port, shared=True) if shared else reserved(host, port))

    def ports(self, config: Config) -> Ports:
        """Bind the configured ports, or take those that were passed. Raises OSError."""
        server = config.server
        shared = None if self.supervisor is None else True
        clients = self.open(server.host, server.port, shared=shared)
        port = server.management_port
        return clients, self.open(server.host, port) if port else []

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
        await _end_of(self.link)


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
        self._origin = origin
        self._environ = environ
        self._leave = leave
        self._take_back = take_back
        self._process: subprocess.Popen[bytes] | None = None
        self._following: asyncio.Task[None] | None = None
        self._ready = False

    def start(self) -> None:
        """Start it, in place of one that is not ready yet."""
        if self._ready:
            _log.warning("an upgrade is under way already")
            return
        if self._process is not None and self._following is not None:
            _log.error("the new process is not ready: another one starts in its place")
            self._following.cancel()
            self._process.kill()
            asyncio.get_running_loop().run_in_executor(None, self._process.wait)
            self._process = None
        link, its = socket.socketpair()
        link.setblocking(False)  # noqa: FBT003
        fds = [its.fileno(), *(sock.fileno() for sock in self._origin.sockets)]
        environ = {k: v for k, v in self._environ.items() if k not in _OF_SYSTEMD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_SIGNALS)
        try:
            self._process = process = subprocess.Popen(  # noqa: S603 - this program itself
                [sys.executable, *sys.orig_argv[1:]],
                env={**environ, PREDECESSOR: ",".join(map(str, fds))},
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            _log.error("the new process cannot be started: %s", error)
            link.close()
        else:
            _log.info("upgrading: process %d starts", process.pid)
            self._following = asyncio.ensure_future(self._follow(link, process))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            its.close()

    def end(self) -> None:
        """Say that this process has ended its work and closed its state.

        A new process that is not ready ends, too: this one was stopped for another reason.
        """
        if self._process is not None and not self._ready:
            self._process.terminate()
        if self._following is not None:
            self._following.cancel()  # which closes the pair's end

    async def _follow(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Wait until the new process says that it listens, and then until it ends."""
        report, why = b"", "the new process ended before it was ready; this one goes on"
        with link:
            try:
                async with asyncio.timeout(START_S):
                    report = await asyncio.get_running_loop().sock_recv(link, 64)
            except TimeoutError:
                why = f"the new process was not ready within {START_S:g} s; this one goes on"
                process.kill()
            except OSError:
                pass
            if report:
                self._ready = True
                _log.info("upgrading: process %d listens, this one leaves", process.pid)
                self._leave(process.pid)
                await _end_of(link)
                why = f"the new process {process.pid} has ended; this one still runs"
        _log.error("%s", why)
        self._process, self._ready = None, False
        asyncio.get_running_loop().run_in_executor(None, process.wait)
        if report:
            (self._take_back or self.start)()


async def _end_of(link: socket.socket) -> None:
    """Wait until the other process has ended."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(link, 64):
            pass


def _inherited(fd: int) -> socket.socket:
    """A socket that the process which started this one passed; programs started here lack it."""
    os.set_inheritable(fd, False)  # noqa: FBT003
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)  # noqa: FBT003
    return sock


def on_signals(*, reload: Callable[[], None], upgrade: Callable[[], None]) -> None:
    """Reload on SIGHUP and upgrade on SIGUSR2, also on those that came during the start."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    loop.add_signal_handler(signal.SIGUSR2, upgrade)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_SIGNALS)
