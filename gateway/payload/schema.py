"""The members that the gateway reads of bodies and answers, as structs, and what it says of others.

Rules:
- A struct names only fields that are counted, routed on or refused, and fields known to hold no
  text. For any other field in a message, item, call, part or document, msgspec raises an error,
  and `gateway.payload.members` counts it. msgspec skips other fields of a body in C.
- A named field of a wrong type is an error; msgspec names its path. Numbers and flags may come
  in the other forms that engines take (`gateway.payload.members`).
- `Raw` marks values that are measured or relayed without being decoded (tools, images).
"""

import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.errors import BadRequest

ABSENT = Raw(b"")
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Prompt = str | list[str | TokenId | list[TokenId]]
MAX_MODEL_CHARS = 256
MAX_CHOICES = 128
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2_147_483_647)]

TEXT_KINDS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
IMAGE_KINDS = frozenset({"image_url", "input_image", "image"})
MEDIA_KINDS = frozenset(
    {
        *("input_audio", "audio_url", "audio", "video_url", "input_video", "video"),
        *("image_embeds", "image_pil", "audio_embeds", "file", "input_file", "document"),
        *("container_upload",),
    }
)
CALL_KINDS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
RESULT_KINDS = frozenset({"tool_result", "mcp_tool_result", "search_result"})
PART_KINDS = TEXT_KINDS | IMAGE_KINDS | MEDIA_KINDS | CALL_KINDS | RESULT_KINDS
PART_KINDS |= {"refusal", "thinking"}
"""Kinds of content parts whose members are read; a part of any other kind counts as a whole."""
ITEM_KINDS = frozenset(
    {
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
    }
)
"""The same for items."""


class ContentPart(Struct, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """A content part of any dialect; `type` says which other fields matter."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    content: "Content | dict[str, Raw]" = None
    source: Raw = ABSENT
    image_url: Raw = ABSENT
    title: str | None = None
    context: str | None = None
    cache_control: Raw = ABSENT
    id: Raw = ABSENT
    tool_use_id: Raw = ABSENT
    is_error: Raw = ABSENT
    signature: Raw = ABSENT
    citations: Raw = ABSENT
    annotations: Raw = ABSENT
    logprobs: Raw = ABSENT
    detail: Raw = ABSENT
    uuid: Raw = ABSENT
    filename: Raw = ABSENT
    input_audio: Raw = ABSENT
    audio_url: Raw = ABSENT
    audio: Raw = ABSENT
    audio_embeds: Raw = ABSENT
    video_url: Raw = ABSENT
    video: Raw = ABSENT
    image: Raw = ABSENT
    image_embeds: Raw = ABSENT
    image_pil: Raw = ABSENT
    file: Raw = ABSENT
    file_id: Raw = ABSENT
    file_data: Raw = ABSENT
    file_url: Raw = ABSENT


Content = str | list[str | ContentPart] | None


class Source(Struct, gc=False):
    """Source of an Anthropic document or image: base64, a reference, or inline text."""

    type: str | None = None


class Function(Struct, gc=False, forbid_unknown_fields=True):
    """Name and arguments of a call; arguments are JSON in a string (an object is accepted)."""

    name: str | None = None
    arguments: str | dict[str, Raw] | None = None


class ToolCall(Struct, gc=False, forbid_unknown_fields=True):
    """One call that an assistant's message carries."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: Function | None = None
    custom: Raw = ABSENT


class Message(Struct, gc=False, forbid_unknown_fields=True):
    """A message of chat or of the Anthropic dialect."""

    role: str
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    annotations: Raw = ABSENT
    audio: Raw = ABSENT


class Item(Struct, gc=False, forbid_unknown_fields=True):
    """An input item of the responses endpoint."""

    type: str | None = None
    role: str | None = None
    id: str | None = None
    call_id: str | None = None
    status: str | None = None
    encrypted_content: Raw = ABSENT
    content: Content = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | dict[str, Raw] = None
    summary: list[ContentPart] | None = None


class RerankDocument(Struct, gc=False, forbid_unknown_fields=True):
    """A document of rerank and score."""

    text: str | None = None
    content: list[str | ContentPart] | None = None


Side = str | list[str | RerankDocument] | RerankDocument | None


class StreamOptions(Struct, gc=False):
    """The gateway reads only whether the client asks for usage."""

    include_usage: bool | None = None


class Body(Struct, gc=False):
    """Common to all endpoints."""

    model: str


class Generating(Body, gc=False):
    """Common to the endpoints that have output tokens."""

    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    n: int | None = None
    best_of: int | None = None
    previous_response_id: str | None = None
    limits: ClassVar[tuple[str, ...]] = ()
    """The output limits that engines read; the largest applies."""


class ChatBody(Generating, kw_only=True, gc=False):
    """/v1/chat/completions."""

    limits: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")
    messages: list[Message]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tools: Raw = ABSENT
    functions: Raw = ABSENT


class CompletionsBody(Generating, kw_only=True, gc=False):
    """/v1/completions: one of `prompt` and `prompt_embeds`, or both."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    prompt: Prompt | None = None
    prompt_embeds: Raw = ABSENT
    max_tokens: int | None = None
    suffix: str | None = None


class ResponsesBody(Generating, kw_only=True, gc=False):
    """/v1/responses."""

    limits: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    input: str | list[Item]
    max_output_tokens: int | None = None
    background: bool | None = None
    instructions: str | list[Item] | None = None
    tools: Raw = ABSENT


class MessagesBody(Generating, kw_only=True, gc=False):
    """/v1/messages (Anthropic)."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    messages: list[Message]
    max_tokens: int | None = None
    system: Content = None
    tools: Raw = ABSENT


class EmbeddingsBody(Body, kw_only=True, gc=False):
    """/v1/embeddings, /classify, /pooling: one of `input`, `messages`, and plugins' `data`."""

    input: Prompt | None = None
    messages: list[Message] | None = None
    data: Raw = ABSENT


class CohereEmbedBody(Body, kw_only=True, gc=False):
    """/v2/embed: at least one of these."""

    texts: list[str | RerankDocument] | None = None
    images: list[Raw] | None = None
    inputs: list[str | RerankDocument] | None = None


class TokenizeBody(Body, kw_only=True, gc=False):
    """/tokenize: one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Raw = ABSENT


class DetokenizeBody(Body, kw_only=True, gc=False):
    """/detokenize."""

    tokens: Prompt


class RerankBody(Body, kw_only=True, gc=False):
    """/v1/rerank."""

    query: str | RerankDocument
    documents: list[str | RerankDocument] | RerankDocument


class ScoreBody(Body, kw_only=True, gc=False):
    """/v1/score: two sides, under any of the names that engines use."""

    text_1: Side = None
    text_2: Side = None
    queries: Side = None
    documents: Side = None
    items: Side = None
    data_1: Side = None
    data_2: Side = None


class CountedBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request by its tokens, without its text: of quotes, and of other proxies.

    Unknown fields are refused, because a misspelt limit must not count as absent.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
    input_tokens: Tokens | None = None
    """Of all prompts, as the sender counted; without it `text_bytes` is needed."""
    text_bytes: Tokens | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2_147_483_647)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1


# -- answers, and the data of events


class Choice(Struct, gc=False):
    """One of an answer's choices."""

    index: int = 0
    finish_reason: str | None = None
    message: Raw = ABSENT
    text: Raw = ABSENT


class Prefilled(Struct):
    """What is read of the answer of vLLM's prefill engine."""

    kv_transfer_params: Raw = ABSENT


class Inner(Struct):
    """A response or message within an event; the delta of a message."""

    usage: dict[str, Any] | None = None
    stop_reason: str | None = None


class Said(Struct):
    """The members read of any JSON; where one has another type, all of it is searched instead."""

    type: str | None = None
    object: str | None = None
    id: str | None = None
    usage: dict[str, Any] | None = None
    choices: list[Choice] | None = None
    content: Raw = ABSENT
    output: Raw = ABSENT
    stop_reason: str | None = None
    status: str | int | None = None
    response: Inner | None = None
    message: Inner | str | None = None
    delta: Inner | str | None = None
    meta: dict[str, Any] | None = None
    error: Raw = ABSENT


# -- 400s, shaped as OpenAI has them, that name the field

_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TYPES = re.compile(r"^Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")


def missing(param: str) -> BadRequest:
    """400: a required field is absent, null or empty."""
    return BadRequest(
        f"Missing required parameter: '{param}'.",
        reason="missing_field",
        param=param,
    )


def invalid(param: str, why: str) -> BadRequest:
    """400: a field has the right type but a value that cannot be served."""
    return BadRequest(
        f"Invalid value for '{param}': {why}",
        reason="invalid_value",
        param=param,
    )


def undecodable(error: Exception, within: str = "") -> BadRequest:
    """400: the body violates JSON, UTF-8 or the endpoint's schema.

    `within` is the path of the value that was being decoded; "" for the whole body.
    """
    if isinstance(error, RecursionError):
        return BadRequest("The request body is nested too deeply.", reason="too_deep")
    if isinstance(error, UnicodeDecodeError):
        return BadRequest("The request body is not valid UTF-8.", reason="invalid_utf8")
    if not isinstance(error, msgspec.ValidationError):
        detail = str(error).removeprefix("JSON is malformed: ")
        return BadRequest(
            f"The request body could not be parsed as JSON: {detail}.", reason="invalid_json"
        )
    text = str(error)
    match = _PATH.search(text)
    path = within + (match["path"] if match else "")
    text = _PATH.sub("", text)
    if absent := _MISSING.match(text):
        field = absent["field"]
        return missing(f"{path}.{field}" if path else field)
    types = _TYPES.match(text)
    if types is None:
        return invalid(path, f"{text}.")
    want, got = (
        " or ".join(_NOUNS.get(name, name) for name in types[side].split(" | "))
        for side in ("want", "got")
    )
    if not path:
        return BadRequest(
            f"The request body must be {want}, but it is {got}.", reason="invalid_type", code=None
        )
    return BadRequest(
        f"Invalid type for '{path}': expected {want}, but got {got} instead.",
        reason="invalid_type",
        param=path,
    )
