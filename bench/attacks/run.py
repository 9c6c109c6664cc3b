"""Structure-aware hostile clients over raw sockets.

Targets: no 5xx, no traceback, no crash, no lease left, memory back at its start. Aim: `/health`
never slow. `SLUICE_BENCH_SEED` draws other cases.
"""

import asyncio
import contextlib
import http.client
import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from bench.attacks.cases import FAMILIES, AttackCase, stream_of_cases
from bench.common.fleet import read_metrics
from bench.common.report import Report, Row, at_most, equals, scaled
from bench.common.tools import build_tools, everything, rss_kib, serve_command, start_engines
from sluice.children import Children, free_ports

# -- sends cases over raw sockets, several at a time, and counts the answers


CLIENTS: Final = 48
_ANSWER_LIMIT_S: Final = 15.0
_PARTIAL_LIMIT_S: Final = 0.05
"""How long an answer to a request that is not whole is waited for."""
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_MAX_EXAMPLES: Final = 5


class Outcomes:
    """What all clients saw."""

    def __init__(self) -> None:
        self.families: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.server_errors = 0
        self.unanswered = 0
        self.examples: list[str] = []
        self.silent: list[str] = []

    def add(self, case: AttackCase, status: int | None, answer: bytes) -> None:
        """Count one case's end; `status` None where no answer came."""
        self.families[case.family] += 1
        if status is not None:
            self.statuses[status] += 1
            if status >= 500:
                self.server_errors += 1
                _note(self.examples, case, answer)
        elif case.whole and case.read_bytes is None:
            self.unanswered += 1
            _note(self.silent, case, answer)


def _note(examples: list[str], case: AttackCase, answer: bytes) -> None:
    if len(examples) < _MAX_EXAMPLES:
        sent = b"".join(step for step in case.steps if isinstance(step, bytes))
        examples.append(f"{case.family}: {sent[:600]!r} -> {answer[:400]!r}")


async def attack(port: int, cases: Iterator[AttackCase], count: int, outcomes: Outcomes) -> None:
    """Send the next `count` cases from many clients at a time, each from an address of its own."""
    taken = itertools.islice(cases, count)

    async def client(number: int) -> None:
        for turn, case in enumerate(taken):
            # Of 127.0.0.0/8, so that no pair of addresses and ports is used twice in a minute.
            source = f"127.{1 + number}.{turn // 200 % 250}.{1 + turn % 200}"
            status, answer = await _one(port, source, case)
            outcomes.add(case, status, answer)

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))


async def _one(port: int, source: str, case: AttackCase) -> tuple[int | None, bytes]:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.bind((source, 0))
        limit_s = _ANSWER_LIMIT_S if case.whole else _PARTIAL_LIMIT_S
        answer = bytearray()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                await loop.sock_connect(client, ("127.0.0.1", port))
                await _send(client, case)
            async with asyncio.timeout(limit_s):
                await _read(client, case, answer)
        status = _STATUS.match(_final(bytes(answer)))
        return int(status[1]) if status else None, bytes(answer)


async def _send(client: socket.socket, case: AttackCase) -> None:
    loop = asyncio.get_running_loop()
    for step in case.steps:
        if isinstance(step, bytes):
            try:
                await loop.sock_sendall(client, step)
            except OSError:
                return  # answered and closed before all was sent: the answer is read
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            client.shutdown(socket.SHUT_WR)


async def _read(client: socket.socket, case: AttackCase, answer: bytearray) -> None:
    loop = asyncio.get_running_loop()
    while case.read_bytes is None or len(answer) < case.read_bytes:
        piece = await loop.sock_recv(client, 65536)
        answer += piece
        if not piece or _complete(answer):
            return


def _complete(answer: bytearray) -> bool:
    data = _final(bytes(answer))
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    length = _LENGTH.search(head + b"\r\n")
    if length:
        return len(body) >= int(length[1])
    return body.endswith(b"0\r\n\r\n") or b"\r\n0\r\n\r\n" in body


def _final(answer: bytes) -> bytes:
    """The answer without the interim ones (1xx) before it."""
    while answer.startswith(b"HTTP/1.1 1"):
        _, found, rest = answer.partition(b"\r\n\r\n")
        if not found:
            return b""
        answer = rest
    return answer


# -- the gateway under attack with every feature on, and its state as seen from outside


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


CASES = scaled(200_000)
_WARM_UP = 10_000
"""Cases, a third of all at most: allocator and caches fill before memory is first read."""
_MAX_GROWTH_MIB = 50.0


def run() -> Report:
    """All families at full size."""
    seed = int(os.environ.get("SLUICE_BENCH_SEED", "1"))
    return Report(name="attacks", rows=rows(cases=CASES, seed=seed))


def rows(*, cases: int, seed: int) -> list[Row]:
    """Attack one gateway with everything on, by `cases` cases drawn with `seed`."""
    with Target() as target:
        outcomes = Outcomes()
        attacks = stream_of_cases(seed)
        warm_up = min(_WARM_UP, cases // 3)
        asyncio.run(attack(target.port, attacks, warm_up, outcomes))
        before_mib = target.settled_rss_mib()
        with HealthWatch(target) as watch:
            asyncio.run(attack(target.port, attacks, cases - warm_up, outcomes))
        after_mib = target.settled_rss_mib()
        return [
            *_answers(outcomes, cases),
            equals("gateway processes that died", target.deaths(), 0),
            equals("tracebacks in its log", target.tracebacks(), 0, target.first_traceback()),
            equals("leases left", target.leases(), 0),
            equals("requests left at the engines", target.running_at_engines(), 0),
            at_most(
                "memory after, MiB over before",
                after_mib - before_mib,
                _MAX_GROWTH_MIB,
                f"{before_mib:.0f} -> {after_mib:.0f} MiB",
            ),
            Row(
                "/health, slowest answer, s",
                watch.slowest_s,
                f"aim: .1; of {watch.probes}; p99 {watch.p99_s:.4f} s; an engine's beside "
                f"it: slowest {watch.control_slowest_s:.4f} s",
            ),
        ]


def _answers(outcomes: Outcomes, cases: int) -> list[Row]:
    statuses = ", ".join(f"{k} {v:,}" for k, v in sorted(outcomes.statuses.items()))
    counts = ", ".join(f"{name} {outcomes.families[name]:,}" for name in FAMILIES)
    return [
        equals("cases", sum(outcomes.families.values()), cases, counts),
        equals("answers of 5xx", outcomes.server_errors, 0, "; ".join(outcomes.examples)),
        equals(
            "whole requests without an answer", outcomes.unanswered, 0, "; ".join(outcomes.silent)
        ),
        Row("answers", sum(outcomes.statuses.values()), statuses),
    ]
