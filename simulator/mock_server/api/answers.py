"""Deterministic answers: their text and their natural length.

A seed picks where the answer starts in a fixed table of word-pieces, one piece per token; a
few tokens have no text, like real tokens that end in the middle of a character.
"""

from math import exp, log
from statistics import NormalDist
from typing import Final

import orjson

from simulator.mock_server import tokenizer

_TEXT: Final = (
    "the of and a to in is it that was for on are as with at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also "
    "around another came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number great tell men say "
    "small every found still between name should home big give air line set own under read last "
    "never us left end along while might next sound below saw something thought both few those "
    "always looked show large often together asked house world going want school important "
    "until form food keep children feet land side without boy once animals life enough took "
    "sometimes four head above kind began almost live page got earth need far hand high year "
    "mother light parts country father let night following picture being study second eyes soon "
    "times story boys since white days ever paper hard near sentence better best across during "
    "today others however sure means knew try told young miles sun ways thing whole hear "
    "example heard several change answer room sea against top turned learn point city play "
    "toward five using himself usually"
)
_SIGMA: Final = 0.8
_NO_TEXT_EVERY: Final = 61
TABLE_SIZE: Final = 2048


def _mix(value: int) -> int:
    """splitmix64: neighbouring numbers give unrelated ones."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def uniform(number: int) -> float:
    """A number in (0, 1) that depends on `number` only."""
    return ((_mix(number) >> 12) + 0.5) / (1 << 52)


def _table() -> list[str]:
    words = [word for word in _TEXT.split() if tokenizer.count(" " + word) == 1]
    pieces = []
    for slot in range(TABLE_SIZE):
        if slot % _NO_TEXT_EVERY == _NO_TEXT_EVERY - 1:
            pieces.append("")
        elif slot % 17 == 16:
            pieces.append(".")
        else:
            pieces.append(" " + words[_mix(slot) % len(words)])
    return pieces


_PIECES: Final = _table()
_PIECES_TWICE: Final = _PIECES * 2
JSON_PIECES: Final = [orjson.dumps(piece) for piece in _PIECES]
"""The table's pieces as JSON strings, quotes included."""
EMPTY_JSON: Final = b'""'


def piece_json(seed: int, index: int) -> bytes:
    """The text of the answer's token `index` (from 1), as a JSON string."""
    return JSON_PIECES[(seed + index) % TABLE_SIZE]


def text(seed: int, tokens: int) -> str:
    """The answer's first `tokens` tokens."""
    start = (seed + 1) % TABLE_SIZE
    if tokens <= TABLE_SIZE:
        return "".join(_PIECES_TWICE[start : start + tokens])
    whole, rest = divmod(tokens, TABLE_SIZE)
    once = "".join(_PIECES_TWICE[start : start + TABLE_SIZE])
    return once * whole + "".join(_PIECES_TWICE[start : start + rest])


_NORMAL: Final = NormalDist()


def natural_length(seed: int, mean_tokens: float) -> int:
    """Tokens before the model would stop by itself: lognormal with the given mean, at least 1."""
    z = _NORMAL.inv_cdf(uniform(seed))
    return max(1, round(exp(log(mean_tokens) - _SIGMA * _SIGMA / 2 + _SIGMA * z)))
