"""A model's configuration -> its run-time objects: routing, pools, workers, schedulers.

Part of the composition root. Each call creates new state.
"""

import importlib
import logging
from functools import partial

from gateway.policy.bfio.rank_group import RankGroup
from gateway.policy.entitlements.entitlement import PROFILES as PROFILES_OF_ADMISSION
from gateway.policy.estimate.estimator import LengthEstimator
from gateway.policy.estimate.profile import PROFILES
from gateway.policy.fleet.engine_telemetry import TelemetryView, held_tokens, kv_usage
from gateway.policy.fleet.fleet import PoolState
from gateway.policy.fleet.health_rules import HealthRules
from gateway.policy.fleet.slot_clock import SlotClock
from gateway.policy.model_runtime import (
    ModelAdmission,
    ModelCompression,
    ModelFleet,
    ModelRuntime,
    ModelScheduling,
    QueueRules,
)
from gateway.policy.pools.conversations import ResponseAffinity
from gateway.policy.pools.routing_table import CompressionRules, PoolShape, Routing
from gateway.policy.prefix.gossip import PrefixGossip
from gateway.policy.prefix.index import MIN_ENTRIES, PrefixIndex
from gateway.policy.schedulers import LOCAL, PREDICTING, SHADOWED, make_scheduler
from gateway.policy.scheduling.scheduler import Scheduler
from gateway.records.attempt import PhaseTimeouts
from gateway.settings import Config, ModelConfig
from gateway.settings.fleet import watch_of
from gateway.settings.token_pools import slot_tokens_per_s
from predictor.artifact import Artifact, PoolSection, load
from predictor.online import PrefillPredictor

_log = logging.getLogger("sluice")


def served_model(config: Config, model: ModelConfig) -> ModelRuntime:
    """Build the model for the stages. Raises ArtifactError for a bad predictor file."""
    timeouts = config.timeouts_for(model)
    health = config.health
    pools = tuple(
        PoolState(
            name,
            [worker.id for worker in pool.addresses],
            pool.max_num_seqs,
            pool.engines,
            may_be_empty=pool.may_be_empty,
        )
        for name, pool in model.pools.items()
    )
    for state, pool in zip(pools, model.pools.values(), strict=True):
        if pool.worker_hour is not None:
            state.slot_clock = SlotClock(pool.worker_hour)
    policies = _policies(config, model)
    predictors = _predictors(model, policies, pools)
    reads = model.boundary.auto or "bfio" in policies or any(p is not None for p in predictors)
    views = tuple(TelemetryView(len(pool.workers)) for pool in pools) if reads else ()
    return ModelRuntime(
        name=model.name,
        aliases=frozenset(model.aliases),
        fallbacks=model.fallbacks,
        routing=_routing(model),
        estimator=LengthEstimator(
            PROFILES[model.estimator],
            output_mode="cap" if model.output_is_cap else None,
            output_prior_tokens=model.output_prior_tokens,
            media_tokens=model.media_tokens,
        ),
        fleet=ModelFleet(
            pools=pools,
            workers=tuple(list(pool.addresses) for pool in model.pools.values()),
            health=HealthRules(
                eject_after=health.eject_after,
                eject_s=health.eject_s,
                max_eject_s=health.max_eject_s,
                stall_s=health.stall_s,
            ),
            response_affinity=ResponseAffinity(),
            timeouts=PhaseTimeouts(
                connect_s=timeouts.connect_s,
                first_byte_s=timeouts.first_byte_s,
                idle_s=timeouts.idle_s,
            ),
            max_attempts=config.retry.max_attempts,
            telemetry=views,
        ),
        admission=_admission(model),
        scheduling=_scheduling(model, policies, pools, predictors, views),
        compression=_compression(model),
        watch=watch_of(model),
        price=None if model.price is None else model.price.per_token(),
        by_hour=any(pool.slot_clock is not None for pool in pools),
    )


def _admission(model: ModelConfig) -> ModelAdmission:
    return ModelAdmission(
        spill_queue=model.spill_queue,
        profile=PROFILES_OF_ADMISSION[model.admission.profile],
        observe=model.observes_admission,
        slot_tokens_per_s=slot_tokens_per_s(model),
        held_share=model.admission.held_share,
        kv_bytes_per_token=model.kv_bytes_per_token or 0,
        reclaim_s=model.admission.reclaim_ms / 1000,
    )


def _routing(model: ModelConfig) -> Routing:
    boundaries = (*model.boundaries, None)
    return Routing(
        pools=tuple(
            PoolShape(name=name, window_tokens=pool.max_model_len, boundary_tokens=boundary)
            for (name, pool), boundary in zip(model.pools.items(), boundaries, strict=True)
        ),
        default_max_tokens=model.default_max_tokens,
        observe=model.mode == "observe",
    )


def _policies(config: Config, model: ModelConfig) -> tuple[str, ...]:
    """Each pool's policy; a plain relay's, least-loaded, where the model only observes."""
    if model.mode == "observe":
        return ("least-loaded",) * len(model.pools)
    return model.policies(config.server.workers)


def _scheduling(
    model: ModelConfig,
    policies: tuple[str, ...],
    pools: tuple[PoolState, ...],
    predictors: tuple[PrefillPredictor | None, ...],
    views: tuple[TelemetryView, ...],
) -> ModelScheduling:
    rules = model.scheduling
    entries = max(rules.prefix_entries, MIN_ENTRIES)
    prefixes = tuple(
        PrefixIndex(len(pool.workers), max_entries=entries)
        if policy in LOCAL or predictor is not None
        else None
        for policy, pool, predictor in zip(policies, pools, predictors, strict=True)
    )
    schedulers = tuple(
        _scheduler(policies[i], pool, predictors[i], views[i] if views else None)
        for i, pool in enumerate(pools)
    )
    # Where no pool has any, requests bind without asking pool by pool.
    kept = any(index is not None for index in prefixes)
    gossip = tuple(None if index is None else PrefixGossip() for index in prefixes)
    return ModelScheduling(
        schedulers=schedulers if any(s is not None for s in schedulers) else (),
        queue=QueueRules(limit=rules.queue_limit, timeout_s=rules.queue_timeout_s),
        predictors=predictors,
        prefixes=prefixes if kept else (),
        follows_prefixes=tuple(policy in LOCAL for policy in policies),
        prefix_gossip=gossip if kept else (),
        salted=model.cache_salt,
        engine_priority=model.engine_priority,
    )


def _predictors(
    model: ModelConfig, policies: tuple[str, ...], pools: tuple[PoolState, ...]
) -> tuple[PrefillPredictor | None, ...]:
    """By pool; None where neither its scheduler predicts nor a shadow, which knows no ranks."""
    path, shadow = model.scheduling.predictor, model.scheduling.shadow
    predicted = [
        policy in PREDICTING or (shadow and policy in SHADOWED and not pool.ranked)
        for policy, pool in zip(policies, model.pools.values(), strict=True)
    ]
    artifact = load(path) if path is not None and any(predicted) else None
    return tuple(
        PrefillPredictor(
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


def _scheduler(
    policy: str, pool: PoolState, predictor: PrefillPredictor | None, view: TelemetryView | None
) -> Scheduler | None:
    """A pool's scheduler; None if its requests bind to the least loaded worker at once."""
    if policy == "least-loaded" and predictor is None:
        return None
    if policy == "bfio":
        return _rank_group(pool, view)
    reported = None if view is None else partial(kv_usage, view)
    shadow = predictor is not None
    return make_scheduler(policy, pool, predictor=predictor, kv_usage=reported, shadow=shadow)


def _rank_group(pool: PoolState, view: TelemetryView | None) -> Scheduler:
    # numpy takes about 20 MB, so it is imported only for balancing ranks.
    solver = importlib.import_module("gateway.policy.bfio.solver")
    reported = None if view is None else partial(held_tokens, view)
    return RankGroup(pool, solver.assign, observed=reported)


def _compression(model: ModelConfig) -> ModelCompression | None:
    if not model.compression.enabled:
        return None
    tokenizer = model.compression.tokenizer
    rules = CompressionRules(
        gamma=model.boundary.gamma,
        max_cut=model.compression.max_cut,
        tokenizer=None if tokenizer is None else str(tokenizer),
        when=model.compression.when,
        mark=model.compression.mark,
        only_when_busy=model.compression.only_when_busy,
    )
    return ModelCompression(rules=rules)


def by_name(config: Config, models: tuple[ModelRuntime, ...]) -> dict[str, ModelRuntime]:
    """Names and aliases -> model."""
    table = {}
    for model, served in zip(config.models, models, strict=True):
        for name in (model.name, *model.aliases):
            table[name] = served
    return table
