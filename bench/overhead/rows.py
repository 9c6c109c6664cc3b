"""`bench overhead`: rows of the main rounds. Ratios are taken within each round."""

import statistics
from collections.abc import Callable
from typing import Final

from bench.common.report import Row, at_least, at_most
from bench.common.tools import Figures
from bench.overhead.contenders import (
    EMBEDDED,
    LEAST_LOADED,
    LITELLM,
    ON_REDIS,
    ROUNDS,
    ROUTER,
)
from bench.overhead.rounds import Round, counting

METRICS: Final = ("whole_cpu_us", "stream_cpu_us", "added_whole_p50_us", "added_stream_p50_us")
LIMITS: Final = (
    (EMBEDDED, "whole_cpu_us", 2.0),
    (EMBEDDED, "stream_cpu_us", 1.5),
    (EMBEDDED, "added_whole_p50_us", 1.5),
    (EMBEDDED, "added_stream_p50_us", 1.5),
    (ON_REDIS, "whole_cpu_us", 3.0),
    (ON_REDIS, "stream_cpu_us", 1.7),
    (LEAST_LOADED, "whole_cpu_us", 1.6),
    (LEAST_LOADED, "stream_cpu_us", 1.5),
    (LEAST_LOADED, "added_whole_p50_us", 1.0),
    (LEAST_LOADED, "added_stream_p50_us", 1.0),
)
"""(gateway, figure, times sglang-router's)."""
MIN_LITELLM_RATIO: Final = 60.0


def main_rows(rounds: list[Round], rss_mib: Figures) -> list[Row]:
    """Figures of each contender, then the ratios that are asked for."""
    if not rounds or not rounds[0]:
        return []
    rows = []
    for name in rounds[0]:
        rows += [_figure(rounds, name, metric) for metric in METRICS]
        rows += _redis(rounds, name)
        rows.append(Row(metric=f"{name}: RSS MiB after the rounds", measured=rss_mib[name]))
        if name != LITELLM:
            rows.append(_errors(rounds, name))
    for name, metric, limit in LIMITS:
        if {name, ROUTER} <= rounds[0].keys():
            rows.append(ratio(rounds, (name, ROUTER), metric, name, limit, at_most))
    if {EMBEDDED, LITELLM} <= rounds[0].keys():
        pair = (LITELLM, EMBEDDED)
        rows.append(ratio(rounds, pair, "whole_cpu_us", EMBEDDED, MIN_LITELLM_RATIO, at_least))
    return rows


def ratio(
    rounds: list[Round],
    pair: tuple[str, str],
    metric: str,
    gateway: str,
    limit: float,
    bound: Callable[[str, float, float], Row],
) -> Row:
    """The first of the pair over the second, the median of the rounds that count for `gateway`.

    Fewer than `ROUNDS` of them do not suffice for the target.
    """
    label = f"{pair[0]} / {pair[1]}: {metric}"
    ratios = [
        figures[pair[0]][metric] / figures[pair[1]][metric]
        for figures in counting(rounds, gateway, metric)
        if figures[pair[1]][metric] > 0
    ]
    if not ratios:
        target = bound(label, limit, limit).target
        return Row(metric=label, measured=None, target=target, holds=False, note="no round counts")
    median = statistics.median(ratios)
    row = bound(label, median, limit)
    return Row(
        metric=label,
        measured=median,
        ratio=median,
        target=row.target,
        holds=bool(row.holds) and len(ratios) >= ROUNDS,
        note=f"{len(ratios)} of {len(rounds)} rounds: "
        + " ".join(f"{value:.2f}" for value in sorted(ratios)),
    )


def _figure(rounds: list[Round], name: str, metric: str) -> Row:
    counted = counting(rounds, name, metric)
    label = f"{name}: {metric}"
    if not counted:
        return Row(metric=label, measured=None, note="never saturated" + _run(rounds, name, metric))
    values = [figures[name][metric] for figures in counted]
    note = f"{min(values):.0f} to {max(values):.0f}"
    if metric.endswith("cpu_us"):
        note += _run(counted, name, metric)
    else:
        p99 = _median(counted, name, metric.replace("p50", "p99"))
        note += f"; p99 {p99:.0f}"
    return Row(metric=label, measured=statistics.median(values), note=note)


def _run(rounds: list[Round], name: str, metric: str) -> str:
    """How much was answered at which utilisation; for streams, how evenly."""
    kind = metric.split("_", maxsplit=1)[0]
    rate = _median(rounds, name, f"{kind}_rps")
    busy = _median(rounds, name, f"{kind}_utilisation")
    text = f"; {rate:.0f}/s at {busy:.2f} cores"
    if kind == "stream":
        p50, p99 = (_median(rounds, name, f"stream_gap_{p}_us") / 1000 for p in ("p50", "p99"))
        text += f"; between pieces {p50:.1f} ms, p99 {p99:.1f} ms"
    return text


def _redis(rounds: list[Round], name: str) -> list[Row]:
    if "whole_redis_us" not in rounds[0][name]:
        return []
    return [
        Row(
            metric=f"{name}: Redis's own CPU, us per {kind}",
            measured=_median(rounds, name, f"{kind}_redis_us"),
        )
        for kind in ("whole", "stream")
    ]


def _errors(rounds: list[Round], name: str) -> Row:
    """Peers' errors are told, the gateway's are not allowed."""
    total = sum(
        figures[name][f"{kind}_errors"] for figures in rounds for kind in ("whole", "stream")
    )
    asked = name.startswith("sluice")
    return Row(
        metric=f"{name}: errors",
        measured=total,
        target="= 0" if asked else None,
        holds=total == 0 if asked else None,
    )


def _median(rounds: list[Round], name: str, metric: str) -> float:
    return statistics.median(figures[name][metric] for figures in rounds)
