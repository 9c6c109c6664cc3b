r"""Collect the parts of a body that an engine tokenizes: texts and media parts.

Rules:
- Text that the engine sees counts, in any role: message contents, names, reasoning, names and
  arguments of calls, tool definitions as compact JSON, prompts. The body's white space and
  data URLs never count. Unknown members count, too (`gateway.payload.members`).
- Unknown roles count as text, and so do ids longer than _ID_CHARS.
- Bytes are UTF-8 lengths of decoded text; a `\u` escape counts as the character it spells.
- Parts of unknown kinds count by the bytes of their JSON.
- Opaque data (base64) is no text: it counts as `gateway.payload.members` says.

A text's category, by which the estimator learns, comes from a small sample of it:
- At most SAMPLE_CHARS characters, in windows spread evenly over the text.
- UTF-8 lead bytes tell scripts apart; accented Latin counts as Latin. A script with .6 of
  the letters' bytes names the category; non-Latin scripts with .2 make it `mixed`.
- Within ASCII, the density of symbols, quotes and digits tells kinds apart.
- Text that is mostly digits, hexadecimal or base64 is `mixed`, which keeps it out of the
  ratios of prose and code; JSON of numbers is `json`.
Thresholds were set on samples in `tests/unit/gateway/payload/test_category.py`.
"""

import binascii
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, get_args

import msgspec
from msgspec import Raw
from msgspec.structs import astuple

from gateway.payload.members import compact, utf8_length, without_data
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
    invalid,
    missing,
)
from gateway.records.request import Category

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
    prefix = bytes(view[:_PREFIX_BYTES])
    start = prefix.find(b";base64,") + 8
    if start < 8:
        at = prefix.find(b'"data"')
        start = prefix.find(b'"', at + 6) + 1
        if at < 0 or not start:
            return default
    end = start + HEAD_CHARS
    text = bytes(view[start:end]).replace(b"\\/", b"/").partition(b'"')[0]
    try:
        head = binascii.a2b_base64(text[: len(text) // 4 * 4])
    except binascii.Error:
        return default
    size = dimensions(head)
    if size is None:
        return default
    tokens = math.ceil(size[0] * size[1] / PIXELS_PER_TOKEN)
    return min(max(tokens, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)


def dimensions(head: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels of a PNG, GIF, WebP or JPEG; None if `head` does not show them."""

    def little(start: int, end: int) -> int:
        return int.from_bytes(head[start:end], "little")

    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return little(6, 8), little(8, 10)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        kind = head[12:16]
        if kind == b"VP8X":
            return little(24, 27) + 1, little(27, 30) + 1
        if kind == b"VP8 ":
            return little(26, 28) & 0x3FFF, little(28, 30) & 0x3FFF
        if kind == b"VP8L":
            bits = little(21, 25)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head.startswith(b"\xff\xd8"):  # a JPEG: its first frame says
        at = 2
        while at + 9 <= len(head) and head[at] == 0xFF:
            if head[at + 1] in _FRAMES:
                return int.from_bytes(head[at + 7 : at + 9]), int.from_bytes(head[at + 5 : at + 7])
            at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return None


MEDIA_TOKENS = 768
"""Default cost, in tokens, of a media part whose size cannot be read cheaply."""

_ROLES = frozenset({"user", "system", "developer", "tool", "assistant", "function"})
_ID_CHARS = 64
"""A longer id counts as text."""
_REFERRED = frozenset({"base64", "url", "file"})
_decode_source = msgspec.json.Decoder(Source).decode
_MEMBERS = ContentPart.__struct_fields__
_MEDIA: Final = frozenset(
    {
        *("image_url", "source", "input_audio", "audio_url", "audio", "audio_embeds", "video_url"),
        *("video", "image", "image_embeds", "image_pil", "file", "file_id", "file_data"),
        "file_url",
    }
)
_COUNTED: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(TEXT_KINDS, frozenset({"text"})),
    **dict.fromkeys(IMAGE_KINDS, _MEDIA),
    **dict.fromkeys(MEDIA_KINDS, _MEDIA | {"title", "context"}),
    **dict.fromkeys(CALL_KINDS, frozenset({"name", "input"})),
    **dict.fromkeys(RESULT_KINDS, frozenset({"content", "title"})),
    "refusal": frozenset({"refusal"}),
    "thinking": frozenset({"thinking", "signature"}),
}
"""Kind of a part -> the members that `_add_part` is done with; any other is counted as a whole."""


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
        if tools is ABSENT:
            return
        first = bytes(memoryview(tools)[:1])
        if first == b"n":
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

    def _add_extras(self, message: Message, index: int) -> None:
        """Add a message's members besides its content; a chat template may render any of them."""
        texts = self.texts
        if message.role not in _ROLES:
            texts.append(message.role)
        reasoning = message.reasoning_content, message.reasoning
        for text in (message.name, message.refusal, *reasoning):
            if text:
                texts.append(text)
        if message.tool_call_id:
            self._add_id(message.tool_call_id)
        if message.function_call:
            self._add_function(message.function_call)
        for call in message.tool_calls or ():
            if call.function:
                self._add_function(call.function)
            elif call.custom is not ABSENT:
                texts.append(compact(call.custom, "custom"))
            self._add_id(call.id)
            self._add_id(call.type)
        for raw in (message.annotations, message.audio):
            if raw is not ABSENT and len(raw) > _ID_CHARS:
                self.add_json(raw, f"messages[{index}]")

    def _add_function(self, function: Function) -> None:
        if function.name:
            self.texts.append(function.name)
        arguments = function.arguments
        if isinstance(arguments, dict):
            self.texts.append(compact(Raw(msgspec.json.encode(arguments)), "arguments"))
        elif arguments:
            self.texts.append(arguments)

    def _add_id(self, name: str | None) -> None:
        if name is not None and len(name) > _ID_CHARS:
            self.texts.append(name)

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
            if kind not in TEXT_KINDS:
                self._add_part(kind, part, f"{where}[{index}]")
            elif part.text is None:
                raise missing(f"{where}[{index}].text")
            else:
                texts.append(part.text)
                if part == ContentPart(type=part.type, text=part.text):  # as nearly always
                    continue
            if kind in _COUNTED:
                self._add_rest(part, _COUNTED[kind], f"{where}[{index}]")

    def _add_part(self, kind: str, part: ContentPart, where: str) -> None:
        """Count what `_COUNTED` names of a part of another kind than text."""
        texts = self.texts
        if kind in IMAGE_KINDS:
            self.add_image(part.source if part.image_url is ABSENT else part.image_url)
        elif kind in MEDIA_KINDS:
            self._add_media(self._media_cost)
            texts.extend(text for text in (part.title, part.context) if text)
            if part.source is ABSENT:
                return
            try:
                referred = _decode_source(part.source).type in _REFERRED
            except msgspec.ValidationError:
                referred = False
            if not referred:  # an inline text document is prompt text
                self.add_json(part.source, f"{where}.source")
        elif kind in CALL_KINDS:
            texts.append(part.name or "")
            if part.input is not ABSENT:
                texts.append(compact(part.input, f"{where}.input"))
        elif kind in RESULT_KINDS:
            self._add_content(part.content, f"{where}.content")
            texts.extend((part.title,) if part.title else ())
        elif kind == "refusal":
            texts.append(part.refusal or "")
        elif kind == "thinking":
            texts.append(part.thinking or "")
        else:
            self.add_json(Raw(msgspec.json.encode(part)), where)

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


# -- categories

SAMPLE_CHARS: Final = 1024
WINDOWS: Final = 4
_SEARCHED_CHARS: Final = 4096
"""Retrieval headers are searched in this many first characters of the longest text."""

_DOMINANT = 0.6
_SUBSTANTIAL = 0.2
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_OF_KINDS = {
    b"s": b" \n",
    b"d": b"0123456789",
    b"b": b"{}[]",
    b"o": b"()<>=;_*/+&|#$@\\^~`%",
    b"m": b'",:',
}
"""Kind of a byte, a letter -> spaces, digits, brackets, operators and other marks."""
# One pass counts all kinds; letters are removed.
_KINDS = bytes.maketrans(
    b"".join(_OF_KINDS.values()), b"".join(kind * len(of) for kind, of in _OF_KINDS.items())
)
_NOT_LEADS = bytes(range(0x80, 0xC0))
_ASCII = bytes(range(0x80))
# Kana, Han and Hangul (E3-ED), and fullwidth forms (EF).
_CJK = bytes((*range(0xE3, 0xEE), 0xEF))
# Greek to N'Ko (CE-DF), Indic and Thai (E0), Georgian to Khmer (E1; Vietnamese has some).
_OTHER = bytes((*range(0xCE, 0xE2),))
_CATEGORIES: dict[str, Category] = {name: name for name in get_args(Category)}
_NUMBERED = re.compile(
    r"^[ \t]*(?:(?:document|source|passage) )?\[\d{1,3}\]", re.MULTILINE | re.IGNORECASE
)
_PASSAGE = re.compile(
    r"^#{1,4} (?:passage|document|source|context|chunk|excerpt|retrieved|search result)",
    re.MULTILINE | re.IGNORECASE,
)


def category_from_header(value: str | None) -> Category | None:
    """The category that a client's header names; None if it is not a known category."""
    return _CATEGORIES.get(value.strip().lower()) if value else None


def sample(text: str) -> str:
    """At most SAMPLE_CHARS characters of `text`, in windows spread evenly.

    Non-ASCII text gives half as many, because each character takes two to four bytes.
    """
    wanted = SAMPLE_CHARS if text.isascii() else SAMPLE_CHARS // 2
    total = len(text)
    if total <= wanted:
        return text
    window = wanted // WINDOWS
    step = total / WINDOWS
    first = (step - window) / 2
    # The loop over WINDOWS, unrolled.
    a, b, c, d = int(first), int(first + step), int(first + 2 * step), int(first + 3 * step)
    return "\n".join(
        (text[a : a + window], text[b : b + window], text[c : c + window], text[d : d + window])
    )


def classify(text: str) -> Category:
    """The category of a sample; `prose` for empty text."""
    data = text.encode()
    if text.isascii():
        return _ascii_kind(data, len(data)) if data else "prose"
    leads = data.translate(None, _ASCII).translate(None, _NOT_LEADS)
    cjk = len(leads) - len(leads.translate(None, _CJK))
    other = len(leads) - len(leads.translate(None, _OTHER))
    letters = len(data.translate(None, _LETTERS))
    # Shares are of bytes, not characters, because the ratio is bytes per token.
    latin = len(data) - letters + 2 * (len(leads) - cjk - other)
    other_bytes = other * (3 if leads.count(b"\xe0") * 2 > other else 2)
    total = latin + 3 * cjk + other_bytes or 1
    cjk_share, other_share = 3 * cjk / total, other_bytes / total
    if cjk_share >= _DOMINANT:
        return "cjk"
    if other_share >= _DOMINANT:
        return "other-script"
    if cjk_share + other_share >= _SUBSTANTIAL:
        return "mixed"
    return _ascii_kind(data, len(data))


def _ascii_kind(data: bytes, size: int) -> Category:
    """Kind of a Latin text by densities per byte."""
    count = data.translate(_KINDS, _LETTERS).count
    spaces, digits, brackets, operators = count(b"s"), count(b"d"), count(b"b"), count(b"o")
    structure = brackets + count(b"m")
    symbols = brackets + operators
    if structure >= 0.1 * size and operators < 0.25 * structure and symbols > operators:
        return "json"
    if digits >= 0.25 * size or (size >= 200 and spaces < 0.04 * size):
        return "mixed"
    if symbols >= 0.045 * size:
        return "code"
    return "mixed" if symbols >= 0.03 * size else "prose"


def has_retrieval_headers(texts: Sequence[str]) -> bool:
    """Whether the longest text begins with numbered or tagged passages."""
    longest = max(texts, key=len, default="")
    if len(longest) < 200:
        return False
    head = longest[:_SEARCHED_CHARS]
    if "<" in head and ("<document" in head or "<context>" in head or "<passage" in head):
        return True
    if "[" in head and len(_NUMBERED.findall(head)) > 1:
        return True
    return "#" in head and _PASSAGE.search(head) is not None
