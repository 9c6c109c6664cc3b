"""Rendering /metrics: the plain numbers of telemetry plus gauges read at scrape time."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from gateway.domain import Record
from gateway.policy import fleet
from gateway.policy.scheduling import BAND_NAMES
from gateway.policy.served import ServedModel
from gateway.ports import AccountView, PoolView
from gateway.telemetry import Counter, Histogram, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


ACCOUNTS_SHOWN = 500
"""Entitlements with gauges of their own, for each model; the busiest of more are not sought."""


_CLAIMS = frozenset({"bound", "pending", "degraded"})
"""States of an entitlement that is to have its capacity; suspended and expired ones are not."""


class PoolFigures(Record, frozen=True, kw_only=True):
    """A managed model's counters at the last look."""

    model: str
    pools: tuple[tuple[str, PoolView], ...]
    """(name, view), in the pools' order."""
    accounts: tuple[AccountView, ...]
    """`ACCOUNTS_SHOWN` at most."""


class StoreCounts(Record, frozen=True, kw_only=True):
    """What went wrong between this process and a shared lease store, since the start."""

    alone: int = 0
    failures: int = 0
    dropped: int = 0


class MetricsPage:
    """The /metrics page of one process."""

    def __init__(
        self,
        metrics: Metrics,
        models: Iterable[ServedModel],
        leases: Callable[[], int],
        clock: Callable[[], float],
        store_up: Callable[[], bool] = lambda: True,
        token_pools: Callable[[], Iterable[PoolFigures]] = tuple,
        store_counts: Callable[[], StoreCounts] = StoreCounts,
    ) -> None:
        """`leases` gives the leases in force; `clock` is the fleet's."""
        self._metrics = metrics
        self._models = list(models)
        self._leases = leases
        self._clock = clock
        self._store_up = store_up
        self._token_pools = token_pools
        self._store_counts = store_counts
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families (called by the registry)."""
        for family in self._metrics.families():
            if isinstance(family, Counter):
                yield counter_family(family)
            else:
                yield histogram_family(family)
        yield from self.gauges()

    def gauges(self) -> Iterator[Metric]:
        """What is read when it is asked for."""
        inflight = GaugeMetricFamily(
            "sluice_pool_inflight", "Sequences holding a lease.", labels=["model", "pool"]
        )
        up = GaugeMetricFamily(
            "sluice_worker_up", "1 when in the rotation.", labels=["model", "pool", "worker"]
        )
        active = GaugeMetricFamily(
            "sluice_worker_inflight", "Sequences at a worker.", labels=["model", "pool", "worker"]
        )
        ratio = GaugeMetricFamily(
            "sluice_bytes_per_token", "Learned ratio.", labels=["model", "category"]
        )
        now_s = self._clock()
        for served in self._models:
            for pool in served.pools:
                inflight.add_metric([served.name, pool.name], pool.inflight)
                sound = set(fleet.available(pool, now_s))
                for i, worker in enumerate(pool.workers):
                    up.add_metric([served.name, pool.name, worker], 1 if i in sound else 0)
                    active.add_metric([served.name, pool.name, worker], pool.active[i])
            learned = served.estimator.snapshot()["categories"]
            for category, state in learned.items():
                ratio.add_metric([served.name, category], state["mean"])
        ignored = CounterMetricFamily(
            "sluice_usage_ignored",
            "Parts of usage reports that taught nothing.",
            labels=["model", "reason"],
        )
        for served in self._models:
            for reason, times in served.estimator.ignored.items():
                ignored.add_metric([served.name, reason], times)
        leases = GaugeMetricFamily("sluice_leases", "Leases by state.", labels=["state"])
        leases.add_metric(["active"], self._leases())
        store = GaugeMetricFamily(
            "sluice_store_up", "1 when the state store answers.", value=int(self._store_up())
        )
        processes = GaugeMetricFamily(
            "sluice_gateway_processes", "Processes whose counts this page adds up.", value=1
        )
        yield from (inflight, up, active, ratio, ignored, leases, store, processes)
        yield from _store(self._store_counts())
        yield from _schedulers(self._models)
        yield from _boundaries(self._models)
        yield from _token_pools(self._token_pools())


def _boundaries(models: Iterable[ServedModel]) -> Iterator[Metric]:
    by_pool = ["model", "pool"]
    tokens = GaugeMetricFamily(
        "sluice_boundary_tokens", "Totals up to this belong to the pool.", labels=by_pool
    )
    errors = GaugeMetricFamily(
        "sluice_boundary_error_ratio",
        "Preempted, rescued and overrun requests of all, where boundaries move.",
        labels=by_pool,
    )
    drift = GaugeMetricFamily(
        "sluice_length_drift",
        "Largest distance between live and planned shares of requests by length.",
        labels=["model"],
    )
    for served in models:
        for shape in served.routing.pools:
            if shape.boundary_tokens is not None:
                tokens.add_metric([served.name, shape.name], shape.boundary_tokens)
        if served.watch is None:
            continue
        for pool, share in zip(served.pools, served.watch.shares, strict=False):
            errors.add_metric([served.name, pool.name], share)
        if served.watch.drift is not None and served.watch.drift.distance is not None:
            drift.add_metric([served.name], served.watch.drift.distance)
    yield from (tokens, errors, drift)


def _schedulers(models: Iterable[ServedModel]) -> Iterator[Metric]:
    by_pool = ["model", "pool"]
    depth = GaugeMetricFamily(
        "sluice_queue_depth",
        "Requests that wait in the gateway for a worker.",
        labels=[*by_pool, "band"],
    )
    coverage = GaugeMetricFamily(
        "sluice_predictor_coverage",
        "Share of recent prefills within their predicted quantile.",
        labels=by_pool,
    )
    fallback = GaugeMetricFamily(
        "sluice_scheduler_fallback",
        "1 while predictions fail and the safe baseline decides.",
        labels=by_pool,
    )
    for served in models:
        for pool, scheduler in zip(served.pools, served.schedulers, strict=False):
            if scheduler is None:
                continue
            labels = [served.name, pool.name]
            for band, waiting in zip(BAND_NAMES, scheduler.waiting, strict=True):
                depth.add_metric([*labels, band], waiting)
            if scheduler.coverage is not None:
                coverage.add_metric(labels, scheduler.coverage)
            fallback.add_metric(labels, int(scheduler.fallback))
    preemptions = CounterMetricFamily(
        "sluice_preemptions",
        "Sequences that engines lost their memory for, as they say.",
        labels=by_pool,
    )
    for served in models:
        for pool, view in zip(served.pools, served.telemetry, strict=False):
            preemptions.add_metric([served.name, pool.name], view.preemptions)
    yield from (depth, coverage, fallback, preemptions)


def _store(counts: StoreCounts) -> Iterator[Metric]:
    for name, text, value in (
        ("alone", "Leases taken while the shared store was away.", counts.alone),
        ("failures", "Round trips and connections to it that failed.", counts.failures),
        ("dropped", "Settlements and the like given up: too many waited.", counts.dropped),
    ):
        yield CounterMetricFamily(f"sluice_store_{name}", text, value=value)


def _token_pools(figures: Iterable[PoolFigures]) -> Iterator[Metric]:
    by_pool, by_account = ["model", "pool"], ["model", "entitlement"]
    slots = GaugeMetricFamily(
        "sluice_pool_slots", "Sequences its ready workers run at once.", labels=by_pool
    )
    leased = GaugeMetricFamily(
        "sluice_pool_leased", "Sequences with a lease, of all gateways.", labels=by_pool
    )
    kv = GaugeMetricFamily("sluice_pool_kv_bytes", "KV cache reserved.", labels=by_pool)
    kv_capacity = GaugeMetricFamily(
        "sluice_pool_kv_capacity_bytes", "KV cache of its ready workers.", labels=by_pool
    )
    desired = GaugeMetricFamily(
        "sluice_pool_desired_replicas", "Workers that demand asks for.", labels=by_pool
    )
    inflight = GaugeMetricFamily(
        "sluice_entitlement_inflight", "Sequences with a lease.", labels=by_account
    )
    bound = GaugeMetricFamily(
        "sluice_entitlement_bound", "1 with its capacity, 0 without.", labels=by_account
    )
    debt = GaugeMetricFamily("sluice_entitlement_debt", "Service debt.", labels=by_account)
    burst = GaugeMetricFamily("sluice_entitlement_burst", "Burst intensity.", labels=by_account)
    priority = GaugeMetricFamily(
        "sluice_entitlement_priority", "Weight under contention.", labels=by_account
    )
    for model in figures:
        for name, pool in model.pools:
            labels = [model.model, name]
            slots.add_metric(labels, pool.slots)
            leased.add_metric(labels, pool.inflight)
            kv.add_metric(labels, pool.kv_bytes)
            kv_capacity.add_metric(labels, pool.kv_capacity_bytes)
            desired.add_metric(labels, pool.desired_replicas)
        for account in model.accounts:
            labels = [model.model, account.name]
            inflight.add_metric(labels, sum(account.inflight))
            if account.state in _CLAIMS:
                bound.add_metric(labels, int(account.state == "bound"))
            debt.add_metric(labels, account.debt)
            burst.add_metric(labels, account.burst)
            priority.add_metric(labels, account.weight)
    yield from (slots, leased, kv, kv_capacity, desired, inflight, bound, debt, burst, priority)


def counter_family(family: Counter) -> Metric:
    """A counter as the client library writes it."""
    metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in list(family.values.items()):
        metric.add_metric(labels, value)
    return metric


def histogram_family(family: Histogram) -> Metric:
    """A histogram as the client library writes it."""
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, row in list(family.series.items()):
        total = 0.0
        buckets = []
        for bound, value in zip(family.bounds, row, strict=False):
            total += value
            buckets.append((repr(bound), total))
        buckets.append(("+Inf", total + row[len(family.bounds)]))
        metric.add_metric(labels, buckets, sum_value=row[-1])
    return metric
