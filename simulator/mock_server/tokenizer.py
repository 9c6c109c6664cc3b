"""The mock engine's own tokenizer: pure, deterministic, content-driven as a real BPE is.

Text is cut as Llama 3's pre-tokenizer cuts it (a word with its leading space, up to three
digits, a run of punctuation, a run of white space) and each cut is split into pieces by what
it holds: its script, its length, its letter case, and a hash of the word for what a real
vocabulary would decide by frequency. So a longer or rarer word costs more pieces, the same
word always costs the same, and two documents of one kind differ.

Bytes per token on real text, and how documents disperse (std of the documents' ratios over
their mean, at 1,000 and at 8,000 tokens a document):

    English prose (a book, licences)      4.49   4.2 %   1.4 %
    JavaScript packages                   3.6    5.3 %   1.0 %
    Python's standard library             3.4    9.5 %   6.7 %   (comments' share differs)
    JSON files of all sorts               3.2   15   %  10   %   (records of words: 3.9)
    Chinese, Japanese                     3.35, 3.83    1.7, 1.4 %   0.9, 0.5 %
    Arabic, Russian, Thai                 4.76, 5.92, 5.62    1.3-1.5 %   0.4-0.6 %
    base64, CSV of numbers                1.51, 1.80    2.0, 1.4 %   0.6, 1.2 %

The non-Latin documents are shuffled translations: one author's text would disperse more.
No token crosses a cut, so joining two texts moves the count by a few tokens at most.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Final
from zlib import crc32

import orjson

CHAT_REQUEST_TOKENS: Final = 3
"""Fixed tokens the chat template adds per request (begin of text, generation prompt)."""
CHAT_MESSAGE_TOKENS: Final = 5
"""Fixed tokens the chat template adds per message (header, role, end of turn)."""
PROMPT_TOKENS: Final = 1
"""Fixed tokens before a plain prompt (begin of text)."""
IMAGE_TOKENS: Final = 576
"""Fixed tokens of one image part."""
BLOCK_TOKENS: Final = 16
"""Tokens in one KV block; prefix hashes are per block."""
VOCABULARY: Final = 128_256
"""Token ids are in [0, VOCABULARY)."""

_CACHE_WORDS: Final = 1 << 17
_LATIN: Final = "A-Za-zÀ-ɏ"
_WIDE_PUNCTUATION: Final = "\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20"
_CUTS: Final = re.compile(
    rf"'(?:[sdmt]|ll|ve|re)\b"
    rf"|[\t -/:-@\[-`{{-~]?[{_LATIN}]{{1,32}}"
    rf"|[0-9]{{1,3}}"
    rf"|[㐀-鿿豈-\ufaff]{{1,2}}"
    rf"|[぀-ヿ]{{1,3}}"
    rf"|[฀-\u0eff]{{1,6}}"
    rf"| ?[^\x00-ɏ{_WIDE_PUNCTUATION}㐀-鿿぀-ヿ฀-\u0eff]{{1,24}}"
    rf"| ?[!-/:-@\[-`{{-~{_WIDE_PUNCTUATION}]{{1,32}}[\r\n]{{0,16}}"
    rf"|[ \t]{{0,64}}[\r\n]{{1,16}}"
    rf"|\s{{1,64}}(?!\S)"
    rf"|\s"
    rf"|.",
    re.DOTALL,
)
_CASE_SEGMENTS: Final = re.compile(r"[A-Z]?[a-zß-ɏ]+|[A-Z]+(?![a-z])|.")
_UNLIKELY: Final = re.compile(r"[bcdfghjklmnpqrstvwxz]{5}|[aeiou]{4}|[qjxz][^aeiou]")
_JSON_MARKS: Final = '",:{}[]'
_SAME: Final = re.compile(r"(.)\1*", re.DOTALL)

# Chance in 1/256 that a lower-case Latin word of so many letters is one token.
_WHOLE: Final = (256, 256, 256, 254, 250, 244, 238, 231, 222, 212, 200, 188, 174, 158, 138, 110)


def _latin_pieces(word: str, seed: int) -> int:
    """Pieces of a run of Latin letters (1-32 of them)."""
    length = len(word)
    if length == 1:
        return 1
    tail = word[1:]
    if tail.islower():
        if length > 2 and _UNLIKELY.search(word.lower()):
            return max(1, (length * 2 + (seed & 3)) // 5)
        whole = _WHOLE[length] if length < 16 else 90
        if seed & 255 < whole:
            return 1
        return 2 if length < 13 or seed & 256 else 3
    if tail.isupper() and word[0].isupper():
        return 1 if length < 4 else (length + 2) // 3
    segments = _CASE_SEGMENTS.findall(word)
    if length < 2.8 * len(segments):  # letters at random, as in base64
        return max(1, (length * 11 + (seed & 15)) // 16)
    return sum(_latin_pieces(segment, crc32(segment.encode())) for segment in segments)


# Pieces per character of a script, in 1/256: fitted to the table above, after subtracting spaces
# and punctuation between words.
_PER_CHARACTER: Final[tuple[tuple[int, int, int], ...]] = (
    # below, per character, per run
    (0x0370, 160, 0),
    (0x0530, 72, 100),  # Greek, Cyrillic
    (0x0600, 140, 0),  # Armenian, Hebrew
    (0x0780, 96, 88),  # Arabic
    (0x0E00, 200, 0),  # the scripts of India
    (0x0F00, 125, 0),  # Thai, Lao
    (0x3040, 200, 0),
    (0x3100, 180, 0),  # kana
    (0x3400, 200, 0),
    (0xA000, 214, 0),  # Han
    (0xAC00, 200, 0),
    (0xD7B0, 180, 0),  # Hangul
    (0xF900, 256, 0),
    (0xFB00, 256, 0),
    (0x10000, 220, 0),
    (0x110000, 420, 0),  # emoji, rare planes
)


def _script_pieces(run: str, seed: int) -> int:
    """Pieces of a run outside Latin: its script's rate, rounded by the run's hash."""
    point = ord(run[0])
    for below, per_character, per_run in _PER_CHARACTER:
        if point < below:
            share = len(run) * per_character + per_run
            break
    # Half a piece of jitter each way: words of one length differ, the mean stays.
    share += (seed >> 8 & 255) - 128
    return max(1, (share + (seed & 255)) >> 8)


def _pieces(cut: str) -> int:
    """Pieces of one cut (at least 1)."""
    if len(cut) == 1:
        return 1 if cut < "ɐ" else _script_pieces(cut, crc32(cut.encode("utf-8", "surrogatepass")))
    first, second = cut[0], cut[1]
    if first.isascii() and first.isdigit():
        return 1
    seed = crc32(cut.encode("utf-8", "surrogatepass"))
    if cut[-1] < "ɐ" and cut[-1].isalpha():
        if first.isalpha():
            return 1 if first == "'" else _latin_pieces(cut, seed)
        bare = cut[1:]
        # Vocabularies hold " word" far more often than "(word" or "_word".
        glued = 0 if first in ' "' or seed & 0xE00 == 0 else 1
        return 1 if first == "'" and len(bare) < 3 else glued + _latin_pieces(bare, seed)
    if cut.isspace():
        return 1 if "\n" in cut else (len(cut) + 2) // 3
    if ord(second if first == " " else first) >= 0x250 and not _is_wide_punctuation(cut[-1]):
        return _script_pieces(cut.lstrip(" "), seed)
    bare = cut.strip()
    if not bare.strip(_JSON_MARKS):
        return (len(bare) + 6) // 7
    return max(1, (len(_SAME.findall(bare)) + (seed & 1)) // 2)


def _is_wide_punctuation(character: str) -> bool:
    point = ord(character)
    return 0x2000 <= point <= 0x206F or 0x3000 <= point <= 0x303F or 0xFF00 <= point <= 0xFF20


class _Words(dict[str, tuple[int, ...]]):
    """Token ids of a cut, cached; the cache is cleared once it holds too many."""

    def __missing__(self, cut: str) -> tuple[int, ...]:
        count = min(_pieces(cut), max(1, len(cut.encode("utf-8", "surrogatepass"))))
        data = cut.encode("utf-8", "surrogatepass")
        if count == 1:
            ids: tuple[int, ...] = (crc32(data) % VOCABULARY,)
        else:
            edges = [len(data) * i // count for i in range(count + 1)]
            ids = tuple(crc32(data[a:b]) % VOCABULARY for a, b in pairwise(edges))
        if len(self) >= _CACHE_WORDS:
            self.clear()
        self[cut] = ids
        return ids


_words = _Words()
_cuts = _CUTS.findall
_ids_of = _words.__getitem__


def encode(text: str) -> list[int]:
    """Token ids of a text; lone surrogates are characters like any other."""
    return list(chain.from_iterable(map(_ids_of, _cuts(text))))


def count(text: str) -> int:
    """How many tokens `encode` gives."""
    return sum(map(len, map(_ids_of, _cuts(text))))


def block_hashes(ids: Sequence[int], salt: int = 0) -> tuple[int, ...]:
    """Chained hashes of the prompt's full 16-token blocks: equal prefixes, equal hashes.

    `salt` separates tenants' caches (`cache_salt`).
    """
    out = []
    chained = salt
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, *ids[start : start + BLOCK_TOKENS]))
        out.append(chained)
    return tuple(out)


def encode_prompt(text: str) -> list[int]:
    """Ids of a plain prompt, with its fixed first token."""
    return [1, *encode(text)]


def _special(name: str, tokens: int) -> list[int]:
    first = crc32(name.encode("utf-8", "surrogatepass"))
    return [(first + i) % VOCABULARY for i in range(tokens)]


def _part_ids(part: object) -> list[int]:
    """Ids of one content part: text, an image (fixed cost), or its JSON."""
    if isinstance(part, str):
        return encode(part)
    if not isinstance(part, dict):
        return encode(str(part))
    kind = str(part.get("type", ""))
    for field in ("text", "thinking", "refusal"):
        if isinstance(part.get(field), str):
            return encode(part[field])
    if "image" in kind:
        return _special(repr(part.get(kind) or part.get("source")), IMAGE_TOKENS)
    if isinstance(part.get("content"), str | list):  # a tool's result
        return _content_ids(part["content"])
    return encode(_json(part))


def _content_ids(content: object) -> list[int]:
    if content is None:
        return []
    if isinstance(content, list):
        return list(chain.from_iterable(map(_part_ids, content)))
    return _part_ids(content)


def _json(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # nested too deep, or a lone surrogate
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return ""


def _call_ids(call: object) -> list[int]:
    """A tool call, rendered as its name and the arguments as received."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return encode(_json(call))
    return encode(f"{function.get('name', '')}{function.get('arguments', '')}")


def encode_chat(messages: Iterable[object], tools: Sequence[object] = ()) -> list[int]:
    """Ids of a conversation under the mock's chat template, tools first."""
    ids = _special("chat", CHAT_REQUEST_TOKENS)
    for tool in tools:
        ids += encode(_json(tool))
    for message in messages:
        if not isinstance(message, dict):
            ids += encode(str(message))
            continue
        ids += _special(str(message.get("role", "")), CHAT_MESSAGE_TOKENS)
        name = message.get("name")
        if isinstance(name, str):
            ids += encode(name)
        ids += _content_ids(message.get("content"))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            ids += _call_ids(call)
    return ids
