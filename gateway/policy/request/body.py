"""Read a request body: one pass finds its members, one counts its text and media.

`read_body` refuses bodies that cannot be served and returns the facts that later stages decide on.
It never changes the bytes. Rules:
- A body is one JSON object in UTF-8: no byte order mark, nothing after it, no unpaired
  surrogates, no repeated top-level names, no nesting deeper than the interpreter's
  recursion limit (about 1,000; msgspec counts it in C, so a hostile body costs microseconds).
- The only error raised is BadRequest, which names the field.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from gateway.errors import BadRequest
from gateway.policy.request import members, schema
from gateway.policy.request.counting import MEDIA_TOKENS, Tally
from gateway.policy.request.fields import known_only, unknown_bytes
from gateway.policy.request.fields import steering as steering_of
from gateway.policy.request.measures import READERS
from gateway.policy.request.multipart import read_form
from gateway.policy.request.refusals import invalid, missing, undecodable
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts, Measure

MAX_MODEL_CHARS = 256
MAX_TOKEN_LIMIT = 2**31
MAX_CHOICES = 128


def read_body(
    endpoint: Endpoint,
    raw: bytes,
    *,
    media_tokens: int = MEDIA_TOKENS,
    content_types: Sequence[bytes] = (),
) -> BodyFacts:
    """Facts of a body sent to `endpoint`; raises BadRequest.

    `media_tokens` is the cost of a media part of unknown dimensions. `content_types` are the
    values of the request's content-type headers; only forms need them.
    """
    if endpoint.multipart:
        return read_form(raw, content_types)
    decode, count, known = READERS[endpoint.name]
    if not raw:
        raise BadRequest("The request body is empty.", reason="empty_body")
    try:
        if not raw.isascii():
            raw.decode()
        pairs = members.pairs(raw)
        named = {key.name: value for key, value in pairs.items()}
        if len(named) < len(pairs):
            raise _duplicate([key.name for key in pairs])
        unknown = unknown_bytes(named, known)
        try:
            body = decode(raw)
        except msgspec.ValidationError:
            plain, nested = known_only(endpoint.name, named)
            body = decode(plain)
            unknown += nested
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise undecodable(error) from None
    model = body.model
    if not model or len(model) > MAX_MODEL_CHARS or model.isspace():
        raise _bad_model(model)
    tally = Tally(media_tokens)
    measure = count(body, tally)
    if unknown:
        measure = msgspec.structs.replace(
            measure,
            text_bytes=measure.text_bytes + unknown,
            longest_text_bytes=measure.longest_text_bytes + unknown,
        )
    steering = steering_of(named)
    if isinstance(body, schema.Generating):
        return _generating_facts(body, measure, steering, named, unknown)
    return BodyFacts(model=model, measure=measure, steering_fields=steering, members=named)


def _generating_facts(
    body: schema.Generating,
    measure: Measure,
    steering: tuple[str, ...],
    named: members.Members,
    unknown: int,
) -> BodyFacts:
    if isinstance(body, schema.ResponsesBody) and body.background:
        raise invalid(
            "background",
            "responses are not run in the background here. Leave it out, and send "
            "'stream': true to get the answer as it is made.",
        )
    cap, field = None, None
    for name, value in _limits(body):
        if value is not None:
            if not 1 <= value <= MAX_TOKEN_LIMIT:
                raise _bad_limit(name, value)
            if cap is None or value > cap:
                cap, field = value, name
    options = body.stream_options
    return BodyFacts(
        model=body.model,
        measure=measure,
        stream=body.stream is True,
        include_usage=options.include_usage if isinstance(options, schema.StreamOptions) else None,
        has_stream_options=options is not UNSET,
        cap_tokens=cap,
        cap_field=field,
        sequences_per_prompt=(
            1 if body.n is None and body.best_of is None else _choices(body.n, body.best_of)
        ),
        steering_fields=steering,
        previous_response_id=body.previous_response_id,
        members=named,
        unknown_bytes=unknown,
    )


def _limits(body: schema.Generating) -> tuple[tuple[str, int | None], ...]:
    """The output limits that the endpoint's engines read; the caller applies the largest."""
    if isinstance(body, schema.ChatBody):
        return (
            ("max_completion_tokens", body.max_completion_tokens),
            ("max_tokens", body.max_tokens),
        )
    if isinstance(body, schema.ResponsesBody):
        return (("max_output_tokens", body.max_output_tokens),)
    if isinstance(body, schema.CompletionsBody | schema.MessagesBody):
        return (("max_tokens", body.max_tokens),)
    return ()


def _choices(n: int | None, best_of: int | None) -> int:
    for name, value in (("n", n), ("best_of", best_of)):
        if value is not None and not 1 <= value <= MAX_CHOICES:
            raise invalid(name, f"expected 1 to {MAX_CHOICES}, but got {_shown(value)}.")
    return max(n or 1, best_of or 1)


def _bad_limit(name: str, value: int) -> BadRequest:
    if value < 1:
        return BadRequest(
            f"Invalid '{name}': integer below minimum value. "
            f"Expected a value >= 1, but got {_shown(value)} instead.",
            reason="invalid_value",
            code="integer_below_min_value",
            param=name,
        )
    return BadRequest(
        f"Invalid '{name}': integer above maximum value. "
        f"Expected a value <= {MAX_TOKEN_LIMIT}, but got {_shown(value)} instead.",
        reason="invalid_value",
        code="integer_above_max_value",
        param=name,
    )


def _shown(value: int) -> str:
    # Printing an integer of thousands of digits is slow or an error.
    return str(value) if abs(value) < 2**63 else "a huge number"


def _bad_model(model: str) -> BadRequest:
    if len(model) > MAX_MODEL_CHARS:
        return invalid("model", f"longer than {MAX_MODEL_CHARS} characters.")
    return missing("model")


def _duplicate(names: list[str]) -> BadRequest:
    seen: set[str] = set()
    # `add` returns None: the first name already seen is the one to report.
    name = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return BadRequest(
        f"Duplicate key '{name[:64]}' in the request body.",
        reason="duplicate_key",
        code="duplicate_key",
        param=name[:64],
    )
