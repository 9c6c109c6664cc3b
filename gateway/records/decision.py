"""Lines of the request log."""

from typing import Literal

from gateway.records.attempt import Attempt
from gateway.records.record import Record

DECISION_SCHEMA = 2
"""Version of the request log's records; raised when a field changes its meaning."""


class PoolEvent(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the request log that is no request: what changed a model's token pool."""

    schema: int
    event: Literal["terms", "entitlement", "removed", "tick"]
    model: str
    unix_s: float
    pools: tuple[str, ...] = ()
    """Names, with terms."""
    detail: object = None
    """The terms or the entitlement as an object, a name, or the tick's seconds."""


class RequestSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What the client sent, as it was read."""

    body_bytes: int = 0
    text_bytes: int | None = None
    messages: int = 0
    media_parts: int = 0
    rag: bool = False


class EstimateSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What the request was expected to take."""

    category: str | None = None
    bytes_per_token: float | None = None
    """The category's mean."""
    bytes_per_token_conservative: float | None = None
    """What the estimate divided by."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cap_tokens: int | None = None
    sequences: int | None = None


class PlanSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where the boundary sent the request, before any work."""

    pool: str | None = None
    reason: str | None = None
    would_route: str | None = None


class AdmissionSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The request's one lease. Most fields are those of managed models only."""

    lease_id: str | None = None
    service_class: str | None = None
    asked_pool: str | None = None
    """The pool that admission was asked for; it may have spilled."""
    alternates: tuple[str, ...] = ()
    """Pools that admission could spill to."""
    spilled: bool = False
    admitted_unix_s: float | None = None
    settled_unix_s: float | None = None
    reserved_tokens: int | None = None
    """What admission took from the entitlement's bucket."""
    reserved_kv_bytes: int | None = None
    priority: float | None = None
    """w_e at admission."""
    contended: bool = False
    would_deny: str | None = None
    """Observe mode: the reason admission would have refused for."""
    evicted: bool = False
    lease_changes: tuple[tuple[float, str, int], ...] = ()
    """(Unix s, resize or transfer, tokens or pool index) between the two."""
    charge_tokens: int | None = None
    """What the entitlement was charged, by the profile's weights; None for a full refund."""


class CompressionSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a prompt that compression could have made fit a smaller window."""

    compressed: str = "none"
    not_compressed: str | None = None
    """Why a prompt in the band went as it came."""
    kept_share: float | None = None
    """Of a compressed prompt's text, in bytes."""


class SchedulingSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker was chosen; most fields are there where a scheduler chose it."""

    score: float | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    expected_hit_tokens: int | None = None
    """Of the prompt, tokens that the worker's prefix cache was expected to hold."""
    backlog_tokens: int | None = None
    """Uncached prefill ahead of it on its worker when it was bound."""
    worker_active: int | None = None
    """Sequences on its worker when it was bound."""
    worker_kv_usage: float | None = None
    """Of its worker's KV cache, as far as it was known."""
    predicted_prefill_s: float | None = None
    """Mean."""
    predicted_prefill_q_s: float | None = None
    """Calibrated upper quantile."""
    prefill_s: float | None = None
    """From dispatch to a stream's first token."""


class UsageSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that are metered."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    source: str | None = None


class TimingSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How long each part took."""

    queue_ms: float = 0.0
    overhead_ms: float | None = None
    """Gateway time until the request was sent to an engine."""
    compress_ms: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float | None = None


NO_REQUEST = RequestSection()
NO_ESTIMATE = EstimateSection()
NO_PLAN = PlanSection()
NO_ADMISSION = AdmissionSection()
NO_COMPRESSION = CompressionSection()
NO_SCHEDULING = SchedulingSection()
NO_USAGE = UsageSection()
NO_TIMING = TimingSection()


class DecisionRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that explains one request: a line of the request log, a look-up's answer.

    A section of a stage that the request did not reach has nothing but defaults, and is left out
    of the line. Never holds prompt text, keys or header values (prompts only when configured).
    """

    schema: int
    time_unix_s: float
    request_id: str
    endpoint: str
    outcome: str
    status: int
    model: str | None = None
    asked_model: str | None = None
    tenant: str | None = None
    entitlement: str | None = None
    stream: bool = False
    reason: str | None = None
    """Refusal reason."""
    mode: str = "enforce"
    pool: str | None = None
    worker: str | None = None
    rescued: bool = False
    finish_reason: str | None = None
    request: RequestSection = NO_REQUEST
    estimate: EstimateSection = NO_ESTIMATE
    plan: PlanSection = NO_PLAN
    admission: AdmissionSection = NO_ADMISSION
    compression: CompressionSection = NO_COMPRESSION
    scheduling: SchedulingSection = NO_SCHEDULING
    attempts: tuple[Attempt, ...] = ()
    usage: UsageSection = NO_USAGE
    timing: TimingSection = NO_TIMING
    prompt: str | None = None
