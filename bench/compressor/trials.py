"""Answers preserved in prompts compressed to a share of their bytes, by us and by baselines."""

import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import numpy as np

import compressor
from bench.common.report import scaled
from bench.common.texts import document
from bench.compressor.prompts import Messages, PromptCase, english, other_languages
from compressor.extraction.plan import planned
from compressor.extraction.select import rendered, selected
from compressor.messages import read_chat, written
from compressor.text.terms import Floats

Method = Literal["default", "paper", "random", "head+tail"]
METHODS: Final[tuple[Method, ...]] = ("default", "paper", "random", "head+tail")
REDUCTIONS: Final = (0.10, 0.154, 0.25, 0.40, 0.50)


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt compressed once."""

    prompt: PromptCase
    method: Method
    reduction: float
    kept: bool
    """Whether every gold sentence is still there, word for word. False when refused."""
    refused: str
    cut: float
    fits: bool


def size_of(messages: Messages) -> int:
    """UTF-8 bytes of the contents."""
    return sum(len(message["content"].encode()) for message in messages)


def trial(prompt: PromptCase, method: Method, reduction: float) -> Trial:
    """`prompt` cut to 1 - `reduction` of its bytes: no estimate of tokens is involved."""
    size = size_of(prompt.messages)
    budget = int(size * (1 - reduction))
    if method in {"default", "paper"}:
        result = compressor.compress(
            prompt.messages,
            budget,
            1.0,
            safety=1.0,
            profile="paper" if method == "paper" else "default",
            when="any",
        )
        if isinstance(result, compressor.Refused):
            return Trial(prompt, method, reduction, False, result.reason, 0.0, True)
        messages = result.messages
    else:
        messages = _baseline(prompt.messages, budget, _SCORES[method])
    after = size_of(messages)
    return Trial(
        prompt, method, reduction, kept_in(messages, prompt.gold), "", 1 - after / size,
        after <= budget,
    )  # fmt: skip


def kept_in(messages: Messages, gold: tuple[str, ...]) -> bool:
    """Whether all sentences are in the messages, line breaks aside."""
    text = " ".join(" ".join(message["content"].split()) for message in messages)
    return all(" ".join(sentence.split()) in text for sentence in gold)


def _baseline(messages: Messages, budget: int, score: Callable[[int], Floats]) -> Messages:
    """The same units and the same protection with other scores."""
    prompt = read_chat(messages)
    free = [slot for slot in prompt.slots if slot.role != "system"]
    protected = size_of(messages) - sum(len(slot.text.encode()) for slot in free)
    plan = planned(free, budget, "default")
    if isinstance(plan, tuple):
        return messages
    layout = plan.layout
    plan = replace(plan, scores=score(len(plan.scores)))
    room = budget - protected - plan.margin_bytes
    kept = selected(plan.costs, plan.section, plan.tiers, plan.scores, room)
    texts = {
        slot.path: rendered(layout.ground.chars, layout.parts.spans, kept, int(start), int(end))
        for slot, start, end in zip(free, layout.starts, layout.ends, strict=True)
    }
    found: Messages = written(messages, texts)
    return found


def _random(units: int) -> Floats:
    return np.array([random.Random(units * 7919 + i).random() for i in range(units)])


def _head_and_tail(units: int) -> Floats:
    at = np.arange(units)
    return -np.minimum(at, units - 1 - at).astype(np.float64)


_SCORES: Final[dict[str, Callable[[int], Floats]]] = {
    "random": _random,
    "head+tail": _head_and_tail,
}


# -- figures of compression: Table 7 of FleetOpt, hostile texts, and the time by prompt size


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


# -- check that compressed prompts fit in tokens, counted with three real vocabularies


VOCABULARIES: Final = ("o200k_base", "qwen3", "llama3")
SAFETY_REDUCTIONS: Final = (0.154, 0.40)
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
