"""Figures of compression: Table 7 of FleetOpt, hostile texts, and the time by prompt size.

Table 7 (appendix C), as far as it can be computed. ROUGE-L recall: an extract in order is a
subsequence of the prompt, so the longest common subsequence is the extract itself and the recall is
the share of words kept, whichever they are. TF-IDF cosine: of the two bags of words, idf
ln(N / df) + 1 over the set's prompts. BERTScore needs RoBERTa-large, which is neither shipped nor
fetched: it is not computed.
"""

import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

import compressor
from bench.common.steps import scaled
from bench.common.texts import document
from bench.compressor.prompts import Messages, english
from bench.compressor.trials import size_of

_WORD = re.compile(r"\w+")


def rouge_l_recall(before: Messages, after: Messages) -> float:
    """Words of the extract over words of the prompt."""
    return sum(bag(after).values()) / max(sum(bag(before).values()), 1)


def bag(messages: Messages) -> Counter[str]:
    """Lower-case words and how often they occur."""
    return Counter(
        word for message in messages for word in _WORD.findall(message["content"].lower())
    )


def inverse_frequencies(bags: Sequence[Counter[str]]) -> dict[str, float]:
    """ln(N / df) + 1 of each word."""
    spread = Counter(word for found in bags for word in found)
    return {word: math.log(len(bags) / count) + 1 for word, count in spread.items()}


def cosine(before: Counter[str], after: Counter[str], idf: dict[str, float]) -> float:
    """Cosine of two bags weighted by `idf`."""
    dot = sum(count * before[word] * idf[word] ** 2 for word, count in after.items())
    norms = [
        math.sqrt(sum((count * idf[word]) ** 2 for word, count in found.items()))
        for found in (before, after)
    ]
    return dot / (norms[0] * norms[1]) if all(norms) else 0.0


def quantiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, p10, p50, p90, as the table has them."""
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    return float(np.mean(values)), low, middle, high


# -- texts that are hard to split; each must quickly fit or be refused

_BYTES = 50_000


@dataclass(frozen=True, slots=True)
class TextOutcome:
    """What became of one text."""

    name: str
    outcome: str
    holds: bool
    ms: float


def texts() -> dict[str, str]:
    """About 50 KB each."""
    seeds = {
        "no punctuation": "word ",
        "one sentence": "clause, ",
        "one word": "a",
        "stops": ". ",
        "blank lines": "a\n\n",
        "brackets": "[",
        "open JSON": '{"a":',
        "fences": "```\n",
        "RST headings": "Title\n~~~~~\nA line of text.\n",
        "rules": "-|-\n",
        "headers": "[1] A\n",
        "emoji": "👨‍👩‍👧‍👦",
        "combining marks": "e\u0301a\u0308 ",
        "lone surrogates": "text \ud83d more. ",
        "Thai": "ภาษาไทยเขียนติดกัน",
    }
    found = {
        name: seed * (_BYTES // len(seed.encode("utf-8", "surrogatepass")))
        for name, seed in seeds.items()
    }
    found["minified JSON"] = json.dumps({f"k{i}": i for i in range(4000)}, separators=(",", ":"))
    return found


def hostile() -> list[TextOutcome]:
    """Each text cut to 70 % of its bytes, a question after it."""
    return [_tried(name, text) for name, text in texts().items()]


def _tried(name: str, text: str) -> TextOutcome:
    messages = [{"role": "user", "content": f"{text}\n\nQuestion: What does it say?"}]
    size = len(text.encode("utf-8", "surrogatepass"))
    started = time.perf_counter()
    found = compressor.compress(messages, int(size * 0.7), 1.0, safety=1.0, when="any")
    ms = 1000 * (time.perf_counter() - started)
    if isinstance(found, compressor.Refused):
        return TextOutcome(name, found.reason, True, ms)
    after = found.messages[0]["content"]
    kept = len(after.encode("utf-8", "surrogatepass"))
    holds = 0.5 * found.budget_bytes <= kept <= found.budget_bytes
    return TextOutcome(name, f"{100 * found.cut:.0f} % cut", holds, ms)


# -- time of one compression, by the prompt sizes of FleetOpt's Table 4

ROUNDS: Final = scaled(7)
_ENGLISH: Final = 4.5
"""Bytes per token, for the bands' limits."""
_CJK: Final = 3.5


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Prompts of a token range, and what the paper measured on its own."""

    name: str
    tokens: tuple[int, int]
    published_ms: tuple[float, float, float] | None
    """p50, p95, p99."""


TOKEN_RANGES: Final = (
    TokenRange("LMSYS, 1.5K-2.3K", (1536, 2304), (1.2, 3.1, 5.2)),
    TokenRange("Azure, 4K-6K", (4096, 6144), (1.8, 4.2, 6.5)),
    TokenRange("Agent-heavy, 8K-12K", (8192, 12_288), (3.4, 6.2, 7.8)),
    TokenRange("16K-32K", (16_384, 32_768), None),
)


def prompts_of(token_range: TokenRange) -> list[Messages]:
    """English questions among so much documentation."""
    low, high = (int(tokens * _ENGLISH) for tokens in token_range.tokens)
    return [p.messages for p in english((max(low - 1000, 500), max(high - 3000, 800)))]


def cjk_prompts() -> list[Messages]:
    """Chinese and Japanese texts of 8K to 12K tokens."""
    rng = random.Random(9)
    return [
        [{"role": "user", "content": document("cjk", rng.randint(8192, 12_288), rng).text}]
        for _ in range(60)
    ]


def best_ms(
    prompts: list[Messages], profile: compressor.Profile, rounds: int = ROUNDS
) -> list[float]:
    """Each prompt's shortest time of `rounds`, in rounds over all: others share the machine."""
    compressor.warm()
    best = np.full(len(prompts), np.inf)
    for _ in range(rounds):
        for index, messages in enumerate(prompts):
            budget = int(size_of(messages) * 0.846)
            started = time.perf_counter()
            compressor.compress(messages, budget, 1.0, profile=profile, when="any")
            best[index] = min(best[index], time.perf_counter() - started)
    found: list[float] = (1000 * best).tolist()
    return found


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p95, p99."""
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    return p50, p95, p99
