"""A model, served by one or more pools; a name that stands for several models."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.routing.boundary_control import BoundaryBounds, BoundaryControl
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.settings.model_parts import (
    AdmissionConfig,
    BoundaryConfig,
    CompressionConfig,
    PolicyName,
    SchedulingConfig,
    TimeoutOverrides,
)
from gateway.settings.pool import Pool, PoolConfig
from gateway.settings.prices import TokenPrices
from gateway.settings.types import Count, Flag, Label, ModelName, Natural, Section, Weight


def _by_window(pools: Mapping[str, PoolConfig]) -> Mapping[str, PoolConfig]:
    return dict(sorted(pools.items(), key=lambda item: item[1].max_model_len))


class ModelConfig(Section):
    """One model, served by one or more pools."""

    name: ModelName
    """Name that clients send."""
    aliases: tuple[ModelName, ...] = ()
    """Other names for it, and patterns of names: `claude-*`, or `*` for every name. A name goes
    before a pattern, a longer pattern before a shorter one."""
    loras: Annotated[tuple[ModelName, ...], Field(max_length=1000)] = ()
    """LoRA adapters that its engines load: further names, served by those workers that list
    them in /v1/models. They share the model's slots; keys with `models` open them by name."""
    discover_loras: Flag = False
    """Serve each LoRA adapter that engines list, named in `loras` or not, while one lists it."""
    fallbacks: Annotated[tuple[ModelName, ...], Field(max_length=8)] = ()
    """Models that answer instead, tried in order, while this one has no worker ready, its queue
    times out, it is full of higher priority, or its engines fail before the first byte."""
    kv_bytes_per_token: Count | None = None
    """KV cache bytes per token: 2 x layers x KV heads x head size x bytes per value."""
    mode: Literal["enforce", "observe"] = "enforce"
    """observe: decisions are computed, logged and counted, never applied."""
    output_estimate: Literal["predicted", "cap"] = "predicted"
    """Output length that the boundary assumes: an online quantile, or the client's own cap."""
    boundary: BoundaryConfig = BoundaryConfig()
    """The line between pools."""
    compression: CompressionConfig = CompressionConfig()
    """Prompt compression at the boundary."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """The choice of worker."""
    admission: AdmissionConfig = AdmissionConfig()
    """Admission when the model's pools are full."""
    engine_priority: Literal["none", "vllm", "sglang"] = "none"
    """Send the entitlement's class to the engines as `priority`, in this engine's numbering.
    Engines obey it only with priority scheduling on: vLLM's --scheduling-policy priority,
    SGLang's --enable-priority-scheduling."""
    pools: Annotated[
        Mapping[Label, Pool],
        Field(min_length=1, max_length=64),
        AfterValidator(_by_window),
    ]
    """Name -> pool; one or more. Pools are ordered by window, whatever their order in the file."""
    cache_salt: Flag = False
    """Separate tenants' prefix caches: engines get a `cache_salt` per tenant (vLLM)."""
    default_max_tokens: Count | None = None
    """Output limit sent upstream if the client sets none, cut to what fits; absent: none."""
    spill_queue: Natural = 0
    """Requests that a pool may queue beyond its ready slots before further ones spill over."""
    media_tokens: Natural = 768
    """Tokens assumed for an image or audio part until reported usage corrects it."""
    output_prior_tokens: Count = 1024
    """Expected output tokens before any answer was seen."""
    estimator: Literal["default", "paper"] = "default"
    """Profile of the length estimator; paper always uses the client's cap as the output."""
    timeouts: TimeoutOverrides = TimeoutOverrides()
    """This model's own time-outs."""
    price: TokenPrices | None = None
    """List price of its tokens, in the gateway's `currency`; absent: its usage has no cost."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """One boundary per pool but the last, in tokens, with defaults applied."""
        windows = tuple(pool.max_model_len for pool in self.pools.values())[:-1]
        given = self.boundary.b_short
        return windows if given is None else given[: len(windows)]

    @property
    def least_boundaries(self) -> tuple[int, ...]:
        """Lower limit of each boundary, in tokens, with defaults applied."""
        given = self.boundary.b_short_min
        return tuple(max(1, b // 2) for b in self.boundaries) if given is None else given

    def policies(self, replicas: int = 1) -> tuple[PolicyName, ...]:
        """Scheduling policy of each pool, with defaults applied.

        Ranks are balanced by one replica only, so with several, bfio is no pool's default.
        """
        return tuple(
            pool.scheduling.policy or self.scheduling.policy or _policy_for(pool, replicas)
            for pool in self.pools.values()
        )

    @property
    def predicts(self) -> bool:
        """Whether quartz serves any pool, or predicts in another policy's shadow."""
        if self.mode == "enforce" and "quartz" in self.policies():
            return True
        return self.scheduling.shadow and not all(pool.ranked for pool in self.pools.values())

    @property
    def observes_boundary(self) -> bool:
        """Whether moves of the boundaries are only computed and counted."""
        return "observe" in (self.mode, self.boundary.mode)

    @property
    def observes_admission(self) -> bool:
        """Whether refusals of admission are only computed and counted."""
        return (self.admission.mode or self.mode) == "observe"

    @property
    def output_is_cap(self) -> bool:
        """Whether the client's cap is the output estimate, by `output_estimate` or `estimator`."""
        return self.output_estimate == "cap" or self.estimator == "paper"

    @property
    def slots(self) -> int:
        """Sequences that all its pools run at once."""
        return sum(pool.slots for pool in self.pools.values())


class SplitAliasConfig(Section):
    """A name that stands for several models, by weight."""

    name: ModelName
    """Name that clients send."""
    split: Annotated[Mapping[ModelName, Weight], Field(min_length=1, max_length=64)]
    """Model -> its weight. A conversation, or a user, stays with its model."""


def _policy_for(pool: PoolConfig, replicas: int) -> PolicyName:
    if not pool.ranked:
        return "quartz"
    balanced = replicas == 1 and all(worker.ranks > 1 for worker in pool.workers)
    return "bfio" if balanced else "least-loaded"


def watch_of(model: ModelConfig) -> BoundaryWatch | None:
    """Watches errors and length drift at a model's boundaries; None if neither is in use."""
    asked = model.boundary
    if not asked.auto and asked.planned is None:
        return None
    return BoundaryWatch(len(model.pools), asked.planned or (), control_of(model))


def control_of(model: ModelConfig) -> BoundaryControl | None:
    """Moves a model's boundaries; None if they are fixed."""
    if not model.boundary.auto:
        return None
    rows = zip(model.pools.items(), model.boundaries, model.least_boundaries, strict=False)
    return BoundaryControl(
        [
            BoundaryBounds(pool=name, start=start, least=least, most=pool.max_model_len)
            for (name, pool), start, least in rows
        ],
        observe=model.observes_boundary,
    )
