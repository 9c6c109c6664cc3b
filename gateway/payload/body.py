"""Read a request body: one pass finds its members, one counts its text and media.

`read_body` refuses bodies that cannot be served and returns the facts that later stages decide on.
It never changes the bytes. Rules:
- A body is one JSON object in UTF-8: no byte order mark, nothing after it, no unpaired
  surrogates, no repeated top-level names, no nesting deeper than the interpreter's
  recursion limit (about 1,000; msgspec counts it in C, so a hostile body costs microseconds).
- The only error raised is BadRequest, which names the field.
- Each endpoint's row of `READERS` turns its body into a Measure: single prompts, batches, pairs,
  token ids.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from gateway.errors import BadRequest
from gateway.payload import members, schema
from gateway.payload.counting import (
    MEDIA_TOKENS,
    Tally,
    classify,
    has_retrieval_headers,
    sample,
)
from gateway.payload.members import (
    ADAPTER_FIELD,
    NOT_TEXT,
    known_only,
    steering,
    unknown_bytes,
    utf8_length,
)
from gateway.payload.multipart import read_form
from gateway.payload.schema import (
    MAX_CHOICES,
    MAX_MODEL_CHARS,
    CountedBody,
    invalid,
    missing,
    undecodable,
)
from gateway.records.endpoint import Endpoint
from gateway.records.request import BodyFacts, Measure

MAX_TOKEN_LIMIT = 2**31
LOOP_US: Final = 5_000.0
"""What the event loop may spend on one body; another process reads what takes longer."""
LIGHT_BYTES: Final = 64 * 1024
"""A body whose members are all known takes less than that, whatever is in it."""
HEAVY_BYTES: Final = 1024 * 1024
"""A larger body is not even counted on the event loop."""
_decode_lora = msgspec.json.Decoder(str | None).decode


class TakesLong(Exception):
    """Reading the body would take longer than the caller allows."""


def read_body(
    endpoint: Endpoint,
    raw: bytes,
    *,
    media_tokens: int = MEDIA_TOKENS,
    content_types: Sequence[bytes] = (),
    limit_us: float | None = None,
) -> BodyFacts:
    """Facts of a body sent to `endpoint`; raises BadRequest.

    `media_tokens` is the cost of a media part of unknown dimensions. `content_types` are the
    values of the request's content-type headers; only forms need them. Raises TakesLong if it
    has unknown members that may take longer than `limit_us`.
    """
    if endpoint.multipart:
        return read_form(raw, content_types)
    shape = endpoint.body or endpoint.name
    decode, decode_lax, count, known = READERS[shape]
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
            if limit_us is not None and of_any_us(raw) > limit_us:
                raise TakesLong from None
            plain, nested = known_only(shape, named)
            body = decode_lax(plain)
            unknown += nested
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise undecodable(error) from None
    model = body.model
    if model and len(model) > MAX_MODEL_CHARS:
        raise invalid("model", f"longer than {MAX_MODEL_CHARS} characters.")
    if not model or model.isspace():
        raise missing("model")
    measure = count(body, Tally(media_tokens))
    if unknown:
        measure = msgspec.structs.replace(
            measure,
            text_bytes=measure.text_bytes + unknown,
            longest_text_bytes=measure.longest_text_bytes + unknown,
        )
    return _facts(body, measure, named, unknown)


def _duplicate(names: list[str]) -> BadRequest:
    seen: set[str] = set()
    # `add` returns None: the first name already seen is the one to report.
    name = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return BadRequest(
        f"Duplicate key '{name[:64]}' in the request body.",
        reason="duplicate_key",
        param=name[:64],
    )


def _facts(body: schema.Body, measure: Measure, named: members.Members, unknown: int) -> BodyFacts:
    """What a body asks for besides its prompt, checked."""
    steered, lora = steering(named), ""
    if ADAPTER_FIELD in steered:
        try:
            lora = _decode_lora(named[ADAPTER_FIELD]) or ""
        except msgspec.ValidationError:
            raise invalid(ADAPTER_FIELD, "expected the name of one LoRA adapter.") from None
    if not isinstance(body, schema.Generating):
        return BodyFacts(
            model=body.model, measure=measure, lora=lora, steering_fields=steered, members=named
        )
    if isinstance(body, schema.ResponsesBody) and body.background:
        raise invalid(
            "background",
            "responses are not run in the background here. Leave it out, and send "
            "'stream': true to get the answer as it is made.",
        )
    cap: int | None = None
    for name in body.limits:
        limit: int | None = getattr(body, name)
        if limit is None:
            continue
        if not 1 <= limit <= MAX_TOKEN_LIMIT:
            side, bound = ("below", ">= 1") if limit < 1 else ("above", f"<= {MAX_TOKEN_LIMIT}")
            extreme = "minimum" if limit < 1 else "maximum"
            raise BadRequest(
                f"Invalid '{name}': integer {side} {extreme} value. "
                f"Expected a value {bound}, but got {_shown(limit)} instead.",
                reason="invalid_value",
                code=f"integer_{side}_{extreme[:3]}_value",
                param=name,
            )
        cap = limit if cap is None else max(cap, limit)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value is not None and not 1 <= value <= MAX_CHOICES:
            raise invalid(name, f"expected 1 to {MAX_CHOICES}, but got {_shown(value)}.")
    options = body.stream_options
    return BodyFacts(
        model=body.model,
        measure=measure,
        lora=lora,
        stream=body.stream is True,
        include_usage=options.include_usage if isinstance(options, schema.StreamOptions) else None,
        has_stream_options=options is not UNSET,
        cap_tokens=cap,
        sequences_per_prompt=max(body.n or 1, body.best_of or 1),
        choices_per_prompt=body.n or 1,
        steering_fields=steered,
        previous_response_id=body.previous_response_id,
        members=named,
        unknown_bytes=unknown,
    )


def facts_of(request: CountedBody) -> BodyFacts:
    """Facts of a request without its text. Raises BadRequest where its length is not given."""
    if request.input_tokens is not None:
        measure = Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=request.input_tokens,
            longest_exact_tokens=request.input_tokens,
        )
    elif request.text_bytes is not None:
        measure = Measure(
            text_bytes=request.text_bytes, longest_text_bytes=request.text_bytes, messages=1
        )
    else:
        raise missing("input_tokens")
    return BodyFacts(
        model=request.model,
        measure=measure,
        cap_tokens=request.max_tokens,
        sequences_per_prompt=request.n,
    )


def _shown(value: int) -> str:
    # Printing an integer of thousands of digits is slow or an error.
    return str(value) if abs(value) < 2**63 else "a huge number"


MAX_BATCH = 2048
"""Most prompts, documents or pairs in one request."""


def _single(tally: Tally) -> Measure:
    """The measure of a request that is one prompt."""
    whole, size = tally.whole()
    return Measure(
        text_bytes=size,
        longest_text_bytes=size,
        messages=tally.messages,
        media_parts=tally.media_parts,
        media_tokens=tally.media_tokens,
        category=classify(sample(whole)),
        rag=has_retrieval_headers(tally.texts),
        tools=tally.tools,
    )


def _chat(body: schema.ChatBody, tally: Tally) -> Measure:
    tally.add_messages(body.messages)
    tally.add_tools(body.tools, "tools")
    tally.add_tools(body.functions, "functions")
    return _single(tally)


def _anthropic(body: schema.MessagesBody, tally: Tally) -> Measure:
    tally.add_system(body.system)
    tally.add_messages(body.messages)
    tally.add_tools(body.tools, "tools")
    return _single(tally)


def _responses(body: schema.ResponsesBody, tally: Tally) -> Measure:
    if body.instructions:
        tally.add_items(body.instructions, "instructions")
    tally.add_items(body.input, "input")
    tally.add_tools(body.tools, "tools")
    return _single(tally)


def _completions(body: schema.CompletionsBody, tally: Tally) -> Measure:
    suffix = body.suffix or ""
    if len(body.prompt_embeds) > len(b"null"):
        tally.add_json(body.prompt_embeds, "prompt_embeds")
        if not body.prompt:
            return _single(tally)
    if body.prompt is None:
        raise missing("prompt")
    return _prompts(body.prompt, "prompt", tally, suffix)


def _embeddings(body: schema.EmbeddingsBody, tally: Tally) -> Measure:
    has_data = len(body.data) > len(b"null")
    if (body.input is not None) + (body.messages is not None) + has_data > 1:
        raise invalid("input", "send one of 'input', 'messages' and 'data'.")
    if body.messages is not None:
        tally.add_messages(body.messages)
        return _single(tally)
    if has_data:
        tally.add_json(body.data, "data")
        return _single(tally)
    if body.input is None:
        raise missing("input")
    return _prompts(body.input, "input", tally)


def _tokenize(body: schema.TokenizeBody, tally: Tally) -> Measure:
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid("prompt", "send one of 'prompt' and 'messages'.")
        tally.add_messages(body.messages)
        tally.add_tools(body.tools, "tools")
        return _single(tally)
    if body.prompt is None:
        raise missing("prompt")
    return _prompts(body.prompt, "prompt", tally)


def _cohere_embed(body: schema.CohereEmbedBody, tally: Tally) -> Measure:
    sizes = tally.add_side(body.texts, "texts") + tally.add_side(body.inputs, "inputs")
    for image in body.images or ():
        tally.add_image(image)
        sizes.append(0)
    if not sizes:
        raise missing("texts")
    _check_batch("texts", len(sizes))
    return _batch(sum(sizes), max(sizes), len(sizes), tally)


def _prompts(prompt: schema.Prompt, param: str, tally: Tally, suffix: str = "") -> Measure:
    """A text, texts, token ids, or lists of token ids; never mixed."""
    if isinstance(prompt, str):
        tally.texts.append(prompt)
        if suffix:
            tally.texts.append(suffix)
        return _single(tally)
    if not prompt:
        raise missing(param)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise invalid(param, "texts, token ids and lists of token ids cannot be mixed.")
    if kinds <= {int, list}:
        ids = [prompt] if kinds == {int} else prompt
        _check_batch(param, len(ids))
        lengths = [len(each) for each in ids if isinstance(each, list)]
        if not all(lengths):
            raise invalid(param, "a list of token ids is empty.")
        return Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=sum(lengths),
            longest_exact_tokens=max(lengths),
            prompts=len(ids),
            category="mixed",
        )
    _check_batch(param, len(prompt))
    tally.texts = [text for text in prompt if isinstance(text, str)]
    extra = utf8_length(suffix)
    sizes = [utf8_length(text) + extra for text in tally.texts]
    return _batch(sum(sizes), max(sizes), len(sizes), tally)


def _rerank(body: schema.RerankBody, tally: Tally) -> Measure:
    query = tally.add_document(body.query, "query")
    sizes = tally.add_side(body.documents, "documents")
    _check_batch("documents", len(sizes))
    total = query * len(sizes) + sum(sizes)
    return _batch(total, query + max(sizes), len(sizes), tally)


def _score(body: schema.ScoreBody, tally: Tally) -> Measure:
    first, left = _side(body, tally, ("text_1", "queries", "data_1"))
    second, right = _side(body, tally, ("text_2", "documents", "items", "data_2"))
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise invalid(second, f"expected as many texts as in '{first}', or one of those.")
    _check_batch(second, len(right))
    pairs = [a + b for a, b in zip(left, right, strict=True)]
    return _batch(sum(pairs), max(pairs), len(pairs), tally)


def _side(body: schema.ScoreBody, tally: Tally, names: tuple[str, ...]) -> tuple[str, list[int]]:
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise missing(names[0])
    if len(given) > 1:
        raise invalid(given[1], f"send one of '{given[0]}' and '{given[1]}'.")
    side: schema.Side = getattr(body, given[0])
    return given[0], tally.add_side(side, given[0])


def _check_batch(param: str, size: int) -> None:
    if size > MAX_BATCH:
        raise invalid(param, f"at most {MAX_BATCH} entries in one request, but got {size}.")


def _batch(total: int, longest: int, prompts: int, tally: Tally) -> Measure:
    return Measure(
        text_bytes=total,
        longest_text_bytes=longest,
        prompts=prompts,
        media_parts=tally.media_parts,
        media_tokens=tally.media_tokens,
        category=classify(sample(tally.whole()[0])),
    )


# A decoder returns the body type that its counter takes. The table cannot say so, hence Any.
_Decode = Callable[[bytes], Any]
_Count = Callable[[Any, Tally], Measure]


_Reader = tuple[_Decode, _Decode, _Count, frozenset[str]]


def _reader(body_type: type[schema.Body], count: _Count) -> _Reader:
    known = NOT_TEXT.union(body_type.__struct_fields__)
    lax = msgspec.json.Decoder(body_type, strict=False).decode
    return msgspec.json.Decoder(body_type).decode, lax, count, known


READERS: dict[str, _Reader] = {
    "chat": _reader(schema.ChatBody, _chat),
    "completions": _reader(schema.CompletionsBody, _completions),
    "embeddings": _reader(schema.EmbeddingsBody, _embeddings),
    "responses": _reader(schema.ResponsesBody, _responses),
    "messages": _reader(schema.MessagesBody, _anthropic),
    "count_tokens": _reader(schema.MessagesBody, _anthropic),
    "tokenize": _reader(schema.TokenizeBody, _tokenize),
    "rerank": _reader(schema.RerankBody, _rerank),
    "score": _reader(schema.ScoreBody, _score),
    "detokenize": _reader(schema.DetokenizeBody, lambda b, t: _prompts(b.tokens, "tokens", t)),
    "cohere_embed": _reader(schema.CohereEmbedBody, _cohere_embed),
}
"""Endpoint name -> (decode, decode laxly, count, top-level members that are known)."""


# -- how long reading takes


def of_known_us(raw: bytes) -> float:
    """How long reading takes at most a body whose messages and parts have no unknown members.

    Counting costs a thousandth of reading. The weights are what the slowest bodies took on one
    processor of 2026, interpreted; separators inside of texts count like others, so a text of code
    is estimated at several times what it takes.
    """
    return 3.0 * raw.count(b"{") + 0.25 * (raw.count(b",") + raw.count(b"[")) + 0.004 * len(raw)


def of_any_us(raw: bytes) -> float:
    """The same of a body that may have unknown members, each of which is looked at."""
    return of_known_us(raw) + 1.2 * raw.count(b":")


def is_heavy(raw: bytes, *, form: bool) -> bool:
    """Whether the event loop should leave a body to another process before it looks into it.

    Of a form only what is large is: the rest of what is read of one is bounded.
    """
    size = len(raw)
    if size <= LIGHT_BYTES or form:
        return size > 4 * HEAVY_BYTES
    return size > HEAVY_BYTES or of_known_us(raw) > LOOP_US
