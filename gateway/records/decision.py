"""Lines of the request log."""

from typing import Final, Literal

from gateway.records.attempt import Attempt
from gateway.records.batch import BatchItem
from gateway.records.record import NO_TRACE, Record, Trace

DECISION_SCHEMA = 2
"""Version of the request log's records; raised when the meaning of a field changes."""


class PoolEvent(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A request log line that records a change of a model's token pool, not a request."""

    schema: int
    event: Literal["terms", "entitlement", "removed", "tick"]
    model: str
    unix_s: float
    pools: tuple[str, ...] = ()
    """Pool names; only in events of kind terms."""
    detail: object = None
    """By event: the terms or entitlement as an object, the removed name, or the tick in seconds."""


class RequestSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of the request body as the gateway read it."""

    body_bytes: int = 0
    text_bytes: int | None = None
    messages: int = 0
    media_parts: int = 0
    rag: bool = False
    body_digest: int | None = None
    """32 bits, keyed by the process, of the end of the body (64 KiB): a retry of a refused request
    has the same."""
    prompt_digests: tuple[tuple[int, int], ...] = ()
    """(bytes, keyed digest) of beginnings of the prompt that others may share, ascending; the last
    is the whole prompt."""


class EstimateSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Estimated token counts of the request."""

    category: str | None = None
    bytes_per_token: float | None = None
    """Mean of the category."""
    bytes_per_token_conservative: float | None = None
    """Divisor that the estimate used."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cap_tokens: int | None = None
    sequences: int | None = None


class PlanSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The pool that the boundary chose."""

    pool: str | None = None
    reason: str | None = None
    would_route: str | None = None


class AdmissionSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The request's lease. Most fields are set for managed models only."""

    lease_id: str | None = None
    service_class: str | None = None
    asked_pool: str | None = None
    """The pool requested from admission; admission may spill to another."""
    alternates: tuple[str, ...] = ()
    """Pools that admission could spill to."""
    spilled: bool = False
    admitted_unix_s: float | None = None
    settled_unix_s: float | None = None
    reserved_tokens: int | None = None
    """Tokens that admission took from the entitlement's bucket."""
    reserved_kv_bytes: int | None = None
    priority: float | None = None
    """Weight w_e at admission."""
    contended: bool = False
    would_deny: str | None = None
    """Observe mode: the reason for which admission would have refused."""
    evicted: bool = False
    lease_changes: tuple[tuple[float, str, int], ...] = ()
    """(Unix s, resize or transfer, tokens or pool index) between admission and settlement."""
    charge_tokens: int | None = None
    """Tokens charged to the entitlement, weighted by the profile; None for a full refund."""


_CUT_UNSENT: Final = frozenset({"observed", "other_pool"})
_NOT_LOOKED_AT: Final = frozenset({None, "not_busy", "spilled"})
"""Reasons of load, which say nothing of p_c; None: not in the compression window."""


class CompressionSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Result of compressing the prompt to fit a smaller pool."""

    compressed: str = "none"
    not_compressed: str | None = None
    """Why a prompt in the compression window was sent unchanged."""
    kept_share: float | None = None
    """Share of the text's bytes that compression kept."""
    when: str | None = None
    """The model's `compression.when`, the rule by which it was cut or not."""

    @property
    def cut(self) -> bool | None:
        """Whether the prompt was cut, or would have been; None if its content was not looked at."""
        if self.kept_share is not None or self.not_compressed in _CUT_UNSENT:
            return True
        return None if self.not_compressed in _NOT_LOOKED_AT else False

    def sent_tokens(self, tokens: int) -> int:
        """Prompt tokens as the client sent them; `tokens`: as an engine got them."""
        return round(tokens / (self.kept_share or 1))


class SchedulingSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker was chosen; most fields are set only if a scheduler chose it."""

    score: float | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    expected_hit_tokens: int | None = None
    """Prompt tokens that the worker's prefix cache was expected to hold."""
    backlog_tokens: int | None = None
    """Uncached prefill tokens ahead of the request on its worker when it was bound."""
    worker_active: int | None = None
    """Sequences on the worker when the request was bound."""
    worker_kv_usage: float | None = None
    """Used share of the worker's KV cache; None if unknown."""
    predicted_prefill_s: float | None = None
    """Mean."""
    predicted_prefill_q_s: float | None = None
    """Calibrated upper quantile."""
    prefill_s: float | None = None
    """From dispatch to the first token of a stream."""
    would_bind: str | None = None
    """The worker that QUARTZ would have chosen, where another policy binds."""
    would_prefill_s: float | None = None
    """Mean predicted prefill there."""


class PrefillSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The first phase of a request whose pool has its prompts computed by other engines."""

    pool: str | None = None
    worker: str | None = None
    """The last one that was asked; None if none was."""
    candidates: tuple[tuple[str, float], ...] = ()
    """(worker id, score) of each that was compared for it."""
    skipped: str | None = None
    """Why decode computed the prompt: short, endpoint, sequences, no_prefill_worker,
    no_decode_worker (none to compute it for), not_handed_over (prefill answered without the KV
    cache's place), failed."""
    wait_ms: float = 0.0
    """In the gateway, for a prefill worker."""
    duration_ms: float | None = None
    """From the request to the prefill worker to its answer."""
    predicted_s: float | None = None
    """Predicted time from there to the first token that the client sees."""
    expected_hit_tokens: int | None = None
    """Prompt tokens that the worker's prefix cache was expected to hold."""
    transfer_s: float | None = None
    """From the request to the decode worker (with SGLang, from the end of the prefill if that is
    later) to its first token, transfer included; streams only."""


class UsageSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Metered tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    source: str | None = None
    cost_nano: int | None = None
    """Cost in 1e-9 of the gateway's currency; None where the model has no prices."""


class TimingSection(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Durations of the request's phases."""

    queue_ms: float = 0.0
    overhead_ms: float | None = None
    """Gateway time until the request was sent to an engine."""
    compress_ms: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float | None = None


NO_ESTIMATE = EstimateSection()
NO_PLAN = PlanSection()
NO_ADMISSION = AdmissionSection()
NO_COMPRESSION = CompressionSection()
NO_SCHEDULING = SchedulingSection()
NO_PREFILL = PrefillSection()
NO_USAGE = UsageSection()
NO_TIMING = TimingSection()


class DecisionRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that explains one request; the request log and the admin look-up show it.

    The section of a stage that the request did not reach keeps its defaults and is left out of the
    log line. Records hold no keys and no header values, and prompts only when configured.
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
    key: str | None = None
    """The key's name, or its fingerprint where it has none."""
    stream: bool = False
    reason: str | None = None
    """Refusal reason."""
    retry_after_s: float | None = None
    """The wait that a refused client was told; None for none."""
    figures: str = ""
    """Limit, used and requested of what admission refused for, as the client was told."""
    mode: str = "enforce"
    pool: str | None = None
    worker: str | None = None
    rescued: bool = False
    finish_reason: str | None = None
    request: RequestSection = RequestSection()
    estimate: EstimateSection = NO_ESTIMATE
    plan: PlanSection = NO_PLAN
    admission: AdmissionSection = NO_ADMISSION
    compression: CompressionSection = NO_COMPRESSION
    scheduling: SchedulingSection = NO_SCHEDULING
    prefill: PrefillSection = NO_PREFILL
    attempts: tuple[Attempt, ...] = ()
    usage: UsageSection = NO_USAGE
    timing: TimingSection = NO_TIMING
    trace: Trace = NO_TRACE
    batch: BatchItem | None = None
    """The item of a batch that it was."""
    prompt: str | None = None
