"""Time of one compression, by the prompt sizes of FleetOpt's Table 4."""

import random
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

import compressor
from bench.common.texts import document
from bench.compressor.prompts import Messages, english
from bench.compressor.trials import size_of

ROUNDS: Final = 7
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
