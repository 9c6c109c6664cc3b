"""Ports for child processes."""

import errno
import socket

import pytest

from sluice.children import free_ports


def listening(port: int, *, as_a_server: bool) -> None:
    with socket.socket() as sock:
        if as_a_server:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()


def test_a_free_port_is_a_servers_and_nobody_elses() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with pytest.raises(OSError, match=r".*") as failed:
            listening(port, as_a_server=False)
        assert failed.value.errno == errno.EADDRINUSE
        listening(port, as_a_server=True)
