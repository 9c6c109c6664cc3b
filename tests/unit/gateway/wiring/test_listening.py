"""Ports are bound before anything starts, and shared only by who asks for it."""

import socket

import pytest

from gateway.wiring.handover import (
    bound,
    own_address,
    port_of,
    reserved,
)


def closed(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def test_a_port_in_use_is_told_at_once() -> None:
    first = bound("127.0.0.1", 0)
    first[0].listen()
    for bind in (bound, reserved):
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port_of(first))
    closed(first)


def test_a_reserved_port_is_for_those_that_share_it() -> None:
    held = reserved("127.0.0.1", 0)
    port = port_of(held)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    replicas = [bound("127.0.0.1", port, shared=True) for _ in range(2)]
    for replica in replicas:
        replica[0].listen()
    with pytest.raises(OSError, match="in use"):
        bound("127.0.0.1", port)
    for _ in range(20):  # whoever only reserves the port gets none of them
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    for sockets in (held, *replicas):
        closed(sockets)


def test_others_reach_a_listener_by_the_address_that_is_used_towards_them() -> None:
    assert own_address("10.1.2.3", "127.0.0.1") == "10.1.2.3"
    assert own_address("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert own_address("0.0.0.0", "no.such.host.invalid") == "127.0.0.1"
