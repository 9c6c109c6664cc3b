"""A private Redis server for tests and benches that break it."""

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from sluice.children import Children, free_ports

_START_S = 10.0


def redis_program() -> str | None:
    """Path of redis-server; None when it is not installed."""
    return shutil.which("redis-server")


class RedisServer:
    """One redis-server that keeps nothing on disk; every start is an empty one."""

    def __init__(self) -> None:
        self._children = Children()
        self.port = free_ports(1)[0]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
        self._children.__exit__(*_)

    def client(self) -> Redis:
        """A plain client; close it."""
        return Redis(port=self.port, socket_timeout=5.0)

    def start(self) -> None:
        """Start, and wait until it answers."""
        program = redis_program()
        if program is None:
            raise FileNotFoundError("redis-server is not on PATH")
        self.process = self._children.start(
            [
                *(program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--appendonly", "no", "--dir", str(Path("/tmp"))),
            ],
            quiet=True,
        )
        deadline = time.monotonic() + _START_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                except (RedisError, OSError):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
                else:
                    return

    def kill(self) -> None:
        """End it at once; what it knew is gone."""
        if self.process is not None:
            self._children.forget(self.process)
            self.process.kill()
            self.process.wait(10.0)
            self.process = None

    def hang(self) -> None:
        """Stop it: connections are accepted by the kernel, nothing is answered."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped one go on."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
