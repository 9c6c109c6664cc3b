"""A worker, an attempt at it, and how the exchange with engines ended."""

from typing import Literal

from gateway.records.record import Record


class WorkerAddress(Record, frozen=True, kw_only=True):
    """Where one engine listens, and how to speak to it."""

    id: str
    """Short and unique in its pool, shown in headers and metrics; never a secret."""
    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    """The url's path, prepended to every request path (`/engine-1`); no trailing slash."""
    api_key: str | None = None
    served_model: str | None = None
    """The name this engine knows the model by; None to send the client's."""
    ca_file: str | None = None
    rank: int | None = None
    """Of several data-parallel ranks behind one address, this one; None for the engine itself."""
    rank_by: Literal["header", "body"] = "header"
    """How the engine is told: X-data-parallel-rank, or the body's data_parallel_rank."""

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path_prefix}"


class PhaseTimeouts(Record, frozen=True, kw_only=True):
    """How long each phase of an exchange with an engine may take, in seconds."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    """Request sent to response head: the engine's queue and prefill are in it."""
    idle_s: float = 120.0
    """Between two pieces of a body."""


class Binding(Record, frozen=True, kw_only=True):
    """The worker that serves the request, and why."""

    pool: int
    worker: int
    score: float
    candidates: tuple[tuple[str, float], ...] = ()
    """(worker id, score) of those compared; lower is better."""


class Usage(Record, frozen=True, kw_only=True):
    """Tokens as the engine reported them, or as the gateway counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_told: bool = False
    """Whether the engine told `cached_tokens`; many tell it only where there are any."""
    source: Literal["engine", "counted"] = "engine"


class Attempt(Record, frozen=True, kw_only=True):
    """One try at one worker, for the log."""

    pool: str
    worker: str
    result: str


class Outcome(Record, frozen=True, kw_only=True):
    """How the exchange with the engines ended."""

    label: str
    """ok, error (the engine's 4xx), refused, evicted, disconnected, upstream_error or
    internal_error."""
    status: int
    usage: Usage | None = None
    finish_reason: str | None = None
    completed: bool = False
    """False when the client left or the stream broke: output length is then censored."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    response_id: str | None = None
    """Of the responses endpoint, for `previous_response_id`."""
