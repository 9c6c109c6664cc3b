"""Models, their pools of engines, and the workers in each pool."""

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.domain import WorkerAddress
from gateway.settings.types import (
    Count,
    Factor,
    Flag,
    Label,
    ModelName,
    Natural,
    Seconds,
    Secret,
    Section,
    Share,
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
    return url.rstrip("/")


def _visible(url: str) -> bool:
    return all("!" <= char <= "~" for char in url)


def _from_url(value: object) -> object:
    """A bare URL is short for a mapping with nothing else in it."""
    return {"url": str.__str__(value)} if isinstance(value, str) else value


class WorkerConfig(Section):
    """One engine."""

    url: Annotated[str, AfterValidator(_worker_url)]
    """Base URL, http or https; a path is prepended to every request's."""
    api_key: Secret | None = None
    """The engine's own key, sent as a bearer token. Client keys are never forwarded."""
    model: ModelName | None = None
    """The name this engine serves the model under; the client's name when absent."""
    ca_file: Text | None = None
    """PEM file of the authority that signed the engine's certificate (https only)."""

    @property
    def id(self) -> str:
        """host:port and the path, if any: shown in headers and metrics."""
        return self.address().id

    def address(self) -> WorkerAddress:
        """The worker as the upstream port takes it (the key in clear)."""
        parts: SplitResult = urlsplit(self.url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        shown = f"[{host}]" if ":" in host else host
        return WorkerAddress(
            id=f"{shown}:{port}{parts.path}",
            scheme=parts.scheme,
            host=host,
            port=port,
            path_prefix=parts.path,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            served_model=self.model,
            ca_file=self.ca_file,
        )


Worker = Annotated[
    WorkerConfig, BeforeValidator(_from_url, json_schema_input_type=str | WorkerConfig)
]


class PoolConfig(Section):
    """Engines of one window."""

    max_model_len: Count
    """The engines' --max-model-len: the window, in tokens."""
    max_num_seqs: Count
    """The engines' --max-num-seqs: slots per worker."""
    workers: Annotated[tuple[Worker, ...], Field(min_length=1, max_length=10_000)]
    """URLs, or mappings where a worker needs a key, a served name or a CA."""

    @property
    def slots(self) -> int:
        """Sequences the whole pool runs at once."""
        return self.max_num_seqs * len(self.workers)


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) or value is None else [value]


class BoundaryConfig(Section):
    """Where the planner drew the line between pools; `sluice plan -o` writes it."""

    b_short: (
        Annotated[
            tuple[Count, ...], BeforeValidator(_as_list, json_schema_input_type=Count | list[Count])
        ]
        | None
    ) = None
    """Expected totals (tokens) up to this go to the smaller pool; a list, ascending, for more
    than two pools. Default: each smaller pool's window."""
    gamma: Factor = 1.5
    """Width of the band above the boundary whose requests may be compressed (1 is none)."""
    auto: Flag = False
    """Let the controller move the boundary."""


class CompressionConfig(Section):
    """Prompt compression at the boundary."""

    enabled: Flag = False
    """Compress what lies within gamma of the boundary."""
    max_cut: Share = 0.5
    """The largest share of a prompt that may be cut."""


class SchedulingConfig(Section):
    """Which worker of a pool serves a request."""

    policy: Literal["least-loaded", "round-robin", "p2c", "quartz", "bfio", "mix"] = "least-loaded"
    """The binding policy."""
    profile: Label = "default"
    """The policy's parameter set."""


class TimeoutsConfig(Section):
    """Per-phase limits towards the engines, in seconds."""

    connect_s: Seconds = 2.0
    """To open a connection."""
    first_byte_s: Seconds = 600.0
    """From the request to the response's head: queueing and prefill count."""
    idle_s: Seconds = 120.0
    """Between two chunks of a response."""


class TimeoutOverrides(Section):
    """A model's own limits; what is absent comes from the top level."""

    connect_s: Seconds | None = None
    """To open a connection."""
    first_byte_s: Seconds | None = None
    """From the request to the response's head."""
    idle_s: Seconds | None = None
    """Between two chunks of a response."""


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
    pools: Annotated[
        Mapping[Label, PoolConfig], Field(min_length=1, max_length=64), AfterValidator(_by_window)
    ]
    """Name -> pool, in order of window whatever the file's order; any names, one or more."""
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
    def output_is_cap(self) -> bool:
        """Whether the output is taken to be the client's cap (either way of asking for it)."""
        return self.output_estimate == "cap" or self.estimator == "paper"

    @property
    def slots(self) -> int:
        """Sequences that all its pools run at once."""
        return sum(pool.slots for pool in self.pools.values())
