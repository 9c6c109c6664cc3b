"""Lengths that the planner's tests share: exact sums to compare with, and made-up traces."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from planner.workload.distribution import Cdf
from planner.workload.workload import Floats, Workload, from_lengths


class Lengths(NamedTuple):
    """Every request, or every whole length of a distribution."""

    total: Floats
    prompt: Floats
    answer: Floats
    weight: Floats

    def only(self, inside: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> "Lengths":
        return Lengths(*(column[inside] for column in self))


def whole_lengths(cdf: Cdf, input_share: float = 0.8) -> Lengths:
    """Lengths 1, 2, 3 ... of a distribution, split as FleetOpt splits them."""
    total = np.arange(1, cdf.tokens[-1] + 1, dtype=np.float64)
    shares = np.interp(np.arange(cdf.tokens[-1] + 1), (0, *cdf.tokens), (0.0, *cdf.shares))
    prompt = np.maximum(1, np.floor(input_share * total + 1e-9))
    return Lengths(total, prompt, np.maximum(1, total - prompt), np.diff(shares))


def made_up_trace(seed: int = 3, requests: int = 4000) -> Workload:
    random = np.random.default_rng(seed)
    prompts = np.ceil(np.clip(random.lognormal(7, 1.0, requests), 1, 14_000))
    answers = np.ceil(np.clip(random.lognormal(5, 0.8, requests), 1, 1500))
    return from_lengths(prompts, answers, name="made-up")


@st.composite
def cdfs(draw: st.DrawFn) -> Cdf:
    """Distributions of two to eight breakpoints up to 64K tokens."""
    tokens = sorted(draw(st.sets(st.integers(64, 65_536), min_size=2, max_size=8)))
    steps = draw(st.lists(st.integers(1, 100), min_size=len(tokens), max_size=len(tokens)))
    shares = np.cumsum(steps) / sum(steps)
    shares[-1] = 1.0
    return Cdf(tuple(tokens), tuple(map(float, shares)))
