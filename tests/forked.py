"""Gateways and engines for tests, forked from a process that has imported them.

A start costs .1 s of CPU instead of .4 to .8 s, and the suites over sockets start hundreds. What
the tests see is the same: a process of its own session that runs `python -m sluice`, with that
command's environment and output. Tests of starting itself use `subprocess`.
"""

import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from sluice import children
from sluice.children import die_with_parent

_IMPORTED: Final = ("sluice.cli", "sluice.serve", "sluice.mock", "gateway.wiring.serving")
_MAX_BYTES: Final = 1 << 20
_VERBS: Final = ("serve", "mock")
_PID_BYTES: Final = 10
_spawn = children.spawn


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that the fork server started; it alone may wait for it, and tells how it ended."""

    def __init__(self, args: Sequence[str], pid: int, told: int) -> None:
        """`told`: a pipe on which the exit status comes."""
        self.args = list(args)
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._told = told
        self._reading = threading.Lock()

    def __del__(self, *_: Any, **__: Any) -> None:
        """The fork server reaps it."""
        os.close(self._told)

    def poll(self) -> int | None:
        """Exit status; None while it runs."""
        with self._reading:
            if self.returncode is None and self._ended(0.0):
                # Nothing comes where the fork server ended, and its children with it.
                self.returncode = int(os.read(self._told, 16) or -signal.SIGTERM)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status once it ends; raises TimeoutExpired."""
        self._ended(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def _ended(self, within_s: float | None) -> bool:
        poller = select.poll()  # select() takes no file beyond 1,023, and tests open thousands
        poller.register(self._told, select.POLLIN)
        return bool(poller.poll(None if within_s is None else 1000 * within_s))

    def send_signal(self, sig: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class ForkServer:
    """The process that forks; it ends, and all that it started, with the one that made it."""

    def __init__(self) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel = own

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess:
        """Start `python -m sluice ...`; RuntimeError when the fork server has ended."""
        told, tell = os.pipe()
        asked = {"command": list(command), "env": dict(env), "cwd": str(Path.cwd())}
        socket.send_fds(self._channel, [json.dumps(asked).encode()], [stdout, stderr, tell])
        os.close(tell)
        pid = os.read(told, _PID_BYTES)
        if not pid:
            raise RuntimeError("the fork server has ended")
        return ForkedProcess(command, int(pid), told)

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.wait(10.0)


@functools.cache
def fork_server() -> ForkServer:
    """This process's, made at the first need."""
    return ForkServer()


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | None,
    stderr: IO[bytes] | int | None,
) -> subprocess.Popen[bytes]:
    """For `sluice.children.spawn`: forks gateways and engines, and starts all else as ever."""
    if list(command[:3]) != [sys.executable, "-m", "sluice"] or command[3] not in _VERBS:
        return _spawn(command, env=env, stdout=stdout, stderr=stderr)
    with Path(os.devnull).open("wb") as null:
        out, error = (
            place if to is None else null.fileno() if to == subprocess.DEVNULL else _number(to)
            for to, place in ((stdout, 1), (stderr, 2))
        )
        return fork_server().start(command, env, out, error)


def _number(file: IO[bytes] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def _serve(channel: socket.socket) -> list[str]:
    """Fork whenever asked, and tell of ends; returns in each child, with its command."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
            continue
        message, fds, _, _ = socket.recv_fds(channel, _MAX_BYTES, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (woken, wake, *running.values()):
                os.close(fd)
            channel.close()
            return _become(json.loads(message), fds)
        stdout, stderr, tell = fds
        os.write(tell, f"{pid:{_PID_BYTES}}".encode())
        os.close(stdout)
        os.close(stderr)
        running[pid] = tell


def _reap(running: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            tell = running.pop(ended[0])
            with contextlib.suppress(BrokenPipeError):
                os.write(tell, str(os.waitstatus_to_exitcode(ended[1])).encode())
            os.close(tell)


def _become(asked: Mapping[str, Any], fds: Sequence[int]) -> list[str]:
    """Make this process what `subprocess` would have made; returns the command."""
    os.setsid()
    die_with_parent()
    for fd, place in zip(fds, (1, 2), strict=False):
        os.dup2(fd, place)
    for fd in fds:
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    command: list[str] = asked["command"]
    sys.orig_argv = list(command)
    sys.argv = ["sluice", *command[3:]]
    return command


def main(channel: socket.socket) -> None:
    """Import, fork, and run what is asked in each child."""
    for name in _IMPORTED:
        importlib.import_module(name)
    _serve(channel)
    runpy.run_module("sluice", run_name="__main__")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
