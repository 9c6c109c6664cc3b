"""A worker, where it is found and when it leaves the rotation; an attempt, and how it ended."""

from collections.abc import Mapping
from typing import Literal

from gateway.records.record import Record


class EngineTls(Record, frozen=True, kw_only=True):
    """How the gateway and an https engine prove who they are; all paths are PEM files."""

    ca_file: str | None = None
    """Authority that signed the engine's certificate; None for the system's."""
    cert_file: str | None = None
    """The gateway's own certificate; None shows none."""
    key_file: str | None = None
    verify: Literal["full", "chain"] = "full"
    """chain does not compare the name."""
    server_name: str | None = None
    """Name that the certificate must have; None for the host."""


class WorkerAddress(Record, frozen=True, kw_only=True):
    """Address of one engine, and the options for talking to it."""

    id: str
    """Short and unique in the pool; shown in headers and metrics, so never a secret."""
    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    """Path of the URL, prepended to every request path (`/engine-1`); no trailing slash."""
    api_key: str | None = None
    served_model: str | None = None
    """Model name sent to this engine; None sends the client's name."""
    tls: EngineTls = EngineTls()
    """For https."""
    rank: int | None = None
    """Data-parallel rank behind the address, from 0; None for an engine that is one worker."""
    rank_by: Literal["header", "body"] = "header"
    """Carrier of the rank: header X-data-parallel-rank, or the body's data_parallel_rank."""
    kv_events: str | None = None
    """ZeroMQ endpoint that sends the events of its prefix cache."""

    def __repr__(self) -> str:
        return f"WorkerAddress({self.url}, rank={self.rank})"  # without its key

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path_prefix}"


class PhaseTimeouts(Record, frozen=True, kw_only=True):
    """Time limits in seconds for each phase of an exchange with an engine."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    """From the sent request to the response head; includes the engine's queue and prefill."""
    idle_s: float = 120.0
    """Between two chunks of a body."""


class HealthRules(Record, frozen=True, kw_only=True):
    """When a worker leaves the rotation and how it returns."""

    eject_after: int = 3
    """Consecutive failed exchanges (reset, time-out, 5xx) before ejection."""
    eject_s: float = 5.0
    """First ejection; doubles with each further one up to `max_eject_s`."""
    max_eject_s: float = 60.0
    stall_s: float = 30.0
    """Seconds without progress, beyond the allowed time, until an engine counts as frozen."""


class Binding(Record, frozen=True, kw_only=True):
    """The worker that serves the request, and why."""

    pool: int
    worker: int
    score: float
    candidates: tuple[tuple[str, float], ...] = ()
    """(worker id, score) of each worker compared; a lower score is better."""


class Usage(Record, frozen=True, kw_only=True):
    """Tokens as the engine reported them, or as the gateway counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_reported: bool = False
    """Whether the engine reported `cached_tokens`; many engines omit it when it is 0."""
    source: Literal["engine", "counted"] = "engine"


class Attempt(Record, frozen=True, kw_only=True):
    """One try at one worker, for the log."""

    pool: str
    worker: str
    result: str
    start_ms: float = 0.0
    """From the request's arrival."""
    duration_ms: float = 0.0


class Handover(Record, frozen=True, kw_only=True):
    """What one call of a request in phases tells its engine of the other phase's."""

    engine_id: str
    """Id of the request at the engines, in both phases."""
    members: Mapping[str, bytes]
    """Members of the body, as JSON: where the KV cache of the prompt is, or shall go."""
    prefills: bool = False
    """Only the prompt shall be computed, for another engine that asks for the result."""


class Outcome(Record, frozen=True, kw_only=True):
    """How the exchange with the engines ended."""

    label: str
    """One of ok, error (the engine's 4xx), refused, fell_back (another model's turn), evicted,
    disconnected, upstream_error and internal_error."""
    status: int
    usage: Usage | None = None
    finish_reason: str | None = None
    completed: bool = False
    """False when the client left or the stream broke; the output length is then censored."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    response_id: str | None = None
    """Id from the responses endpoint, which a later `previous_response_id` may name."""


class DiscoverySource(Record, frozen=True, kw_only=True):
    """A place that names engines: a checked discovery URL."""

    url: str
    """As the configuration has it; shown in logs and metrics."""
    kind: Literal["dns", "file", "service", "pods", "inferencepool"]
    name: str = ""
    """Host name, path of the file, or name of the Kubernetes object."""
    namespace: str = ""
    """Of Kubernetes; "" for the gateway's own."""
    port: str = ""
    """Number or name; "" where the source says it itself."""
    selector: str = ""
    """Label selector of pods."""
    server: tuple[str, int] | None = None
    """DNS server to ask; None for the system's."""


class ClusterAccess(Record, frozen=True, kw_only=True):
    """How the Kubernetes API is reached."""

    url: str
    """Base URL without a trailing slash."""
    namespace: str
    """Of objects that are named without one."""
    token_file: str | None = None
    """The service account's token, which changes while the gateway runs; None sends none."""
    ca_file: str | None = None


class FoundEngine(Record, frozen=True, kw_only=True):
    """An engine that a source named."""

    urls: tuple[str, ...]
    """Base URLs: one, or one for each rank where ranks listen on ports of their own."""
    model: str | None = None
    """Model name that it serves; None as configured."""
    ranks: int = 0
    """Data-parallel ranks behind its one URL; 0 as configured."""
