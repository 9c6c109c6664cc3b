r"""Collect the parts of a body that an engine tokenizes: texts and media parts.

Rules:
- Text that the engine sees counts, in any role: message contents, names, reasoning, names and
  arguments of calls, tool definitions as compact JSON, prompts. The body's white space and
  data URLs never count. Unknown members count, too (`gateway.payload.members`).
- Unknown roles count as text, and so do ids longer than _ID_CHARS.
- Bytes are UTF-8 lengths of decoded text; a `\u` escape counts as the character it spells.
- Parts of unknown kinds count by the bytes of their JSON.
- Opaque data (base64) is no text: it counts as `gateway.payload.members` says.
"""

import binascii
import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import astuple

from gateway.payload.members import compact, utf8_length, without_data
from gateway.payload.refusals import invalid, missing
from gateway.payload.schema import (
    ABSENT,
    CALL_KINDS,
    IMAGE_KINDS,
    MEDIA_KINDS,
    RESULT_KINDS,
    TEXT_KINDS,
    Content,
    ContentPart,
    Function,
    Item,
    Message,
    RerankDocument,
    Side,
    Source,
)

PIXELS_PER_TOKEN = 750
MIN_IMAGE_TOKENS = 64
MAX_IMAGE_TOKENS = 4096
HEAD_CHARS = 4096
"""Base64 characters decoded: enough for a JPEG whose EXIF block is small."""

_PREFIX_BYTES = 256
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def image_tokens(source: msgspec.Raw, default: int) -> int:
    """Tokens of an image given as JSON: a data URL, or Anthropic's base64 source."""
    view = memoryview(source)
    start = _base64_start(bytes(view[:_PREFIX_BYTES]))
    if start < 0:
        return default
    text = bytes(view[start : start + HEAD_CHARS]).replace(b"\\/", b"/")
    text = text.partition(b'"')[0]
    try:
        head = binascii.a2b_base64(text[: len(text) // 4 * 4])
    except binascii.Error:
        return default
    size = dimensions(head)
    if size is None:
        return default
    tokens = math.ceil(size[0] * size[1] / PIXELS_PER_TOKEN)
    return min(max(tokens, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)


def _base64_start(prefix: bytes) -> int:
    at = prefix.find(b";base64,")
    if at >= 0:
        return at + 8
    at = prefix.find(b'"data"')
    if at < 0:
        return -1
    return prefix.find(b'"', at + 6) + 1 or -1


def dimensions(head: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels of a PNG, GIF, WebP or JPEG; None if `head` does not show them."""
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    if head.startswith(b"\xff\xd8"):  # a JPEG: its first frame says
        at = 2
        while at + 9 <= len(head) and head[at] == 0xFF:
            if head[at + 1] in _FRAMES:
                return int.from_bytes(head[at + 7 : at + 9]), int.from_bytes(head[at + 5 : at + 7])
            at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return (
            int.from_bytes(head[24:27], "little") + 1,
            int.from_bytes(head[27:30], "little") + 1,
        )
    if kind == b"VP8 ":
        return (
            int.from_bytes(head[26:28], "little") & 0x3FFF,
            int.from_bytes(head[28:30], "little") & 0x3FFF,
        )
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


MEDIA_TOKENS = 768
"""Default cost, in tokens, of a media part whose size cannot be read cheaply."""

_ROLES = frozenset({"user", "system", "developer", "tool", "assistant", "function"})
_ID_CHARS = 64
"""A longer id counts as text."""
_REFERRED = frozenset({"base64", "url", "file"})
_decode_source = msgspec.json.Decoder(Source).decode
_MEMBERS = ContentPart.__struct_fields__
# Members that the counting of a kind of part handles; `_add_rest` counts the others.
_OF_TEXT = frozenset({"text"})
_OF_IMAGE = frozenset(
    {
        *("image_url", "source", "input_audio", "audio_url", "audio", "audio_embeds", "video_url"),
        *("video", "image", "image_embeds", "image_pil", "file", "file_id", "file_data"),
        "file_url",
    }
)
_OF_MEDIA = _OF_IMAGE | {"title", "context"}
_OF_CALL = frozenset({"name", "input"})
_OF_RESULT = frozenset({"content", "title"})
_OF_REFUSAL = frozenset({"refusal"})
_OF_THINKING = frozenset({"thinking", "signature"})
_ALL = frozenset(_MEMBERS)


class Tally:
    """Texts and media of one body, in the order of the counting."""

    __slots__ = ("_media_cost", "media_parts", "media_tokens", "messages", "texts", "tools")

    def __init__(self, media_cost: int) -> None:
        self.texts: list[str] = []
        self.messages = 0
        self.media_parts = 0
        self.media_tokens = 0
        self.tools = False
        self._media_cost = media_cost

    def whole(self) -> tuple[str, int]:
        """All texts joined by line breaks, and their total bytes without those breaks."""
        texts = self.texts
        if len(texts) == 1:
            return texts[0], utf8_length(texts[0])
        text = "\n".join(texts)
        return text, utf8_length(text) - max(len(texts) - 1, 0)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Chat or Anthropic messages; an empty list is refused."""
        if not messages:
            raise missing("messages")
        self.messages += len(messages)
        texts = self.texts
        for index, message in enumerate(messages):
            content = message.content
            if type(content) is str:
                texts.append(content)
            elif content:
                self._add_parts(content, f"messages[{index}].content")
            self._add_extras(message, index)

    def add_items(self, items: str | Sequence[Item], param: str) -> None:
        """Input of the responses endpoint: one text, or items that each count as a message."""
        if type(items) is str:
            self.messages += 1
            self.texts.append(items)
            return
        if not items:
            raise missing(param)
        self.messages += len(items)
        for index, item in enumerate(items):
            if isinstance(item, Item):
                where = f"{param}[{index}]"
                self._add_content(item.content, f"{where}.content")
                self._add_content(item.output, f"{where}.output")
                if item.summary:
                    self._add_parts(item.summary, f"{where}.summary")
                texts = (item.name, item.arguments, item.input)
                self.texts.extend(text for text in texts if text)
                for name in (item.type, item.role, item.status, item.id, item.call_id):
                    self._add_id(name)
                if len(item.encrypted_content) > _ID_CHARS:
                    self.add_json(item.encrypted_content, f"{where}.encrypted_content")

    def add_system(self, system: Content) -> None:
        """Anthropic's system prompt, which counts as a message unless empty."""
        if system:
            self.messages += 1
            self._add_content(system, "system")

    def add_tools(self, tools: Raw, param: str) -> None:
        """Tool definitions, which chat templates render as JSON."""
        first = bytes(memoryview(tools)[:1])
        if first in (b"", b"n"):
            return
        if first != b"[":
            raise invalid(param, "expected an array.")
        text = compact(tools, param)
        if text != "[]":
            self.tools = True
            self.texts.append(text)

    def add_document(self, document: str | RerankDocument, param: str) -> int:
        """Add a query or document of rerank or score; returns its bytes."""
        if type(document) is str:
            self.texts.append(document)
            return utf8_length(document)
        before = len(self.texts)
        if isinstance(document, RerankDocument):
            if document.text is None and document.content is None:
                raise missing(f"{param}.text")
            if document.text:
                self.texts.append(document.text)
            if document.content:
                self._add_parts(document.content, f"{param}.content")
        return sum(map(utf8_length, self.texts[before:]))

    def add_side(self, side: Side, param: str) -> list[int]:
        """Add one side of score; returns the bytes of each of its texts."""
        if isinstance(side, list):
            if not side:
                raise missing(param)
            return [self.add_document(d, f"{param}[{i}]") for i, d in enumerate(side)]
        return [self.add_document(side, param)] if side is not None else []

    def _add_content(self, content: Content | dict[str, Raw], where: str) -> None:
        if type(content) is str:
            self.texts.append(content)
        elif isinstance(content, dict):
            self.add_json(Raw(msgspec.json.encode(content)), where)
        elif isinstance(content, list):
            self._add_parts(content, where)

    def add_json(self, raw: Raw, where: str) -> None:
        """JSON that an engine may render as text, but for the data in it."""
        self.texts.append(without_data(compact(raw, where)))

    def _add_function(self, function: Function) -> None:
        if function.name:
            self.texts.append(function.name)
        arguments = function.arguments
        if isinstance(arguments, dict):
            self.texts.append(compact(Raw(msgspec.json.encode(arguments)), "arguments"))
        elif arguments:
            self.texts.append(arguments)

    def _add_extras(self, message: Message, index: int) -> None:
        """Add a message's members besides its content; a chat template may render any of them."""
        texts = self.texts
        if message.role not in _ROLES:
            texts.append(message.role)
        if message.name:
            texts.append(message.name)
        if message.refusal:
            texts.append(message.refusal)
        if message.reasoning_content:
            texts.append(message.reasoning_content)
        if message.reasoning:
            texts.append(message.reasoning)
        if message.tool_call_id:
            self._add_id(message.tool_call_id)
        if message.function_call:
            self._add_function(message.function_call)
        if message.tool_calls:
            for call in message.tool_calls:
                self._add_call(call.function, call.custom)
                self._add_id(call.id)
                self._add_id(call.type)
        for raw in (message.annotations, message.audio):
            if raw is not ABSENT and len(raw) > _ID_CHARS:
                self.add_json(raw, f"messages[{index}]")

    def _add_id(self, name: str | None) -> None:
        if name is not None and len(name) > _ID_CHARS:
            self.texts.append(name)

    def _add_call(self, function: Function | None, custom: Raw) -> None:
        if function:
            self._add_function(function)
        elif custom is not ABSENT:
            self.texts.append(compact(custom, "custom"))

    def _add_parts(self, parts: Iterable[str | ContentPart], where: str) -> None:
        texts = self.texts
        for index, part in enumerate(parts):
            if isinstance(part, str):
                texts.append(part)
                continue
            kind = part.type
            if kind is None:
                kind = "" if part.image_url is ABSENT else "image_url"
                kind = kind if part.text is None else "text"
            if kind in TEXT_KINDS:
                if part.text is None:
                    raise missing(f"{where}[{index}].text")
                texts.append(part.text)
                if part != ContentPart(type=part.type, text=part.text):
                    self._add_rest(part, _OF_TEXT, f"{where}[{index}]")
            else:
                used = self._add_other(kind, part, f"{where}[{index}]")
                self._add_rest(part, used, f"{where}[{index}]")

    def _add_other(self, kind: str, part: ContentPart, where: str) -> frozenset[str]:
        """Count a part of another kind than text; returns the members that are done with."""
        if kind in IMAGE_KINDS:
            source = part.source if part.image_url is ABSENT else part.image_url
            self.add_image(source)
            return _OF_IMAGE
        if kind in MEDIA_KINDS:
            self._add_media(self._media_cost)
            self.texts.extend(text for text in (part.title, part.context) if text)
            # An inline text document is prompt text.
            if part.source is not ABSENT and not _is_referred(part.source):
                self.add_json(part.source, f"{where}.source")
            return _OF_MEDIA
        if kind in CALL_KINDS:
            self.texts.append(part.name or "")
            if part.input is not ABSENT:
                self.texts.append(compact(part.input, f"{where}.input"))
            return _OF_CALL
        if kind in RESULT_KINDS:
            self._add_content(part.content, f"{where}.content")
            if part.title:
                self.texts.append(part.title)
            return _OF_RESULT
        if kind == "refusal":
            self.texts.append(part.refusal or "")
            return _OF_REFUSAL
        if kind == "thinking":
            self.texts.append(part.thinking or "")
            return _OF_THINKING
        self.add_json(Raw(msgspec.json.encode(part)), where)
        return _ALL

    def _add_rest(self, part: ContentPart, used: frozenset[str], where: str) -> None:
        """Add a part's members outside `used` that are too long to be an id or a setting."""
        for name, value in zip(_MEMBERS, astuple(part), strict=True):
            if value is None or value is ABSENT or name in used:
                continue
            if isinstance(value, Raw):
                if len(value) > _ID_CHARS:
                    self.add_json(value, f"{where}.{name}")
            elif name == "content":
                self._add_content(value, f"{where}.content")
            else:
                self._add_id(value)

    def add_image(self, source: Raw) -> None:
        """Add an image by its URL, which may hold it, or by an object with that or the data."""
        self._add_media(image_tokens(source, self._media_cost))

    def _add_media(self, tokens: int) -> None:
        self.media_parts += 1
        self.media_tokens += tokens


def _is_referred(source: Raw) -> bool:
    """Whether a document's source is encoded bytes or a reference rather than inline text."""
    try:
        return _decode_source(source).type in _REFERRED
    except msgspec.ValidationError:
        return False
