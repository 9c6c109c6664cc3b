"""What systemd is told, at which address, and how often."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from gateway.wiring.handover import READY, ServiceManager


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


async def test_a_watchdog_that_is_another_process_s_is_left_alone() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"})
    assert manager.watchdog_s == 0
    await asyncio.wait_for(manager.live(), 1)


def test_a_service_manager_that_does_not_listen_holds_nothing_up(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with listener(path):
        manager = ServiceManager({"NOTIFY_SOCKET": path})
        for _ in range(2_000):  # more than a socket's queue takes
            manager.say(READY)
