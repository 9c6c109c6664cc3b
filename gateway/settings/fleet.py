"""Models, their pools of engines, and the workers in each pool."""

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from itertools import accumulate, starmap
from typing import Annotated, Final, Literal
from urllib.parse import SplitResult, urlsplit

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from gateway.policy.pools.boundary_control import BoundaryBounds, BoundaryControl
from gateway.policy.pools.boundary_watch import BoundaryWatch
from gateway.policy.pools.gamma_control import GammaControl
from gateway.records.attempt import EngineTls, WorkerAddress
from gateway.records.discovery import DiscoverySource, FoundEngine
from gateway.settings.discovery import is_source, source_of
from gateway.settings.model_parts import (
    AdmissionConfig,
    BoundaryConfig,
    CompressionConfig,
    PolicyName,
    PoolSchedulingConfig,
    SchedulingConfig,
    TimeoutOverrides,
)
from gateway.settings.tenancy.prices import Price, TokenPrices
from gateway.settings.tls import EngineTlsConfig
from gateway.settings.types import (
    Amount,
    Count,
    Drain,
    Flag,
    Gib,
    Label,
    ModelName,
    Natural,
    Ranks,
    Secret,
    Section,
    Text,
    Weight,
    reject,
)

DISCOVERED: Final = 64
"""Most discovered workers of a pool that reservations may count on, unless `replicas.max` says."""
_MAX_URL = 2048
_MAX_NAME = 256
_WORKER_FIX = "write it as http://host:port or https://host:port"


def _worker_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        reject("not a URL", _WORKER_FIX)
    if parts.scheme not in {"http", "https"}:
        if is_source(url):
            reject("a place that names engines, not an engine", "write it as `discover`")
        reject("not an http or https URL", _WORKER_FIX)
    if parts.username is not None or parts.password is not None:
        reject("credentials in a worker's URL", "put the key in `api_key`, as ${NAME}")
    if parts.query or parts.fragment:
        reject("a worker's URL has no query and no fragment", _WORKER_FIX)
    if len(url) > _MAX_URL or not parts.hostname or port == 0 or not _visible(url):
        reject("not a URL with a host", _WORKER_FIX)
    # Base URLs often end in /v1, but request paths already start with it.
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _found_url(url: str) -> str:
    """The URL of an engine that another system or an admin named.

    Not a link-local address: there a cloud's metadata service tells secrets, and no engine runs.
    """
    found = _worker_url(url)
    host = urlsplit(found).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        if _is_number(host):
            raise ValueError("a number for a host: write the address as 10.0.0.1") from None
        return found  # a name
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        raise ValueError("not an address that an engine can have")
    return found


def _is_number(host: str) -> bool:
    """Whether a host is no name but a short, octal or hexadecimal form of an IPv4 address."""
    try:
        socket.inet_aton(host.rstrip("."))
    except OSError:
        return False
    return True


def _visible(url: str) -> bool:
    return all("!" <= char <= "~" for char in url)


def _from_url(value: object) -> object:
    """A bare URL is short for a mapping with only `url` or `discover`."""
    if not isinstance(value, str):
        return value
    text = str.__str__(value)
    return {"discover" if is_source(text) else "url": text}


def _source_url(url: str) -> str:
    return source_of(url).url


def _one_place(worker: "WorkerConfig") -> "WorkerConfig":
    if (worker.url is None) == (worker.discover is None):
        reject(
            "a worker has a `url` or a `discover`, one of them",
            "give the engine's url, or the place that names engines",
        )
    return worker


def _listed(value: object) -> object:
    """One URL is short for a list of it."""
    return (value,) if isinstance(value, str) else value


class WorkerConfig(Section):
    """One engine, or a place that names engines at run time."""

    url: Annotated[str, AfterValidator(_worker_url)] | None = None
    """Base URL, http or https. Its path, without a final `/v1`, is prepended to request paths."""
    discover: Annotated[str, AfterValidator(_source_url)] | None = None
    """Instead of `url`, where engines are found: dns://host:port, file:///workers.yaml,
    k8s://service/NAME.NAMESPACE:port, k8s://pods?selector=...&port=... or
    inferencepool://NAME.NAMESPACE. The other keys are for each engine that is found."""
    scheme: Literal["http", "https"] = "http"
    """How engines that are found are called."""
    api_key: Secret | None = None
    """The engine's own key, sent as a bearer token. Client keys are never forwarded."""
    model: ModelName | None = None
    """Model name that this engine serves; absent: the client's name is sent."""
    ca_file: Text | None = None
    """PEM file of the authority that signed the engine's certificate (https only)."""
    ranks: Ranks = 1
    """Data-parallel ranks of this engine (vLLM's --data-parallel-size, SGLang's --dp-size). With 2
    or more, each rank counts as a worker: `host:port#0`, `host:port#1` and so on."""
    rank_by: Literal["header", "body"] = "header"
    """Carrier of the rank: header X-data-parallel-rank (vLLM, newer SGLang), or the body's
    `data_parallel_rank` (every SGLang)."""

    _tls: EngineTls = PrivateAttr(default_factory=EngineTls)

    @property
    def id(self) -> str:
        """host:port and the path, if any; shown in headers and metrics."""
        return self.address().id

    @property
    def engine_tls(self) -> EngineTls:
        """TLS as the upstream port takes it; `ca_file` comes before the pool's `tls.ca`."""
        return self._tls if self.ca_file is None else replace(self._tls, ca_file=self.ca_file)

    def of_pool(self, tls: EngineTls) -> "WorkerConfig":
        """The worker with its pool's TLS."""
        found = self.model_copy()
        found.note_tls(tls)
        return found

    def note_tls(self, tls: EngineTls) -> None:
        """Take over the pool's TLS."""
        self._tls = tls

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The engine, or each of its ranks."""
        if self.ranks == 1:
            return (self.address(),)
        return tuple(self.address(rank) for rank in range(self.ranks))

    def address(self, rank: int | None = None) -> WorkerAddress:
        """The worker as the upstream port takes it, with its key in clear text."""
        parts: SplitResult = urlsplit(self.url or "")
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        shown = f"[{host}]" if ":" in host else host
        return WorkerAddress(
            id=f"{shown}:{port}{parts.path}{'' if rank is None else f'#{rank}'}",
            scheme=parts.scheme,
            host=host,
            port=port,
            path_prefix=parts.path,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            served_model=self.model,
            tls=self.engine_tls,
            rank=rank,
            rank_by=self.rank_by,
        )

    @property
    def source(self) -> DiscoverySource | None:
        """Where its engines are found; None for an engine of its own."""
        return None if self.discover is None else source_of(self.discover)

    def found(self, engine: FoundEngine) -> tuple[WorkerAddress, ...]:
        """An engine that its source named, with an address for each rank.

        Raises ValueError for a URL that is none, or of this machine's cloud, and a model's name
        that is none.
        """
        if engine.model is not None and not 0 < len(engine.model) <= _MAX_NAME:
            raise ValueError(f"its model's name is not of 1 to {_MAX_NAME} characters")
        changes: dict[str, object] = {"discover": None, "model": engine.model or self.model}
        changes["ranks"] = engine.ranks or self.ranks
        ones = [self.model_copy(update={**changes, "url": _found_url(u)}) for u in engine.urls]
        return ones[0].addresses if len(ones) == 1 else tuple(one.address() for one in ones)


Worker = Annotated[
    WorkerConfig,
    BeforeValidator(_from_url, json_schema_input_type=str | WorkerConfig),
    AfterValidator(_one_place),
]


class ReplicasConfig(Section):
    """How many workers a pool may have. The gateway itself starts and stops none."""

    min: Natural | None = None
    """Fewest workers; default: the number of listed workers, 0 if workers are discovered."""
    max: Count | None = None
    """Most workers; default: the number of listed workers, 64 more if workers are discovered.
    Reservations must fit this number."""
    cooldown_s: Drain = 300.0
    """Seconds of less demand after which `sluice_pool_desired_replicas` falls."""


class PoolConfig(Section):
    """Engines with the same context window."""

    max_model_len: Count
    """The engines' --max-model-len: the window, in tokens."""
    max_num_seqs: Count
    """The engines' --max-num-seqs: slots per worker (per rank, if engines have ranks)."""
    workers: Annotated[
        tuple[Worker, ...],
        Field(min_length=1, max_length=10_000),
        BeforeValidator(_listed, json_schema_input_type=str | tuple[str | WorkerConfig, ...]),
    ]
    """URLs, or mappings for workers that need a key, a served name or a CA. A URL such as
    dns://host:port or k8s://service/NAME.NAMESPACE:port finds engines at run time."""
    tokens_per_second: Amount | None = None
    """Input and output tokens per second of one worker; absent: no limit and no surplus."""
    kv_cache_gib: Gib | None = None
    """KV cache of one worker, in GiB; absent: as the engine reports, else no limit."""
    tls: EngineTlsConfig | None = None
    """TLS towards this pool's https engines, and the certificate that the gateway shows them."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Bounds of `sluice_pool_desired_replicas`; each rank counts as one worker."""
    scheduling: PoolSchedulingConfig = PoolSchedulingConfig()
    """The choice of worker in this pool."""
    gpu_hour: Price | None = None
    """Cost of one GPU for an hour, in the gateway's `currency`. A request then costs the share of
    its worker's slots that it holds while it runs; what nobody holds is reported as idle."""
    gpus: Count = 1
    """GPUs of one worker (of one rank, if engines have ranks); for `gpu_hour`."""

    flow_headers: Flag | None = None
    """Tell an llm-d router or another Inference Gateway before the engines each request's tenant
    and class: x-llm-d-inference-fairness-id and -objective, x-gateway-inference-fairness-id and
    -objective. Default: only where an inferencepool:// names the engines."""

    @property
    def worker_hour(self) -> float | None:
        """What an hour of one worker costs; None where it has no price."""
        return None if self.gpu_hour is None else self.gpu_hour * self.gpus

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


def _with_tls(pool: PoolConfig) -> PoolConfig:
    if pool.tls is None:
        return pool
    tls = pool.tls.address()
    return pool.model_copy(update={"workers": tuple(w.of_pool(tls) for w in pool.workers)})


def _by_window(pools: Mapping[str, PoolConfig]) -> Mapping[str, PoolConfig]:
    return dict(sorted(pools.items(), key=lambda item: item[1].max_model_len))


class ModelConfig(Section):
    """One model, served by one or more pools."""

    name: ModelName
    """Name that clients send."""
    aliases: tuple[ModelName, ...] = ()
    """Other names for it; `*` matches every name that no model has."""
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
        Mapping[Label, Annotated[PoolConfig, AfterValidator(_with_tls)]],
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
    return BoundaryWatch(len(model.pools), asked.planned or ())


def gamma_control_of(model: ModelConfig) -> GammaControl | None:
    """Moves a model's gamma; None if it is fixed or has no window to move."""
    asked = model.boundary
    if not (asked.auto and model.compression.enabled and asked.gamma > 1):
        return None
    return GammaControl(asked.gamma, observe=model.observes_boundary)


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
