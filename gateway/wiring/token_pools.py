"""Builds the token pools of one process: store, upkeep, entitlements.

Part of the composition root; `gateway.wiring.app` builds, starts and ends it. The order of the
start matters: a shared store connects, entitlements are entered, the embedded store restores its
state from before the restart, and capacity is published.
"""

import asyncio
import contextlib
import importlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from gateway.admission.token_pool import TokenPool
from gateway.background_task import BackgroundTasks
from gateway.control.metrics_page import ACCOUNTS_SHOWN, PoolSnapshot, StoreCounts
from gateway.errors import BadRequest
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import GoneSeries, Metrics
from gateway.ports import RecordSink
from gateway.records.decision import DECISION_SCHEMA, PoolEvent
from gateway.records.entitlement import Entitlement
from gateway.records.tenancy import RowKind
from gateway.settings import Config, ConfigError, ModelConfig
from gateway.settings.loading import read_admin_fields
from gateway.settings.token_pools import (
    base_terms,
    limits_of,
    managed,
    prefill_places,
    shape_of,
    shared_limits,
    tenancy_file,
    worker_shares,
)
from gateway.store.backends import backend_of, open_cluster, open_directory, sqlite_path
from gateway.store.memory_leases import MemoryLeases
from gateway.store.sqlite_leases import SqliteLeases
from gateway.store.upkeep import DEMAND_EVERY_S, ModelSpec, StoreUpkeep
from gateway.tenancy.changes import Audit
from gateway.tenancy.cluster_sync import ClusterSync
from gateway.tenancy.entitlement_admin import EntitlementAdmin
from gateway.tenancy.keyring import CLUSTER_GRANTS, DIRECTORY, Keyring
from gateway.tenancy.tenancy import Tenancy
from gateway.tenancy.tenant_admin import TenantAdmin
from gateway.usage.budgets import BudgetService
from gateway.wiring.auth import issuer_rules, token_verifier

if TYPE_CHECKING:
    from gateway.store.redis.leases import RedisLeases

_log = logging.getLogger("sluice.pools")

UNREAD: Final = "not read yet, so that keys get 503 which may be valid or revoked there: %s"
SNAPSHOT_EVERY_S = 1.0
EXTEND_EVERY_S = 1.0
SWEEP_EVERY_S = 3600.0
CLUSTER_EVERY_S = 1.0


class AdmissionRuntime:
    """The objects of one process for admission."""

    def __init__(
        self,
        config: Config,
        models: Mapping[str, ModelRuntime],
        metrics: Metrics,
        clock: Callable[[], float],
        event_sink: RecordSink | None = None,
        *,
        decide_anew: Callable[[], Awaitable[None]],
    ) -> None:
        """`models` by name (not by alias); `event_sink` records changes of the pools. No I/O.

        `decide_anew` calls `prepare` and `use` with the configuration in force.
        """
        self._config = config
        self._url = config.state.address
        self._metrics = metrics
        self._clock = clock
        by_name = {model.name: model for model in config.models}
        self._managed = {n: m for n, m in by_name.items() if managed(config, m)}
        self._served = dict(models)
        self._rates = {name: served.admission.rates for name, served in models.items()}
        self.shapes = {name: shape_of(model) for name, model in by_name.items()}
        self.tokens = token_verifier(config, metrics, clock)
        self.keyring = Keyring(limits=limits_of(config), verifier=self.tokens)
        self.keyring.unread = _unread(config)
        self.cluster: ClusterSync | None = None
        trail = Audit(time.time)
        token_pools = {name: TokenPool(base_terms(model)) for name, model in self._managed.items()}
        self.store, self._saved = self._open_store(config, token_pools)
        self.budgets = BudgetService(self.store, metrics, note=trail.note)
        self.budgets.replace("", shared_limits(config))
        self.store.on_warning = self.budgets.warned
        self.tenancy = tenancy = Tenancy(
            directory=open_directory(self._url),
            keyring=self.keyring,
            store=self.store,
            shapes=self.shapes,
            managed=self._managed,
            changed=lambda model: self.upkeep.entitlements_changed(model),  # noqa: PLW0108 - made below
            clock=clock,
            rates=self._rates,
            limits_changed=self.budgets.replace,
            count_limits=self._count_limits,
        )

        def read_fields(kind: RowKind, fields: Mapping[str, object]) -> dict[str, Any]:
            """Fields of the admin routes, checked as the file's. Raises BadRequest."""
            try:
                return read_admin_fields(self._config, kind, fields)
            except ConfigError as error:
                problem = error.problems[0]
                code = "invalid_entitlement" if kind == "entitlement" else "invalid_tenant"
                message = f"{problem.path}: {problem.message}; {problem.fix}."
                raise BadRequest(message, reason=code, param=problem.path) from None

        common: dict[str, Any] = {"wall_clock": time.time, "read_fields": read_fields}
        self.entitlements = EntitlementAdmin(
            tenancy,
            trail,
            self.store,
            self.shapes,
            managed=self._managed,
            pools=lambda model: self.upkeep.pools(model),  # noqa: PLW0108 - made below
            **common,
        )
        self.tenants = TenantAdmin(
            tenancy,
            trail,
            removal=self.entitlements.removal,
            adapters=lambda m: self._served[m].adapters.names if m in self._served else [],
            **common,
        )
        self._decide_anew = decide_anew
        self._gone_entitlements = GoneSeries(
            metrics, "entitlement", tenancy.index.entries.__contains__
        )
        self._gone_tenants = gone_tenants = GoneSeries(
            metrics,
            "tenant",
            lambda name: tenancy.tenant(name).exists or bool(self.keyring.entitlements_of(name)),
        )

        def removed(terms: Entitlement) -> None:
            self._gone_entitlements.note(terms.name)
            gone_tenants.note(terms.tenant)

        tenancy.on_entitlement_removed = removed
        tenancy.on_tenant_removed = gone_tenants.note
        specs = {n: self._spec(self._served[n], model) for n, model in self._managed.items()}
        self.upkeep = StoreUpkeep(cast("Any", self.store), specs, self._clock, time.time)
        if isinstance(self.store, MemoryLeases) and event_sink is not None:

            def note(model: str, event: str, unix_s: float, detail: object) -> None:
                # By the configuration: a reload prepares token pools before their model is served.
                pools = tuple(self._managed[model].pools) if event == "terms" else ()
                event_sink(
                    PoolEvent(
                        schema=DECISION_SCHEMA,
                        event=cast("Any", event),
                        model=model,
                        unix_s=unix_s,
                        pools=pools,
                        detail=detail,
                    )
                )

            self.store.event_sink = note
            for name, token_pool in token_pools.items():
                self.store.event_sink(name, "terms", time.time(), token_pool.terms)
        self.snapshots: tuple[PoolSnapshot, ...] = ()
        """Counters at the last refresh, for /metrics."""

    @asynccontextmanager
    async def _in_step_with_cluster(self, stale_after_s: float) -> AsyncIterator[None]:
        """Take over what a cluster's controller publishes, and tell it the demand."""
        store = open_cluster(self._url)
        self.cluster = ClusterSync(
            store.read, self.tenancy, stale_after_s=stale_after_s, clock=self._clock
        )

        async def report() -> None:
            """Of the models that this process leads; 0 is not known yet."""
            demand = {
                name: {
                    pool: desired
                    for place, pool in enumerate(self._managed[name].all_pools)
                    if (desired := self.upkeep.desired_replicas(name, place))
                }
                for name in cast("RedisLeases", self.store).led
            }
            await store.report(demand)

        chores = BackgroundTasks()
        await self.cluster.poll()
        chores.start(_often(CLUSTER_EVERY_S, self.cluster.poll), _often(DEMAND_EVERY_S, report))
        try:
            yield
        finally:
            await chores.close()
            await store.close()

    async def _count_limits(self) -> None:
        """A request is counted where it gets a managed model's lease."""
        if self.shapes.keys() - self._managed.keys():
            await self._decide_anew()

    def _is_managed(self, config: Config, model: ModelConfig) -> bool:
        return bool(self.tenancy.limited) or managed(config, model)

    def manages(self, model: str) -> bool:
        """Whether a model's entitlements have limits."""
        return model in self._managed

    @property
    def up(self) -> bool:
        """Whether the shared store decides, the persistent one saves and the directory answers."""
        saved = self._saved is None or self._saved.up
        return self.store.up and self.tenancy.up and saved

    def replicas(self, model: str) -> int:
        """Gateways that a shared store has heard of recently; 1 for embedded stores."""
        return self.store.replicas(model) if self.manages(model) else 1

    @property
    def store_counts(self) -> StoreCounts:
        """Failures of the shared lease store; all 0 without one."""
        store = self.store
        return StoreCounts(
            alone=store.alone_total, failures=store.failures_total, dropped=store.dropped_total
        )

    @asynccontextmanager
    async def running(self, extend: Callable[[], None]) -> AsyncIterator[None]:
        """Keep everything current during the block; `extend` makes streams reserve more."""

        async def close_tokens() -> None:
            if self.tokens is not None:
                await self.tokens.close()

        async def extending() -> None:
            try:
                extend()
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("having streams reserve more failed")

        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.store.close)
            await self.store.start()
            closing.push_async_callback(self.tenancy.close)
            closing.push_async_callback(close_tokens)
            if self.tokens is not None:
                await self.tokens.start()
            # If an admin may have created entitlements, serve no request before they are known.
            await self.tenancy.start(tenancy_file(self._config))
            if (controller := self._config.state.controller) is not None:
                in_step = self._in_step_with_cluster(controller.stale_after_s)
                await closing.enter_async_context(in_step)
            if self.keyring.unread:
                _log.warning(UNREAD, ", ".join(sorted(self.keyring.unread)))
            if self._saved is not None:
                closing.push_async_callback(self._saved.close)
                await self._saved.start()
            closing.push_async_callback(self.upkeep.close)
            await self.upkeep.start()
            await self._look()
            chores = BackgroundTasks()
            closing.push_async_callback(chores.close)
            chores.start(
                _often(SNAPSHOT_EVERY_S, self._look),
                _often(SWEEP_EVERY_S, self.sweep),
                _often(EXTEND_EVERY_S, extending),
            )
            yield

    async def prepare(self, config: Config, served: Mapping[str, ModelRuntime]) -> None:
        """Have the token pools and entitlements of another configuration ready.

        Requests are decided as before until `use`.
        """
        for name in self.shapes.keys() - served.keys():
            del self.shapes[name]
        publishes = False
        for model in config.models:
            name = model.name
            self.shapes[name] = shape_of(model)
            self._rates[name] = served[name].admission.rates
            if self._is_managed(config, model) and name not in self._managed:
                token_pool = TokenPool(base_terms(model))
                await self.store.manage(served[name], token_pool)
                if self._saved is not None:
                    self._saved.added(token_pool)
                self._managed[name] = model
                self.tenancy.manage(name)
            elif name not in self._managed or len(model.pools) <= len(self._managed[name].pools):
                continue  # more pools have to be known before a request asks for them
            self._managed[name] = model
            self.upkeep.respecify(name, self._spec(served[name], model))
            publishes = True
        self._config = config
        self.keyring.limit(limits_of(config))
        self.budgets.replace("", shared_limits(config))
        await self.tenancy.adopt(tenancy_file(config))
        if self.tokens is not None:
            await self.tokens.prepare(issuer_rules(config))
        elif (tokens := token_verifier(config, self._metrics, self._clock)) is not None:
            self.tokens = tokens
            tokens.on_change(self.keyring.tokens.clear)
            await tokens.start()
        if publishes:
            await self.upkeep.step()

    def use(self, config: Config, served: Mapping[str, ModelRuntime]) -> None:
        """Decide by another configuration from now on; models that are gone go with `forget`."""
        self._served.update(served)
        self.store.pending.clear()
        if self.tokens is not None:
            self.tokens.use()
            # A gateway that tokens closed stays closed, as one whose last entitlement went.
            self.keyring.open = False
            self.keyring.verifier = self.tokens if config.auth.jwt else None
        for model in config.models:
            name = model.name
            if self._is_managed(config, model):
                self._managed[name] = model
                self.upkeep.respecify(name, self._spec(served[name], model))
            elif name in self._managed:
                self._unmanage(name)

    def forget(self, served: ModelRuntime) -> None:
        """Drop a model that is gone and serves nothing any more, unless it came back."""
        if self._served.get(served.name) is served:
            self._unmanage(served.name)
            del self._served[served.name]
            self._rates.pop(served.name, None)

    def _unmanage(self, name: str) -> None:
        self.upkeep.forget(name)
        self._managed.pop(name, None)
        self.store.unmanage(name)

    def _open_store(
        self, config: Config, token_pools: Mapping[str, TokenPool]
    ) -> "tuple[MemoryLeases | RedisLeases, SqliteLeases | None]":
        backend = backend_of(self._url)
        owner = secrets.token_hex(6)
        if backend == "redis":
            # The Redis client is an optional extra, needed only if Redis is configured.
            module = importlib.import_module("gateway.store.redis.leases")
            store: RedisLeases = module.RedisLeases(
                self._url,
                self._served,
                token_pools,
                self._clock,
                local=MemoryLeases(self._served, self._clock, owner=owner),
                fail_mode=config.state.fail_mode,
                owner=owner,
                replicas=config.server.workers,
            )
            return store, None
        embedded = MemoryLeases(self._served, self._clock, token_pools, owner=owner)
        if backend == "sqlite":
            return embedded, SqliteLeases(
                sqlite_path(self._url), embedded.token_pools, embedded.limits
            )
        return embedded, None

    def _spec(self, served: ModelRuntime, model: ModelConfig) -> ModelSpec:
        pools = served.fleet.pools
        return ModelSpec(
            base=base_terms(model),
            pools=pools,
            shares=worker_shares(model),
            prefills=prefill_places(model),
            kv_bytes_per_token=model.kv_bytes_per_token or 0,
            entitlements=lambda: self.entitlements.terms(model.name),
            kv_bytes=lambda pool, worker: (
                pools[pool].kv_tokens.get(worker, 0) * (model.kv_bytes_per_token or 0)
            ),
        )

    async def _look(self) -> None:
        """Refresh the counters for /metrics, so that a scrape waits for no store."""
        snapshots = []
        for name in list(self._managed):
            shown = islice(self.entitlements.terms(name), ACCOUNTS_SHOWN)
            views, accounts = await asyncio.gather(
                self.upkeep.pools(name), self.store.view(name, [terms.name for terms in shown])
            )
            names = [pool.name for pool in self._served[name].fleet.pools]
            pools = tuple(zip(names, views, strict=False))
            snapshots.append(PoolSnapshot(model=name, pools=pools, accounts=tuple(accounts)))
        self.snapshots = tuple(snapshots)

    async def sweep(self) -> None:
        """Drop what is kept of entitlements, tenants and limits that are gone."""
        for series in (self._gone_entitlements, self._gone_tenants):
            series.sweep()
        await self.budgets.sweep()


def _unread(config: Config) -> set[str]:
    """What has to be read before keys open, as `Keyring.unread` says."""
    administered = config.administered and backend_of(config.state.address) != "memory"
    needed = {DIRECTORY: administered, CLUSTER_GRANTS: config.state.controller is not None}
    return {name for name, is_needed in needed.items() if is_needed}


async def _often(every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(every_s)
        # An unreachable store has been logged already; the figures stay unchanged.
        with contextlib.suppress(Exception):
            await work()
