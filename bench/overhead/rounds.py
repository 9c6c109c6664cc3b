"""`bench overhead`, the main rounds: CPU at saturation, time added to the first byte.

All contenders run by turns in each round, with the others stopped; the first round is discarded.
64 connections in a closed loop saturate the gateway with whole answers, 128 with streams: engines
tick every millisecond, so that 128 streams ask for 128,000 chunks/s, more than one core relays.
For gateways that also wait for Redis the numbers are four times and twice as high: with fewer in
flight, the other core saturates first. Gateways and LiteLLM, which use one core at most, have it
to themselves meanwhile, another one in each round (`bench.overhead.cores`). A round in which a
gateway used less than .9 of its core does not count for it; rounds go on until each has enough.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.progress import Progress

from bench.common.tools import Figures, HttpLoad, rss_kib, spent
from bench.overhead.contenders import (
    GATEWAYS,
    LITELLM,
    OF_ONE_CORE,
    ON_REDIS,
    ROUNDS,
    TIME_SCALE,
    Contender,
    Field,
    alone,
)
from bench.overhead.cores import own_core

KINDS: Final = ("whole", "stream")
CHUNKS: Final = 64
TICK_US: Final = 1000
CONNECTIONS: Final = {"whole": 64, "stream": 128}
ON_REDIS_TIMES: Final = {"whole": 4, "stream": 2}
RUN_S: Final = 1.5 * TIME_SCALE
FIRST_BYTE_RUN_S: Final = 3.0 * TIME_SCALE
SLOW_TIMES: Final = 4
"""So many times as long for LiteLLM: it answers the 64 requests in flight nearly at once, two or
three such lots in RUN_S, and one more or less would be a third of its figure."""
RATE_PER_S: Final = 50
MIN_UTILISATION: Final = 0.9
_MAX_ROUNDS: Final = 3 * ROUNDS

Round = dict[str, Figures]
"""By contender."""


def main_rounds(field: Field, body: Mapping[str, Path]) -> list[Round]:
    """Rounds that count, and those in which some gateway was not saturated."""
    rounds: list[Round] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=(ROUNDS + 1) * len(field.contenders))
        for number in range(1 + _MAX_ROUNDS):
            if enough(rounds):
                break
            direct = _first_bytes(field.load, field.engine_ports[0], body)
            figures: Round = {}
            for name, contender in field.contenders.items():
                figures[name] = _one(field.load, contender, body, direct, number)
                progress.advance(task)
            if number:  # the first round warms everybody up
                rounds.append(figures)
    return rounds


def enough(rounds: list[Round]) -> bool:
    """Whether so many rounds count for each gateway and each kind."""
    if len(rounds) < ROUNDS:
        return False
    names = [name for name in GATEWAYS if name in rounds[0]]
    return all(
        len(counting(rounds, name, f"{kind}_cpu_us")) >= ROUNDS for name in names for kind in KINDS
    )


def counting(rounds: list[Round], name: str, metric: str) -> list[Round]:
    """Rounds that count for a contender's figure: of a gateway's CPU, the saturated ones."""
    if name not in GATEWAYS or not metric.endswith("cpu_us"):
        return rounds
    busy = metric.replace("cpu_us", "utilisation")
    return [figures for figures in rounds if figures[name][busy] >= MIN_UTILISATION]


def cost(
    load: HttpLoad,
    contender: Contender,
    connections: int,
    seconds: float,
    in_flight: int = 0,
    *,
    turn: int,
) -> Figures:
    """CPU-us of a request in a closed loop, and what else the run showed.

    `turn`: the round's number, by which cores are given out (`overhead_cores`).
    """
    with ExitStack() as stack:
        if contender.name in OF_ONE_CORE:
            stack.enter_context(own_core(contender.pids["self"], turn))
        run = stack.enter_context(load.start(connections, seconds, in_flight=in_flight))
        seen, cpu_s = spent(run, contender.pids)
    answered = max(1.0, seen["requests"])
    found = {
        "cpu_us": cpu_s["self"] * 1e6 / answered,
        "utilisation": cpu_s["self"] / seen["seconds"],
        **{key: seen[key] for key in ("requests", "rps", "errors", "gap_p50_us", "gap_p99_us")},
    }
    if "redis" in cpu_s:
        found["redis_us"] = cpu_s["redis"] * 1e6 / answered
    return found


def resident_mib(field: Field) -> Figures:
    """Memory of each contender now."""
    return {name: rss_kib(c.pids["self"]) / 1024 for name, c in field.contenders.items()}


def _one(
    load: Path, contender: Contender, body: Mapping[str, Path], direct: Figures, turn: int
) -> Figures:
    figures: Figures = {}
    with alone(contender):
        for kind in KINDS:
            times = ON_REDIS_TIMES[kind] if contender.name == ON_REDIS else 1
            connections = CONNECTIONS[kind] * times
            asking = HttpLoad(load, contender.port, body[kind])
            run_s = RUN_S * (SLOW_TIMES if contender.name == LITELLM else 1)
            seen = cost(asking, contender, connections, run_s, turn=turn)
            figures |= {f"{kind}_{key}": value for key, value in seen.items()}
        for key, value in _first_bytes(load, contender.port, body).items():
            figures[f"added_{key}"] = value - direct[key]
    return figures


def _first_bytes(load: Path, port: int, body: Mapping[str, Path]) -> Figures:
    """First-byte times at a low rate, in us."""
    found = {}
    for kind in KINDS:
        seen = HttpLoad(load, port, body[kind]).run(8, FIRST_BYTE_RUN_S, RATE_PER_S)
        found[f"{kind}_p50_us"] = seen["first_p50_us"]
        found[f"{kind}_p99_us"] = seen["first_p99_us"]
    return found
