"""The gateway under attack with every feature on, and its state as seen from outside."""

import contextlib
import http.client
import multiprocessing
import re
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from bench.common.everything_on import everything, serve_command
from bench.common.fleet import read_metrics
from bench.common.tools import build_tools, rss_kib, start_engines
from sluice.children import Children, free_ports

_TICK_US: Final = 500
_SETTLE_S: Final = 8.0
"""Longer than the gateway keeps what it refused (its linger) before it is measured."""
_PROBE_EVERY_S: Final = 0.02


class Target:
    """One gateway before two C engines."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        tools = build_tools(folder)
        if tools is None:
            raise RuntimeError("a C compiler is needed to build the engines")
        children = self._stack.enter_context(Children())
        self.engine_ports = start_engines(children, tools[0], 2, _TICK_US)
        (self.port,) = free_ports(1)
        urls = [f"http://127.0.0.1:{port}" for port in self.engine_ports]
        file = everything(folder, self.port, urls)
        self._log = folder / "gateway.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                serve_command(file), stdout=log, stderr=subprocess.STDOUT
            )
        self._stack.callback(self._stop)
        children.wait_for(f"http://127.0.0.1:{self.port}/ready")

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def deaths(self) -> int:
        """1 if the gateway has ended."""
        return int(self._process.poll() is not None)

    def tracebacks(self) -> int:
        """How many its log holds."""
        return self._log.read_bytes().count(b"Traceback (most recent call last)")

    def first_traceback(self) -> str:
        """The first one's last lines."""
        found = re.search(rb"Traceback \(most.*?\n(?=\S)[^\n]*", self._log.read_bytes(), re.DOTALL)
        return found[0].decode(errors="replace")[-600:] if found else ""

    def leases(self) -> float:
        """In force now."""
        page = read_metrics(f"http://127.0.0.1:{self.port}")
        return page['sluice_leases{state="active"}']

    def running_at_engines(self) -> int:
        """Streams that the engines still send."""
        return int(
            sum(
                value
                for port in self.engine_ports
                for series, value in read_metrics(f"http://127.0.0.1:{port}").items()
                if series.startswith("vllm:num_requests_running")
            )
        )

    def settled_rss_mib(self) -> float:
        """Resident memory once what was sent has been dealt with."""
        time.sleep(_SETTLE_S)
        return rss_kib(self._process.pid) / 1024


class HealthWatch:
    """Asks the gateway's /health, and an engine's, all the time, from a process of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.slowest_s = self.p99_s = self.control_slowest_s = 0.0
        self.probes = 0

    def __enter__(self) -> Self:
        self._mine, theirs = multiprocessing.Pipe()
        ports = (self._target.port, self._target.engine_ports[0])
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_probe, args=(theirs, *ports), daemon=True)
        self._process.start()
        self._mine.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._mine.send(None)
        asked, control = self._mine.recv()
        self._process.join()
        asked.sort()
        self.probes = len(asked)
        self.slowest_s, self.p99_s = asked[-1], asked[int(0.99 * len(asked))]
        self.control_slowest_s = max(control)


def _probe(told: Connection, port: int, control_port: int) -> None:
    """Ask until told to end; then tell how long each answer took, in seconds."""
    asked: list[float] = []
    control: list[float] = []
    told.send(None)
    while not told.poll(_PROBE_EVERY_S):
        asked.append(_ask(port))
        control.append(_ask(control_port))
    told.send((asked, control))


def _ask(port: int) -> float:
    started_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return 30.0
    finally:
        connection.close()
    return time.perf_counter() - started_s
