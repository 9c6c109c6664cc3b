"""A request as it came in: who asks, its head, and what is read of its body."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Raw

from gateway.records.endpoint import Endpoint
from gateway.records.record import Record

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


class Measure(Record, frozen=True, kw_only=True):
    """What is counted in a request body (docs/concepts/pipeline.md, "What is counted").

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
    """Headers that travel to the engine, as lines (`gateway.policy.request.header_lines`)."""


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
