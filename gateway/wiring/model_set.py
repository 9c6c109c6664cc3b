"""Replaces the models that a running gateway serves. Part of the composition root.

A model whose pools stay is changed in place: requests that wait are placed anew by its present
schedulers. One with other pools is replaced by another object, which shares the pools that both
have: workers, load, what was learned, queues. Whoever holds the earlier object keeps it, and its
leases settle in the books that they came from. A pool or model that is gone takes no new requests,
but its engines stay until the last request that may use them has ended; then it retires.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from gateway.control.roles import RoleKeys
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import Prober
from gateway.fleet.rotation import CONFIGURED, Engine, Rotation
from gateway.metrics import Metrics
from gateway.replicas.estimator_sync import EstimatorSync
from gateway.routing.split_alias import SplitAlias
from gateway.settings import Config, ModelConfig
from gateway.settings.worker import WorkerConfig
from gateway.usage.report import FleetBill
from gateway.wiring.auth import role_keys
from gateway.wiring.discovery import Discovery
from gateway.wiring.models import by_name, served_model
from gateway.wiring.replicas import Replicas
from gateway.wiring.schedulers import Former, former
from gateway.wiring.token_pools import AdmissionRuntime
from gateway.wiring.workers import Workers

GRACE_S: Final = 5.0
"""A model that is gone stays at least this long, for requests that read its name just before."""
_SWEEP_S: Final = 1.0

_log = logging.getLogger("sluice.reload")


class Parts(Protocol):
    """The parts of a gateway that know its models."""

    config: Config
    metrics: Metrics
    pools: AdmissionRuntime
    prober: Prober
    rotation: Rotation
    learning: EstimatorSync
    discovery: Discovery
    workers: Workers
    replicas: Replicas
    bill: FleetBill
    role_keys: RoleKeys
    served: "Served"


class Served:
    """The models by all their names, as requests and routes look them up; changed in place."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime]) -> None:
        self.models = list(models)
        self.retiring: list[ModelRuntime] = []
        """Those that are gone, or have pools that are, while requests of theirs may run."""
        self.by_name: dict[str, ModelRuntime] = {}
        self.names: dict[str, str] = {}
        """Name or alias -> model, without patterns of names."""
        self.splits: dict[str, SplitAlias] = {}
        self.shares: dict[str, tuple[str, ...]] = {}
        """Split alias -> its models."""
        self.name(config)

    def name(self, config: Config) -> None:
        """Use a configuration's names of the models."""
        found = by_name(config, self.models)
        splits = {alias.name: SplitAlias(alias.name, alias.split) for alias in config.aliases}
        self.by_name.clear()
        self.by_name.update(found)
        self.splits.clear()
        self.splits.update(splits)
        self.names.clear()
        self.names.update((name, m.name) for name, m in found.items() if "*" not in name)
        self.shares.clear()
        self.shares.update((alias.name, tuple(alias.split)) for alias in config.aliases)


class _Next(NamedTuple):
    """One model of the next configuration."""

    model: ModelConfig
    before: Former | None
    ready: ModelRuntime
    """Built beforehand, so that a bad file is noticed and new engines are probed."""


class _Retiree:
    """A model, or pools of one, that is gone."""

    def __init__(self, served: ModelRuntime, pools: list[PoolState], engines: list[Engine]) -> None:
        self.served = served
        self.pools = pools
        self.engines = engines
        self.since_s = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether no request can be under way any more."""
        scheduling, pools = self.served.scheduling, self.served.fleet.pools
        mine = [s for p, s in zip(pools, scheduling.schedulers, strict=False) if p in self.pools]
        return (
            time.monotonic() - self.since_s >= GRACE_S
            and not any(pool.inflight or any(pool.active) for pool in self.pools)
            and not any(where in mine for where in scheduling.queued.values())
        )


class ModelSet:
    """The models of a running gateway."""

    def __init__(self, gateway: Parts) -> None:
        self._gateway = gateway
        self._retirees: list[_Retiree] = []
        self._followed: dict[tuple[str, str], Sequence[WorkerConfig]] = {
            (model.name, name): pool.workers
            for model in gateway.config.models
            for name, pool in model.pools.items()
        }
        """Model and pool -> the workers and sources that are followed, also after a failure."""

    def build(self, target: Config) -> list[_Next]:
        """Build what changes. Raises ArtifactError; nothing has changed."""
        running = self._gateway.config
        known = {model.name: model for model in running.models}
        now = {served.name: served for served in self._gateway.served.models}
        found = []
        rules = ("server", "health", "timeouts", "retry")
        alike = all(getattr(running, name) == getattr(target, name) for name in rules)
        for model in target.models:
            before, ready = None, now.get(model.name)
            if ready is not None:
                before = former(running, known[model.name], ready)
            if ready is None or not alike or known[model.name] != model:
                ready = served_model(target, model, before)
            found.append(_Next(model, before, ready))
        return found

    async def replace(self, target: Config, following: Sequence[_Next]) -> None:
        """Serve the next configuration's models."""
        gateway = self._gateway
        await gateway.prober.look(
            [
                (each.ready, index, ranks[0])
                for each in following
                for index, pool in enumerate(each.ready.fleet.pools)
                if each.before is None or pool not in each.before.served.fleet.pools
                for ranks in pool.engines
            ]
        )
        await gateway.pools.prepare(target, {each.model.name: each.ready for each in following})
        async with gateway.rotation.still():
            self._switch(target, following)
        await self._follow_workers(target)

    def sweep(self) -> None:
        """Retire what is gone and serves nothing any more."""
        for retiree in [each for each in self._retirees if each.over]:
            self._retirees.remove(retiree)
            self._retire(retiree)

    def _switch(self, target: Config, following: Sequence[_Next]) -> None:
        """All at once: no request runs in between."""
        gateway, served = self._gateway, self._gateway.served
        before = {each.name: each for each in served.models}
        after = [(each, self._present(target, each)) for each in following]
        for each, now in after:
            old = before.pop(now.name, None)
            for pool, state in zip(each.model.pools.values(), now.fleet.pools, strict=True):
                state.slots_per_worker = pool.max_num_seqs
                state.may_be_empty = pool.may_be_empty
            if old is not now:
                self._retire_later(old, now)
        for gone in before.values():
            self._retire_later(gone, None)
        served.models[:] = [now for _, now in after]
        served.name(target)
        gateway.pools.use(target, {now.name: now for _, now in after})
        gateway.role_keys.follow(role_keys(target, gateway.pools.tokens))
        gateway.learning.replace({estimator_key(m): m.estimator for m in served.models})
        gateway.config = gateway.workers.config = target
        gateway.replicas.follow(target)
        gateway.bill.follow((m.name, pool) for m in served.models for pool in m.fleet.pools)

    def _present(self, target: Config, each: _Next) -> ModelRuntime:
        """The model as it is served from now on."""
        if each.before is None or each.ready is each.before.served:
            return each.ready
        # Built anew: engines may have come since.
        old, new = each.before.served, served_model(target, each.model, each.before, each.ready)
        if list(each.before.model.pools) == list(each.model.pools):
            _become(old, new)
            return old
        _hand_over(old, new)
        return new

    def _retire_later(self, old: ModelRuntime | None, now: ModelRuntime | None) -> None:
        engines = self._gateway.rotation.replace(old, now)
        if old is not None:
            kept = () if now is None else now.fleet.pools
            pools = [pool for pool in old.fleet.pools if pool not in kept]
            self._retirees.append(_Retiree(old, pools, engines))
            self._gateway.served.retiring.append(old)

    def _retire(self, retiree: _Retiree) -> None:
        gateway, old = self._gateway, retiree.served
        gateway.served.retiring.remove(old)
        # What started the process is never collected, and would keep all that came after it.
        old.fleet.response_affinity.on_remember = None
        gateway.pools.forget(old)
        gateway.rotation.close_connections(retiree.engines)
        here = {m.name: [p.name for p in m.fleet.pools] for m in gateway.served.models}
        if old.name not in here:
            gateway.metrics.forget(model=old.name)
            _log.info("model %s is gone", old.name)
        for pool in old.fleet.pools:
            if pool not in retiree.pools:
                continue
            gateway.prober.drop(pool)
            for worker in pool.workers:
                gateway.metrics.ejections.values.pop((pool.name, worker), None)
            if pool.name not in here.get(old.name, ()):
                gateway.metrics.forget(model=old.name, pool=pool.name)
                _log.info("pool %s/%s is gone", old.name, pool.name)

    async def _follow_workers(self, target: Config) -> None:
        gateway, followed = self._gateway, self._followed
        now = {(model.name, name): p for model in target.models for name, p in model.pools.items()}
        for gone in [place for place in followed if place not in now]:
            await gateway.discovery.change(*gone, followed[gone], ())
            del followed[gone]
        for place, pool in now.items():
            engines = [worker.addresses for worker in pool.listed]
            await gateway.rotation.apply_to(*place, CONFIGURED, engines)
            await gateway.discovery.change(*place, followed.get(place, ()), pool.workers)
            followed[place] = pool.workers


def estimator_key(served: ModelRuntime) -> str:
    """The name under which an estimator's state is stored."""
    return f"{served.estimator.profile.name}:{served.name}"


def _become(served: ModelRuntime, new: ModelRuntime) -> None:
    """Change a model in place, for requests under way, too."""
    old, compression = served.scheduling, served.compression
    for field in ("routing", "estimator", "fleet", "admission", "scheduling", "watch"):
        setattr(served, field, getattr(new, field))
    for field in ("aliases", "adapters", "fallbacks", "price", "by_hour"):
        setattr(served, field, getattr(new, field))
    if compression is not None and new.compression is not None:
        compression.rules = new.compression.rules
    else:
        served.compression = new.compression
    _place_anew(old.schedulers, served)


def _hand_over(old: ModelRuntime, new: ModelRuntime) -> None:
    """Let requests that hold the earlier model use the pools that the next one shares with it."""
    places = {
        here: new.fleet.pools.index(pool)
        for here, pool in enumerate(old.fleet.pools)
        if pool in new.fleet.pools
    }
    moved = old.fleet.response_affinity.moved(places)
    new.fleet = replace(new.fleet, response_affinity=moved)
    before, after = old.scheduling, new.scheduling
    parts: dict[str, Any] = {}
    for name in ("schedulers", "predictors", "prefixes", "prefix_gossip", "follows_prefixes"):
        mine, theirs = getattr(before, name), getattr(after, name)
        if any(theirs) or any(mine):
            parts[name] = tuple(
                (theirs[places[here]] if theirs else None)
                if here in places
                else (mine[here] if mine else None)
                for here in range(len(old.fleet.pools))
            )
    old.scheduling = replace(before, **parts)
    _place_anew(before.schedulers, old)


def _place_anew(schedulers: Sequence[object], served: ModelRuntime) -> None:
    """Have the requests that wait with schedulers that are replaced bind again."""
    replaced = [s for s in schedulers if s is not None and s not in served.scheduling.schedulers]
    now_s = time.monotonic()
    for job, where in list(served.scheduling.queued.items()):
        if where in replaced and job.owner is not None and not job.owner.done():
            where.cancel(job, now_s)
            job.state = "nowhere"
            job.owner.set_result(True)
