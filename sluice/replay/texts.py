"""Prompts of a given length and kind, each different from its beginning: no prefix is cached."""

import random
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

_WORDS: Final = tuple(
    word
    for line in (
        "time year people way day man thing woman life child world school state family student",
        "country problem hand part place case week company system program question work number",
        "point home water room mother area money story fact month lot right study book eye job",
        "business issue side kind head house service friend father power hour game line end group",
    )
    for word in line.split()
)
_SIGNS: Final = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过"
)
_LETTERS: Final = "абвгдежзиклмнопрстуфхцчшыэюя"
_MANY: Final = 400


def _prose(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=9)).capitalize() + ". "


def _code(draw: random.Random) -> str:
    one, two, three = draw.choices(_WORDS, k=3)
    return f"def {one}_{two}({three}):\n    return {three}.{one}[{draw.randrange(1000)}]\n\n"


def _json(draw: random.Random) -> str:
    one, two = draw.choices(_WORDS, k=2)
    return f'{{"{one}": {draw.randrange(100_000)}, "name": "{two}", "ok": true}},\n'


def _cjk(draw: random.Random) -> str:
    return "".join(draw.choices(_SIGNS, k=14)) + "。"


def _other(draw: random.Random) -> str:
    words = ("".join(draw.choices(_LETTERS, k=draw.randint(3, 9))) for _ in range(6))
    return " ".join(words).capitalize() + ". "


KINDS: Final[dict[str, Callable[[random.Random], str]]] = {
    "prose": _prose,
    "code": _code,
    "json": _json,
    "cjk": _cjk,
    "other-script": _other,
    "mixed": lambda draw: _prose(draw) + _cjk(draw),
}
"""A piece of text by category of the request log."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt of one kind: a fixed number, and those of each piece."""

    fixed: float
    per_piece: float


class Texts:
    """Generates prompts once the pieces' lengths are learned."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` None gives different prompts each time, which an engine cannot have cached."""
        self._draw = random.Random(seed)
        self._scales: dict[str, Scale] = {}

    async def learn(self, kinds: set[str], count: Callable[[str], Awaitable[int | None]]) -> None:
        """Learn how many tokens each kind's pieces take; `count` is the engine's tokenizer.

        Without a count, four bytes are taken as one token.
        """
        for kind in sorted({kind_of(k) for k in kinds}):
            one, many = "a", self._pieces(kind, _MANY)
            fixed = (await count(one) or 1) - 1
            tokens = await count(many) or len(many.encode()) // 4
            per_piece = max((tokens - fixed) / _MANY, 0.5)
            self._scales[kind] = Scale(fixed=fixed, per_piece=per_piece)

    def prompt(self, kind: str, tokens: int) -> str:
        """A prompt of about so many tokens of that kind, template included."""
        kind = kind_of(kind)
        scale = self._scales[kind]
        pieces = max(0.0, (tokens - scale.fixed) / scale.per_piece)
        whole = self._pieces(kind, int(pieces) + 1)
        # Shorten the last piece if it would exceed the length.
        last = len(whole) / (int(pieces) + 1)
        return whole[: max(1, round(last * pieces))]

    def _pieces(self, kind: str, count: int) -> str:
        make = KINDS[kind]
        return "".join(make(self._draw) for _ in range(count))


def kind_of(category: str | None) -> str:
    """The kind of text for a category; prose for unknown ones."""
    return category if category in KINDS else "prose"
