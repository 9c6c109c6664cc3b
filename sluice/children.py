"""Child processes of demo, benches and tests: started together and ended together."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import httpx

_START_S = 60.0
_END_S = 15.0
"""Seconds to end; a gateway's farewell to unreachable stores takes time."""
_PR_SET_PDEATHSIG = 1


class ChildDied(Exception):
    """A child ended, or did not become ready, while it was needed."""


class Children:
    """Child processes that end with the `with` block or with this process."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
        silent: bool = False,
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start one child; on Linux it gets SIGTERM if this process dies, even when killed.

        `quiet` drops its stdout, `silent` its stderr; `log` is a file that gets its stderr.
        """
        with contextlib.ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            child = spawn(
                command,
                env={**os.environ, **(env or {})},
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if silent else file,
            )
        self._running.append(child)
        return child

    def forget(self, child: subprocess.Popen[bytes]) -> None:
        """Stop watching a child that is about to be killed on purpose."""
        self._running.remove(child)

    def wait_for(self, url: str) -> None:
        """Wait until `url` answers 200; raises ChildDied when a child dies first."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=1.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.05)
        raise ChildDied(f"{url} did not answer within {_START_S:g} s")

    def watch(self, duration_s: float | None, until: Callable[[], bool] | None = None) -> None:
        """Wait for Ctrl-C, SIGTERM, the end of `duration_s`, `until`, or a child's death."""
        deadline = None if duration_s is None else time.monotonic() + duration_s
        while (deadline is None or time.monotonic() < deadline) and not (until and until()):
            self._check()
            time.sleep(0.2)

    def _check(self) -> None:
        for child in self._running:
            status = child.poll()
            if status is not None:
                raise ChildDied(f"{' '.join(_args(child))} ended with status {status}")

    def _end_all(self) -> None:
        """End children newest first, one by one: a gateway ends before the engines it uses."""
        for child in reversed(self._running):
            child.terminate()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"{' '.join(_args(child))} did not end, and is killed\n")
                child.kill()
                child.wait()


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | None,
    stderr: IO[bytes] | int | None,
) -> subprocess.Popen[bytes]:
    """A process in a session of its own; outputs as `subprocess.Popen` takes them."""
    return subprocess.Popen(  # noqa: S603 - our own commands
        list(command),
        env=env,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )


def _args(child: subprocess.Popen[bytes]) -> list[str]:
    return [str(part) for part in child.args] if isinstance(child.args, list) else [""]


def die_with_parent() -> None:
    """Ask Linux to end this child if its parent dies; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """Unused ports of 127.0.0.1 that the kernel gives to nobody else for a minute.

    Each port has just closed a connection. Until the kernel forgets it, only a server (which sets
    SO_REUSEADDR) can bind the port, and the kernel does not hand it out as a free one.
    """
    return [_closed_port() for _ in range(count)]


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Set only after binding: otherwise the kernel might give out a port that is about to be
        # used.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(1)
        address: tuple[str, int] = listener.getsockname()
        with socket.create_connection(address):
            listener.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
        return address[1]
