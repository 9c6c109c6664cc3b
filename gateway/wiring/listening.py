"""Listening sockets, bound before anything else starts, so that a used port is reported at once.

Replicas on one host share a port through SO_REUSEPORT: each has its own listening socket, and
the kernel distributes connections by a hash of their addresses. A gateway that replaces another
shares its ports in the same way, or takes sockets that systemd holds.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

BACKLOG: Final = 4096
"""Connections that may wait in the kernel at each socket."""
_FIRST_FD: Final = 3
"""The first file descriptor that systemd passes."""


def bound(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind a socket to every address of a host, without listening yet. Raises OSError.

    For port 0 the system chooses a port, the same for all addresses. With `shared`, other
    processes of the same user may also bind the port.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found: list[socket.socket] = []
    with ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            sock = opened.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or (port_of(found) if found else 0)
            sock.bind((address[0], chosen, *address[2:]))
            sock.setblocking(False)  # noqa: FBT003
            found.append(sock)
        opened.pop_all()
    return found


def reserved(host: str, port: int) -> list[socket.socket]:
    """Sockets that reserve a port for replicas to share. Raises OSError, also if it is in use.

    They never listen, so they get no connections; other programs cannot take the port.
    """
    alone = bound(host, port)
    port = port_of(alone)
    for sock in alone:
        sock.close()
    return bound(host, port, shared=hasattr(socket, "SO_REUSEPORT"))


def passed(environ: Mapping[str, str]) -> list[socket.socket]:
    """Listening sockets that systemd passed to this process (sd_listen_fds), on TCP."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    first = range(_FIRST_FD, _FIRST_FD + int(environ.get("LISTEN_FDS", "0")))
    found = [inherited(fd) for fd in first]
    return [sock for sock in found if sock.family in {socket.AF_INET, socket.AF_INET6}]


def inherited(fd: int) -> socket.socket:
    """A socket that the process which started this one passed; programs started here lack it."""
    os.set_inheritable(fd, False)  # noqa: FBT003
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)  # noqa: FBT003
    return sock


def port_of(sockets: Sequence[socket.socket]) -> int:
    """The port of bound sockets."""
    found: int = sockets[0].getsockname()[1]
    return found


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
