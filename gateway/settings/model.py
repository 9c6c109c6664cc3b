"""A model and its parts, its pools, and a name that stands for several models."""

from collections.abc import Mapping
from itertools import accumulate, starmap
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from gateway.fleet.model_runtime import TransferKind
from gateway.records.attempt import WorkerAddress
from gateway.routing.boundary_control import BoundaryBounds, BoundaryControl
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.settings.server import EngineTlsConfig
from gateway.settings.source import KeyPath
from gateway.settings.tenants import Price, PriceConfig
from gateway.settings.types import (
    Amount,
    Count,
    Drain,
    Factor,
    Flag,
    Gib,
    Label,
    Milliseconds,
    ModelName,
    Natural,
    Port,
    Seconds,
    Section,
    Share,
    Weight,
)
from gateway.settings.worker import Worker, WorkerConfig

Bounds = Annotated[
    tuple[Count, ...],
    BeforeValidator(
        lambda value: value if isinstance(value, list | tuple) or value is None else [value],
        json_schema_input_type=Count | list[Count],
    ),
]


class BoundaryConfig(Section):
    """The token boundary between pools; `sluice plan -o` writes it."""

    b_short: Bounds | None = None
    """Largest expected total (tokens) for the smaller pool; an ascending list for more than two
    pools. Default: each smaller pool's window."""
    gamma: Factor = 1.5
    """Compression window: requests up to gamma x boundary may be compressed (1: none)."""
    auto: Flag = False
    """Let errors, and one pool that queues while the other idles, move the boundaries."""
    mode: Literal["enforce", "observe"] | None = None
    """observe: moves are computed, logged and counted, not applied; default: the model's mode."""
    b_short_min: Bounds | None = None
    """Lower limit of each moving boundary (tokens), in the form of `b_short`. Default: half of
    each boundary. The upper limit is the pool's window."""
    planned: (
        Annotated[tuple[tuple[Count, Share], ...], Field(min_length=1, max_length=256)] | None
    ) = None
    """Length distribution the fleet was planned for: [tokens, share of requests up to that],
    ascending. `sluice_length_drift` shows how far live lengths differ."""


class CompressionConfig(Section):
    """Prompt compression at the boundary."""

    enabled: Flag = False
    """Compress prompts in the compression window (see `boundary.gamma`)."""
    when: Literal["asked", "any", "header"] = "asked"
    """asked: only a question over retrieved passages. any: other tasks as well, which may lose
    what they need. header: any task of requests with `x-sluice-compress: on`."""
    only_when_busy: Flag = True
    """Compress only while the larger pool has no free slot."""
    mark: Flag = True
    """Put `[...]` where text was cut."""
    max_cut: Share = 0.5
    """The largest share of a prompt that may be cut."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, to count compressed prompts exactly (extra `exact`)."""


PolicyName = Literal["quartz", "sticky", "least-loaded", "round-robin", "bfio"]


class SchedulingConfig(Section):
    """The choice of a worker within a pool."""

    policy: PolicyName | None = None
    """quartz: by predicted prefill, prefix locality and fairness, with a queue in the gateway.
    bfio: for data-parallel ranks behind one barrier. The others bind at once. Default, by pool:
    bfio if all its engines have ranks (least-loaded if some have, or with several replicas), else
    quartz."""
    predictor: Path | None = None
    """Prefill time predictor written by `sluice train`; absent: learned from live traffic."""
    shadow: Flag = True
    """Predict prefills beside a policy other than quartz, log what quartz would have done, and
    learn. Costs some 22 us of CPU a request, a quarter of a least-loaded one's, and the memory of
    `prefix_entries`."""
    queue_limit: Count = 1000
    """Requests that may wait for a pool's workers; further ones are refused with 429."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait of one request in that queue."""
    prefix_entries: Count = 350_000  # beyond 361,000 the hash table doubles
    """Prefixes remembered for each pool, about 120 bytes each."""


class PoolSchedulingConfig(Section):
    """The choice of a worker within this pool, where it differs from the model's."""

    policy: PolicyName | None = None
    """These engines' own policy. Default: the model's; in phases quartz for prefill, and for decode
    bfio if all its engines have ranks (and there is one replica), else least-loaded."""


class AdmissionConfig(Section):
    """Admission when a model's pools are full."""

    mode: Literal["enforce", "observe"] | None = None
    """observe: admission's refusals are computed and counted, not applied; default: the model's
    mode."""
    profile: Literal["default", "paper"] = "default"
    """Coefficients of weight, debt and charge; paper uses the published ones."""
    headroom: Natural = 1
    """Slots of a pool that spot, preemptible and above-baseline traffic leave free."""
    mean_slo_ms: Milliseconds | None = None
    """The average SLO that weights compare with; default: the mean over entitlements."""
    held_share: Share = 0.5
    """Share of a pool's slots that other proxies' leases may hold beyond reserved baselines."""
    reclaim: Literal["preemptible", "cancel"] = "preemptible"
    """Running requests that give way to waiting protected ones: those of preemptible; with cancel
    also those of spot."""
    reclaim_ms: Count = 500
    """How long a protected request waits before other requests give way."""


class TimeoutsConfig(Section):
    """Time limits for each phase of an exchange with an engine, in seconds."""

    connect_s: Seconds = 2.0
    """To open a connection."""
    first_byte_s: Seconds = 600.0
    """From the request to the response head; includes queueing and prefill."""
    idle_s: Seconds = 120.0
    """Between two chunks of a response. An engine whose own token counters move may be silent up to
    `first_byte_s`."""


class TimeoutOverrides(Section):
    """A model's own time-outs; absent ones come from the top level."""

    connect_s: Seconds | None = None
    """To open a connection."""
    first_byte_s: Seconds | None = None
    """From the request to the response head."""
    idle_s: Seconds | None = None
    """Between two chunks of a response."""


DISCOVERED: Final = 64
"""Most discovered workers of a pool that reservations may count on, unless `replicas.max` says."""


class ReplicasConfig(Section):
    """How many workers a pool may have. The gateway itself starts and stops none."""

    min: Natural | None = None
    """Fewest workers; default: the number of listed workers, 0 if workers are discovered."""
    max: Count | None = None
    """Most workers; default: the number of listed workers, 64 more if workers are discovered.
    Reservations must fit this number."""
    cooldown_s: Drain = 300.0
    """Seconds of less demand after which `sluice_pool_desired_replicas` falls."""


class EnginesConfig(Section):
    """Engines that serve alike."""

    max_num_seqs: Count
    """The engines' --max-num-seqs: slots per worker (per rank, if engines have ranks)."""
    workers: Annotated[
        tuple[Worker, ...],
        Field(min_length=1, max_length=10_000),
        BeforeValidator(
            lambda v: (v,) if isinstance(v, str) else v,
            json_schema_input_type=str | tuple[str | WorkerConfig, ...],
        ),
    ]
    """URLs, or mappings for workers that need a key, a served name or a CA. A URL such as
    dns://host:port or k8s://service/NAME.NAMESPACE:port finds engines at run time."""
    tokens_per_second: Amount | None = None
    """Input and output tokens per second of one worker; absent: as many as its slots make."""
    kv_cache_gib: Gib | None = None
    """KV cache of one worker, in GiB; absent: as the engine reports, else no limit."""
    tls: EngineTlsConfig | None = None
    """TLS towards these https engines, and the certificate that the gateway shows them."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Bounds of `sluice_pool_desired_replicas`; each rank counts as one worker."""
    scheduling: PoolSchedulingConfig = PoolSchedulingConfig()
    """The choice of worker among these engines."""
    gpu_hour: Price | None = None
    """Cost of one GPU for an hour, in the gateway's `currency`. A request then costs the share of
    its worker's slots that it holds while it runs; what nobody holds is reported as idle."""
    gpus: Count = 1
    """GPUs of one worker (of one rank, if engines have ranks); for `gpu_hour`."""

    flow_headers: Flag | None = None
    """Tell an llm-d router or another Inference Gateway before the engines each request's tenant
    and class: x-llm-d-inference-fairness-id and -objective, x-gateway-inference-fairness-id and
    -objective. Default: only where an inferencepool:// names the engines."""

    @model_validator(mode="after")
    def _with_tls(self) -> "EnginesConfig":
        for worker in self.workers:
            if self.tls is not None:
                worker.note_tls(self.tls.address())
        return self

    @property
    def worker_hour(self) -> float | None:
        """What an hour of one worker costs; None where it has no price."""
        return None if self.gpu_hour is None else self.gpu_hour * self.gpus

    @property
    def only_decodes(self) -> bool:
        """Whether other engines compute its prompts: those of a pool in phases, `PoolConfig`."""
        return getattr(self, "prefill", None) is not None

    @property
    def ranked(self) -> bool:
        """Whether an engine has data-parallel ranks."""
        return any(worker.ranks > 1 for worker in self.workers)

    @property
    def tells_flow(self) -> bool:
        """Whether requests tell an inference gateway before the engines whose they are."""
        if self.flow_headers is not None:
            return self.flow_headers
        return any((w.discover or "").startswith("inferencepool:") for w in self.workers)

    @property
    def may_be_empty(self) -> bool:
        """Whether workers come and go at run time, so that there may be none."""
        return any(worker.discover is not None for worker in self.workers)

    @property
    def listed(self) -> tuple[WorkerConfig, ...]:
        """The engines that the file names itself."""
        return tuple(worker for worker in self.workers if worker.url is not None)

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Every listed worker; each rank of an engine is one."""
        return tuple(address for worker in self.listed for address in worker.addresses)

    @property
    def engines(self) -> tuple[range, ...]:
        """For each engine, the indices of its ranks in `addresses`."""
        ends = list(accumulate(worker.ranks for worker in self.listed))
        return tuple(starmap(range, zip([0, *ends], ends, strict=False)))

    @property
    def worker_count(self) -> int:
        """Number of listed workers; each rank of an engine is one."""
        return sum(worker.ranks for worker in self.listed)

    @property
    def slots(self) -> int:
        """Sequences that the whole pool runs at once."""
        return self.max_num_seqs * self.worker_count

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Fewest and most workers, with defaults applied."""
        listed = self.worker_count
        fewest, most = self.replicas.min, self.replicas.max
        if most is None:
            most = max(listed + DISCOVERED * self.may_be_empty, fewest or 0)
        if fewest is None:
            fewest = 0 if self.may_be_empty else min(listed, most)
        return fewest, most


class TransferConfig(Section):
    """How the KV cache of a prompt comes from a prefill engine to a decode engine."""

    kind: TransferKind
    """Whose protocol: vllm (`kv_transfer_params`, as with NIXL) or sglang (bootstrap)."""
    bytes_per_second: Amount | None = None
    """Speed of a transfer before any was seen; absent: learned alone."""
    skip_below_tokens: Natural = 0
    """Prompt tokens below which a decode engine computes the prompt itself; 0: never."""
    bootstrap_port: Port = 8998
    """SGLang prefill engines' --disaggregation-bootstrap-port."""


class PhasedPoolConfig(Section):
    """A pool in phases: some engines compute prompts, and others answer."""

    max_model_len: Count
    """All its engines' --max-model-len: the window, in tokens."""
    prefill: EnginesConfig
    """Engines that compute prompts: the pool `POOL/prefill` in metrics, logs and admin routes."""
    decode: EnginesConfig
    """Engines that answer; elsewhere in the gateway they are the pool itself."""
    transfer: TransferConfig
    """How prefill engines hand over a prompt's KV cache."""


class PoolConfig(EnginesConfig):
    """Engines with the same context window, in phases or not.

    In phases, its own engines are those of `decode`.
    """

    max_model_len: Count
    """The engines' --max-model-len: the window, in tokens."""
    prefill: SkipJsonSchema[EnginesConfig | None] = None
    decode: SkipJsonSchema[EnginesConfig | None] = None
    transfer: SkipJsonSchema[TransferConfig | None] = None

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without decode's settings as its own: the file has them once."""
        written: dict[str, Any] = dump(self)
        left_out = () if self.decode is None else EnginesConfig.model_fields
        return {name: value for name, value in written.items() if name not in left_out}


def _pool(value: object, without_phases: ValidatorFunctionWrapHandler) -> PoolConfig:
    """A pool as written, in phases if any part of them is there."""
    phases = ("prefill", "decode", "transfer")
    if not isinstance(value, Mapping) or value.keys().isdisjoint(phases):
        pool: PoolConfig = without_phases(value)
        return pool
    written = PhasedPoolConfig.model_validate(value)
    settings = {name: getattr(written, name) for name in PhasedPoolConfig.model_fields}
    return PoolConfig.model_construct(**dict(written.decode), **settings)


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
        Mapping[
            Label,
            Annotated[
                PoolConfig,
                WrapValidator(_pool, json_schema_input_type=PoolConfig | PhasedPoolConfig),
            ],
        ],
        Field(min_length=1, max_length=64),
        AfterValidator(lambda pools: dict(sorted(pools.items(), key=lambda p: p[1].max_model_len))),
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
    price: PriceConfig | None = None
    """List price of its tokens, in the gateway's `currency`; absent: its usage has no cost."""

    @property
    def all_pools(self) -> dict[str, EnginesConfig]:
        """Engines by pool: those of `pools`, then `POOL/prefill` of those in phases."""
        written = self.pools.items()
        prefill = {f"{name}/prefill": pool.prefill for name, pool in written if pool.prefill}
        return {**self.pools, **prefill}

    @property
    def written(self) -> list[tuple[KeyPath, EnginesConfig]]:
        """The values of `all_pools`, in that order, with their places in the model's section."""
        return [
            (("pools", *name.split("/"), *(("decode",) if pool.only_decodes else ())), pool)
            for name, pool in self.all_pools.items()
        ]

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
        """Scheduling policy of each of `all_pools`, with defaults applied.

        Ranks are balanced by one replica only, so with several, bfio is no pool's default.
        """
        names: list[PolicyName] = []
        for name, pool in self.all_pools.items():
            balanced = replicas == 1 and all(worker.ranks > 1 for worker in pool.workers)
            default: PolicyName | None = self.scheduling.policy
            if name not in self.pools:
                default = "quartz"
            elif pool.only_decodes or (default is None and pool.ranked):
                default = "bfio" if balanced else "least-loaded"
            names.append(pool.scheduling.policy or default or "quartz")
        return tuple(names)

    @property
    def predicts(self) -> bool:
        """Whether quartz serves any pool, or predicts in another policy's shadow."""
        if self.mode == "enforce" and "quartz" in self.policies():
            return True
        shadowed = (not pool.ranked and not pool.only_decodes for pool in self.all_pools.values())
        return self.scheduling.shadow and any(shadowed)

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
        """Sequences that all its engines run at once."""
        return sum(pool.slots for pool in self.all_pools.values())


class SplitAliasConfig(Section):
    """A name that stands for several models, by weight."""

    name: ModelName
    """Name that clients send."""
    split: Annotated[Mapping[ModelName, Weight], Field(min_length=1, max_length=64)]
    """Model -> its weight. A conversation, or a user, stays with its model."""


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
