"""Lines of the request log."""

from typing import Literal

from gateway.records.attempt import Attempt
from gateway.records.record import Record

DECISION_SCHEMA = 1
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


class DecisionRecord(Record, frozen=True, omit_defaults=True):
    """Everything that explains one request: a line of the request log, a look-up's answer.

    Never holds prompt text, keys or header values (prompts only when configured).
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
    category: str | None = None
    rag: bool = False
    text_bytes: int | None = None
    body_bytes: int = 0
    messages: int = 0
    media_parts: int = 0
    bytes_per_token: float | None = None
    """The category's mean."""
    bytes_per_token_conservative: float | None = None
    """What the estimate divided by."""
    estimated_input_tokens: int | None = None
    estimated_output_tokens: int | None = None
    estimated_total_tokens: int | None = None
    cap_tokens: int | None = None
    sequences: int | None = None
    planned_pool: str | None = None
    plan_reason: str | None = None
    would_route: str | None = None
    pool: str | None = None
    worker: str | None = None
    spilled: bool = False
    rescued: bool = False
    compressed: str = "none"
    score: float | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    attempts: tuple[Attempt, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    usage_source: str | None = None
    finish_reason: str | None = None
    queue_ms: float = 0.0
    overhead_ms: float | None = None
    """Gateway time until the request was sent to an engine."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float | None = None
    not_compressed: str | None = None
    """Why a prompt in the band went as it came."""
    kept_share: float | None = None
    """Of a compressed prompt's text, in bytes."""
    compress_ms: float | None = None
    lease_id: str | None = None
    service_class: str | None = None
    asked_pool: str | None = None
    """The pool that admission was asked for; it may have spilled."""
    alternates: tuple[str, ...] = ()
    """Pools that admission could spill to."""
    admitted_unix_s: float | None = None
    reserved_tokens: int | None = None
    """What admission took from the entitlement's bucket."""
    reserved_kv_bytes: int | None = None
    priority: float | None = None
    """w_e at admission."""
    contended: bool = False
    would_deny: str | None = None
    """Observe mode: the reason admission would have refused for."""
    evicted: bool = False
    charge_tokens: int | None = None
    """What the entitlement was charged, by the profile's weights; None for a full refund."""
    settled_unix_s: float | None = None
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
    lease_changes: tuple[tuple[float, str, int], ...] = ()
    """(Unix s, resize or transfer, tokens or pool index) between the two."""
    prompt: str | None = None
