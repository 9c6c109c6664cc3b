"""Classify the members of a body by name: steering, known, or counted by their bytes.

- Clients may not set members that steer an engine (its scheduling, cache, rank, session, request
  id or code to run): the gateway removes them.
- An engine's chat template may render any other member of a body or of a message. Known members
  are those that `gateway.policy.request.counting` counts and those that never enter a prompt:
  sampling parameters, the answer's format, metadata. Every other member counts by its bytes.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Raw

from gateway.policy.request import schema
from gateway.policy.request.members import compact, utf8_length

STEERING_FIELDS: Final = frozenset(
    {
        "priority",
        "cache_salt",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "kv_transfer_params",
        "request_id",
        "rid",
        "session_params",
        "custom_logit_processor",
        "vllm_xargs",
    }
)
_STEERING_PREFIXES: Final = ("bootstrap_", "x-gateway-")


def steering(names: Iterable[str]) -> tuple[str, ...]:
    """The top-level names that steer an engine, in the body's order."""
    joined = "\n" + "\n".join(names)
    if (
        STEERING_FIELDS.isdisjoint(names)
        and "\nbootstrap_" not in joined
        and "\nx-gateway-" not in joined
    ):
        return ()
    return tuple(n for n in names if n in STEERING_FIELDS or n.startswith(_STEERING_PREFIXES))


NOT_TEXT: Final = STEERING_FIELDS | {
    *("model", "stream", "stream_options", "n", "best_of", "seed", "stop", "stop_sequences"),
    *("stop_token_ids", "user", "metadata", "temperature", "top_p", "top_k", "min_p", "top_a"),
    *("typical_p", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
    *("max_completion_tokens", "max_output_tokens", "max_tokens", "min_tokens"),
    *("max_tool_calls", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "bad_words", "allowed_token_ids"),
    *("truncate_prompt_tokens", "truncation", "add_special_tokens", "add_generation_prompt"),
    *("continue_final_message", "no_stop_trim", "use_beam_search", "early_stopping"),
    *("response_format", "text", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
    *("structured_outputs", "structural_tag", "regex", "ebnf", "json_schema", "tool_choice"),
    *("function_call", "parallel_tool_calls", "reasoning", "reasoning_effort", "thinking"),
    *("include_reasoning", "separate_reasoning", "stream_reasoning", "verbosity"),
    *("modalities", "store", "background", "include", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "previous_response_id"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_hidden_states"),
    *("logits_processors", "mm_processor_kwargs", "lora_path", "encoding_format"),
    *("dimensions", "input_type", "normalize", "activation", "use_activation", "top_n"),
    *("return_documents", "max_tokens_per_doc", "voice", "speed", "language"),
}
"""Top-level members that no engine puts into a prompt."""

Known = Mapping[str, "Known | None"]
"""Known members of an object -> known members of their own objects, if those are checked."""


def _fields(of: type[msgspec.Struct], **inner: Known) -> Known:
    return {name: inner.get(name) for name in of.__struct_fields__}


_FUNCTION: Final = _fields(schema.Function)
# Parts nest three deep at most: a text in a search result in a tool's result.
_PART: Final = _fields(
    schema.ContentPart, content=_fields(schema.ContentPart, content=_fields(schema.ContentPart))
)
_MESSAGE: Final = _fields(
    schema.Message,
    content=_PART,
    tool_calls=_fields(schema.ToolCall, function=_FUNCTION),
    function_call=_FUNCTION,
)
_ITEM: Final = _fields(schema.Item, content=_PART, output=_PART, summary=_PART)
_DOCUMENT: Final = _fields(schema.RerankDocument, content=_PART)
_IN_LISTS: Final = frozenset({"content", "output", "summary"})
"""Members that hold parts only as a list; a bare object there counts as a whole."""
_OF_SCORE: Final = ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")
_WITHIN: Final[Mapping[str, Mapping[str, Known]]] = {
    "responses": {"input": _ITEM, "instructions": _ITEM},
    "messages": {"messages": _MESSAGE, "system": _PART},
    "count_tokens": {"messages": _MESSAGE, "system": _PART},
    "rerank": {"query": _DOCUMENT, "documents": _DOCUMENT},
    "score": dict.fromkeys(_OF_SCORE, _DOCUMENT),
    **{name: {"messages": _MESSAGE} for name in ("chat", "embeddings", "tokenize", "speech")},
}
_NOTHING: Final = frozenset({b"null", b"true", b"false", b"[]", b"{}", b'""'})
_NAME_CHARS: Final = 64
"""A longer name of a member counts as text."""
_elements = msgspec.json.Decoder(list[Raw]).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


def unknown_bytes(members: Mapping[str, Raw], known: Collection[str]) -> int:
    """Bytes of text in a body's top-level members that are not `known`."""
    names = members.keys() - known
    return sum(_bytes_of(name, members[name], name) for name in names) if names else 0


def known_only(endpoint_name: str, members: Mapping[str, Raw]) -> tuple[bytes, int]:
    """Strip a body's unknown members at every level; returns the body and the bytes stripped.

    `members` are the body's top-level members. A value of an unexpected shape stays as it is.
    """
    kept = dict(members)
    total = 0
    for name, known in _WITHIN.get(endpoint_name, {}).items():
        if name in kept:
            kept[name], size = _split(kept[name], known, name)
            total += size
    return msgspec.json.encode(kept), total


def _split(raw: Raw, known: Known, where: str) -> tuple[Raw, int]:
    """Strip unknown members from an object, or from each object in a list; count their bytes."""
    first = bytes(memoryview(raw)[:1])
    if first == b"{":
        return _split_object(raw, known, where)
    if first != b"[":
        return raw, 0
    elements = _elements(raw)
    total = 0
    for index, element in enumerate(elements):
        if bytes(memoryview(element)[:1]) == b"{":
            elements[index], size = _split_object(element, known, f"{where}[{index}]")
            total += size
    return (Raw(msgspec.json.encode(elements)), total) if total else (raw, 0)


def _split_object(raw: Raw, known: Known, where: str) -> tuple[Raw, int]:
    total = 0
    kept = {}
    changed = False
    for name, value in _members(raw).items():
        if name not in known:
            total += _bytes_of(name, value, f"{where}.{name[:64]}")
            changed = True
            continue
        inner = known[name]
        kept[name] = value
        if inner is None or (name in _IN_LISTS and bytes(memoryview(value)[:1]) != b"["):
            continue
        kept[name], size = _split(value, inner, f"{where}.{name}")
        total += size
    return (Raw(msgspec.json.encode(kept)), total) if changed or total else (raw, 0)


def _bytes_of(name: str, value: Raw, where: str) -> int:
    size = utf8_length(name) if len(name) > _NAME_CHARS else 0
    # The length check comes first because it is cheap, and most members are flags.
    if len(value) < 6 and bytes(value) in _NOTHING:
        return size
    return size + utf8_length(compact(value, where))
