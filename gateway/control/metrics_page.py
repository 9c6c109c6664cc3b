"""The /metrics page: telemetry counters plus gauges read at scrape time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from gateway.control.exposition import (
    Buckets,
    Family,
    Rows,
    counter_family,
    gauge,
    histogram_family,
)
from gateway.control.model_metrics import BY_POOL, adapters, boundaries, learned, schedulers
from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.certificates import TlsStatus
from gateway.metrics import Counter, Metrics
from gateway.ports import AccountView, PoolView
from gateway.records.record import Record

ACCOUNTS_SHOWN = 500
"""Most entitlements per model with gauges of their own: the first ones, not the busiest."""


_CLAIMS = frozenset({"bound", "pending", "degraded"})
"""States in which an entitlement claims capacity; suspended and expired ones do not."""


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

    def collect(self) -> Iterator[Family | Buckets]:
        """All families."""
        for family in self._metrics.families():
            if isinstance(family, Counter):
                yield counter_family(family)
            else:
                yield histogram_family(family)
        yield from self.gauges()

    def gauges(self) -> Iterator[Family]:
        """Gauges read at scrape time."""
        models = tuple(self._models)  # a reload may change them while the page is written
        yield gauge(
            "sluice_pool_inflight",
            "Sequences holding a lease.",
            BY_POOL,
            [
                ((served.name, pool.name), pool.inflight)
                for served in models
                for pool in served.fleet.pools
            ],
        )
        by_worker = (*BY_POOL, "worker")
        yield gauge("sluice_worker_up", "1 when in the rotation.", by_worker, self._up())
        yield gauge(
            "sluice_worker_inflight",
            "Sequences at a worker.",
            by_worker,
            (
                ((served.name, pool.name, worker), pool.active[i])
                for served in models
                for pool in served.fleet.pools
                for i, worker in members.present(pool)
            ),
        )
        yield from learned(models)
        yield gauge(
            "sluice_leases", "Leases by state.", ("state",), [(("active",), self._leases())]
        )
        yield _single("sluice_store_up", "1 when the state store answers.", int(self._store_up()))
        yield _single("sluice_replicas", "Live replicas, this one included.", self._replicas())
        yield from _store(self._store_counts())
        yield from schedulers(models)
        yield from boundaries(models)
        yield from adapters(models, self._clock())
        yield from _token_pools(list(self._token_pools()))
        yield from _discovery(list(self._sources()))
        yield gauge(
            "sluice_jwt_keys_age_seconds",
            "Time since an issuer's keys were last read.",
            ("issuer",),
            [((issuer,), age_s) for issuer, age_s in self._token_keys()],
        )
        reload = self._reload()
        name = "sluice_config_last_reload"
        text = "1 when the configuration file, as last read, is in force."
        yield _single(f"{name}_successful", text, int(reload.successful))
        text = "When the configuration file was last read."
        yield _single(f"{name}_timestamp_seconds", text, reload.unix_s)
        yield from _certificate(self._tls())

    def _up(self) -> Rows:
        for served in tuple(self._models):
            for pool in served.fleet.pools:
                sound = set(fleet.available(pool, self._clock()))
                for i, worker in members.present(pool):
                    yield (served.name, pool.name, worker), float(i in sound)


def _store(counts: StoreCounts) -> Iterator[Family]:
    for name, text, value in (
        ("alone", "Leases taken while the shared store was away.", counts.alone),
        ("failures", "Round trips and connections to it that failed.", counts.failures),
        ("dropped", "Settlements and the like given up: too many waited.", counts.dropped),
    ):
        yield Family(name=f"sluice_store_{name}", help=text, rows=[((), value)], type="counter")


def _bound(account: AccountView) -> float | None:
    return int(account.state == "bound") if account.state in _CLAIMS else None


_POOL_GAUGES: Final[Sequence[tuple[str, str, Callable[[PoolView], float]]]] = (
    ("slots", "Sequences its ready workers run at once.", lambda pool: pool.slots),
    ("leased", "Sequences with a lease, of all gateways.", lambda pool: pool.inflight),
    ("kv_bytes", "KV cache reserved.", lambda pool: pool.kv_bytes),
    ("kv_capacity_bytes", "KV cache of its ready workers.", lambda pool: pool.kv_capacity_bytes),
    ("desired_replicas", "Workers that demand asks for.", lambda pool: pool.desired_replicas),
)
_ACCOUNT_GAUGES: Final[Sequence[tuple[str, str, Callable[[AccountView], float | None]]]] = (
    ("inflight", "Sequences with a lease.", lambda account: sum(account.inflight)),
    ("bound", "1 with its capacity, 0 without.", _bound),
    ("debt", "Service debt.", lambda account: account.debt),
    ("burst", "Burst intensity.", lambda account: account.burst),
    ("priority", "Weight under contention.", lambda account: account.weight),
)


def _token_pools(figures: Sequence[PoolSnapshot]) -> Iterator[Family]:
    for name, text, value_of in _POOL_GAUGES:
        yield gauge(
            f"sluice_pool_{name}",
            text,
            BY_POOL,
            [
                ((model.model, pool_name), value_of(pool))
                for model in figures
                for pool_name, pool in model.pools
            ],
        )
    for name, text, figure_of in _ACCOUNT_GAUGES:
        yield gauge(
            f"sluice_entitlement_{name}",
            text,
            ("model", "entitlement"),
            (
                ((model.model, account.name), figure)
                for model in figures
                for account in model.accounts
                if (figure := figure_of(account)) is not None
            ),
        )


def _discovery(sources: Sequence[SourceReport]) -> Iterator[Family]:
    by_source = (*BY_POOL, "source")
    for name, text, value_of in (
        ("up", "1 while a source of engines answers.", lambda each: int(not each.failing)),
        ("engines", "Engines in a source's last set.", lambda each: each.engines),
    ):
        yield gauge(
            f"sluice_discovery_{name}",
            text,
            by_source,
            [((each.model, each.pool, each.source), value_of(each)) for each in sources],
        )


def _certificate(tls: TlsStatus | None) -> Iterator[Family]:
    found = [] if tls is None else [tls]
    yield gauge(
        "sluice_tls_certificate_expiry_timestamp_seconds",
        "When the certificate of the clients' port expires, in Unix seconds.",
        (),
        [((), status.expires_unix_s) for status in found],
    )
    yield gauge(
        "sluice_tls_last_reload_successful",
        "1 when the certificate's files could be used at the last look.",
        (),
        [((), int(status.successful)) for status in found],
    )


def _single(name: str, text: str, value: float) -> Family:
    return Family(name=name, help=text, rows=[((), value)])
