"""Tells systemd how this service is doing (sd_notify); silent where systemd does not ask."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_ALIVE: Final = "WATCHDOG=1"


class ServiceManager:
    """The service manager that started this process."""

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
            self.say(_ALIVE)
            await asyncio.sleep(self.watchdog_s)
