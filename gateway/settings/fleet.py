"""Models, their pools of engines, and the workers in each pool."""

from collections.abc import Mapping
from itertools import accumulate, starmap
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.policy.pools.boundary_control import BoundaryControl, Bounds
from gateway.policy.pools.boundary_watch import BoundaryWatch
from gateway.records.attempt import WorkerAddress
from gateway.settings.model_parts import (
    AdmissionConfig,
    BoundaryConfig,
    CompressionConfig,
    SchedulingConfig,
    TimeoutOverrides,
)
from gateway.settings.types import (
    Amount,
    Count,
    Flag,
    Gib,
    Label,
    ModelName,
    Natural,
    Ranks,
    Secret,
    Section,
    Text,
    reject,
)

_WORKER_FIX = "write it as http://host:port or https://host:port"


def _worker_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        reject("not a URL", _WORKER_FIX)
    if parts.scheme not in {"http", "https"}:
        if parts.scheme == "dns":
            reject("dns:// workers come with a later version", "list the workers' own URLs")
        reject("not an http or https URL", _WORKER_FIX)
    if parts.username is not None or parts.password is not None:
        reject("credentials in a worker's URL", "put the key in `api_key`, as ${NAME}")
    if parts.query or parts.fragment:
        reject("a worker's URL has no query and no fragment", _WORKER_FIX)
    if not parts.hostname or port == 0 or not _visible(url):
        reject("not a URL with a host", _WORKER_FIX)
    # Clients' base URLs end so; requests' paths bring it along.
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _visible(url: str) -> bool:
    return all("!" <= char <= "~" for char in url)


def _from_url(value: object) -> object:
    """A bare URL is short for a mapping with nothing else in it."""
    return {"url": str.__str__(value)} if isinstance(value, str) else value


class WorkerConfig(Section):
    """One engine."""

    url: Annotated[str, AfterValidator(_worker_url)]
    """Base URL, http or https; a path is prepended to every request's, but for a last `/v1`."""
    api_key: Secret | None = None
    """The engine's own key, sent as a bearer token. Client keys are never forwarded."""
    model: ModelName | None = None
    """The name this engine serves the model under; the client's name when absent."""
    ca_file: Text | None = None
    """PEM file of the authority that signed the engine's certificate (https only)."""
    ranks: Ranks = 1
    """Data-parallel ranks of this engine (vLLM's --data-parallel-size, SGLang's --dp-size): from
    2 on each counts as a worker, `host:port#0` and so on."""
    rank_by: Literal["header", "body"] = "header"
    """How the engine is told the rank: header X-data-parallel-rank (vLLM, newer SGLang), or the
    body's `data_parallel_rank` (every SGLang)."""

    @property
    def id(self) -> str:
        """host:port and the path, if any: shown in headers and metrics."""
        return self.address().id

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The engine, or each of its ranks."""
        if self.ranks == 1:
            return (self.address(),)
        return tuple(self.address(rank) for rank in range(self.ranks))

    def address(self, rank: int | None = None) -> WorkerAddress:
        """The worker as the upstream port takes it (the key in clear)."""
        parts: SplitResult = urlsplit(self.url)
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
            ca_file=self.ca_file,
            rank=rank,
            rank_by=self.rank_by,
        )


Worker = Annotated[
    WorkerConfig, BeforeValidator(_from_url, json_schema_input_type=str | WorkerConfig)
]


class ReplicasConfig(Section):
    """How many workers a pool may have, whoever starts and stops them."""

    min: Natural | None = None
    """The fewest that are asked for; default: as many as are listed."""
    max: Count | None = None
    """The most; default: as many as are listed. What is reserved must fit them."""


class PoolConfig(Section):
    """Engines of one window."""

    max_model_len: Count
    """The engines' --max-model-len: the window, in tokens."""
    max_num_seqs: Count
    """The engines' --max-num-seqs: slots per worker (of each rank, where engines have ranks)."""
    workers: Annotated[tuple[Worker, ...], Field(min_length=1, max_length=10_000)]
    """URLs, or mappings where a worker needs a key, a served name or a CA."""
    tokens_per_second: Amount | None = None
    """Input and output tokens that one worker serves per second; absent: no limit, no surplus."""
    kv_cache_gib: Gib | None = None
    """KV cache of one worker, in GiB; absent: as its engine says, else no limit."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Bounds of `sluice_pool_desired_replicas`; ranks count one by one."""

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Every worker, the ranks of an engine one by one."""
        return tuple(address for worker in self.workers for address in worker.addresses)

    @property
    def engines(self) -> tuple[range, ...]:
        """By engine, the indices of its ranks in `addresses`."""
        ends = list(accumulate(worker.ranks for worker in self.workers))
        return tuple(starmap(range, zip([0, *ends], ends, strict=False)))

    @property
    def worker_count(self) -> int:
        """Workers, the ranks of an engine one by one."""
        return sum(worker.ranks for worker in self.workers)

    @property
    def slots(self) -> int:
        """Sequences the whole pool runs at once."""
        return self.max_num_seqs * self.worker_count

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Fewest and most workers, the defaults filled in."""
        listed = self.worker_count
        fewest, most = self.replicas.min, self.replicas.max
        if most is None:
            most = max(listed, fewest or 0)
        return min(listed, most) if fewest is None else fewest, most


def _by_window(pools: Mapping[str, PoolConfig]) -> Mapping[str, PoolConfig]:
    return dict(sorted(pools.items(), key=lambda item: item[1].max_model_len))


class ModelConfig(Section):
    """One model, served by one or more pools."""

    name: ModelName
    """The name clients ask for."""
    aliases: tuple[ModelName, ...] = ()
    """Other names for it; `*` catches every name that no model has."""
    kv_bytes_per_token: Count | None = None
    """KV cache per token: 2 x layers x KV heads x head size x bytes per value."""
    mode: Literal["enforce", "observe"] = "enforce"
    """observe: decisions are computed, logged and counted, never applied."""
    output_estimate: Literal["predicted", "cap"] = "predicted"
    """What the boundary expects of the output: an online quantile, or the client's own cap."""
    boundary: BoundaryConfig = BoundaryConfig()
    """The line between pools."""
    compression: CompressionConfig = CompressionConfig()
    """Prompt compression at the boundary."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """The choice of worker."""
    admission: AdmissionConfig = AdmissionConfig()
    """Who may enter when its pools are full."""
    engine_priority: Literal["none", "vllm", "sglang"] = "none"
    """Send an entitlement's class to the engines as `priority`, in this engine's sense. Engines
    heed it only with their priority scheduling on: vLLM's --scheduling-policy priority, SGLang's
    --enable-priority-scheduling."""
    pools: Annotated[
        Mapping[Label, PoolConfig], Field(min_length=1, max_length=64), AfterValidator(_by_window)
    ]
    """Name -> pool, in order of window whatever the file's order; any names, one or more."""
    cache_salt: Flag = False
    """Keep tenants' prefix caches apart: engines are sent a `cache_salt` of the tenant (vLLM)."""
    default_max_tokens: Count | None = None
    """Sent upstream when a client sets no limit, shrunk to what fits; absent: none is sent."""
    spill_queue: Natural = 0
    """Requests a pool may queue beyond its ready slots before others spill over."""
    media_tokens: Natural = 768
    """Tokens assumed for an image or audio part until usage teaches better."""
    output_prior_tokens: Count = 1024
    """Expected output before any answer was seen."""
    estimator: Literal["default", "paper"] = "default"
    """Profile of the length estimator; paper takes the client's cap as the output everywhere."""
    timeouts: TimeoutOverrides = TimeoutOverrides()
    """This model's own time-outs."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """One boundary per pool but the last, in tokens, the defaults filled in."""
        windows = tuple(pool.max_model_len for pool in self.pools.values())[:-1]
        given = self.boundary.b_short
        return windows if given is None else given[: len(windows)]

    @property
    def least_boundaries(self) -> tuple[int, ...]:
        """What each boundary may move down to, in tokens, the defaults filled in."""
        given = self.boundary.b_short_min
        return tuple(max(1, b // 2) for b in self.boundaries) if given is None else given

    @property
    def policy(self) -> str:
        """How workers are chosen, the default filled in."""
        if self.scheduling.policy is not None:
            return self.scheduling.policy
        ranked = any(w.ranks > 1 for pool in self.pools.values() for w in pool.workers)
        return "least-loaded" if ranked else "quartz"

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
        """Whether the output is taken to be the client's cap (either way of asking for it)."""
        return self.output_estimate == "cap" or self.estimator == "paper"

    @property
    def slots(self) -> int:
        """Sequences that all its pools run at once."""
        return sum(pool.slots for pool in self.pools.values())


def watch_of(model: ModelConfig) -> BoundaryWatch | None:
    """What is watched of a model's boundaries; None where nothing would read it."""
    asked = model.boundary
    if not asked.auto and asked.planned is None:
        return None
    return BoundaryWatch(len(model.pools), asked.planned or ())


def control_of(model: ModelConfig) -> BoundaryControl | None:
    """What may move a model's boundaries; None where they stay as they are."""
    if not model.boundary.auto:
        return None
    rows = zip(model.pools.items(), model.boundaries, model.least_boundaries, strict=False)
    return BoundaryControl(
        [
            Bounds(pool=name, start=start, least=least, most=pool.max_model_len)
            for (name, pool), start, least in rows
        ],
        observe=model.observes_boundary,
    )
