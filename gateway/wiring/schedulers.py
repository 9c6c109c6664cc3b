"""The schedulers of a model's pools, and what they learn from.

Part of the composition root. `Former` is a model as it was served before a reload: what is still
valid of it stays in use.
"""

import importlib
import logging
from functools import partial
from typing import TypeVar

from gateway.fleet.engine_telemetry import TelemetryView, held_tokens, kv_usage
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime, ModelScheduling, QueueRules
from gateway.records.record import Record
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import MIN_ENTRIES, PrefixIndex
from gateway.scheduling.rank_group import RankGroup
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.schedulers import LOCAL, PREDICTING, SHADOWED, make_scheduler
from gateway.settings import Config, ModelConfig
from predictor.artifact import Artifact, PoolSection, load
from predictor.online import PrefillPredictor

_log = logging.getLogger("sluice")
_T = TypeVar("_T")


class Former(Record, frozen=True, kw_only=True):
    """A model as it is served before a reload."""

    served: ModelRuntime
    model: ModelConfig
    policies: tuple[str, ...]
    """By pool."""

    def of(self, pool: str, parts: tuple[_T, ...]) -> _T | None:
        """A pool's own of the parts by pool; None where it has none."""
        names = list(self.model.pools)
        return parts[names.index(pool)] if parts and pool in names else None


def former(config: Config, model: ModelConfig, served: ModelRuntime) -> Former:
    """The model as the configuration in force serves it."""
    return Former(served=served, model=model, policies=policies_of(config, model))


def policies_of(config: Config, model: ModelConfig) -> tuple[str, ...]:
    """Each pool's policy; a plain relay's, least-loaded, where the model only observes."""
    if model.mode == "observe":
        return ("least-loaded",) * len(model.pools)
    return model.policies(config.server.workers)


def scheduling_of(
    model: ModelConfig,
    policies: tuple[str, ...],
    pools: tuple[PoolState, ...],
    predictors: tuple[PrefillPredictor | None, ...],
    views: tuple[TelemetryView, ...],
    before: Former | None,
) -> ModelScheduling:
    """Schedulers, queues and what they learn; those of the same pool and policy stay."""
    rules = model.scheduling
    old = None if before is None else before.served.scheduling
    indexed = [
        policy in LOCAL or predictor is not None
        for policy, predictor in zip(policies, predictors, strict=True)
    ]
    prefixes, gossip = _prefixes(model, pools, indexed, before)
    schedulers = tuple(
        _scheduler(policies[i], pool, predictors[i], views[i] if views else None, before)
        for i, pool in enumerate(pools)
    )
    # Where no pool has any, requests bind without asking pool by pool.
    kept = any(indexed)
    return ModelScheduling(
        schedulers=schedulers if any(s is not None for s in schedulers) else (),
        queue=QueueRules(limit=rules.queue_limit, timeout_s=rules.queue_timeout_s),
        queued={} if old is None else old.queued,
        waiting_for_workers={} if old is None else old.waiting_for_workers,
        predictors=predictors,
        prefixes=prefixes if kept else (),
        follows_prefixes=tuple(policy in LOCAL for policy in policies),
        prefix_gossip=gossip if kept else (),
        salted=model.cache_salt,
        engine_priority=model.engine_priority,
        reports_cached=_reports_cached(pools, before),
    )


def _prefixes(
    model: ModelConfig,
    pools: tuple[PoolState, ...],
    indexed: list[bool],
    before: Former | None,
) -> tuple[tuple[PrefixIndex | None, ...], tuple[PrefixGossip | None, ...]]:
    """By pool, what each worker was sent, and what other replicas are told of it."""
    entries = max(model.scheduling.prefix_entries, MIN_ENTRIES)
    if before is not None and before.model.scheduling.prefix_entries != (
        model.scheduling.prefix_entries
    ):
        before = None
    prefixes: list[PrefixIndex | None] = []
    gossip: list[PrefixGossip | None] = []
    for pool, wanted in zip(pools, indexed, strict=True):
        index = told = None
        if wanted and before is not None:
            index = before.of(pool.name, before.served.scheduling.prefixes)
            told = before.of(pool.name, before.served.scheduling.prefix_gossip)
        if wanted and (index is None or told is None):
            index = PrefixIndex(len(pool.workers), max_entries=entries)
            for place, present in enumerate(pool.present):
                if not present:
                    index.left(place)
            told = PrefixGossip()
        prefixes.append(index)
        gossip.append(told)
    return tuple(prefixes), tuple(gossip)


def _scheduler(
    policy: str,
    pool: PoolState,
    predictor: PrefillPredictor | None,
    view: TelemetryView | None,
    before: Former | None,
) -> Scheduler | None:
    """The pool's scheduler with its queue, where it would be made alike; else a new one.

    None if the pool's requests bind to the least loaded worker at once.
    """
    if before is not None and before.of(pool.name, before.policies) == policy:
        served = before.served
        known = before.of(pool.name, served.scheduling.schedulers)
        alike = (
            before.of(pool.name, served.scheduling.predictors) is predictor
            and before.of(pool.name, served.fleet.telemetry) is view
        )
        if known is not None and alike:
            return known
    if policy == "least-loaded" and predictor is None:
        return None
    if policy == "bfio":
        # numpy takes about 20 MB, so it is imported only for balancing ranks.
        solver = importlib.import_module("gateway.scheduling.rank_solver")
        observed = None if view is None else partial(held_tokens, pool, view)
        return RankGroup(pool, solver.assign, observed=observed)
    reported = None if view is None else partial(kv_usage, view)
    shadow = predictor is not None
    return make_scheduler(policy, pool, predictor=predictor, kv_usage=reported, shadow=shadow)


def _reports_cached(pools: tuple[PoolState, ...], before: Former | None) -> set[tuple[int, int]]:
    if before is None:
        return set()
    served = before.served
    if pools == served.fleet.pools:
        return served.scheduling.reports_cached
    place = {id(pool): index for index, pool in enumerate(pools)}
    found = (
        (place.get(id(served.fleet.pools[p])), rank) for p, rank in served.scheduling.reports_cached
    )
    return {(pool, rank) for pool, rank in found if pool is not None}


def predictors_of(
    model: ModelConfig,
    policies: tuple[str, ...],
    pools: tuple[PoolState, ...],
    before: Former | None,
) -> tuple[PrefillPredictor | None, ...]:
    """By pool; None where neither its scheduler predicts nor a shadow, which knows no ranks."""
    path, shadow = model.scheduling.predictor, model.scheduling.shadow
    predicted = [
        policy in PREDICTING or (shadow and policy in SHADOWED and not pool.ranked)
        for policy, pool in zip(policies, model.pools.values(), strict=True)
    ]
    kept = before if before is not None and before.model.scheduling.predictor == path else None
    artifact = load(path) if path is not None and any(predicted) else None
    return tuple(
        (kept and kept.of(pool.name, kept.served.scheduling.predictors))
        or PrefillPredictor(
            _section(artifact, model, pool), workers=len(pool.workers), slots=pool.slots_per_worker
        )
        if wanted
        else None
        for wanted, pool in zip(predicted, pools, strict=True)
    )


def _section(artifact: Artifact | None, model: ModelConfig, pool: PoolState) -> PoolSection | None:
    """What was trained for a pool; None, and a line in the log, if nothing was."""
    if artifact is None:
        return None
    section = artifact.section(model.name, pool.name)
    if section is None:
        _log.warning(
            "model %s, pool %s: %s has no section for it; predictions start untrained",
            model.name,
            pool.name,
            model.scheduling.predictor,
        )
    return section
