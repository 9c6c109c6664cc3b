"""Prompts of a given kind and length, from real text; deterministic for a seed.

Prose and code are the standard library's own documentation and sources, JSON is random nested
records, other scripts are sentences written for this bench. A document is assembled from runs of
its sources, so that bytes per token vary between documents as in traffic. Lengths are counted
with the mock engine's tokenizer; a document's count is the sum of its pieces', accurate to a few
tokens.
"""

import random
import re
import string
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, Literal, get_args

import msgspec
import orjson

from bench.common.sentences import ARABIC, CHINESE, HINDI, JAPANESE, RUSSIAN, THAI
from simulator.mock_server import tokenizer

Kind = Literal["prose", "code", "json", "cjk", "other-script"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_MIN_RUN, _LONGEST_RUN = 100, 4000
"""Tokens taken from one source at a stretch, log-uniform."""
_PLAIN = frozenset(string.ascii_letters + " .,;:'\"-?!")
_DOCSTRING = re.compile(r'^[ \t]*r?"""(.*?)"""[ \t]*\n', re.DOTALL | re.MULTILINE)
_LINES_PER_CHUNK = 12
_MARKS = frozenset("()[]{}=<>")
_VOCABULARY: Final = (
    *("alpha", "invoice", "customer", "delivery", "region", "warehouse", "status", "pending"),
    *("shipped", "active", "archived", "temperature", "pressure", "sensor", "gateway"),
    *("upstream", "retry", "summary", "description", "payload", "network", "profile"),
    *("birthday", "language", "country", "currency", "balance", "account", "transfer"),
    *("deposit", "withdrawal"),
)


class SampleText(msgspec.Struct, frozen=True):
    """A text and the mock engine's count of its tokens, template not included."""

    pieces: tuple[str, ...]
    """The text in pieces that stand by themselves; joined they are the document."""
    tokens: int

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(self.pieces)


class _Chunk(msgspec.Struct, frozen=True):
    text: str
    tokens: int


_Source = tuple[_Chunk, ...]


def document(kind: Kind, tokens: int, rng: random.Random) -> SampleText:
    """A document of about `tokens` tokens (at least 8), drawn with `rng`."""
    return _json_document(tokens, rng) if kind == "json" else _text_document(kind, tokens, rng)


def _text_document(kind: Kind, tokens: int, rng: random.Random) -> SampleText:
    sources = _sources(kind)
    if kind in _LANGUAGES:
        # A document is in one language, on a few subjects: some sentences and not others.
        language = rng.choice(sources)
        sources = (tuple(rng.sample(language, 10)),)
    pieces: list[str] = []
    rest = tokens
    while rest > 0:
        source = rng.choice(sources)
        run = min(rest, round(_MIN_RUN * (_LONGEST_RUN / _MIN_RUN) ** rng.random()))
        at = rng.randrange(len(source))
        texts: list[str] = []
        while run > 0:
            chunk = source[at % len(source)]
            if chunk.tokens > rest:
                chunk = _cut(chunk, rest)
            texts.append(chunk.text)
            run -= chunk.tokens
            rest -= chunk.tokens
            at = rng.randrange(len(source)) if kind in _LANGUAGES else at + 1
        pieces.append("".join(texts))
    return SampleText(tuple(pieces), tokens - rest)


def _cut(chunk: _Chunk, tokens: int) -> _Chunk:
    """The beginning of a chunk, of at least one and about `tokens` tokens."""
    end = max(1, len(chunk.text) * tokens // chunk.tokens)
    text = chunk.text[:end]
    return _Chunk(text, max(1, tokenizer.count(text)))


# -- prose, code, sentences


@cache
def _sources(kind: Kind) -> tuple[_Source, ...]:
    """The sources of a kind; each holds at least one chunk."""
    if kind == "prose":
        found = [_chunks(_paragraphs(text)) for text in (*topics.values(), *_docstrings())]
        return tuple(source for source in found if sum(c.tokens for c in source) > 200)
    if kind == "code":
        return tuple(_chunks(_code_pieces(text)) for text in _modules())
    return tuple(_chunks([s + end for s in lines]) for lines, end in _LANGUAGES[kind])


_LANGUAGES: Final[dict[str, tuple[tuple[Sequence[str], str], ...]]] = {
    "cjk": ((CHINESE, ""), (JAPANESE, "")),
    "other-script": ((RUSSIAN, " "), (ARABIC, " "), (THAI, " "), (HINDI, " ")),
}


def _chunks(texts: Sequence[str], glue: str = "") -> _Source:
    """Texts with what each adds to a document of its like: a cut may span two of them."""
    count = tokenizer.count
    return tuple(_Chunk(t, max(1, count(t + glue + t) - count(t))) for t in texts)


@cache
def _modules() -> tuple[str, ...]:
    """Sources of the standard library's modules of middle size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(folder.glob("*.py")) if 12_000 < f.stat().st_size < 60_000]
    return tuple(f.read_text(encoding="utf-8") for f in files)


def _docstrings() -> list[str]:
    return ["\n\n".join(_DOCSTRING.findall(text)) for text in _modules()]


def _paragraphs(text: str) -> list[str]:
    """Paragraphs that are sentences, not grammar, tables or examples."""
    found = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [
        block + "\n\n"
        for block in found
        if len(block) >= 80 and sum(c in _PLAIN for c in block) >= 0.97 * len(block)
    ]


def _code_pieces(text: str) -> list[str]:
    lines = _DOCSTRING.sub("", text).splitlines(keepends=True)
    pieces = [lines[at : at + _LINES_PER_CHUNK] for at in range(0, len(lines), _LINES_PER_CHUNK)]
    return ["".join(piece) for piece in pieces if _is_code(piece)]


def _is_code(lines: Sequence[str]) -> bool:
    """Neither mostly comments and text, nor a table of numbers."""
    said = [line.strip() for line in lines if line.strip()]
    text = "".join(said)
    comments = sum(line.startswith("#") for line in said)
    statements = sum(not _MARKS.isdisjoint(line) for line in said)
    digits = sum(map(str.isdigit, text))
    return comments * 4 <= len(said) <= statements * 2 and digits * 6 <= len(text)


# -- JSON


def _json_document(tokens: int, rng: random.Random) -> SampleText:
    """An array of records of one to three shapes, minified."""
    shapes = rng.sample(_records(), rng.randint(2, 4))
    texts: list[str] = []
    rest = tokens - 2
    while rest > 0:
        fitting = rng.choice(shapes)
        chunk = rng.choice(fitting)
        if chunk.tokens > rest:
            small = [c for shape in _records() for c in shape if c.tokens <= rest]
            if not small:
                break
            chunk = max(small, key=lambda c: c.tokens)
        texts.append(chunk.text)
        rest -= chunk.tokens
    return SampleText(("[" + ",".join(texts) + "]",), tokens - rest)


@cache
def _records() -> tuple[_Source, ...]:
    """For each shape of record, many of them with random values."""
    rng = random.Random(20_240_501)
    return tuple(
        _chunks([orjson.dumps(make(rng)).decode() for _ in range(60)], ",") for make in _SHAPES
    )


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(_VOCABULARY, k=rng.randint(low, high)))


def _day(rng: random.Random) -> str:
    return f"20{rng.randint(10, 25)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _order(rng: random.Random) -> dict[str, Any]:
    return {
        "order_id": rng.randint(10_000, 9_999_999),
        "customer": {"name": _words(rng, 1, 2).title(), "vip": rng.random() < 0.2},
        "lines": [
            {
                "sku": "".join(rng.choices(string.ascii_uppercase, k=3)) + str(rng.randint(1, 999)),
                "quantity": rng.randint(1, 20),
                "unit_price": round(rng.uniform(1, 500), 2),
            }
            for _ in range(rng.randint(1, 6))
        ],
        "status": rng.choice(("pending", "shipped", "returned")),
        "created_at": _day(rng) + "T08:30:00Z",
    }


def _event(rng: random.Random) -> dict[str, Any]:
    return {
        "timestamp": rng.randint(1_500_000_000, 1_800_000_000),
        "level": rng.choice(("info", "warning", "error")),
        "logger": ".".join(rng.choices(_VOCABULARY, k=3)),
        "message": _words(rng, 4, 14),
        "context": {"attempt": rng.randint(1, 5), "duration_ms": round(rng.expovariate(0.01), 1)},
    }


def _profile(rng: random.Random) -> dict[str, Any]:
    return {
        "id": rng.randint(1, 999_999),
        "display_name": _words(rng, 2, 2).title(),
        "email": f"{rng.choice(_VOCABULARY)}{rng.randint(1, 99)}@example.org",
        "tags": rng.choices(_VOCABULARY, k=rng.randint(0, 5)),
        "biography": _words(rng, 8, 25) if rng.random() < 0.5 else None,
        "settings": {"newsletter": rng.random() < 0.5, "theme": "dark", "birthday": _day(rng)},
    }


def _feature(rng: random.Random) -> dict[str, Any]:
    def point() -> list[float]:
        return [round(rng.uniform(-180, 180), 4), round(rng.uniform(-90, 90), 4)]

    return {
        "type": "Feature",
        "properties": {"name": _words(rng, 1, 3), "population": rng.randint(100, 9_000_000)},
        "geometry": {"type": "LineString", "coordinates": [point() for _ in range(4)]},
    }


def _call(rng: random.Random) -> dict[str, Any]:
    return {
        "tool": rng.choice(("search_documents", "get_weather", "send_message", "run_query")),
        "arguments": {rng.choice(_VOCABULARY): _words(rng, 1, 6) for _ in range(3)},
        "result": {"ok": rng.random() < 0.9, "items": rng.randint(0, 50)},
    }


def _flag(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(_VOCABULARY): rng.choice((True, False, None, rng.randint(0, 99)))}


_SHAPES: Final[tuple[Callable[[random.Random], dict[str, Any]], ...]] = (
    _order,
    _event,
    _profile,
    _feature,
    _call,
    _flag,
)
