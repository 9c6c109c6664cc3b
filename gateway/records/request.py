"""A request as it came in: its principal, its head, and the facts read from its body."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Raw

from gateway.records.batch import BatchItem
from gateway.records.endpoint import Endpoint
from gateway.records.limit import UNLIMITED, KeyLimits, Limit
from gateway.records.record import NO_TRACE, Record, Trace

CATEGORIES = ("prose", "code", "json", "cjk", "other-script", "mixed")
Category = Literal["prose", "code", "json", "cjk", "other-script", "mixed"]


class TenantKey(Record, frozen=True, kw_only=True):
    """A key of a tenant, which may open several models; see `Keyring.enter`."""

    tenant: str
    name: str
    sha256: bytes
    models: frozenset[str] | None = None
    """The only models that it opens; None for all of its entitlements'."""
    entitlements: tuple[str, ...] = ()
    """Those it uses, in order of preference."""
    only_listed: bool = False
    """Whether it uses no further entitlements of its tenant."""
    queue_status: bool = False
    expires_unix_s: float | None = None
    suspended: bool = False
    stated: KeyLimits = UNLIMITED
    """Its own limits as the file or an administrator states them."""
    limits: tuple[Limit, ...] = ()
    """The same as admission counts them; those of its tenant and entitlements come on top."""


class Principal(Record, frozen=True, kw_only=True):
    """The identity behind an API key. The token pool, not the principal, knows its limits.

    A tenant's key may open several models: which entitlement its request uses is known once the
    model is. Until then its principal has no entitlement, and `choices`.
    """

    entitlement: str
    """Empty until it is chosen."""
    tenant: str
    key: str = ""
    """Name of a tenant's key; empty for a key of an entitlement's own."""
    choices: Mapping[str, "tuple[Principal, ...]"] = {}
    """By model, what the key opens, in order of preference; empty once one is chosen."""
    only: frozenset[str] | None = None
    """The only models and LoRA adapters that a tenant's key opens; None for all."""
    behind: Mapping[str, "tuple[Principal, ...]"] = {}
    """With `only`: by model, what the key uses for its adapters."""
    service_class: str = "elastic"
    model: str | None = None
    """The only model this key may use; None for any model (open gateway)."""
    expires_unix_s: float | None = None
    """From this time on the gateway answers its keys with 403; None for never."""
    suspended: bool = False
    """The gateway answers its keys with 403 until an admin resumes the entitlement."""
    verdict: str = ""
    """`pending` or `degraded`: the gateway answers its requests with 503."""
    message: str = ""
    """The verdict in words."""
    of_cluster: bool = False
    """A cluster's controller grants it."""
    compress: bool = True
    """Whether its prompts may be compressed."""
    queue_status: bool = False
    """Whether its streams say how long they have to wait, if they do not ask for either."""
    trusted_usage: bool = False
    """Whether usage that another proxy reports teaches the tenant's estimates."""
    tokens_per_s: float = 0.0
    """Baseline token rate, used as the fairness weight; 0 if none is stated."""
    slo_ms: int = 0
    """Target time to first token; 0 for none."""
    slo_tpot_ms: float = 0.0
    """Target time per output token; 0 for none."""
    limits: tuple[Limit, ...] = ()
    """Of its key, its entitlement and its tenant, over all models."""

    def opens(self, model: str, adapter: str = "") -> bool:
        """Whether it may use a model, or a LoRA adapter of it."""
        if self.entitlement:
            return self.model is None or self.model == model
        return bool(self.of(model, adapter))

    def of(self, model: str, adapter: str = "") -> "tuple[Principal, ...]":
        """What a tenant's key uses for a model, or a LoRA adapter of it, in its order."""
        if not adapter or self.only is None:
            return self.choices.get(model, ())
        return self.behind.get(model, ()) if adapter in self.only else ()


OPEN = Principal(entitlement="open", tenant="open")
"""Principal of every request while no entitlement was ever entered."""


class Measure(Record, frozen=True, kw_only=True):
    """Counts taken from a request body (docs/concepts/pipeline.md, "What is counted").

    Bytes are UTF-8 lengths of the decoded text that the engine tokenizes.
    """

    text_bytes: int
    """Sum over all prompts of the batch."""
    longest_text_bytes: int
    """Text bytes of the longest single prompt."""
    exact_tokens: int = 0
    """Total length of prompts sent as token ids, which is exact."""
    longest_exact_tokens: int = 0
    messages: int = 0
    """Chat messages, each of which adds template tokens; 0 for plain prompts."""
    prompts: int = 1
    media_parts: int = 0
    media_tokens: int = 0
    """Cost of image and audio parts, configured or derived from their dimensions."""
    category: Category = "prose"
    rag: bool = False
    """Retrieval headers are present. A flag, not a category."""
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
    """Facts that the gateway reads from a request body; the bytes stay untouched."""

    model: str
    measure: Measure
    adapter: str = ""
    """The model's LoRA adapter that the request is for; "" for the model itself."""
    lora: str = ""
    """The LoRA adapter that a field of the body names beside the model; "" for none."""
    stream: bool = False
    include_usage: bool | None = None
    """The client's stream_options.include_usage; None if absent."""
    has_stream_options: bool = False
    cap_tokens: int | None = None
    """The largest output limit among the fields that engines read here; None if absent."""
    sequences_per_prompt: int = 1
    """max(n, best_of)."""
    choices_per_prompt: int = 1
    """n; best_of adds none to the answer."""
    steering_fields: tuple[str, ...] = ()
    """Top-level fields that control the engine and must be removed."""
    previous_response_id: str | None = None
    members: Mapping[str, Raw] = {}
    """The body's top-level members as sent (views into the body); empty for a form."""
    places: tuple[tuple[str, int, int, int], ...] = ()
    """(name, start of key, start of value, end) of each member; empty if not yet known."""
    unknown_bytes: int = 0
    """Bytes of the measured text that stand in members unknown to the gateway."""
    parts: tuple[FormPart, ...] = ()
    """Form parts that are forwarded; empty for other bodies."""


class Prompt(Record, frozen=True, kw_only=True):
    """The body to send, compressed or not."""

    body: bytes
    compressed: str = "none"
    """`none`, or lengths such as `12043->8110`, as in the x-sluice-compressed header."""
    not_compressed: str = ""
    """Why a prompt that should have been compressed was not."""
    only_pool: int | None = None
    """The only pool that gets the compressed body; other pools get the client's body."""
    kept_share: float = 1.0
    """Share of the text's bytes that compression kept."""


class RequestHead(Record, frozen=True, kw_only=True):
    """Facts that the gateway reads from a request's headers."""

    key_digest: bytes | None = None
    """SHA-256 of the presented API key, which itself is not passed on; None without a key."""
    token: bytes | None = None
    """The key itself if it may be a token (JWT), which has to be verified once; else None."""
    request_id: str | None = None
    """The client's own request id; None if absent or unusable."""
    category: str | None = None
    """Value of x-sluice-category, unchecked."""
    compress: bool | None = None
    """Whether x-sluice-compress is on or off; None if it is absent."""
    entitlement: str | None = None
    """Value of x-sluice-entitlement, unchecked."""
    queue_status: bool | None = None
    """Whether the stream shall say how long it has to wait; None: as its key states."""
    read_timeout_s: float | None = None
    """The client's own read timeout (x-stainless-read-timeout)."""
    json_body: bool = True
    """The content type is JSON, or absent."""
    form_body: bool = False
    """The content type is multipart/form-data."""
    plain_body: bool = True
    """No content encoding."""
    forwarded: bytes = b""
    """Header lines forwarded to the engine (`gateway.payload.head`)."""

    def __repr__(self) -> str:
        """Without anything that the client sent: a token must not reach a log."""
        return "RequestHead(...)"


class Incoming(Record, frozen=True, kw_only=True):
    """A client's request with its whole body."""

    request_id: str
    """The client's own x-request-id, or the gateway's."""
    lease_id: str
    """Unique to this request, whatever the client sends."""
    endpoint: Endpoint
    head: RequestHead
    body: bytes
    received_s: float
    """Monotonic clock."""
    received_unix_s: float
    trace: Trace = NO_TRACE
    batch: BatchItem | None = None
    """The item of a batch that it is; None of a client's own request."""
    principal: Principal | None = None
    """Who asks, of an item; None where its head says so."""
