"""Turn each endpoint's body into a Measure: single prompts, batches, pairs, token ids."""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.policy.request import schema
from gateway.policy.request.category import classify, has_retrieval_headers, sample
from gateway.policy.request.counting import Tally
from gateway.policy.request.fields import NOT_TEXT
from gateway.policy.request.members import utf8_length
from gateway.policy.request.refusals import invalid, missing
from gateway.records.request import Measure

MAX_BATCH = 2048
"""Most prompts, documents or pairs in one request."""


def _single(tally: Tally) -> Measure:
    """The measure of a request that is one prompt."""
    texts = tally.texts
    whole, size = tally.whole()
    return Measure(
        text_bytes=size,
        longest_text_bytes=size,
        messages=tally.messages,
        media_parts=tally.media_parts,
        media_tokens=tally.media_tokens,
        category=classify(sample(whole)),
        rag=has_retrieval_headers(texts),
        tools=tally.tools,
    )


def _chat(body: schema.ChatBody, tally: Tally) -> Measure:
    tally.add_messages(body.messages)
    if body.tools is not schema.ABSENT:
        tally.add_tools(body.tools, "tools")
    if body.functions is not schema.ABSENT:
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
    return _prompts(body.prompt, "prompt", tally, suffix)


def _embeddings(body: schema.EmbeddingsBody, tally: Tally) -> Measure:
    if body.messages is not None:
        if body.input is not None:
            raise invalid("input", "send one of 'input' and 'messages'.")
        tally.add_messages(body.messages)
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
    if kinds == {int}:
        return Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=len(prompt),
            longest_exact_tokens=len(prompt),
            category="mixed",
        )
    _check_batch(param, len(prompt))
    if kinds == {list}:
        lengths = [len(ids) for ids in prompt if isinstance(ids, list)]
        if not all(lengths):
            raise invalid(param, "a list of token ids is empty.")
        return Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=sum(lengths),
            longest_exact_tokens=max(lengths),
            prompts=len(prompt),
            category="mixed",
        )
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


def _reader(body_type: type[schema.Body], count: _Count) -> tuple[_Decode, _Count, frozenset[str]]:
    known = NOT_TEXT.union(body_type.__struct_fields__)
    return msgspec.json.Decoder(body_type).decode, count, known


READERS: dict[str, tuple[_Decode, _Count, frozenset[str]]] = {
    "chat": _reader(schema.ChatBody, _chat),
    "completions": _reader(schema.CompletionsBody, _completions),
    "embeddings": _reader(schema.EmbeddingsBody, _embeddings),
    "responses": _reader(schema.ResponsesBody, _responses),
    "messages": _reader(schema.MessagesBody, _anthropic),
    "count_tokens": _reader(schema.MessagesBody, _anthropic),
    "tokenize": _reader(schema.TokenizeBody, _tokenize),
    "rerank": _reader(schema.RerankBody, _rerank),
    "score": _reader(schema.ScoreBody, _score),
    "speech": _reader(schema.EmbeddingsBody, _embeddings),
}
"""Endpoint name -> (decode, count, top-level members that are known)."""
