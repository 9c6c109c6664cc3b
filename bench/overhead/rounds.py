"""How `bench overhead` measures: cases in rounds, all contenders by turns in each.

The first round is discarded and ratios are taken within a round. 64 connections in a closed loop
saturate the gateway with whole answers, 128 with streams: engines tick every millisecond, so that
128 streams ask for 128,000 chunks/s, more than one core relays. For gateways that also wait for
Redis the numbers are four times and twice as high: with fewer in flight, the other core saturates
first. A round in which a gateway used less than .9 of its core does not count for it; rounds go on
until each has enough. A single connection saturates no contender, so its rounds always count.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from bench.common.report import Row, equals
from bench.common.steps import bars, scaled, scaled_s
from bench.common.tools import Figures, HttpLoad, spent
from bench.overhead.field import (
    LITELLM,
    ON_REDIS,
    ROUTER,
    Contender,
    Field,
    alone,
    by_turns,
    is_gateway,
    own_core,
)

ROUNDS: Final = scaled(5)
"""That must count."""
MOST_TIMES: Final = 3
"""So many times as many rounds are measured at most."""
RUN_S: Final = scaled_s(1.5, 0.3)
CONNECTIONS: Final = {"whole": 64, "stream": 128}
ON_REDIS_TIMES: Final = {"whole": 4, "stream": 2}
SLOW_TIMES: Final = 4
"""So many times as long for LiteLLM: it answers the 64 requests in flight nearly at once, two or
three such lots in RUN_S, and one more or less would be a third of its figure."""
MIN_UTILISATION: Final = 0.9

Round = dict[str, Figures]
"""By contender."""


class Case(msgspec.Struct, frozen=True):
    """One way to ask. `rate` 0: a closed loop, and CPU counts; else the time to the first byte."""

    label: str
    body: Path
    kind: str
    connections: int
    run_s: float = RUN_S
    rate: float = 0.0
    per: int = 1
    """What CPU is divided by: the chunks of a stream."""
    aims: dict[str, float] = {}
    """By contender: times the router's."""
    saturates: bool = True

    @property
    def in_flight(self) -> int:
        """Requests under way at any time: with more connections they take turns."""
        return min(self.connections, CONNECTIONS[self.kind])


Seen = dict[str, tuple[Case, list[Round]]]
"""By the case's label."""


def counting(case: Case, rounds: Sequence[Round], name: str) -> list[Round]:
    """Rounds that count for a contender."""
    if not is_gateway(name) or case.rate or not case.saturates:
        return list(rounds)
    return [figures for figures in rounds if figures[name]["utilisation"] >= MIN_UTILISATION]


def enough(case: Case, rounds: Sequence[Round]) -> bool:
    """Whether so many rounds count for each gateway."""
    return len(rounds) >= ROUNDS and all(
        len(counting(case, rounds, name)) >= ROUNDS for name in rounds[0] if is_gateway(name)
    )


def measured(found: Field, cases: Sequence[Case], label: str) -> Seen:
    """Rounds of every case; one with enough rounds that count is done."""
    seen: Seen = {case.label: (case, []) for case in cases}
    with by_turns(found), bars() as bar:
        step = bar(label, (1 + ROUNDS) * len(cases))
        for number in range(1 + MOST_TIMES * ROUNDS):
            for case, rounds in seen.values():
                if enough(case, rounds):
                    continue
                direct = _first_byte(found, case, found.engine_ports[0]) if case.rate else {}
                figures: Round = {}
                for name, contender in found.contenders.items():
                    with alone(contender):
                        if case.rate:
                            first = _first_byte(found, case, contender.port)
                            figures[name] = {k: v - direct[k] for k, v in first.items()}
                        else:
                            figures[name] = cost(found, case, contender, number)
                step()
                if number:  # the first round warms everybody up
                    rounds.append(figures)
    return seen


def cost(found: Field, case: Case, contender: Contender, turn: int) -> Figures:
    """CPU-us of a request in a closed loop, and what else the run showed."""
    times = ON_REDIS_TIMES[case.kind] if contender.name == ON_REDIS else 1
    load = HttpLoad(found.load, contender.port, case.body)
    run_s = case.run_s * (SLOW_TIMES if contender.name == LITELLM else 1)
    in_flight = times * case.in_flight if case.connections > case.in_flight else 0
    connections = case.connections if in_flight else times * case.connections
    with ExitStack() as stack:
        if is_gateway(contender.name) or contender.name == LITELLM:
            stack.enter_context(own_core(contender.pids["self"], turn))
        run = stack.enter_context(load.start(connections, run_s, in_flight=in_flight))
        seen, cpu_s = spent(run, contender.pids)
    answered = max(1.0, seen["requests"])
    figures = {
        "us": cpu_s["self"] * 1e6 / answered / case.per,
        "utilisation": cpu_s["self"] / seen["seconds"],
        **{key: seen[key] for key in ("rps", "errors", "gap_p50_us", "gap_p99_us")},
    }
    if "redis" in cpu_s:
        figures["redis_us"] = cpu_s["redis"] * 1e6 / answered
    return figures


def _first_byte(found: Field, case: Case, port: int) -> Figures:
    seen = HttpLoad(found.load, port, case.body).run(8, case.run_s, case.rate)
    return {"us": seen["first_p50_us"], "p99_us": seen["first_p99_us"]}


def rows_of(seen: Seen) -> list[Row]:
    """A row for each case and contender; its ratio is to the router in the same rounds."""
    rows = []
    errors = 0.0
    for case, rounds in seen.values():
        for name in rounds[0] if rounds else ():
            told = sum(figures[name].get("errors", 0.0) for figures in rounds)
            errors += told if is_gateway(name) else 0.0
            rows.append(_row(case, rounds, name, told))
    return [*rows, equals("errors of the gateways", errors, 0)]


def _row(case: Case, rounds: list[Round], name: str, errors: float) -> Row:
    counted = counting(case, rounds, name)
    label = f"{name}: {case.label}"
    if not counted:
        busy = max(figures[name]["utilisation"] for figures in rounds)
        return Row(label, None, f"at most {busy:.2f} cores: never saturated")

    def middle(key: str) -> float:
        return statistics.median(figures[name][key] for figures in counted)

    values = [figures[name]["us"] for figures in counted]
    note = f"{min(values):.1f} to {max(values):.1f}"
    if case.rate:
        note += f"; p99 {middle('p99_us'):.0f}"
    else:
        note += f"; {middle('rps'):.0f}/s at {middle('utilisation'):.2f} cores"
        if case.kind == "stream":
            p50, p99 = (middle(f"gap_{p}_us") / 1000 for p in ("p50", "p99"))
            note += f"; between pieces {p50:.1f} ms, p99 {p99:.1f} ms"
        if "redis_us" in counted[0][name]:
            note += f"; Redis {middle('redis_us'):.0f} us"
    if len(counted) < len(rounds):
        note += f"; {len(counted)} of {len(rounds)} rounds count"
    if errors:
        note += f"; {errors:.0f} errors"
    ratio = None
    if ROUTER in rounds[0] and name != ROUTER:
        ratios = sorted(ratios_of(case, rounds, name))
        ratio = statistics.median(ratios) if ratios else None
        if name in case.aims:
            note += f"; times the router's {ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else ""
            note += f"; aim: {case.aims[name]:g}"
    return Row(label, statistics.median(values), note, ratio=ratio)


def ratios_of(case: Case, rounds: list[Round], name: str) -> list[float]:
    """A contender's figure over the router's, in each round that counts."""
    counted = [figures for figures in counting(case, rounds, name) if figures[ROUTER]["us"] > 0]
    return [figures[name]["us"] / figures[ROUTER]["us"] for figures in counted]
