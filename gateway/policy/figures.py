"""The numbers behind /metrics as values that several processes can add up.

Counters and histograms are sums. Gauges are merged by what they mean: `MERGED` says how, for each
family; one that is not in it is not merged at all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from gateway.counts import MAX_SERIES, Counter, Histogram
from gateway.domain import Record
from gateway.telemetry import Metrics

Labels = tuple[str, ...]
How = Literal["sum", "mean", "max", "min", "own"]

MERGED: Final[Mapping[str, How]] = {
    "sluice_pool_inflight": "sum",
    "sluice_worker_up": "max",
    "sluice_worker_inflight": "sum",
    "sluice_bytes_per_token": "mean",
    "sluice_usage_ignored": "sum",
    "sluice_leases": "sum",
    "sluice_store_up": "min",
    "sluice_gateway_processes": "sum",
    "sluice_queue_depth": "sum",
    "sluice_predictor_coverage": "mean",
    "sluice_boundary_tokens": "mean",
    "sluice_boundary_error_ratio": "mean",
    "sluice_length_drift": "max",
    "sluice_pool_beyond_window_tokens": "max",
    "sluice_preemptions": "max",
    "sluice_store_alone": "sum",
    "sluice_store_failures": "sum",
    "sluice_store_dropped": "sum",
    # Of the store that all processes share: each shows the same.
    "sluice_pool_slots": "own",
    "sluice_pool_leased": "own",
    "sluice_pool_kv_bytes": "own",
    "sluice_pool_kv_capacity_bytes": "own",
    "sluice_pool_desired_replicas": "own",
    "sluice_entitlement_inflight": "own",
    "sluice_entitlement_bound": "own",
    "sluice_entitlement_debt": "own",
    "sluice_entitlement_burst": "own",
    "sluice_entitlement_priority": "own",
}
"""How a gauge of several processes becomes one. own: that of the process which is asked."""

_COMBINE: Final[Mapping[How, Callable[[Sequence[float]], float]]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
}


class Figures(Record, frozen=True, kw_only=True):
    """What one process counted. Families by name; series by label values."""

    counters: dict[str, list[tuple[Labels, float]]] = msgspec.field(default_factory=dict)
    histograms: dict[str, list[tuple[Labels, list[float]]]] = msgspec.field(default_factory=dict)
    """As in `gateway.telemetry.Histogram.series`."""
    gauges: dict[str, list[tuple[Labels, float]]] = msgspec.field(default_factory=dict)


def counted(metrics: Metrics) -> Figures:
    """The counters and histograms of a process, as they stand."""
    families = metrics.families()
    return Figures(
        counters={f.name: list(f.values.items()) for f in families if isinstance(f, Counter)},
        histograms={
            f.name: [(labels, list(row)) for labels, row in f.series.items()]
            for f in families
            if isinstance(f, Histogram)
        },
    )


def added(figures: Iterable[Figures]) -> Figures:
    """Counters and histograms of several processes in one; gauges are left out."""
    counters: dict[str, dict[Labels, float]] = {}
    histograms: dict[str, dict[Labels, list[float]]] = {}
    for each in figures:
        for name, values in each.counters.items():
            _add_counts(counters.setdefault(name, {}), values)
        for name, rows in each.histograms.items():
            _add_rows(histograms.setdefault(name, {}), rows)
    return Figures(
        counters={name: list(values.items()) for name, values in counters.items()},
        histograms={name: list(rows.items()) for name, rows in histograms.items()},
    )


def combined(
    name: str, own: Mapping[Labels, float], others: Iterable[Figures]
) -> Mapping[Labels, float]:
    """A gauge's series over several processes."""
    how = MERGED.get(name, "own")
    if how == "own":
        return own
    found = {labels: [value] for labels, value in own.items()}
    for each in others:
        for labels, value in each.gauges.get(name, ()):
            found.setdefault(labels, []).append(value)
    return {labels: _COMBINE[how](values) for labels, values in found.items()}


def _add_counts(total: dict[Labels, float], values: Iterable[tuple[Labels, float]]) -> None:
    for labels, value in values:
        if labels not in total and len(total) >= MAX_SERIES:
            labels = ("other",) * len(labels)  # noqa: PLW2901 - as the counter itself does
        total[labels] = total.get(labels, 0) + value


def _add_rows(total: dict[Labels, list[float]], rows: Iterable[tuple[Labels, list[float]]]) -> None:
    for labels, row in rows:
        known = total.get(labels)
        if known is None or len(known) != len(row):
            total[labels] = list(row)
        else:
            total[labels] = [a + b for a, b in zip(known, row, strict=True)]
