"""A fleet of real processes for benches and tests: mock engines and a gateway before them.

with Fleet(short=2, long=1) as fleet:
httpx.post(fleet.url + "/v1/chat/completions", ...)
"""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from redis import Redis
from redis.exceptions import RedisError

from sluice.children import Children, free_ports

MODEL = "bench-model"
ADMIN_KEY = "bench-admin-key"


class EngineProcess:
    """One mock engine process."""

    def __init__(self, pool: str, port: int, command: list[str]) -> None:
        self.pool = pool
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.id = f"127.0.0.1:{port}"
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    def metrics(self) -> dict[str, float]:
        """Its /metrics, series name with labels -> value."""
        return read_metrics(self.url)

    def running(self) -> int:
        """Sequences running or waiting in the engine now."""
        values = self.metrics()
        return int(
            sum(v for k, v in values.items() if k.startswith("vllm:num_requests_") and "{" in k)
        )

    def finished(self) -> int:
        """Requests it answered successfully so far."""
        values = self.metrics()
        return int(sum(v for k, v in values.items() if k.startswith("vllm:request_success_total")))

    def fail(self, spec: str) -> None:
        """Change its fault at run time; "" for none."""
        httpx.post(f"{self.url}/mock/fail", json={"spec": spec}, trust_env=False).raise_for_status()

    def last(self, count: int = 1) -> list[dict[str, Any]]:
        """The newest requests it received."""
        answer = httpx.get(f"{self.url}/mock/last", params={"n": count}, trust_env=False)
        found = answer.json()
        requests: list[dict[str, Any]] = found["requests"] if isinstance(found, dict) else found
        return requests


class GatewayProcess:
    """One gateway process, or several on one port (`server.workers`)."""

    def __init__(self, port: int, config: dict[str, Any]) -> None:
        """`config`: its file."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.config = config
        self.command: list[str] = []
        self.env: Mapping[str, str] | None = None
        """Beside this process's own."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def file(self) -> Path:
        """Its configuration file, once the fleet runs."""
        return Path(self.command[self.command.index("-c") + 1])

    @property
    def managed_at(self) -> list[str]:
        """Where each of its processes shows its metrics and takes an admin's calls."""
        server = self.config["server"]
        first, count = server.get("management_port", 0), server.get("workers", 1)
        if not first:
            return [self.url]
        ports = [first] if count == 1 else range(first + 1, first + 1 + count)
        return [f"http://127.0.0.1:{port}" for port in ports]

    def metrics(self) -> dict[str, float]:
        """Its /metrics; of several processes the sum, gauges of shared things included."""
        total: Counter[str] = Counter()
        for url in self.managed_at:
            total.update(read_metrics(url))
        return dict(total)

    def leases(self) -> int:
        """Leases in force here."""
        return int(self.metrics()['sluice_leases{state="active"}'])

    def admin(self, path: str) -> httpx.Response:
        """GET an admin path."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.get(self.managed_at[0] + path, headers=headers, trust_env=False)


class Fleet:
    """Mock engines in pools and a gateway before them, or several."""

    def __init__(
        self,
        *,
        short: int = 2,
        long: int = 1,
        short_window: int = 8192,
        long_window: int = 65536,
        short_slots: int = 128,
        long_slots: int = 64,
        mock: Sequence[str] = ("--speed", "20"),
        model: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        further: Sequence[Mapping[str, Any]] = (),
        server: Mapping[str, Any] | None = None,
        idle: bool = False,
    ) -> None:
        """`mock`: further arguments of every mock; `model`, `config`: merged into the file.

        `idle`: the gateways have their files and commands, and the caller starts them.

        `server`: merged into that section of every gateway's.

        `further`: one more gateway each, with this merged into its file.
        """
        self._children = Children()
        self._stack = contextlib.ExitStack()
        ports = free_ports(short + long + 1 + len(further))
        shapes = [("short", short_window, short_slots)] * short
        shapes += [("long", long_window, long_slots)] * long
        self.engines = [
            EngineProcess(pool, port, _mock(port, window, slots, mock))
            for port, (pool, window, slots) in zip(ports, shapes, strict=False)
        ]
        own, *others = ports[short + long :]
        pools = {
            name: {
                "max_model_len": window,
                "max_num_seqs": slots,
                "workers": [e.url for e in self.engines if e.pool == name],
            }
            for name, window, slots in dict.fromkeys(shapes)
        }
        section = {"host": "127.0.0.1", "port": own, "admin_key": ADMIN_KEY, **(server or {})}
        config_of_first: dict[str, Any] = {
            "version": 1,
            "server": section,
            "health": {"interval_s": 0.25, "timeout_s": 1.0},
            "models": [
                {
                    "name": MODEL,
                    **({"boundary": {"b_short": short_window}} if long and short else {}),
                    "pools": pools,
                    **(model or {}),
                }
            ],
            **(config or {}),
        }
        self.replicas = [GatewayProcess(own, config_of_first)]
        for port, more in zip(others, further, strict=True):
            told = {**config_of_first, "server": {**section, "port": port}, **more}
            self.replicas.append(GatewayProcess(port, told))
        self._idle = idle
        self.port = own
        self.url = self.replicas[0].url
        self.gateway: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._children)
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            for engine in self.engines:
                self.start_engine(engine)
            for engine in self.engines:
                self._children.wait_for(f"{engine.url}/health")
            for replica in self.replicas:
                replica.command = _serve(replica, folder)
            for replica in () if self._idle else self.replicas:
                self.start_replica(replica)
            for replica in () if self._idle else self.replicas:
                self.wait_ready(replica)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pool(self, name: str) -> list[EngineProcess]:
        """The engines of a pool."""
        return [e for e in self.engines if e.pool == name]

    def start_engine(self, engine: EngineProcess) -> None:
        """Start (or start again) an engine's process."""
        engine.process = self._children.start(engine.command, quiet=True)

    def kill_engine(self, engine: EngineProcess, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill an engine's process."""
        if engine.process is not None:
            self._children.forget(engine.process)
            engine.process.send_signal(sig)
            engine.process.wait(10.0)
            engine.process = None

    def start_replica(self, replica: GatewayProcess) -> None:
        """Start (or start again) a gateway's process."""
        replica.process = self._children.start(replica.command, env=replica.env, quiet=True)
        self.gateway = self.replicas[0].process

    def wait_ready(self, replica: GatewayProcess) -> None:
        """Wait until it, and each of its processes, says that it is."""
        for url in (replica.url, *replica.managed_at):
            self._children.wait_for(f"{url}/ready")

    def kill_replica(
        self, replica: GatewayProcess, sig: signal.Signals = signal.SIGKILL, limit_s: float = 10.0
    ) -> None:
        """Kill a gateway's process, and wait for its end."""
        if replica.process is not None:
            self._children.forget(replica.process)
            replica.process.send_signal(sig)
            replica.process.wait(limit_s)
            replica.process = None

    def forget_gateway(self) -> None:
        """Stop minding a gateway that ended on purpose."""
        if self.gateway is not None:
            self._children.forget(self.gateway)
            self.gateway = self.replicas[0].process = None

    def metrics(self) -> dict[str, float]:
        """The (first) gateway's /metrics."""
        return self.replicas[0].metrics()

    def leases(self) -> int:
        """Leases in force in living gateways."""
        return sum(r.leases() for r in self.replicas if r.process is not None)

    def decision(self, request_id: str) -> dict[str, Any]:
        """The decision record of a request."""
        answer = self.admin(f"/admin/decisions/{request_id}")
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def admin(self, path: str) -> httpx.Response:
        """GET an admin path."""
        return self.replicas[0].admin(path)

    def wait_until_idle(self, limit_s: float = 10.0) -> float:
        """Seconds until no engine has a sequence and the gateway no lease; raises TimeoutError."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            if not self.leases() and not any(e.running() for e in self.engines if e.process):
                return time.monotonic() - begin
            time.sleep(0.02)
        raise TimeoutError("the fleet did not become idle")


def read_metrics(url: str) -> dict[str, float]:
    """A Prometheus page as series -> value."""
    page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    values = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def _serve(replica: GatewayProcess, folder: Path) -> list[str]:
    file = folder / f"sluice-{replica.port}.yaml"
    file.write_text(yaml.safe_dump(replica.config, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "sluice", "serve", "-c", str(file)]
    return [*command, "--log-level", "warning"]


def _mock(port: int, window: int, slots: int, more: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "sluice", "mock", "--port", str(port), "--model", MODEL),
        *("--max-model-len", str(window), "--max-num-seqs", str(slots), *more),
    ]


def consecutive_ports(count: int) -> int:
    """The first of some consecutive ports that nothing listens on.

    Below those that systems hand out by themselves, so that none is taken meanwhile.
    """
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


# -- a private Redis server for tests and benches that break it


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
