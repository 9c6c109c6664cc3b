"""The ports of a process, and its turn: alone, beside its replicas, or after another process."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.settings import Config
from gateway.settings.token_pools import managed
from gateway.store.backends import backend_of
from gateway.wiring.listening import bound, reserved
from gateway.wiring.successor import HELD_SIGNALS, Started

BACKLOG: Final = 4096
"""Connections that may wait in the kernel at each socket."""

_log = logging.getLogger("sluice.upgrade")


class Parent(NamedTuple):
    """The supervisor, for its replica."""

    pipe: int
    """File descriptor that reaches its end when the supervisor ends."""
    sockets: tuple[int, ...] = ()
    """Listening sockets that systemd holds, instead of sockets of the replica's own."""
    succeeds: bool = False
    """Whether it replaces another supervisor, whose replicas still have the ports."""


class Ports(NamedTuple):
    """The sockets of a process."""

    clients: list[socket.socket]
    management: list[socket.socket]
    """Those of `clients` where metrics have no port of their own."""
    held: frozenset[int]
    """Descriptors of those that other processes hold too."""

    @property
    def sockets(self) -> list[socket.socket]:
        """All, the clients' ones first."""
        apart = self.management is not self.clients
        return [*self.clients, *self.management] if apart else self.clients


def listening(
    config: Config, parent: Parent | None, started: Started, *, again: bool = False
) -> Ports:
    """Bind the ports, or take those that were passed. Raises OSError.

    With `again`, another process may still hold them.
    """
    server = config.server
    succeeds = again or started.link is not None or (parent is not None and parent.succeeds)
    opened = partial(bound, shared=True) if succeeds else reserved
    if parent is None:
        passed = [sock.dup() for sock in started.listening_on(server.port)]
        clients = passed or opened(server.host, server.port)
    else:
        passed = [socket.socket(fileno=fd) for fd in parent.sockets]
        clients = passed or bound(server.host, server.port, shared=True)
    management = clients
    if server.management_port:
        managing = [sock.dup() for sock in started.listening_on(server.management_port)]
        passed = passed + managing
        management = managing or opened(server.host, server.management_port)
    return Ports(clients, management, frozenset(sock.fileno() for sock in passed))


async def taken_over(config: Config, started: Started, sockets: list[socket.socket]) -> None:
    """If the state belongs to one process at a time, wait for the end of the one before.

    Connections that arrive meanwhile wait in the kernel.
    """
    backend = backend_of(config.state.address)
    limited = any(managed(config, model) for model in config.models)
    # Two processes at a time would share a file, or spend the same limits twice.
    for_one = backend == "sqlite" or (backend == "memory" and limited)
    if started.link is None or not for_one:
        return
    for sock in sockets:
        sock.listen(BACKLOG)
    started.ready()
    _log.info("waiting until the process before has drained")
    await started.alone(asyncio.get_running_loop())


def on_signals(
    loop: asyncio.AbstractEventLoop, *, reload: Callable[[], None], upgrade: Callable[[], None]
) -> None:
    """Reload on SIGHUP and upgrade on SIGUSR2, also on those that came during the start."""
    if sys.platform != "win32":
        loop.add_signal_handler(signal.SIGHUP, reload)
        loop.add_signal_handler(signal.SIGUSR2, upgrade)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
