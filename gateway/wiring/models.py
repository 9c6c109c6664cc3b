"""A model's configuration -> its run-time objects: routing, pools, workers, schedulers.

Part of the composition root. Each part is made from some lines of the configuration. A reload
builds the model anew and takes over the parts that are made from the same: workers and their load,
what was learned, schedulers with their queues. Pools keep theirs by name.
"""

import importlib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from gateway.estimate.estimator import PROFILES, LengthEstimator
from gateway.estimate.live_demand import LiveDemand
from gateway.fleet.engine_metrics import kv_usage
from gateway.fleet.fleet import SlotClock, held_tokens
from gateway.fleet.lora_adapters import Adapters
from gateway.fleet.model_runtime import (
    ModelAdmission,
    ModelCompression,
    ModelFleet,
    ModelRuntime,
    ModelScheduling,
    Phases,
    Pool,
)
from gateway.records.attempt import HealthRules, PhaseTimeouts
from gateway.records.entitlement import PROFILES as PROFILES_OF_ADMISSION
from gateway.records.entitlement import MeanRate
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.routing import CompressionRules, PoolShape, ResponseAffinity, Routing
from gateway.routing.split_alias import SplitAlias
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import MIN_ENTRIES, PrefixIndex
from gateway.scheduling.rank_group import RankGroup
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.schedulers import LOCAL, PREDICTING, SHADOWED, make_scheduler
from gateway.settings import Config, ModelConfig
from gateway.settings.model import EnginesConfig, watch_of
from gateway.settings.token_pools import prefill_places, slot_tokens_per_s
from predictor.artifact import Artifact, load
from predictor.online import PrefillPredictor

_log = logging.getLogger("sluice")
_T = TypeVar("_T")
_Key = tuple[Hashable, ...]


class _Parts:
    """Parts of a model or pool by what they are made from; those of before stay in use."""

    def __init__(self, before: Mapping[_Key, Any]) -> None:
        self._before = before
        self.made: dict[_Key, Any] = {}

    def of(self, make: Callable[[], _T], *made_from: Hashable) -> _T:
        """The part that was made from the same, or a new one."""
        before: _T | None = self._before.get(made_from)
        self.made[made_from] = part = make() if before is None else before
        return part


def served_model(config: Config, model: ModelConfig) -> ModelRuntime:
    """Build the model for the stages. Raises ArtifactError for a bad predictor file."""
    served = next_model(config, model, None)
    equip(equipment(config, model, served, artifact_of(model)))
    return served


def artifact_of(model: ModelConfig) -> Artifact | None:
    """The model's trained predictors, if it has a file of them. Raises ArtifactError."""
    path = model.scheduling.predictor
    return None if path is None else load(path)


def next_model(config: Config, model: ModelConfig, before: ModelRuntime | None) -> ModelRuntime:
    """Build the model, of which `before` has parts already; `equip` its pools before it serves.

    What is taken over of `before` is not changed.
    """
    parts = _Parts({} if before is None else before.parts)
    pools = tuple(
        parts.of(partial(_pool, name, pool), "pool", name) for name, pool in model.all_pools.items()
    )
    policies = _policies(config, model)
    predicted = any(_predicts(model, policy, pool) for policy, pool in policies)
    rules, timeouts, watch = model.scheduling, config.timeouts_for(model), _watch(model, parts)
    return ModelRuntime(
        name=model.name,
        aliases=frozenset(model.aliases),
        adapters=parts.of(
            partial(Adapters, model.loras, discovers=model.discover_loras), "adapters"
        ),
        fallbacks=model.fallbacks,
        routing=_routing(model),
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
            phases=_phases(model),
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
            reads_metrics=predicted
            or bool(model.loras)
            or model.discover_loras
            or model.boundary.auto
            or any(policy == "bfio" for policy, _ in policies),
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
        scheduling=ModelScheduling(
            queue_limit=rules.queue_limit,
            queue_timeout_s=rules.queue_timeout_s,
            waiting_for_workers=parts.of(dict, "waiting"),
            indexed=predicted or any(policy in LOCAL for policy, _ in policies),
            salted=model.cache_salt,
            engine_priority=model.engine_priority,
        ),
        compression=_compression(model, None if before is None else before.compression),
        demand=parts.of(LiveDemand, "demand"),
        watch=watch,
        price=None if model.price is None else model.price.per_token(),
        by_hour=any(pool.slot_clock is not None for pool in pools),
        parts=parts.made,
    )


def equipment(
    config: Config, model: ModelConfig, served: ModelRuntime, artifact: Artifact | None
) -> list[tuple[Pool, dict[str, object]]]:
    """The schedulers of the model's pools, and what these learn, by the pools' attributes.

    A scheduler with its queue, a predictor and an index stay where they would be made alike.
    Nothing is in force before `equip`.
    """
    rules = model.scheduling
    entries = max(rules.prefix_entries, MIN_ENTRIES)
    equipped = []
    prefill = {
        served.fleet.pools[place].name: served.fleet.pools[phases.prefill]
        for place, phases in served.fleet.phases.items()
    }
    for pool, (policy, asked) in zip(served.fleet.pools, _policies(config, model), strict=True):
        predicts = _predicts(model, policy, asked)
        parts = _Parts(pool.parts)
        slots, pool.slots_per_worker = pool.slots_per_worker, asked.max_num_seqs
        try:  # with the slots that its parts will see
            predictor, prefixes, gossip = None, None, pool.gossip
            if predicts:
                trained = partial(_predictor, model, pool, artifact)
                predictor = parts.of(trained, "predictor", rules.predictor)
            if predicts or policy in LOCAL:
                indexed = partial(_prefixes, pool, entries)
                prefixes, gossip = parts.of(indexed, "prefixes", entries)
            scheduled = partial(_scheduler, policy, pool, predictor)
            scheduler = parts.of(scheduled, "scheduler", policy, id(predictor))
        finally:
            pool.slots_per_worker = slots
        attributes: dict[str, object] = {
            "slots_per_worker": asked.max_num_seqs,
            "may_be_empty": asked.may_be_empty,
            "predictor": predictor,
            "prefixes": prefixes,
            "gossip": gossip,
            "follows_prefixes": policy in LOCAL,
            "scheduler": scheduler,
            "prefill": prefill.get(pool.name),
            "parts": parts.made,
        }
        equipped.append((pool, attributes))
    return equipped


def equip(equipped: Iterable[tuple[Pool, Mapping[str, object]]]) -> None:
    """Give pools their `equipment`."""
    for pool, attributes in equipped:
        for name, part in attributes.items():
            setattr(pool, name, part)


def _phases(model: ModelConfig) -> dict[int, Phases]:
    """Those of the pools in phases, by place."""
    pools = list(model.pools.values())
    return {
        place: Phases(prefill=prefill, **dict(pools[place].transfer or {}))
        for place, prefill in prefill_places(model).items()
    }


def _policies(config: Config, model: ModelConfig) -> list[tuple[str, EnginesConfig]]:
    """The policy of each pool: a plain relay's, where the model only observes."""
    observed = ("least-loaded",) * len(model.all_pools)
    policies = observed if model.mode == "observe" else model.policies(config.server.workers)
    return list(zip(policies, model.all_pools.values(), strict=True))


def _predicts(model: ModelConfig, policy: str, pool: EnginesConfig) -> bool:
    """Whether a pool's scheduler predicts, or a shadow, which knows no ranks nor decodes alone."""
    shadowed = model.scheduling.shadow and policy in SHADOWED
    return policy in PREDICTING or (shadowed and not pool.ranked and not pool.only_decodes)


def _watch(model: ModelConfig, parts: _Parts) -> BoundaryWatch | None:
    """What is watched of the lines between pools, by what says how they are drawn and moved."""
    windows = tuple((name, pool.max_model_len) for name, pool in model.pools.items())
    drawn = model.boundary.model_dump_json()
    lines = (drawn, model.compression.enabled, model.observes_boundary, windows)
    return parts.of(partial(watch_of, model), "watch", *lines)


def _pool(name: str, pool: EnginesConfig) -> Pool:
    made = Pool(
        name, pool.addresses, pool.max_num_seqs, pool.engines, may_be_empty=pool.may_be_empty
    )
    if pool.worker_hour is not None:
        made.slot_clock = SlotClock(pool.worker_hour)
    return made


def _routing(model: ModelConfig) -> Routing:
    boundaries = (*model.boundaries, None)
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


def _predictor(model: ModelConfig, pool: Pool, artifact: Artifact | None) -> PrefillPredictor:
    section = None if artifact is None else artifact.section(model.name, pool.name)
    if artifact is not None and section is None:
        _log.warning(
            "model %s, pool %s: %s has no section for it; predictions start untrained",
            model.name,
            pool.name,
            model.scheduling.predictor,
        )
    return PrefillPredictor(section, workers=len(pool.workers), slots=pool.slots_per_worker)


def _prefixes(pool: Pool, entries: int) -> tuple[PrefixIndex, PrefixGossip]:
    index = PrefixIndex(len(pool.workers), max_entries=entries)
    for place, present in enumerate(pool.present):
        if not present:
            index.left(place)
    return index, PrefixGossip()


def _scheduler(policy: str, pool: Pool, predictor: PrefillPredictor | None) -> Scheduler:
    if policy == "bfio":
        # numpy takes about 20 MB, so it is imported only for balancing ranks.
        solver = importlib.import_module("gateway.scheduling.rank_solver")
        return RankGroup(pool, solver.assign, observed=partial(held_tokens, pool))
    reported, shadow = partial(kv_usage, pool.view), predictor is not None
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
