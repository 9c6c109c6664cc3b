"""Extractive compression of prompts: whole sentences stay, in order, within a token budget.

Pure, numpy only. `compress` takes chat messages; `compress_prompt`, `compress_responses` and
`compress_anthropic` take the other endpoints' bodies. Each gives `Compressed` or `Refused`.
"""

from compressor.api import (
    compress,
    compress_anthropic,
    compress_prompt,
    compress_responses,
    warm,
)
from compressor.exact import load_counter
from compressor.extraction.task import When
from compressor.result import TIERS, Compressed, Reason, Refused, Tier, Trace, Unit
from compressor.scoring.score import PROFILES, Profile, Weights

__all__ = [
    "PROFILES",
    "TIERS",
    "Compressed",
    "Profile",
    "Reason",
    "Refused",
    "Tier",
    "Trace",
    "Unit",
    "Weights",
    "When",
    "compress",
    "compress_anthropic",
    "compress_prompt",
    "compress_responses",
    "load_counter",
    "warm",
]
