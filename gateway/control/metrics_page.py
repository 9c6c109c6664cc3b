"""The /metrics page: what the gateway counted, and gauges read at scrape time.

Rows are read on the event loop, a family at a time, so that no other thread sees the gateway's
state. prometheus-client makes the text in a thread, for a page of thousands of series takes tens of
milliseconds. A page is therefore not a snapshot: families are read one after the other. A row, with
all lines of a histogram, is of one moment.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.tls import TlsStatus
from gateway.metrics import Counter, Histogram, Metrics
from gateway.ports import AccountView, PoolView
from gateway.records.record import Record
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES

ACCOUNTS_SHOWN = 500
"""Most entitlements per model with gauges of their own: the first ones, not the busiest."""
MAX_SHOWN: Final = 1000
"""Most adapters of a model with a row of their own."""
BY_POOL: Final = ("model", "pool")

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, Any]]


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


class MetricsPage:
    """The /metrics page of one process."""

    def __init__(
        self,
        metrics: Metrics,
        models: Sequence[ModelRuntime],
        leases: Callable[[], int],
        clock: Callable[[], float],
        store_up: Callable[[], bool] = lambda: True,
        token_pools: Callable[[], Iterable[PoolSnapshot]] = tuple,
        store_counts: Callable[[], StoreCounts] = StoreCounts,
        replicas: Callable[[], int] = lambda: 1,
        sources: Callable[[], Iterable[SourceReport]] = tuple,
        reload: Callable[[], ReloadStatus] = ReloadStatus,
        tls: Callable[[], TlsStatus | None] = lambda: None,
        token_keys: Callable[[], Iterable[tuple[str, float]]] = tuple,
    ) -> None:
        """`leases` returns the number of active leases; `clock` is the fleet's."""
        self._metrics = metrics
        self._models = models
        self._leases = leases
        self._clock = clock
        self._store_up = store_up
        self._token_pools = token_pools
        self._store_counts = store_counts
        self._replicas = replicas
        self._sources = sources
        self._reload = reload
        self._tls = tls
        self._token_keys = token_keys

    def collect(self) -> Iterator[Family]:
        """All families."""
        yield from map(counted, self._metrics.families())
        models = tuple(self._models)  # a reload may change them while the page is written
        yield from _of_models(models)
        yield from _of_workers(models, self._clock())
        yield from _of_token_pools(list(self._token_pools()))
        counts, sources, tls, reload = (
            self._store_counts(),
            list(self._sources()),
            self._tls(),
            self._reload(),
        )
        yield gauge("leases", "Leases by state.", ("state",), [(("active",), self._leases())])
        for name, text, value in (
            ("store_up", "1 when the state store answers.", int(self._store_up())),
            ("replicas", "Live replicas, this one included.", self._replicas()),
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
        for name, text, read in (
            ("up", "1 while a source of engines answers.", lambda s: int(not s.failing)),
            ("engines", "Engines in a source's last set.", lambda s: s.engines),
        ):
            rows = [((s.model, s.pool, s.source), read(s)) for s in sources]
            yield gauge(f"discovery_{name}", text, (*BY_POOL, "source"), rows)
        yield gauge(
            "jwt_keys_age_seconds",
            "Time since an issuer's keys were last read.",
            ("issuer",),
            [((issuer,), age_s) for issuer, age_s in self._token_keys()],
        )


_BY_MODEL: Final[Sequence[tuple[str, str, Callable[[ModelRuntime], float | None]]]] = (
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
_BY_POOL: Final[Sequence[tuple[str, str, Callable[[ModelRuntime, int], float | None]]]] = (
    ("pool_inflight", "Sequences holding a lease.", lambda m, i: m.fleet.pools[i].inflight),
    (
        "boundary_tokens",
        "Totals up to this belong to the pool.",
        lambda m, i: m.routing.pools[i].boundary_tokens,
    ),
    (
        "pool_beyond_window_tokens",
        "Most tokens served in one sequence beyond the configured window; 0: none.",
        lambda m, i: m.fleet.pools[i].beyond_window_tokens,
    ),
    (
        "boundary_error_ratio",
        "Preempted, rescued and overrun requests of all, where boundaries move.",
        lambda m, i: None if m.watch is None or i >= len(m.watch.shares) else m.watch.shares[i],
    ),
    (
        "predictor_coverage",
        "Share of recent prefills within their predicted quantile.",
        lambda m, i: m.scheduling.schedulers[i].coverage,
    ),
)


def _of_models(models: Sequence[ModelRuntime]) -> Iterator[Family]:
    """Estimators, compression, boundaries, queues, adapters."""
    for name, text, of_model in _BY_MODEL:
        yield gauge(name, text, ("model",), [((m.name,), of_model(m)) for m in models])
    pools = [(m, i, (m.name, pool.name)) for m in models for i, pool in enumerate(m.fleet.pools)]
    for name, text, of_pool in _BY_POOL:
        yield gauge(name, text, BY_POOL, [(names, of_pool(m, i)) for m, i, names in pools])
    yield gauge(
        "queue_depth",
        "Requests that wait in the gateway for a worker.",
        (*BY_POOL, "band"),
        [
            ((*names, band), waiting)
            for m, i, names in pools
            for band, waiting in zip(
                PRIORITY_CLASS_NAMES, m.scheduling.schedulers[i].waiting, strict=True
            )
        ],
    )
    yield Family(
        "sluice_preemptions",
        "Sequences that engines lost their memory for, as they say.",
        BY_POOL,
        [
            (names, m.fleet.telemetry[i].preemptions)
            for m, i, names in pools
            if i < len(m.fleet.telemetry)
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


def _of_workers(models: Sequence[ModelRuntime], now_s: float) -> Iterator[Family]:
    """A row a worker, and how many of them have an adapter."""
    yield gauge(
        "worker_up",
        "1 when in the rotation.",
        (*BY_POOL, "worker"),
        [
            ((m.name, pool.name, worker), float(i in sound))
            for m in models
            for pool in m.fleet.pools
            for sound in [set(fleet.available(pool, now_s))]
            for i, worker in members.present(pool)
        ],
    )
    yield gauge(
        "worker_inflight",
        "Sequences at a worker.",
        (*BY_POOL, "worker"),
        [
            ((m.name, pool.name, worker), pool.active[i])
            for m in models
            for pool in m.fleet.pools
            for i, worker in members.present(pool)
        ],
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


_BY_TOKEN_POOL: Final[Sequence[tuple[str, str, Callable[[PoolView], float]]]] = (
    ("slots", "Sequences its ready workers run at once.", lambda pool: pool.slots),
    ("leased", "Sequences with a lease, of all gateways.", lambda pool: pool.inflight),
    ("kv_bytes", "KV cache reserved.", lambda pool: pool.kv_bytes),
    ("kv_capacity_bytes", "KV cache of its ready workers.", lambda pool: pool.kv_capacity_bytes),
    ("desired_replicas", "Workers that demand asks for.", lambda pool: pool.desired_replicas),
)
_CLAIMS: Final = frozenset({"bound", "pending", "degraded"})
"""States in which an entitlement claims capacity; suspended and expired ones do not."""
_BY_ACCOUNT: Final[Sequence[tuple[str, str, Callable[[AccountView], float | None]]]] = (
    ("inflight", "Sequences with a lease.", lambda account: sum(account.inflight)),
    (
        "bound",
        "1 with its capacity, 0 without.",
        lambda account: int(account.state == "bound") if account.state in _CLAIMS else None,
    ),
    ("debt", "Service debt.", lambda account: account.debt),
    ("burst", "Burst intensity.", lambda account: account.burst),
    ("priority", "Weight under contention.", lambda account: account.weight),
)


def _of_token_pools(figures: Sequence[PoolSnapshot]) -> Iterator[Family]:
    """Managed models: their pools and entitlements."""
    pools = [((m.model, name), pool) for m in figures for name, pool in m.pools]
    for name, text, of_pool in _BY_TOKEN_POOL:
        yield gauge(
            f"pool_{name}", text, BY_POOL, [(names, of_pool(pool)) for names, pool in pools]
        )
    accounts = [((m.model, account.name), account) for m in figures for account in m.accounts]
    for name, text, of_account in _BY_ACCOUNT:
        rows = [(names, of_account(account)) for names, account in accounts]
        yield gauge(f"entitlement_{name}", text, ("model", "entitlement"), rows)


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
        return map(_metric, self._families)


def _metric(family: Family) -> Metric:
    if family.bounds:
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*map(repr, family.bounds), "+Inf"]
        for values, row in family.rows:
            buckets = list(zip(bounds, accumulate(row[:-1]), strict=True))
            histogram.add_metric(values, buckets, row[-1])
        return histogram
    metric = Metric(family.name, family.help, family.type)
    shown = family.name + ("_total" if family.type == "counter" else "")
    for values, value in family.rows:
        metric.add_sample(shown, dict(zip(family.labels, values, strict=True)), value)
    return metric


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
