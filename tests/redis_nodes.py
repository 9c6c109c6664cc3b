"""Several Redis servers: a cluster of three nodes, and a sentinel with its master."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from bench.common.fleet import redis_program
from sluice.children import Children, free_ports

_WAIT_S = 20.0
SLOTS = 16384


class _Nodes:
    """Servers that end with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children = Children()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
        self._children.__exit__(*_)

    def _start(self, port: int, *options: str) -> None:
        program = redis_program()
        assert program is not None
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        self._processes[port] = self._children.start(
            [
                *(program, *options, "--port", str(port), "--bind", "127.0.0.1"),
                *("--dir", str(folder), "--save", "", "--appendonly", "no"),
            ],
            quiet=True,
        )
        until(lambda: _answers(port))

    def kill(self, port: int) -> None:
        """End one at once."""
        process = self._processes.pop(port)
        self._children.forget(process)
        process.kill()
        process.wait(10.0)

    def hang(self, port: int) -> None:
        """Stop one: connections are accepted by the kernel, nothing is answered."""
        self._processes[port].send_signal(signal.SIGSTOP)


class RedisCluster(_Nodes):
    """Three masters, a third of the slots each; a node that is away takes only its own along."""

    def __enter__(self) -> Self:
        ports = free_ports(6)
        self.nodes = dict(zip(ports[:3], ports[3:], strict=True))
        for port in self.nodes:
            self.start(port)
        first = next(iter(self.nodes))
        for index, (port, bus) in enumerate(self.nodes.items()):
            with node(port) as client:
                low, high = index * SLOTS // 3, (index + 1) * SLOTS // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
            with node(first) as client:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        until(lambda: all(_knows_all(port) for port in self.nodes))
        return self

    @property
    def url(self) -> str:
        """As `state.url` has it."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.nodes)

    def start(self, port: int) -> None:
        """Start a node, with the cluster as it knew it and without data."""
        self._start(
            port,
            *("--cluster-enabled", "yes", "--cluster-port", str(self.nodes[port])),
            *("--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"),
        )

    def owner(self, slot: int) -> int:
        """Port of the node that holds a slot."""
        return list(self.nodes)[min(slot * 3 // SLOTS, 2)]


class SentinelledRedis(_Nodes):
    """A master, a replica, and one sentinel that replaces the one by the other."""

    service = "mine"

    def __enter__(self) -> Self:
        self.master, self.replica, self.sentinel = free_ports(3)
        self._start(self.master)
        self._start(self.replica, "--replicaof", f"127.0.0.1 {self.master}")
        with node(self.replica) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up")
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"sentinel monitor {self.service} 127.0.0.1 {self.master} 1\n"
            f"sentinel down-after-milliseconds {self.service} 500\n"
            f"sentinel failover-timeout {self.service} 3000\n"
        )
        program = redis_program()
        assert program is not None
        self._processes[self.sentinel] = self._children.start(
            [program, str(config), "--sentinel"], quiet=True
        )
        until(lambda: self._replicas_known() == 1)
        return self

    @property
    def url(self) -> str:
        """As `state.url` has it."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel}/{self.service}/0"

    def _replicas_known(self) -> int:
        if not _answers(self.sentinel):
            return 0
        with node(self.sentinel) as client:
            return len(client.execute_command("SENTINEL", "REPLICAS", self.service))


def node(port: int) -> Redis:
    """A plain client of one server; close it."""
    return Redis(port=port, socket_timeout=2.0)


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, within limits."""
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("Redis is not ready")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        with node(port) as client:
            return bool(client.ping())
    except (RedisError, OSError):
        return False


def _knows_all(port: int) -> bool:
    with node(port) as client:
        found = client.execute_command("CLUSTER", "INFO")
        text = found.decode() if isinstance(found, bytes) else str(found)
    if isinstance(found, dict):
        return bool(found["cluster_state"] == "ok" and found["cluster_known_nodes"] == "3")
    return "cluster_state:ok" in text and "cluster_known_nodes:3" in text
