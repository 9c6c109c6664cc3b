"""A model's configuration -> its run-time objects: routing, pools, workers, schedulers.

Part of the composition root. Each call creates new state.
"""

import importlib
from functools import partial

from gateway.policy.bfio.rank_group import RankGroup
from gateway.policy.entitlements.entitlement import PROFILES as PROFILES_OF_ADMISSION
from gateway.policy.estimate.estimator import LengthEstimator
from gateway.policy.estimate.profile import PROFILES
from gateway.policy.fleet.engine_telemetry import TelemetryView, held_tokens, kv_usage
from gateway.policy.fleet.fleet import PoolState
from gateway.policy.fleet.health_rules import HealthRules
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
from gateway.policy.schedulers import LOCAL, PREDICTING, make_scheduler
from gateway.policy.scheduling.scheduler import Scheduler
from gateway.records.attempt import PhaseTimeouts
from gateway.settings import Config, ModelConfig
from gateway.settings.fleet import watch_of
from gateway.settings.token_pools import slot_tokens_per_s
from predictor.artifact import load
from predictor.online import PrefillPredictor

_READING = PREDICTING | {"bfio"}
"""Policies that use the KV cache figures reported by engines."""


def served_model(config: Config, model: ModelConfig) -> ModelRuntime:
    """Build the model for the stages. Raises ArtifactError for a bad predictor file."""
    timeouts = config.timeouts_for(model)
    health = config.health
    pools = tuple(
        PoolState(name, tuple(w.id for w in pool.addresses), pool.max_num_seqs, pool.engines)
        for name, pool in model.pools.items()
    )
    views = tuple(TelemetryView(len(pool.workers)) for pool in pools) if _reads(model) else ()
    return ModelRuntime(
        name=model.name,
        aliases=frozenset(model.aliases),
        routing=_routing(model),
        estimator=LengthEstimator(
            PROFILES[model.estimator],
            output_mode="cap" if model.output_is_cap else None,
            output_prior_tokens=model.output_prior_tokens,
            media_tokens=model.media_tokens,
        ),
        fleet=ModelFleet(
            pools=pools,
            workers=tuple(pool.addresses for pool in model.pools.values()),
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
        scheduling=_scheduling(model, pools, views),
        compression=_compression(model),
        watch=watch_of(model),
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


def _reads(model: ModelConfig) -> bool:
    """Whether the model uses metrics reported by its engines."""
    return model.boundary.auto or (model.policy in _READING and model.mode != "observe")


def _predictors(model: ModelConfig, pools: tuple[PoolState, ...]) -> tuple[PrefillPredictor, ...]:
    rules = model.scheduling
    if model.policy not in PREDICTING or model.mode == "observe":
        return ()
    artifact = None if rules.predictor is None else load(rules.predictor)
    return tuple(PrefillPredictor(artifact, workers=len(p.workers)) for p in pools)


def _scheduling(
    model: ModelConfig, pools: tuple[PoolState, ...], views: tuple[TelemetryView, ...]
) -> ModelScheduling:
    predictors = _predictors(model, pools)
    schedulers, prefixes = _schedulers(model, pools, views, predictors)
    return ModelScheduling(
        schedulers=schedulers,
        queue=QueueRules(
            limit=model.scheduling.queue_limit, timeout_s=model.scheduling.queue_timeout_s
        ),
        predictors=predictors,
        prefixes=prefixes,
        prefix_gossip=tuple(PrefixGossip() for _ in prefixes),
        salted=model.cache_salt,
        engine_priority=model.engine_priority,
    )


def _schedulers(
    model: ModelConfig,
    pools: tuple[PoolState, ...],
    views: tuple[TelemetryView, ...],
    predictors: tuple[PrefillPredictor, ...],
) -> tuple[tuple[Scheduler | None, ...], tuple[PrefixIndex, ...]]:
    """Schedulers and prefix indices by pool; both empty if requests bind at once."""
    rules = model.scheduling
    if model.policy == "least-loaded" or model.mode == "observe":
        return (), ()
    if model.policy == "bfio":
        return tuple(_rank_group(*pair) for pair in zip(pools, views, strict=True)), ()
    schedulers = tuple(
        make_scheduler(
            model.policy,
            pool,
            predictor=predictors[index] if predictors else None,
            kv_usage=partial(kv_usage, views[index]) if views else None,
        )
        for index, pool in enumerate(pools)
    )
    if model.policy not in LOCAL:
        return schedulers, ()
    return schedulers, tuple(
        PrefixIndex(len(pool.workers), max_entries=max(rules.prefix_entries, MIN_ENTRIES))
        for pool in pools
    )


def _rank_group(pool: PoolState, view: TelemetryView) -> Scheduler | None:
    if len(pool.engines) == len(pool.workers):
        return None  # no engine has several ranks
    # numpy takes about 20 MB, so it is imported only for balancing ranks.
    solver = importlib.import_module("gateway.policy.bfio.solver")
    return RankGroup(pool, solver.assign, observed=partial(held_tokens, view))


def _compression(model: ModelConfig) -> ModelCompression | None:
    if not model.compression.enabled:
        return None
    tokenizer = model.compression.tokenizer
    rules = CompressionRules(
        gamma=model.boundary.gamma,
        max_cut=model.compression.max_cut,
        tokenizer=None if tokenizer is None else str(tokenizer),
    )
    return ModelCompression(rules=rules)


def by_name(config: Config, models: tuple[ModelRuntime, ...]) -> dict[str, ModelRuntime]:
    """Names and aliases -> model."""
    table = {}
    for model, served in zip(config.models, models, strict=True):
        for name in (model.name, *model.aliases):
            table[name] = served
    return table
