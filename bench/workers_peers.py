"""What it costs peers to be two: the same offered load on one process of a peer and on two.

Two of a peer share nothing, as two gateways apart: each gets half of the connections. What they pay
for being half as busy each is what this machine asks of anybody, whatever they share.
"""

import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.progress import Progress

from bench.overhead_peers import MAKERS
from bench.overhead_tools import Load, spent, tree
from bench.report import Row
from bench.workers_rounds import CONNECTIONS, WARM_UP_S
from sluice.children import ChildDied, Children, free_ports

PEERS: Final = ("sluice", "sglang-router", "nginx")
"""The gateway among them, to be seen in the same rounds."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one or two processes."""

    cpu_us: float
    """For each request, of all of them."""
    cores: float
    """In use."""
    served: float
    """Requests/s."""
    errors: int


class Processes:
    """One or two of a peer, each for itself."""

    def __init__(self, name: str, count: int) -> None:
        """`name`: a peer of `bench overhead`."""
        self.name = name
        self._ports = free_ports(count)
        self._pids: list[int] = []

    def start(self, children: Children, folder: Path, engine_ports: Sequence[int]) -> bool:
        """Start them, wait until they serve, stop them there; False where it is not installed."""
        for port in self._ports:
            own = folder / f"{self.name}-{port}"
            own.mkdir()
            peer = MAKERS[self.name](own, port, engine_ports)
            if peer is None:
                return False
            child = children.start(peer.command, env=peer.env, quiet=True, silent=True)
            try:
                children.wait_for(f"http://127.0.0.1:{port}{peer.ready_path}")
            except ChildDied:
                children.forget(child)
                child.kill()
                return False
            time.sleep(peer.warm_up_s)
            self._pids.append(child.pid)
        self._signal(signal.SIGSTOP)
        return True

    def run(self, tool: Path, body: Path, rate: float, seconds: float) -> Cost:
        """Measure them under a load, everybody else stopped."""
        self.go_on()
        try:
            load = Load(tool, self._ports, body)
            load.run(CONNECTIONS, WARM_UP_S, rate)
            with load.start(CONNECTIONS, seconds, rate) as running:
                found, cpu_s = spent(running, {str(pid): pid for pid in self._pids})
        finally:
            self._signal(signal.SIGSTOP)
        cores_s = sum(cpu_s.values())
        return Cost(
            cpu_us=cores_s * 1e6 / max(1.0, found["requests"]),
            cores=cores_s / found["seconds"],
            served=found["requests"] / found["seconds"],
            errors=int(found["errors"]),
        )

    def go_on(self) -> None:
        """Let them go on: who is stopped does not end."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for root in self._pids:
            for pid in tree(root):
                os.kill(pid, number)


def peer_rows(
    folder: Path,
    tool: Path,
    engine_ports: Sequence[int],
    body: Path,
    loads: tuple[Sequence[float], int, float],
) -> list[Row]:
    """A row for each peer and rate. `loads`: requests/s, rounds, seconds of a run."""
    rates, rounds, seconds = loads
    with Children() as children:
        field = {name: [Processes(name, 1), Processes(name, 2)] for name in PEERS}
        missing = [
            name
            for name, pair in field.items()
            if not all(each.start(children, folder, engine_ports) for each in pair)
        ]
        pairs = [pair for name, pair in field.items() if name not in missing]
        found: dict[tuple[str, float], list[list[Cost]]] = {}
        with Progress(transient=True) as progress:
            task = progress.add_task("peers", total=(rounds + 1) * len(rates) * len(pairs))
            for number in range(rounds + 1):
                for rate in rates:
                    for pair in pairs:
                        turns = pair if number % 2 else pair[::-1]
                        seen = {each: each.run(tool, body, rate, seconds) for each in turns}
                        if number:  # the first round warms everybody up
                            key = pair[0].name, rate
                            found.setdefault(key, []).append([seen[each] for each in pair])
                        progress.advance(task)
        for pair in field.values():
            for each in pair:
                each.go_on()
    rows = [pair_row(name, rate, seen) for (name, rate), seen in found.items()]
    return rows + [
        Row(metric=f"{name}: two apart / one", measured=None, note="did not start")
        for name in missing
    ]


def pair_row(name: str, rate: float, found: Sequence[Sequence[Cost]]) -> Row:
    """CPU per request of two over that of one: the median of the rounds' ratios."""
    ratios = sorted(two.cpu_us / one.cpu_us for one, two in found)
    one, two = (
        (
            statistics.median(pair[place].cpu_us for pair in found),
            statistics.median(pair[place].cores for pair in found),
        )
        for place in (0, 1)
    )
    errors = sum(each.errors for pair in found for each in pair)
    median = statistics.median(ratios)
    return Row(
        metric=f"{name}: two apart / one, {rate:.0f}/s whole answers, CPU per request",
        measured=median,
        ratio=median,
        note=f"{two[0]:.0f} and {one[0]:.0f} us, {two[1]:.2f} and {one[1]:.2f} cores; rounds "
        + " ".join(f"{ratio:.2f}" for ratio in ratios)
        + (f"; {errors} errors" if errors else ""),
    )
