"""A model's configuration -> its run-time objects: routing, pools, workers, schedulers.

Part of the composition root. Each part is made from some lines of the configuration. A reload
builds the model anew and takes over the parts that are made from the same: workers and their load,
what was learned, schedulers with their queues. Pools keep theirs by name.
"""

import importlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from gateway.estimate.estimator import PROFILES, LengthEstimator
from gateway.fleet.engine_telemetry import TelemetryView, held_tokens, kv_usage
from gateway.fleet.fleet import PoolState, SlotClock
from gateway.fleet.lora_adapters import Adapters
from gateway.fleet.model_runtime import (
    ModelAdmission,
    ModelCompression,
    ModelFleet,
    ModelRuntime,
    ModelScheduling,
    QueueRules,
)
from gateway.records.attempt import HealthRules, PhaseTimeouts, WorkerAddress
from gateway.records.entitlement import PROFILES as PROFILES_OF_ADMISSION
from gateway.records.entitlement import MeanRate
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.conversations import ResponseAffinity
from gateway.routing.routing import CompressionRules, PoolShape, Routing
from gateway.routing.split_alias import SplitAlias
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import MIN_ENTRIES, PrefixIndex
from gateway.scheduling.rank_group import RankGroup
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.schedulers import LOCAL, PREDICTING, SHADOWED, make_scheduler
from gateway.settings import Config, ModelConfig
from gateway.settings.model import PoolConfig, watch_of
from gateway.settings.token_pools import slot_tokens_per_s
from predictor.artifact import load
from predictor.online import PrefillPredictor

_log = logging.getLogger("sluice")
_T = TypeVar("_T")
_Key = tuple[Hashable, ...]


class _Parts:
    """Parts of a model by what they are made from; those of its generation before stay in use."""

    def __init__(self, before: Mapping[_Key, Any]) -> None:
        self._before = before
        self.made: dict[_Key, Any] = {}

    def of(self, make: Callable[[], _T], *made_from: Hashable) -> _T:
        """The part that was made from the same, or a new one."""
        found: _T | None = self._before.get(made_from)
        self.made[made_from] = part = make() if found is None else found
        return part


def served_model(
    config: Config,
    model: ModelConfig,
    before: ModelRuntime | None = None,
    ready: ModelRuntime | None = None,
) -> ModelRuntime:
    """Build the model for the stages. Raises ArtifactError for a bad predictor file.

    What is taken over of `before` is not changed. New pools are those of `ready`, if that is given.
    """
    known = {} if ready is None else {k: p for k, p in ready.parts.items() if k[0] == "pool"}
    parts = _Parts(known if before is None else {**known, **before.parts})
    held = [
        parts.of(partial(_pool, name, pool), "pool", name) for name, pool in model.pools.items()
    ]
    pools = tuple(state for state, _ in held)
    policies = ("least-loaded",) * len(pools)  # a plain relay's, where the model only observes
    if model.mode != "observe":
        policies = model.policies(config.server.workers)
    predictors = _predictors(model, policies, pools, parts)
    adapted = bool(model.loras) or model.discover_loras
    reads = (
        adapted
        or any(p is not None for p in predictors)
        or model.boundary.auto
        or "bfio" in policies
    )
    views = tuple(
        parts.of(partial(TelemetryView, len(pool.workers)), "view", pool.name)
        for pool in (pools if reads else ())
    )
    watch = parts.of(partial(watch_of, model), "watch", *_lines(model))
    timeouts = config.timeouts_for(model)
    return ModelRuntime(
        name=model.name,
        aliases=frozenset(model.aliases),
        adapters=parts.of(
            partial(Adapters, model.loras, discovers=model.discover_loras), "adapters"
        ),
        fallbacks=model.fallbacks,
        routing=_routing(model, watch, before),
        estimator=parts.of(
            partial(
                LengthEstimator,
                PROFILES[model.estimator],
                output_mode="cap" if model.output_is_cap else None,
                output_prior_tokens=model.output_prior_tokens,
                media_tokens=model.media_tokens,
            ),
            *("estimator", model.estimator, model.output_is_cap),
            *(model.output_prior_tokens, model.media_tokens),
        ),
        fleet=ModelFleet(
            pools=pools,
            workers=tuple(addresses for _, addresses in held),
            health=HealthRules(
                eject_after=config.health.eject_after,
                eject_s=config.health.eject_s,
                max_eject_s=config.health.max_eject_s,
                stall_s=config.health.stall_s,
            ),
            response_affinity=parts.of(ResponseAffinity, "responses"),
            timeouts=PhaseTimeouts(
                connect_s=timeouts.connect_s,
                first_byte_s=timeouts.first_byte_s,
                idle_s=timeouts.idle_s,
            ),
            max_attempts=config.retry.max_attempts,
            telemetry=views,
        ),
        admission=ModelAdmission(
            spill_queue=model.spill_queue,
            profile=PROFILES_OF_ADMISSION[model.admission.profile],
            observe=model.observes_admission,
            slot_tokens_per_s=slot_tokens_per_s(model),
            held_share=model.admission.held_share,
            kv_bytes_per_token=model.kv_bytes_per_token or 0,
            reclaim_s=model.admission.reclaim_ms / 1000,
            rates=parts.of(MeanRate, "rates"),
        ),
        scheduling=_scheduling(model, policies, pools, predictors, views, parts),
        compression=_compression(model, None if before is None else before.compression),
        watch=watch,
        price=None if model.price is None else model.price.per_token(),
        by_hour=any(pool.slot_clock is not None for pool in pools),
        parts=parts.made,
    )


def _lines(model: ModelConfig) -> tuple[Hashable, ...]:
    """What says how the lines between pools are drawn and moved."""
    windows = tuple((name, pool.max_model_len) for name, pool in model.pools.items())
    drawn = model.boundary.model_dump_json()
    return (drawn, model.compression.enabled, model.observes_boundary, windows)


def _pool(name: str, pool: PoolConfig) -> tuple[PoolState, list[WorkerAddress]]:
    state = PoolState(
        name,
        [worker.id for worker in pool.addresses],
        pool.max_num_seqs,
        pool.engines,
        may_be_empty=pool.may_be_empty,
    )
    if pool.worker_hour is not None:
        state.slot_clock = SlotClock(pool.worker_hour)
    return state, list(pool.addresses)


def _routing(
    model: ModelConfig, watch: BoundaryWatch | None, before: ModelRuntime | None
) -> Routing:
    boundaries: tuple[int | None, ...] = (*model.boundaries, None)
    if model.boundary.auto and before is not None and before.watch is watch:
        # Where they have moved to.
        boundaries = tuple(shape.boundary_tokens for shape in before.routing.pools)
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


def _compression(model: ModelConfig, before: ModelCompression | None) -> ModelCompression | None:
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
    if before is None:
        return ModelCompression(rules=rules)
    return replace(before, rules=rules)


def _predictors(
    model: ModelConfig, policies: Sequence[str], pools: Sequence[PoolState], parts: _Parts
) -> tuple[PrefillPredictor | None, ...]:
    """By pool; None where neither its scheduler predicts nor a shadow, which knows no ranks."""
    path, shadow = model.scheduling.predictor, model.scheduling.shadow
    artifact = cache(load)

    def made(pool: PoolState) -> PrefillPredictor:
        section = None if path is None else artifact(path).section(model.name, pool.name)
        if path is not None and section is None:
            _log.warning(
                "model %s, pool %s: %s has no section for it; predictions start untrained",
                model.name,
                pool.name,
                path,
            )
        return PrefillPredictor(section, workers=len(pool.workers), slots=pool.slots_per_worker)

    return tuple(
        parts.of(partial(made, pool), "predictor", pool.name, path)
        if policy in PREDICTING or (shadow and policy in SHADOWED and not asked.ranked)
        else None
        for policy, pool, asked in zip(policies, pools, model.pools.values(), strict=True)
    )


def _scheduling(
    model: ModelConfig,
    policies: tuple[str, ...],
    pools: tuple[PoolState, ...],
    predictors: tuple[PrefillPredictor | None, ...],
    views: tuple[TelemetryView, ...],
    parts: _Parts,
) -> ModelScheduling:
    """Schedulers, queues and what they learn."""
    rules = model.scheduling
    entries = max(rules.prefix_entries, MIN_ENTRIES)
    # What each worker was sent, and what other replicas are told of it.
    prefixes = [
        parts.of(partial(_prefixes, pool, entries), "prefixes", pool.name, entries)
        if policy in LOCAL or predictor is not None
        else (None, None)
        for policy, predictor, pool in zip(policies, predictors, pools, strict=True)
    ]
    schedulers: list[Scheduler] = []
    for i, (policy, pool) in enumerate(zip(policies, pools, strict=True)):
        predictor, view = predictors[i], views[i] if views else None
        make = partial(_scheduler, policy, pool, predictor, view)
        # The one before stays, with its queue, where it would be made alike.
        key = ("scheduler", pool.name, policy, id(predictor), id(view))
        schedulers.append(parts.of(make, *key))
    indexed = any(index is not None for index, _ in prefixes)
    return ModelScheduling(
        schedulers=tuple(schedulers),
        queue=QueueRules(limit=rules.queue_limit, timeout_s=rules.queue_timeout_s),
        queued=parts.of(dict, "queued"),
        waiting_for_workers=parts.of(dict, "waiting"),
        predictors=predictors,
        prefixes=tuple(index for index, _ in prefixes) if indexed else (),
        follows_prefixes=tuple(policy in LOCAL for policy in policies),
        prefix_gossip=tuple(gossip for _, gossip in prefixes) if indexed else (),
        salted=model.cache_salt,
        engine_priority=model.engine_priority,
    )


def _prefixes(pool: PoolState, entries: int) -> tuple[PrefixIndex, PrefixGossip]:
    index = PrefixIndex(len(pool.workers), max_entries=entries)
    for place, present in enumerate(pool.present):
        if not present:
            index.left(place)
    return index, PrefixGossip()


def _scheduler(
    policy: str, pool: PoolState, predictor: PrefillPredictor | None, view: TelemetryView | None
) -> Scheduler:
    if policy == "bfio":
        # numpy takes about 20 MB, so it is imported only for balancing ranks.
        solver = importlib.import_module("gateway.scheduling.rank_solver")
        observed = None if view is None else partial(held_tokens, pool, view)
        return RankGroup(pool, solver.assign, observed=observed)
    reported = None if view is None else partial(kv_usage, view)
    shadow = predictor is not None
    return make_scheduler(policy, pool, predictor=predictor, kv_usage=reported, shadow=shadow)


class Served:
    """The models by all their names, as requests and routes look them up; changed in place."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime]) -> None:
        self.models = list(models)
        self.retiring: list[ModelRuntime] = []
        """Those that are gone, or have pools that are, while requests of theirs may run."""
        self.by_name: dict[str, ModelRuntime] = {}
        """Names and aliases -> model."""
        self.names: dict[str, str] = {}
        """Name or alias -> model, without patterns of names."""
        self.splits: dict[str, SplitAlias] = {}
        self.shares: dict[str, tuple[str, ...]] = {}
        """Split alias -> its models."""
        self.name(config)

    def name(self, config: Config) -> None:
        """Use a configuration's names of the models."""
        for table in (self.by_name, self.names, self.splits, self.shares):
            table.clear()
        for model, served in zip(config.models, self.models, strict=True):
            names = (model.name, *model.aliases)
            self.by_name.update(dict.fromkeys(names, served))
            self.names.update((name, model.name) for name in names if "*" not in name)
        for alias in config.aliases:
            self.splits[alias.name] = SplitAlias(alias.name, alias.split)
            self.shares[alias.name] = tuple(alias.split)
