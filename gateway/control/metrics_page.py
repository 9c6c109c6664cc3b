"""The /metrics page: what the gateway counted, and gauges read at scrape time.

Rows are read on the event loop, a family at a time, so that no other thread sees the gateway's
state. prometheus-client makes the text in a thread, for a page of thousands of series takes tens of
milliseconds. A page is therefore not a snapshot: families are read one after the other. A row, with
all lines of a histogram, is of one moment.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.tls import Certificates
from gateway.metrics import Counter, Histogram, Metrics
from gateway.ports import AccountView, PoolView
from gateway.records.record import Record
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES, BarrierLoad

ACCOUNTS_SHOWN = 500
"""Most entitlements per model with gauges of their own: the first ones, not the busiest."""
MAX_SHOWN: Final = 1000
"""Most adapters of a model with a row of their own."""
BY_POOL: Final = ("model", "pool")

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, Any]]
_Gauges = Sequence[tuple[str, str, Callable[..., float | None]]]


class PoolSnapshot(Record, frozen=True, kw_only=True):
    """A managed model's counters at the last refresh."""

    model: str
    pools: tuple[tuple[str, PoolView], ...]
    """(name, view), in the pools' order."""
    accounts: tuple[AccountView, ...]
    """`ACCOUNTS_SHOWN` at most."""


class StoreCounts(Record, frozen=True, kw_only=True):
    """Failures between this process and a shared lease store since the start."""

    alone: int = 0
    failures: int = 0
    dropped: int = 0


class ReloadStatus(Record, frozen=True, kw_only=True):
    """How the last reading of the configuration went."""

    successful: bool = True
    unix_s: float = 0.0
    """When that was."""


class SourceReport(Record, frozen=True, kw_only=True):
    """A source of engines that are found at run time."""

    model: str
    pool: str
    source: str
    """Its URL."""
    failing: str
    """Why it does not answer; "" while it does."""
    engines: int
    """Engines in its last set."""


class Family(NamedTuple):
    """One gauge, counter or histogram."""

    name: str
    """Without `_total`."""
    help: str
    labels: Labels
    rows: Sequence[tuple[Labels, Any]]
    """(label values, value) per series; of a histogram the count of each bucket and the sum."""
    type: str = "gauge"
    bounds: tuple[float, ...] = ()
    """Of a histogram."""


def gauge(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    """A gauge; series without a value are left out."""
    return Family(f"sluice_{name}", text, labels, [row for row in rows if row[1] is not None])


@dataclass(frozen=True)
class MetricsPage:
    """The /metrics page of one process."""

    metrics: Metrics
    models: Sequence[ModelRuntime]
    leases: Callable[[], int]
    """Number of active leases."""
    clock: Callable[[], float]
    """The fleet's."""
    store_up: Callable[[], bool] = lambda: True
    token_pools: Callable[[], Iterable[PoolSnapshot]] = tuple
    store_counts: Callable[[], StoreCounts] = StoreCounts
    replicas: Callable[[], int] = lambda: 1
    sources: Callable[[], Iterable[SourceReport]] = tuple
    reload: Callable[[], ReloadStatus] = ReloadStatus
    tls: Callable[[], Certificates | None] = lambda: None
    token_keys: Callable[[], Iterable[tuple[str, float]]] = tuple
    cluster_age_s: Callable[[], float | None] = lambda: None
    batches: Callable[[], Iterable[tuple[str, int, int]]] = tuple
    """(model as batches name it, batches that run here, their items in flight)."""

    def collect(self) -> Iterator[Family]:
        """All families."""
        yield from map(counted, self.metrics.families())
        models = tuple(self.models)  # a reload may change them while the page is written
        now_s, token_pools, sources = self.clock(), list(self.token_pools()), list(self.sources())
        pools = [
            ((m.name, pool.name), (m, i, pool))
            for m in models
            for i, pool in enumerate(m.fleet.pools)
        ]

        def workers() -> Rows:
            for names, (_, _, pool) in pools:
                sound = set(fleet.available(pool, now_s))
                for i, worker in members.present(pool):
                    yield (*names, worker), (pool, i, i in sound)

        of_models = [((m.name,), (m,)) for m in models]
        of_token_pools = [((m.model, name), (pool,)) for m in token_pools for name, pool in m.pools]
        of_accounts = [((m.model, row.name), (row,)) for m in token_pools for row in m.accounts]
        of_sources = [((row.model, row.pool, row.source), (row,)) for row in sources]
        for labels, rows, gauges in (
            (("model",), lambda: of_models, _BY_MODEL),
            (BY_POOL, lambda: pools, _BY_POOL),
            ((*BY_POOL, "worker"), workers, _BY_WORKER),
            (BY_POOL, lambda: of_token_pools, _BY_TOKEN_POOL),
            (("model", "entitlement"), lambda: of_accounts, _BY_ACCOUNT),
            ((*BY_POOL, "source"), lambda: of_sources, _BY_SOURCE),
        ):
            for name, text, read in gauges:
                yield gauge(name, text, labels, [(names, read(*of)) for names, of in rows()])
        yield gauge(
            "queue_depth",
            "Requests that wait in the gateway for a worker.",
            (*BY_POOL, "band"),
            [
                ((*names, band), waiting)
                for names, (m, i, _) in pools
                for band, waiting in zip(
                    PRIORITY_CLASS_NAMES, m.fleet.pools[i].scheduler.waiting, strict=True
                )
            ],
        )
        barriers = [
            ((*names, engine), barrier)
            for names, (_, _, pool) in pools
            for engine, barrier in pool.scheduler.barriers.items()
        ]
        for name, text, read, kind in _BY_BARRIER:
            read_rows = [(names, read(barrier)) for names, barrier in barriers]
            yield Family(f"sluice_barrier_{name}", text, (*BY_POOL, "engine"), read_rows, kind)
        yield Family(
            "sluice_preemptions",
            "Sequences that engines lost their memory for, as they say.",
            BY_POOL,
            [
                (names, m.fleet.pools[i].view.preemptions)
                for names, (m, i, _) in pools
                if m.fleet.reads_metrics
            ],
            "counter",
        )
        yield gauge(
            "bytes_per_token",
            "Learned ratio.",
            ("model", "category"),
            [
                ((m.name, category), state["mean"])
                for m in models
                for category, state in m.estimator.snapshot()["categories"].items()
            ],
        )
        yield Family(
            "sluice_usage_ignored",
            "Parts of usage reports that taught nothing.",
            ("model", "reason"),
            [((m.name, why), times) for m in models for why, times in m.estimator.ignored.items()],
            "counter",
        )
        yield gauge(
            "lora_workers",
            "Workers in the rotation that have the LoRA adapter.",
            ("model", "adapter"),
            [
                ((m.name, name), m.adapters.ready(name, m.fleet.pools, now_s))
                for m in models
                for name in m.adapters.names[:MAX_SHOWN]
            ],
        )
        yield gauge("leases", "Leases by state.", ("state",), [(("active",), self.leases())])
        yield gauge(
            "jwt_keys_age_seconds",
            "Time since an issuer's keys were last read.",
            ("issuer",),
            [((issuer,), age_s) for issuer, age_s in self.token_keys()],
        )
        of_batches = list(self.batches())
        for name, text, at in (
            ("batches_running", "Batches that this replica runs.", 1),
            ("batch_items_running", "Their items in flight.", 2),
        ):
            yield gauge(name, text, ("model",), [((row[0],), row[at]) for row in of_batches])
        yield from self._of_process()

    def _of_process(self) -> Iterator[Family]:
        """Single figures: the store, the replicas, the configuration, the certificate."""
        counts, tls, reload = self.store_counts(), self.tls(), self.reload()
        for name, text, value in (
            ("store_up", "1 when the state store answers.", int(self.store_up())),
            ("replicas", "Live replicas, this one included.", self.replicas()),
            ("cluster_age_seconds", "Age of the cluster's entitlements.", self.cluster_age_s()),
            (
                "config_last_reload_successful",
                "1 when the configuration file, as last read, is in force.",
                int(reload.successful),
            ),
            (
                "config_last_reload_timestamp_seconds",
                "When the configuration file was last read.",
                reload.unix_s,
            ),
            (
                "tls_certificate_expiry_timestamp_seconds",
                "When the certificate of the clients' port expires, in Unix seconds.",
                None if tls is None else tls.expires_unix_s,
            ),
            (
                "tls_last_reload_successful",
                "1 when the certificate's files could be used at the last look.",
                None if tls is None else int(tls.successful),
            ),
        ):
            yield gauge(name, text, (), [((), value)])
        for name, text, times in (
            ("alone", "Leases taken while the shared store was away.", counts.alone),
            ("failures", "Round trips and connections to it that failed.", counts.failures),
            ("dropped", "Settlements and the like given up: too many waited.", counts.dropped),
        ):
            yield Family(f"sluice_store_{name}", text, (), [((), times)], "counter")


# Gauges: (name, help, what it reads of the row's subject).
_BY_MODEL: Final[_Gauges] = (
    (
        "gamma",
        "Totals up to gamma x boundary may be compressed.",
        lambda m: None if m.compression is None else m.compression.rules.gamma,
    ),
    (
        "compression_success_ratio",
        "Of the latest prompts in the compression window, those that were cut (p_c).",
        lambda m: None if m.compression is None else m.compression.success,
    ),
    (
        "length_drift",
        "Largest distance between live and planned shares of requests by length.",
        lambda m: None if m.watch is None or m.watch.drift is None else m.watch.drift.distance,
    ),
)
_BY_POOL: Final[_Gauges] = (
    ("pool_inflight", "Sequences holding a lease.", lambda m, i, _: m.fleet.inflight(i)),
    (
        "boundary_tokens",
        "Totals up to this belong to the pool.",
        lambda m, i, _: m.routing.pools[m.fleet.route_of(i)].boundary_tokens,
    ),
    (
        "pool_beyond_window_tokens",
        "Most tokens served in one sequence beyond the configured window; 0: none.",
        lambda _m, _i, pool: pool.beyond_window_tokens,
    ),
    (
        "boundary_error_ratio",
        "Preempted, rescued and overrun requests of all, where boundaries move.",
        lambda m, i, _: None if m.watch is None or i >= len(m.watch.shares) else m.watch.shares[i],
    ),
    (
        "predictor_coverage",
        "Share of recent prefills within their predicted quantile.",
        lambda m, i, _: m.fleet.pools[i].scheduler.coverage,
    ),
)
_BY_WORKER: Final[_Gauges] = (
    ("worker_up", "1 when in the rotation.", lambda _pool, _i, sound: float(sound)),
    ("worker_inflight", "Sequences at a worker.", lambda pool, i, _: pool.active[i]),
    (
        "worker_kv_event_timestamp_seconds",
        "When its engine last sent an event of its cache, in Unix seconds.",
        lambda pool, i, _: pool.notices[i].heard_unix_s if i in pool.notices else None,
    ),
)
_BY_TOKEN_POOL: Final[_Gauges] = (
    ("pool_slots", "Sequences its ready workers run at once.", lambda pool: pool.slots),
    ("pool_leased", "Sequences with a lease, of all gateways.", lambda pool: pool.inflight),
    ("pool_kv_bytes", "KV cache reserved.", lambda pool: pool.kv_bytes),
    (
        "pool_kv_capacity_bytes",
        "KV cache of its ready workers.",
        lambda pool: pool.kv_capacity_bytes,
    ),
    ("pool_desired_replicas", "Workers that demand asks for.", lambda pool: pool.desired_replicas),
)
_CLAIMS: Final = frozenset({"bound", "pending", "degraded"})
"""States in which an entitlement claims capacity; suspended and expired ones do not."""
_BY_ACCOUNT: Final[_Gauges] = (
    ("entitlement_inflight", "Sequences with a lease.", lambda account: sum(account.inflight)),
    (
        "entitlement_bound",
        "1 with its capacity, 0 without.",
        lambda account: int(account.state == "bound") if account.state in _CLAIMS else None,
    ),
    ("entitlement_debt", "Service debt.", lambda account: account.debt),
    ("entitlement_burst", "Burst intensity.", lambda account: account.burst),
    ("entitlement_priority", "Weight under contention.", lambda account: account.weight),
)
_BY_BARRIER: Final[Sequence[tuple[str, str, Callable[[BarrierLoad], float], str]]] = (
    ("busy_seconds", "Time in which an engine's ranks had load.", lambda b: b.busy_s, "counter"),
    ("idle_seconds", "Of that, waiting for the fullest rank.", lambda b: b.idle_s, "counter"),
    (
        "imbalance_tokens",
        "Sum over an engine's ranks of how far each is below the fullest.",
        lambda b: b.imbalance_tokens,
        "gauge",
    ),
)
_BY_SOURCE: Final[_Gauges] = (
    ("discovery_up", "1 while a source of engines answers.", lambda of: int(not of.failing)),
    ("discovery_engines", "Engines in a source's last set.", lambda of: of.engines),
)


def counted(family: Counter | Histogram) -> Family:
    """What was counted so far."""
    about = (family.name, family.help, family.labels)
    if isinstance(family, Counter):
        values = [(labels, value / family.unit) for labels, value in family.values.items()]
        return Family(*about, values, "counter")
    rows = [(labels, tuple(row)) for labels, row in family.series.items()]
    return Family(*about, rows, "histogram", family.bounds)


class _Page(Collector):
    """What `generate_latest` asks for families."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Each family when its turn comes."""
        for family in self._families:
            if family.bounds:
                histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
                bounds = [*map(repr, family.bounds), "+Inf"]
                for values, row in family.rows:
                    buckets = list(zip(bounds, accumulate(row[:-1]), strict=True))
                    histogram.add_metric(values, buckets, row[-1])
                yield histogram
                continue
            metric = Metric(family.name, family.help, family.type)
            shown = family.name + ("_total" if family.type == "counter" else "")
            for values, value in family.rows:
                metric.add_sample(shown, dict(zip(family.labels, values, strict=True)), value)
            yield metric


def text_of(families: Iterable[Family]) -> bytes:
    """The page in Prometheus's text format."""
    return generate_latest(_Page(families))


async def write(families: Iterable[Family]) -> bytes:
    """The same, read with pauses for requests and written in a thread."""
    read = []
    for family in families:
        read.append(family)
        await asyncio.sleep(0)
    return await asyncio.to_thread(text_of, read)
