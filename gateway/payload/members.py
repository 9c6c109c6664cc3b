r"""Find the members of a JSON body in one C pass, edit them by splicing, and classify them by name.

Finding:
- msgspec decodes the object as a mapping of `Key` to `Raw`. Keys compare by identity, so a
  repeated key appears twice instead of silently replacing the first. Keys are decoded:
  `"mod\u0065l"` is `model`.
- At most MAX_MEMBERS names are decoded, because each costs a Python call.
- A Raw value has its exact length. The lengths and the order of the keys locate every member
  in the original bytes, whatever the white space, without a JSON scanner in Python.

Editing, as splices into the client's original bytes:
- Unedited bytes stay as they are: white space, order, escapes, number spellings.
- Only top-level members are edited, including every occurrence of a repeated name.
- An edit that changes nothing returns the very same object.
- Inserting needs no scan: new members go right after the opening brace.

Classes: known members, and those that are counted by their bytes:
- An engine's chat template may render any other member of a body or of a message. Known members
  are those that `gateway.payload.counting` counts and those that never enter a prompt:
  sampling parameters, the answer's format, metadata. Every other member counts by its bytes.
  So does every member of a part or an item of an unknown kind.
- Opaque data in those is no text: an image in base64 costs less than its bytes.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw
from pydantic import TypeAdapter

from gateway.errors import BadRequest
from gateway.payload import schema
from gateway.payload.schema import undecodable

MAX_MEMBERS: Final = 1_000
MAX_NAME_CHARS: Final = 256
ADAPTER_FIELD: Final = "lora_path"
"""SGLang's second name of the model: the LoRA adapter that answers. The gateway reads it, checks
it against the key's rights as it does `model`, and writes its own."""

_BOTH: Final = ("priority", "cache_salt", "data_parallel_rank", "request_id", "session_id")
_VLLM: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "logits_processors")
_SGLANG: Final = (
    *("rid", "session_params", "extra_key", "routed_dp_rank", "disagg_prefill_dp_rank"),
    *("custom_logit_processor", "custom_params", "custom_labels", ADAPTER_FIELD),
)
STEERING_FIELDS: Final = frozenset((*_BOTH, *_VLLM, *_SGLANG))
"""They choose scheduling, cache, rank, session, request id, another engine to fetch from, labels of
the engine's metrics, or code to run: clients may not set them, and the gateway removes them. The
names are those of the engines' request classes; a test lists all fields of those."""
_STEERING_PREFIXES: Final = ("bootstrap_", "x-gateway-")
_names_left = 0
"""How many more names the decoder may decode in this call."""


class Key:
    """One member's decoded name; compares by identity."""

    __slots__ = ("name",)

    def __init__(self, _type: type, name: str) -> None:
        global _names_left  # noqa: PLW0603 - the decoder's hook knows nothing of its call
        if not _names_left:
            raise BadRequest(
                f"The request body has more than {MAX_MEMBERS:,} members at its top level. "
                "Send fewer.",
                reason="too_many_members",
            )
        if len(name) > MAX_NAME_CHARS:
            raise BadRequest(
                f"A member of the request body has a name of more than {MAX_NAME_CHARS} "
                "characters. Send its content as a value.",
                reason="too_complex",
            )
        _names_left -= 1
        self.name = name


class Member(NamedTuple):
    """Where one top-level member lies in the body: offsets of its key and of its value."""

    name: str
    key_start: int
    value_start: int
    value_end: int


Members = Mapping[str, msgspec.Raw]
"""Name -> value as sent, as a view into the body."""

# The class itself is the hook: calling it is a C-level constructor call.
_decode = msgspec.json.Decoder(dict[Key, msgspec.Raw], dec_hook=Key).decode
_OPENING = re.compile(rb"[ \t\n\r]*\{[ \t\n\r]*")
# White space and comma before a member, then its key up to where its value starts.
_KEY = re.compile(rb'[ \t\n\r,]*("(?:[^"\\]++|\\.)*+"[ \t\n\r]*:[ \t\n\r]*)')


def pairs(raw: bytes) -> dict[Key, msgspec.Raw]:
    """All top-level members in order, repeated ones included.

    Raises msgspec.DecodeError (not JSON), ValidationError (not an object), RecursionError, and
    BadRequest for more than MAX_MEMBERS, or a name above MAX_NAME_CHARS.
    """
    global _names_left  # noqa: PLW0603
    _names_left = MAX_MEMBERS
    return _decode(raw)


def by_name(raw: bytes) -> Members:
    """The members of a body that `read_body` has accepted, or of an edited copy of one."""
    return {key.name: value for key, value in pairs(raw).items()}


def locate(raw: bytes) -> list[Member]:
    """All top-level members with their offsets; raises as `pairs` does."""
    members: list[Member] = []
    match_key = _KEY.match
    at = body_start(raw)
    for key, value in pairs(raw).items():
        match = match_key(raw, at)
        if match is None:
            raise ValueError("msgspec and the key pattern disagree")
        key_start, value_start = match.span(1)
        at = value_start + len(value)
        members.append(Member(key.name, key_start, value_start, at))
    return members


def body_start(raw: bytes) -> int:
    """Offset of the first thing after the opening brace and its white space."""
    match = _OPENING.match(raw)
    if match is None:
        raise ValueError("not a JSON object")
    return match.end()


_DATA_CHARS: Final = 3_072
"""What data counts at least, unless it is shorter: about as much as an image of 768 tokens."""
_DATA_CHARS_PER_CHAR: Final = 1_024
"""Embeddings of one token, the smallest there are, take 4,096 characters of base64."""
_DATA: Final = re.compile(r'(?:data:[^",]{0,256},)?[A-Za-z0-9+/_=\\-]+')
_OTHER_KIND: Final[Mapping[str, None]] = {"type": None}

Pieces = list[bytes | memoryview]
"""Consecutive pieces of a body."""

_NONE: Mapping[str, bytes] = MappingProxyType({})
_NO_CUTS: Sequence[tuple[int, int, bytes]] = ()
_USAGE = {"include_usage": b"true"}
RUNNING_USAGE = "continuous_usage_stats"
"""vLLM's option for usage in every chunk of a stream."""


def edits(
    raw: bytes,
    *,
    replace: Mapping[str, bytes] = _NONE,
    insert: Mapping[str, bytes] = _NONE,
    remove: Collection[str] = (),
    places: Sequence[tuple[str, int, int, int]] = (),
) -> Pieces | None:
    """The edited body in pieces, most of them views into `raw`; None if nothing changes.

    Values are JSON bytes. `replace` sets a member's value and adds the member if it is absent.
    `insert` adds a member that the caller knows to be absent (or removes in the same call).
    `read_body` must have accepted `raw`: anything but a JSON object raises ValueError. `places`
    are its members as `locate` returns them, if the caller has them.
    """
    if not (replace or remove or insert):
        return None
    added, cuts = insert, _NO_CUTS
    if replace or remove:
        members = [Member(*place) for place in places] if places else locate(raw)
        cuts = _cuts(members, replace, frozenset(remove))
        present = {member.name for member in members}
        added = {name: value for name, value in replace.items() if name not in present}
        added.update(insert)
        empty = present <= set(remove)
        if not cuts and not added:
            return None
    else:
        at = body_start(raw)
        empty = raw[at : at + 1] == b"}"
    view, at = memoryview(raw), 0
    pieces: Pieces = []
    if added:
        at = raw.index(b"{") + 1
        new = (msgspec.json.encode(name) + b":" + value for name, value in added.items())
        pieces += (view[:at], b",".join(new), b"" if empty else b",")
    for start, end, value in cuts:
        pieces += (view[at:start], value)
        at = end
    pieces.append(view[at:])
    return pieces


def with_usage(options: msgspec.Raw | None, *, running: bool = False) -> bytes:
    """`options` with include_usage true and all else kept; None: there is no stream_options.

    With `running`, usage is asked for in every chunk.
    """
    given = b"null" if options is None else bytes(options)
    raw = b"{}" if given == b"null" else given
    pieces = edits(raw, replace={**_USAGE, RUNNING_USAGE: b"true"} if running else _USAGE)
    return raw if pieces is None else b"".join(pieces)


def _cuts(
    members: list[Member], replace: Mapping[str, bytes], remove: frozenset[str]
) -> list[tuple[int, int, bytes]]:
    """(start, end, new bytes) in order. One cut removes neighbours together with their commas."""
    cuts: list[tuple[int, int, bytes]] = []
    kept_end = removed_from = -1
    for member in members:
        if member.name in remove:
            if removed_from < 0:
                removed_from = member.key_start
            continue
        if removed_from >= 0:
            cuts.append((removed_from, member.key_start, b""))
            removed_from = -1
        if member.name in replace:
            cuts.append((member.value_start, member.value_end, replace[member.name]))
        kept_end = member.value_end
    if removed_from >= 0:
        # The removed members are the last ones: the comma before them goes, too.
        start = removed_from if kept_end < 0 else kept_end
        cuts.append((start, members[-1].value_end, b""))
    return cuts


def utf8_length(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def compact(raw: Raw, param: str) -> str:
    r"""JSON without white space and with its strings' `\u` escapes decoded."""
    try:
        data = bytes(raw)
        if b"\\u" in data:
            return msgspec.json.encode(msgspec.json.decode(data)).decode()
        return msgspec.json.format(data, indent=-1).decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise undecodable(error, param) from None


def without_data(text: str) -> str:
    """JSON text whose opaque data is cut to as many characters as text of its cost has."""
    pieces = []
    done, at = 0, _DATA_CHARS
    while at < len(text) and (end := text.find('"', at)) >= 0:
        # A string that long lies over one of the places looked at; few quotes are.
        start = text.rfind('"', done, at) + 1
        if end - start >= _DATA_CHARS and _DATA.fullmatch(text, start, end):
            most = max(_DATA_CHARS, (end - start) // _DATA_CHARS_PER_CHAR)
            pieces.append(text[done : start + most])
            done = end
        at = end + _DATA_CHARS
    return "".join((*pieces, text[done:]))


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
    *("mm_processor_kwargs", "encoding_format"),
    *("dimensions", "input_type", "normalize", "activation", "use_activation", "top_n"),
    *("return_documents", "max_tokens_per_doc", "voice", "speed", "language"),
    *("embedding_types", "output_dimension", "truncate", "task"),
}
"""Top-level members that no engine puts into a prompt."""

Known = Mapping[str, "Known | None"]
"""Known members of an object -> known members of their own objects, if those are checked.

Those of `type` are the kinds of objects whose members are known."""


def _fields(of: type[msgspec.Struct], **inner: Known) -> Known:
    return {name: inner.get(name) for name in of.__struct_fields__}


_FUNCTION: Final = _fields(schema.Function)
# Parts nest three deep at most: a text in a search result in a tool's result.
_KINDS: Final = dict.fromkeys(schema.PART_KINDS)
_PART: Final = _fields(
    schema.ContentPart,
    type=_KINDS,
    content=_fields(
        schema.ContentPart, type=_KINDS, content=_fields(schema.ContentPart, type=_KINDS)
    ),
)
_MESSAGE: Final = _fields(
    schema.Message,
    content=_PART,
    tool_calls=_fields(schema.ToolCall, function=_FUNCTION),
    function_call=_FUNCTION,
)
_ITEM_KINDS: Final = dict.fromkeys(schema.ITEM_KINDS)
_ITEM: Final = _fields(schema.Item, type=_ITEM_KINDS, content=_PART, output=_PART, summary=_PART)
_DOCUMENT: Final = _fields(schema.RerankDocument, content=_PART)
_IN_LISTS: Final = frozenset({"content", "output", "summary"})
"""Members that hold parts only as a list; a bare object there counts as a whole."""
_OF_SCORE: Final = ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")
_WITHIN: Final[Mapping[str, Mapping[str, Known]]] = {
    "responses": {"input": _ITEM, "instructions": _ITEM},
    "messages": {"messages": _MESSAGE, "system": _PART},
    "count_tokens": {"messages": _MESSAGE, "system": _PART},
    "cohere_embed": {"inputs": _DOCUMENT},
    "rerank": {"query": _DOCUMENT, "documents": _DOCUMENT},
    "score": dict.fromkeys(_OF_SCORE, _DOCUMENT),
    **{name: {"messages": _MESSAGE} for name in ("chat", "embeddings", "tokenize")},
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


def known_only(shape: str, members: Mapping[str, Raw]) -> tuple[bytes, int]:
    """Strip a body's unknown members at every level; returns the body and the bytes stripped.

    `shape` is the name of an endpoint with such bodies, `members` are the top-level ones. A value
    of an unexpected shape stays as it is.
    """
    relaxed = _relaxed(members)
    total = 0
    for name, known in _WITHIN.get(shape, {}).items():
        if name in relaxed:
            relaxed[name], size = _split(relaxed[name], known, name)
            total += size
    return msgspec.json.encode(relaxed), total


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
    known_members = {}
    changed = False
    members = _members(raw)
    kind = members.get("type", schema.ABSENT)
    if (kinds := known.get("type")) and bytes(memoryview(kind)[:1]) == b'"':
        known = known if msgspec.json.decode(kind) in kinds else _OTHER_KIND
    for name, value in members.items():
        if name not in known:
            total += _bytes_of(name, value, f"{where}.{name[:64]}")
            changed = True
            continue
        inner = known[name]
        known_members[name] = value
        if inner is None or (name in _IN_LISTS and bytes(memoryview(value)[:1]) != b"["):
            continue
        known_members[name], size = _split(value, inner, f"{where}.{name}")
        total += size
    return (Raw(msgspec.json.encode(known_members)), total) if changed or total else (raw, 0)


def _bytes_of(name: str, value: Raw, where: str) -> int:
    size = utf8_length(name) if len(name) > _NAME_CHARS else 0
    # The length check comes first because it is cheap, and most members are flags.
    if len(value) < 6 and bytes(value) in _NOTHING:
        return size
    return size + utf8_length(without_data(compact(value, where)))


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


_LIMITS: Final = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens")
_FORMS: Final = {
    **dict.fromkeys(_LIMITS, TypeAdapter(int).validate_json),
    **dict.fromkeys(("stream", "background", "include_usage"), TypeAdapter(bool).validate_json),
}


def _relaxed(members: Members) -> dict[str, Raw]:
    """The members with numbers and flags in other forms as JSON's own, by the rules of pydantic.

    Programs that hold every number as a double send 1024.0, and forms send "1024"; engines read
    both as 1024. What engines refuse stays as it is, and the reader of the body refuses it, too.
    """
    relaxed = dict(members)
    for name in relaxed.keys() & _FORMS.keys():
        try:
            relaxed[name] = Raw(msgspec.json.encode(_FORMS[name](bytes(relaxed[name]))))
        except (ValueError, OverflowError):
            continue
    options = relaxed.get("stream_options")
    if options is not None and bytes(memoryview(options)[:1]) == b"{":
        relaxed["stream_options"] = Raw(msgspec.json.encode(_relaxed(_members(options))))
    return relaxed
