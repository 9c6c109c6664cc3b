"""Who shares ports, where a process comes from, which one follows it, and what systemd hears."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from gateway.wiring.handover import (
    PREDECESSOR,
    READY,
    Origin,
    ServiceManager,
    Successor,
    bound,
    own_address,
    port_of,
    reserved,
)

PROGRAM = """
import json, os, sys
from gateway.wiring.handover import PREDECESSOR, Origin
origin = Origin(os.environ)
found = {
    "ports": [sock.getsockname()[1] for sock in origin.sockets],
    "linked": origin.link is not None,
    "left": [name for name in os.environ if name.startswith("LISTEN_") or name == PREDECESSOR],
}
print(json.dumps(found), file=open(sys.argv[1], "w"))
origin.ready()
"""


@pytest.mark.parametrize("held", [0, 1, 2])
async def test_the_new_process_takes_the_sockets_that_this_one_holds_and_no_other(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    origin = Origin({})
    origin.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(held)]
    # As a unit passes them that has a Unix socket before ours, or as another program got them.
    foreign = {"LISTEN_FDS": "3", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a:b:c"}
    left = asyncio.Event()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", PROGRAM, str(told)])
    environ = {**os.environ, **foreign}
    ended = asyncio.Event()
    successor = Successor(origin, environ, lambda _: left.set(), ended.set)
    successor.start()
    process = successor._process
    assert process is not None
    async with asyncio.timeout(60):
        await left.wait()
        await ended.wait()
    ports = [sock.getsockname()[1] for sock in origin.sockets]
    assert json.loads(told.read_text()) == {"ports": ports, "linked": True, "left": []}
    successor.end()
    for sock in origin.sockets:
        sock.close()


def test_a_process_that_replaces_none_is_passed_nothing() -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1", PREDECESSOR: ""}
    origin = Origin(environ)
    assert (origin.link, origin.sockets) == (None, [])


# -- systemd


def listener(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(address)
    sock.settimeout(5)
    return sock


@pytest.mark.parametrize("abstract", [False, True])
def test_states_reach_the_socket(abstract: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with listener(f"\0{path}" if abstract else path) as sock:
        manager = ServiceManager({"NOTIFY_SOCKET": f"@{path}" if abstract else path})
        manager.say(READY)
        assert sock.recv(100) == b"READY=1"
        manager.replaced_by(77)
        assert sock.recv(100) == b"MAINPID=77\nREADY=1"
        manager.reloading()
        first, second = sock.recv(100).decode().split("\n")
        assert first == "RELOADING=1"
        assert int(second.removeprefix("MONOTONIC_USEC=")) > 0


def test_without_systemd_and_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    ServiceManager({}).say(READY)
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).say(READY)


async def test_signs_of_life_come_twice_in_the_allowed_time(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())}
    with listener(path) as sock:
        manager = ServiceManager(environ)
        assert manager.watchdog_s == 0.05
        living = asyncio.create_task(manager.live())
        await asyncio.sleep(0.3)
        living.cancel()
        assert [sock.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    other = ServiceManager(environ | {"WATCHDOG_PID": "1"})
    assert other.watchdog_s == 0
    await asyncio.wait_for(other.live(), 1)


def test_a_service_manager_that_does_not_listen_holds_nothing_up(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with listener(path):
        manager = ServiceManager({"NOTIFY_SOCKET": path})
        for _ in range(2_000):  # more than a socket's queue takes
            manager.say(READY)


# -- ports


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
