"""A model's configuration -> its run-time objects: routing, pools, workers, schedulers.

Part of the composition root. Without a `Former`, a call creates new state. With one it takes over
what is still valid of the model before a reload: the workers and their load, what was learned, and
schedulers with their queues. Pools keep theirs by name.
"""

from collections.abc import Sequence

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.profile import PROFILES
from gateway.fleet.engine_telemetry import TelemetryView
from gateway.fleet.fleet import PoolState
from gateway.fleet.lora_adapters import Adapters
from gateway.fleet.model_runtime import (
    ModelAdmission,
    ModelCompression,
    ModelFleet,
    ModelRuntime,
)
from gateway.fleet.slot_clock import SlotClock
from gateway.records.attempt import HealthRules, PhaseTimeouts, WorkerAddress
from gateway.records.entitlement import PROFILES as PROFILES_OF_ADMISSION
from gateway.records.entitlement import MeanRate
from gateway.routing.conversations import ResponseAffinity
from gateway.routing.routing_table import CompressionRules, PoolShape, Routing
from gateway.settings import Config, ModelConfig
from gateway.settings.model import PoolConfig, watch_of
from gateway.settings.token_pools import slot_tokens_per_s
from gateway.wiring.schedulers import Former, policies_of, predictors_of, scheduling_of


def served_model(
    config: Config,
    model: ModelConfig,
    before: Former | None = None,
    ready: ModelRuntime | None = None,
) -> ModelRuntime:
    """Build the model for the stages. Raises ArtifactError for a bad predictor file.

    What is taken over of `before` is not changed. New pools are those of `ready`, if that is given.
    """
    policies = policies_of(config, model)
    pools = _pools(model, before, ready)
    predictors = predictors_of(model, policies, pools, before)
    adapted = bool(model.loras) or model.discover_loras
    predicts = any(p is not None for p in predictors)
    reads = adapted or predicts or model.boundary.auto or "bfio" in policies
    views = tuple(
        (before and before.of(pool.name, before.served.fleet.telemetry))
        or TelemetryView(len(pool.workers))
        for pool in (pools if reads else ())
    )
    same_pools = before is not None and list(before.model.pools) == list(model.pools)
    return ModelRuntime(
        name=model.name,
        aliases=frozenset(model.aliases),
        adapters=_adapters(model, before),
        fallbacks=model.fallbacks,
        routing=_routing(model, before),
        estimator=_estimator(model, before),
        fleet=ModelFleet(
            pools=pools,
            workers=_workers(model, before),
            health=HealthRules(
                eject_after=config.health.eject_after,
                eject_s=config.health.eject_s,
                max_eject_s=config.health.max_eject_s,
                stall_s=config.health.stall_s,
            ),
            response_affinity=(
                before.served.fleet.response_affinity
                if before is not None and same_pools
                else ResponseAffinity()
            ),
            timeouts=_timeouts(config, model),
            max_attempts=config.retry.max_attempts,
            telemetry=views,
        ),
        admission=_admission(model, before),
        scheduling=scheduling_of(model, policies, pools, predictors, views, before),
        compression=_compression(model, before),
        watch=(
            before.served.watch
            if before is not None and same_lines(before, model)
            else watch_of(model)
        ),
        price=None if model.price is None else model.price.per_token(),
        by_hour=any(pool.slot_clock is not None for pool in pools),
    )


def same_lines(before: Former, model: ModelConfig) -> bool:
    """Whether the lines between pools are drawn and moved as before."""
    old = before.model
    return (
        old.boundary == model.boundary
        and old.compression.enabled == model.compression.enabled
        and old.observes_boundary == model.observes_boundary
        and [(n, p.max_model_len) for n, p in old.pools.items()]
        == [(n, p.max_model_len) for n, p in model.pools.items()]
    )


def _adapters(model: ModelConfig, before: Former | None) -> Adapters:
    found = Adapters(model.loras, discovers=model.discover_loras)
    if before is not None:
        names = list(model.pools)
        places = {at: names.index(n) for at, n in enumerate(before.model.pools) if n in names}
        found.follow(before.served.adapters.known(places))
    return found


def _workers(model: ModelConfig, before: Former | None) -> tuple[list[WorkerAddress], ...]:
    return tuple(
        list(pool.addresses) if known is None else known
        for name, pool in model.pools.items()
        for known in [None if before is None else before.of(name, before.served.fleet.workers)]
    )


def _pools(
    model: ModelConfig, before: Former | None, ready: ModelRuntime | None
) -> tuple[PoolState, ...]:
    made = {} if ready is None else {pool.name: pool for pool in ready.fleet.pools}
    return tuple(
        (before and before.of(name, before.served.fleet.pools))
        or made.get(name)
        or _pool(name, pool)
        for name, pool in model.pools.items()
    )


def _pool(name: str, pool: PoolConfig) -> PoolState:
    state = PoolState(
        name,
        [worker.id for worker in pool.addresses],
        pool.max_num_seqs,
        pool.engines,
        may_be_empty=pool.may_be_empty,
    )
    if pool.worker_hour is not None:
        state.slot_clock = SlotClock(pool.worker_hour)
    return state


def _estimator(model: ModelConfig, before: Former | None) -> LengthEstimator:
    settings = ("estimator", "output_is_cap", "output_prior_tokens", "media_tokens")
    if before is not None and all(
        getattr(before.model, name) == getattr(model, name) for name in settings
    ):
        return before.served.estimator
    return LengthEstimator(
        PROFILES[model.estimator],
        output_mode="cap" if model.output_is_cap else None,
        output_prior_tokens=model.output_prior_tokens,
        media_tokens=model.media_tokens,
    )


def _timeouts(config: Config, model: ModelConfig) -> PhaseTimeouts:
    timeouts = config.timeouts_for(model)
    return PhaseTimeouts(
        connect_s=timeouts.connect_s,
        first_byte_s=timeouts.first_byte_s,
        idle_s=timeouts.idle_s,
    )


def _admission(model: ModelConfig, before: Former | None) -> ModelAdmission:
    return ModelAdmission(
        spill_queue=model.spill_queue,
        profile=PROFILES_OF_ADMISSION[model.admission.profile],
        observe=model.observes_admission,
        slot_tokens_per_s=slot_tokens_per_s(model),
        held_share=model.admission.held_share,
        kv_bytes_per_token=model.kv_bytes_per_token or 0,
        reclaim_s=model.admission.reclaim_ms / 1000,
        rates=MeanRate() if before is None else before.served.admission.rates,
    )


def _routing(model: ModelConfig, before: Former | None) -> Routing:
    boundaries: tuple[int | None, ...] = (*model.boundaries, None)
    if model.boundary.auto and before is not None and same_lines(before, model):
        # Where they have moved to.
        boundaries = tuple(shape.boundary_tokens for shape in before.served.routing.pools)
    return Routing(
        pools=tuple(
            PoolShape(
                name=name,
                window_tokens=pool.max_model_len,
                boundary_tokens=boundary,
                tells_flow=pool.tells_flow,
            )
            for (name, pool), boundary in zip(model.pools.items(), boundaries, strict=True)
        ),
        default_max_tokens=model.default_max_tokens,
        observe=model.mode == "observe",
    )


def _compression(model: ModelConfig, before: Former | None) -> ModelCompression | None:
    if not model.compression.enabled:
        return None
    tokenizer = model.compression.tokenizer
    old = None if before is None else before.served.compression
    rules = CompressionRules(
        gamma=model.boundary.gamma,
        max_cut=model.compression.max_cut,
        tokenizer=None if tokenizer is None else str(tokenizer),
        when=model.compression.when,
        mark=model.compression.mark,
        only_when_busy=model.compression.only_when_busy,
    )
    if old is None:
        return ModelCompression(rules=rules)
    return ModelCompression(
        rules=rules, conversations=old.conversations, judged=old.judged, success=old.success
    )


def by_name(config: Config, models: Sequence[ModelRuntime]) -> dict[str, ModelRuntime]:
    """Names and aliases -> model."""
    table = {}
    for model, served in zip(config.models, models, strict=True):
        for name in (model.name, *model.aliases):
            table[name] = served
    return table
