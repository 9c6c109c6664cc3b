"""Frozen records passed between the stages; no behaviour beyond small derived values.

Each stage takes named inputs and returns its own record, so a reader sees what a stage
needs and what it gives. msgspec structs because they cost .05 us to make; `gc=False`
because none of them can be part of a reference cycle.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Raw


class Record(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of all records: immutable, not tracked by the garbage collector."""


class Dialect(StrEnum):
    """Whose error and stream shape an endpoint speaks."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Endpoint(Record, frozen=True, kw_only=True):
    """One data-plane route.

    `generates` is false where no output tokens are counted, `computes` where not even the prompt
    is read by the model: such a request is charged no tokens. `multipart` where the body is a
    form with a file.
    """

    name: str
    path: str
    dialect: Dialect = Dialect.OPENAI
    generates: bool = True
    computes: bool = True
    multipart: bool = False


CHAT = Endpoint(name="chat", path="/v1/chat/completions")
COMPLETIONS = Endpoint(name="completions", path="/v1/completions")
EMBEDDINGS = Endpoint(name="embeddings", path="/v1/embeddings", generates=False)
RESPONSES = Endpoint(name="responses", path="/v1/responses")
MESSAGES = Endpoint(name="messages", path="/v1/messages", dialect=Dialect.ANTHROPIC)
COUNT_TOKENS = Endpoint(
    name="count_tokens",
    path="/v1/messages/count_tokens",
    dialect=Dialect.ANTHROPIC,
    generates=False,
    computes=False,
)
TOKENIZE = Endpoint(name="tokenize", path="/tokenize", generates=False, computes=False)
RERANK = Endpoint(name="rerank", path="/v1/rerank", generates=False)
SCORE = Endpoint(name="score", path="/v1/score", generates=False)
SPEECH = Endpoint(name="speech", path="/v1/audio/speech", generates=False)
TRANSCRIPTIONS = Endpoint(
    name="transcriptions", path="/v1/audio/transcriptions", generates=False, multipart=True
)
TRANSLATIONS = Endpoint(
    name="translations", path="/v1/audio/translations", generates=False, multipart=True
)
ENDPOINTS: dict[str, Endpoint] = {
    e.path: e
    for e in (
        *(CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE),
        *(RERANK, SCORE, SPEECH, TRANSCRIPTIONS, TRANSLATIONS),
    )
}
ROUTES: dict[str, Endpoint] = {
    path: e for e in ENDPOINTS.values() for path in (e.path.removeprefix("/v1"), e.path)
}
"""Paths as clients may write them: some have a base URL without /v1."""


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


CATEGORIES = ("prose", "code", "json", "cjk", "other-script", "mixed")
Category = Literal["prose", "code", "json", "cjk", "other-script", "mixed"]


class Principal(Record, frozen=True, kw_only=True):
    """Who asks: what an API key stands for. Its limits are the token pool's to know."""

    entitlement: str
    tenant: str
    service_class: str = "elastic"
    model: str | None = None
    """The one model this key may use; None for any (open gateway)."""
    expires_unix_s: float | None = None
    """From then on its keys answer 403; None for never."""
    suspended: bool = False
    """Its keys answer 403 until an admin resumes it."""
    compress: bool = True
    """Whether its prompts may be compressed."""
    tokens_per_s: float = 0.0
    """The rate it is entitled to; 0 for none stated. Fairness weighs by it."""


OPEN = Principal(entitlement="open", tenant="open")
"""Whoever asks while no entitlement was ever entered."""


class PhaseTimeouts(Record, frozen=True, kw_only=True):
    """How long each phase of an exchange with an engine may take, in seconds."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    """Request sent to response head: the engine's queue and prefill are in it."""
    idle_s: float = 120.0
    """Between two pieces of a body."""


class Measure(Record, frozen=True, kw_only=True):
    """What is counted in a request body (pipeline.md, "What is counted").

    Bytes are UTF-8 lengths of the decoded text that the engine tokenizes.
    """

    text_bytes: int
    """Sum over all prompts of the batch."""
    longest_text_bytes: int
    """Of the longest single prompt."""
    exact_tokens: int = 0
    """Sum of token-id prompts' lengths: known exactly."""
    longest_exact_tokens: int = 0
    messages: int = 0
    """Chat messages (the template's tokens grow with them); 0 for plain prompts."""
    prompts: int = 1
    media_parts: int = 0
    media_tokens: int = 0
    """Configured or dimension-derived cost of image and audio parts."""
    category: Category = "prose"
    rag: bool = False
    """Retrieval headers are present. A mark, not a category."""
    tools: bool = False
    """Tool definitions are present: chat templates add a preamble for them."""


class FormPart(Record, frozen=True, kw_only=True):
    """One part of a form body; its content is `body[start:end]`."""

    name: str
    start: int
    end: int
    filename: str | None = None
    content_type: bytes | None = None


class BodyFacts(Record, frozen=True, kw_only=True):
    """What the gateway reads of a request body; the bytes themselves stay untouched."""

    model: str
    measure: Measure
    stream: bool = False
    include_usage: bool | None = None
    """The client's stream_options.include_usage; None when it did not say."""
    has_stream_options: bool = False
    cap_tokens: int | None = None
    """The largest of the limits that the endpoint's engines read; None when absent."""
    cap_field: str | None = None
    sequences_per_prompt: int = 1
    """max(n, best_of)."""
    steering_fields: tuple[str, ...] = ()
    """Top-level fields that steer an engine and must be removed."""
    previous_response_id: str | None = None
    members: Mapping[str, Raw] = {}
    """The body's top-level members as sent, views into it; none of a form."""
    places: tuple[tuple[str, int, int, int], ...] = ()
    """Where the members lie, where that is known already: name, starts of key and value, end."""
    unknown_bytes: int = 0
    """Of the measure's text, what stands where the gateway knows of no text."""
    parts: tuple[FormPart, ...] = ()
    """Of a form, those that travel; nothing of any other body."""


class LengthEstimate(Record, frozen=True, kw_only=True):
    """The three output figures and what follows from them, in tokens (pipeline.md)."""

    category: Category
    text_bytes: int
    ratio: float
    """c-hat, mean bytes per token of the category."""
    ratio_conservative: float
    """c* = c-hat - gamma sigma-hat (token-budget paper, eq. 5)."""
    template_tokens: int
    input_tokens: int
    """L_in of the longest single prompt, conservative, template and media included."""
    input_tokens_total: int
    """L_in summed over the batch."""
    input_tokens_lowest: int
    """Lowest plausible L_in of the longest prompt: bytes/(c + 3 sigma); refusing needs this."""
    cap_tokens: int | None
    """The client's own limit; None when absent (the window's rest)."""
    expected_output_tokens: int
    """q_out: online .95 quantile of completion tokens."""
    output_tokens: int
    """L_out = min(cap, q_out), or the cap itself under `output_estimate: cap`."""
    fit_tokens: int
    """L_fit = longest prompt + L_out: what the boundary compares."""
    cost_tokens: int
    """L_cost = sum of prompts + sequences x L_out."""
    sequences: int


class Plan(Record, frozen=True, kw_only=True):
    """Where the request should go, before any work. Pools are indices by window."""

    pool: int
    alternates: tuple[int, ...]
    """Pools that could serve it instead, best first (load-aware spillover)."""
    reason: str
    compress: bool = False


class Ask(Record, frozen=True, kw_only=True):
    """What admission is asked for, in one atomic call."""

    lease_id: str
    """The gateway's own, never a client's: two requests may bear one request id."""
    model: str
    entitlement: str
    pool: int
    alternates: tuple[int, ...]
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    """What `cost_tokens` take of the engines' KV cache."""


class Limits(Record, frozen=True, kw_only=True):
    """What an entitlement may still do, for x-ratelimit-*; `requests` there are sequences."""

    sequences: int
    sequences_free: int
    sequences_reset_s: float
    tokens: int
    """Depth of the token bucket; 0 where no rate is set."""
    tokens_free: int
    tokens_reset_s: float


class Lease(Record, frozen=True, kw_only=True):
    """The one lease of a request; settled exactly once."""

    id: str
    model: str
    entitlement: str
    pool: int
    spilled: bool
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    weight: float = 0.0
    """w_e when it was issued; 0 where nothing is managed."""
    contended: bool = False
    """Its pool was full: an engine will queue it."""
    protected: bool = False
    """Within a reserved baseline: others give way when it waits."""
    would_deny: str = ""
    """Observe mode: what it would have been refused for."""
    limits: Limits | None = None
    issued_unix_s: float = 0.0
    """By the store's clock."""


class Prompt(Record, frozen=True, kw_only=True):
    """The final body, after compression or its refusal."""

    body: bytes
    compressed: str = "none"
    """`none` or `12043->8110`, as in the x-sluice-compressed header."""
    not_compressed: str = ""
    """Why a prompt that should have been compressed was not."""
    only_pool: int | None = None
    """The pool a compressed body is for; every other gets the client's own."""
    kept_share: float = 1.0
    """Of the text's bytes."""


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


class Observation(Record, frozen=True, kw_only=True):
    """What a served request teaches the estimator (settle stage)."""

    endpoint: str
    tenant: str
    measure: Measure
    prompt_tokens: int | None
    """usage.prompt_tokens as reported, unchecked; None when missing."""
    completion_tokens: int | None
    sequences: int
    output_censored: bool
    """True when the answer was cut (client left, cap reached): only a lower bound."""
    learn_ratio: bool = True
    """False for compressed requests: they stay out of the EMA."""


class RequestHead(Record, frozen=True, kw_only=True):
    """What the gateway reads of a request's headers."""

    key_digest: bytes | None = None
    """SHA-256 of the API key as presented; None without one. The key itself goes no further."""
    request_id: str | None = None
    """The client's own, when it is usable."""
    category: str | None = None
    """What x-sluice-category names, unchecked."""
    compress: bool = True
    """False where x-sluice-compress says off."""
    read_timeout_s: float | None = None
    """How long the client says it waits for an answer (x-stainless-read-timeout)."""
    json_body: bool = True
    """The content type is JSON, or not given."""
    form_body: bool = False
    """The content type is multipart/form-data."""
    plain_body: bool = True
    """No content encoding."""
    forwarded: bytes = b""
    """Headers that travel to the engine, as lines (`gateway.policy.response.header_lines`)."""


class Incoming(Record, frozen=True, kw_only=True):
    """A client's request as it came in, body read."""

    request_id: str
    """The client's own x-request-id, or the gateway's."""
    lease_id: str
    """Unique to this request whatever the client sends."""
    endpoint: Endpoint
    head: RequestHead
    body: bytes
    received_s: float
    """Monotonic."""
    received_unix_s: float


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
