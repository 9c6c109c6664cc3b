"""Texts for the compressor's tests."""

import random
from typing import Any

WORDS = [
    *("river", "bridge", "harbour", "lantern", "copper", "meadow", "signal", "garden"),
    *("winter", "engine", "market", "letter", "window", "mountain", "thread", "silver"),
    *("archive", "cellar", "compass", "orchard", "valley", "kitchen", "ladder"),
]


def sentence(rng: random.Random, words: int = 12) -> str:
    """A sentence of plain words."""
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def prose(sentences: int, seed: int = 0, per_paragraph: int = 5) -> str:
    """Paragraphs of sentences, all different."""
    rng = random.Random(seed)
    found = [sentence(rng, rng.randint(8, 18)) for _ in range(sentences)]
    return "\n\n".join(
        " ".join(found[at : at + per_paragraph]) for at in range(0, sentences, per_paragraph)
    )


def user(text: str) -> list[dict[str, Any]]:
    """One user message."""
    return [{"role": "user", "content": text}]


def size(text: str) -> int:
    """UTF-8 bytes, lone surrogates too."""
    return len(text.encode("utf-8", "surrogatepass"))
