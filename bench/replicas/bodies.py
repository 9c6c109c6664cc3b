"""Unusual request bodies that are nevertheless valid JSON."""

import json
from random import Random
from typing import Any, Final

from bench.common.fleet import MODEL

_WORDS: Final = (
    *("river", "road", "\u00e9t\u00e9", "\u6c34", "\U0001f30a", "caf\u00e9", "\u2028"),
    *("null", "{}", "//", "\\", '"', "\t"),
)


def request(number: int) -> tuple[str, bytes]:
    """A path and a body, each unlike every other."""
    draw = Random(f"observe/{number}")
    fields: list[tuple[str, Any]] = [("model", MODEL), (f"x_{number}", _anything(draw, 3))]
    if draw.random() < 0.3:
        path = "/v1/completions"
        fields.append(("prompt", _text(draw, 1, 30)))
    else:
        path = "/v1/chat/completions"
        parts: Any = _text(draw, 1, 30)
        if draw.random() < 0.3:
            parts = [
                {"type": "text", "text": _text(draw, 1, 30)} for _ in range(draw.randint(1, 3))
            ]
        fields.append(("messages", [{"role": "user", "content": parts}]))
    if draw.random() < 0.7:
        fields.append(("max_tokens", draw.randint(1, 500)))
    if draw.random() < 0.5:
        fields.append(("stream", draw.random() < 0.7))
        if fields[-1][1] and draw.random() < 0.4:
            fields.append(("stream_options", {"include_usage": draw.random() < 0.5}))
    if draw.random() < 0.3:
        fields.append(("temperature", Number(draw.choice(["1e0", "0.70", "1.0E+0", "0", "5e-1"]))))
    draw.shuffle(fields)
    return path, _written(dict(fields), draw).encode()


def _text(draw: Random, least: int, most: int) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))


def _gap(draw: Random) -> str:
    return draw.choice(["", "", " ", "\n", "\t ", "\r\n  "])


class Number(str):
    """A number as it is to be written."""

    __slots__ = ()


def _anything(draw: Random, depth: int) -> Any:
    kind = draw.randint(0, 5 if depth else 3)
    if kind == 0:
        return _text(draw, 0, 5)
    if kind == 1:
        return Number(draw.choice(["-0", "1E2", "12345678901234567890123", "0.10", "1e-7"]))
    if kind in {2, 3}:
        return draw.choice([True, False, None])
    if kind == 4:
        return [_anything(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return {f"k{n} {draw.choice(_WORDS)}": _anything(draw, depth - 1) for n in range(3)}


def _written(value: Any, draw: Random) -> str:
    """JSON with spaces and escapes wherever they may be."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        return '"' + "".join(_letter(letter, draw) for letter in value) + '"'
    if isinstance(value, list):
        return "[" + _separated([_written(v, draw) for v in value], draw) + "]"
    if isinstance(value, dict):
        pairs = [
            _written(k, draw) + _gap(draw) + ":" + _gap(draw) + _written(v, draw)
            for k, v in value.items()
        ]
        return _gap(draw) + "{" + _separated(pairs, draw) + "}" + _gap(draw)
    return json.dumps(value)


def _separated(items: list[str], draw: Random) -> str:
    return ",".join(_gap(draw) + item + _gap(draw) for item in items) or _gap(draw)


def _letter(letter: str, draw: Random) -> str:
    if letter == "/" and draw.random() < 0.5:
        return "\\/"
    if letter.isalpha() and draw.random() > 0.05:
        return letter
    if letter in '"\\\t' or draw.random() < 0.1:
        units = letter.encode("utf-16-be")
        return "".join(f"\\u{units[n]:02x}{units[n + 1]:02X}" for n in range(0, len(units), 2))
    return letter
