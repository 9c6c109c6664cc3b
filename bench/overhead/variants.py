"""`bench overhead`, the variants: other answers, bodies and numbers of open connections.

With 5,000 connections open, 64 whole answers or 128 streams run at any time and the connections
take turns: all are used, few at once. A single connection saturates no contender, so its rounds
count at any utilisation; other rounds count if the gateway used at least .9 of a core. Bodies of
200 KB are prompts of some 44,000 tokens: they go to the long pool.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rich.progress import Progress

from bench.common.everything_on import MODEL
from bench.common.report import Row
from bench.common.tools import HttpLoad, bodies
from bench.overhead.contenders import (
    EMBEDDED,
    GATEWAYS,
    ON_REDIS,
    ROUNDS,
    ROUTER,
    TIME_SCALE,
    Field,
    alone,
)
from bench.overhead.rounds import CONNECTIONS, MIN_UTILISATION, Round, cost

CONTENDERS: Final = (EMBEDDED, ON_REDIS, ROUTER, "nginx")
MANY: Final = 5000
RUN_S: Final = 0.6 * TIME_SCALE
LONG_RUN_S: Final = 1.0 * TIME_SCALE
"""For 1,000 chunks: a stream takes a second at least."""
_MAX_ROUNDS: Final = 2 * ROUNDS


class Variant(NamedTuple):
    """One way to ask."""

    chunks: int
    """0 for whole answers."""
    body_kb: int
    connections: int

    @property
    def in_flight(self) -> int:
        """Requests under way at any time."""
        return min(self.connections, CONNECTIONS["stream" if self.chunks else "whole"])

    @property
    def label(self) -> str:
        """In words."""
        answer = f"stream of {self.chunks:,}" if self.chunks else "whole"
        return f"{answer}, {self.body_kb} KB, {self.connections:,} open"


VARIANTS: Final = tuple(
    Variant(chunks, body_kb, connections)
    for chunks, body_kb in ((0, 2), (64, 2), (1000, 2), (0, 200), (64, 200))
    for connections in (1, CONNECTIONS["stream" if chunks else "whole"], MANY)
    if connections in (1, MANY) or body_kb > 2 or chunks == 1000
)
"""The main rounds have the others."""

Seen = dict[Variant, list[Round]]


def variant_rounds(field: Field, folder: Path) -> Seen:
    """Rounds of every variant, by turns; a variant with enough rounds that count is done."""
    files = {variant: _body(folder, variant) for variant in VARIANTS}
    contenders = {name: c for name, c in field.contenders.items() if name in CONTENDERS}
    seen: Seen = {variant: [] for variant in VARIANTS}
    with Progress(transient=True) as progress:
        task = progress.add_task("variants", total=(1 + ROUNDS) * len(VARIANTS))
        for number in range(1 + _MAX_ROUNDS):
            for variant in VARIANTS:
                if enough(variant, seen[variant]):
                    continue
                figures: Round = {}
                for name, contender in contenders.items():
                    load = HttpLoad(field.load, contender.port, files[variant])
                    run_s = LONG_RUN_S if variant.chunks >= 1000 else RUN_S
                    with alone(contender):
                        figures[name] = cost(
                            load,
                            contender,
                            variant.connections,
                            run_s,
                            variant.in_flight,
                            turn=number,
                        )
                progress.advance(task)
                if number:
                    seen[variant].append(figures)
    return seen


def counting(variant: Variant, rounds: list[Round], name: str) -> list[Round]:
    """Rounds that count for a contender."""
    if name not in GATEWAYS or variant.connections == 1:
        return rounds
    return [figures for figures in rounds if figures[name]["utilisation"] >= MIN_UTILISATION]


def enough(variant: Variant, rounds: list[Round]) -> bool:
    """Whether so many rounds count for each gateway."""
    return len(rounds) >= ROUNDS and all(
        len(counting(variant, rounds, name)) >= ROUNDS for name in rounds[0] if name in GATEWAYS
    )


def variant_rows(seen: Seen) -> list[Row]:
    """A row for each variant and contender; its ratio is to sglang-router in the same rounds."""
    rows = [
        _row(variant, rounds, name)
        for variant, rounds in seen.items()
        for name in (rounds[0] if rounds else ())
    ]
    errors = sum(
        figures["errors"]
        for rounds in seen.values()
        for by_name in rounds
        for name, figures in by_name.items()
        if name in GATEWAYS
    )
    total = Row(
        metric="variants: the gateway's errors", measured=errors, target="= 0", holds=errors == 0
    )
    return [*rows, total]


def _row(variant: Variant, rounds: list[Round], name: str) -> Row:
    counted = counting(variant, rounds, name)
    label = f"{variant.label}: {name}, CPU us"
    if not counted:
        busy = max(figures[name]["utilisation"] for figures in rounds)
        return Row(metric=label, measured=None, note=f"at most {busy:.2f} cores: never saturated")
    return Row(
        metric=label,
        measured=_median(counted, name, "cpu_us"),
        ratio=_times_router(counted, name),
        note=_note(rounds, counted, name),
    )


def _times_router(counted: list[Round], name: str) -> float | None:
    if ROUTER not in counted[0] or name == ROUTER:
        return None
    return statistics.median(f[name]["cpu_us"] / f[ROUTER]["cpu_us"] for f in counted)


def _note(rounds: list[Round], counted: list[Round], name: str) -> str:
    values = [figures[name]["cpu_us"] for figures in counted]
    rate, busy = (_median(counted, name, key) for key in ("rps", "utilisation"))
    text = f"{min(values):.0f} to {max(values):.0f}; {rate:.0f}/s at {busy:.2f} cores"
    if len(counted) < len(rounds):
        text += f"; {len(counted)} of {len(rounds)} rounds count"
    if errors := sum(figures[name]["errors"] for figures in rounds):
        text += f"; {errors:.0f} errors"
    if "redis_us" in counted[0][name]:
        text += f"; Redis {_median(counted, name, 'redis_us'):.0f}"
    return text


def _median(rounds: list[Round], name: str, key: str) -> float:
    return statistics.median(figures[name][key] for figures in rounds)


def _body(folder: Path, variant: Variant) -> Path:
    text_bytes = variant.body_kb * 1000 - 150
    kinds: Mapping[str, Path] = bodies(
        folder, MODEL, text_bytes=text_bytes, max_tokens=variant.chunks or 64
    )
    return kinds["stream" if variant.chunks else "whole"]
