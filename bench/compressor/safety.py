"""Check that compressed prompts fit in tokens, counted with three real vocabularies.

The vocabularies come with the package quicktok (MIT; o200k_base from tiktoken, MIT; Qwen,
Apache-2.0; Llama 3 under Meta's community licence), a development dependency. Without it the
rows say so. The mean bytes per token of a kind is the value that the estimator would have
learned: all bytes of the kind's prompts over all their tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import compressor
from bench.common.texts import document
from bench.compressor.prompts import Messages, english, other_languages
from bench.compressor.trials import size_of

VOCABULARIES: Final = ("o200k_base", "qwen3", "llama3")
REDUCTIONS: Final = (0.154, 0.40)
_MIXED_PROMPTS: Final = 60
_CJK_PROMPTS: Final = 40
_EVERY: Final = 2

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Safety:
    """One kind in one vocabulary at one reduction."""

    vocabulary: str
    kind: str
    reduction: float
    exact: bool
    """Whether the compressor had the tokenizer."""
    prompts: int
    refused: int
    over: int
    """Compressed prompts with more tokens than T_c."""
    worst: float
    """Highest share of T_c that was used."""
    ratio: float
    """Mean bytes per token of the kind."""


def counter(vocabulary: str) -> Count | None:
    """Counts a text's tokens; None when quicktok is not installed."""
    try:
        import quicktok  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    encoding = quicktok.get_encoding(vocabulary)

    def count(text: str) -> int:
        return len(encoding.encode(text))

    return count


@cache
def kinds() -> dict[str, list[Messages]]:
    """Prompts by kind: documentation, Chinese and Japanese, documentation with code."""
    cjk = [p.messages for p in other_languages() if p.language in {"Chinese", "Japanese"}]
    rng = random.Random(5)
    for _ in range(_CJK_PROMPTS):
        text = document("cjk", rng.randint(4000, 10_000), rng).text
        cjk.append([{"role": "user", "content": f"{text}\n\nこの文章を要約してください。"}])
    return {
        "English": [p.messages for p in english()[::_EVERY]],
        "CJK": cjk[::_EVERY],
        "code + markdown": [_mixed(rng) for _ in range(_MIXED_PROMPTS)],
    }


def _mixed(rng: random.Random) -> Messages:
    """Headings, prose and fenced code, up to half of it code."""
    parts = ["Explain how these modules work together."]
    for section in range(rng.randint(8, 14)):
        parts += [f"## Section {section}", document("prose", rng.randint(200, 700), rng).text]
        if rng.random() < 0.7:
            code = document("code", rng.randint(60, 350), rng).text.replace("```", "")
            parts.append(f"```python\n{code.strip()}\n```")
    return [{"role": "user", "content": "\n\n".join(parts)}]


def measured(vocabulary: str, kind: str, reduction: float, *, exact: bool) -> Safety | None:
    """Over how many prompts of `kind` the token budget was passed."""
    count = counter(vocabulary)
    if count is None:
        return None
    prompts = kinds()[kind]
    tokens = [_tokens(count, messages) for messages in prompts]
    ratio = sum(map(size_of, prompts)) / sum(tokens)
    refused = over = 0
    worst = 0.0
    for messages, total in zip(prompts, tokens, strict=True):
        budget = int(total * (1 - reduction))
        found = compressor.compress(
            messages,
            budget,
            ratio,
            exact_counter=count if exact else None,
            max_cut=0.6,
            when="any",
        )
        if isinstance(found, compressor.Refused):
            refused += 1
            continue
        used = _tokens(count, found.messages) / budget
        over += used > 1
        worst = max(worst, used)
    return Safety(
        vocabulary, kind, reduction, exact, len(prompts), refused, over, worst, ratio
    )  # fmt: skip


def _tokens(count: Count, messages: Messages) -> int:
    return sum(count(message["content"]) for message in messages)
