"""Workloads and drifts for barrier-synchronised groups; a seed determines a workload exactly."""

from typing import Final

import numpy as np

from simulator.barrier.records import BarrierWork, Floats
from simulator.fleet.traffic import Random

PROMPT_MEAN, PROMPT_SD, MAX_PROMPT = 870.0, 1060.0, 16_000
OUTPUT_MEAN, MAX_OUTPUT = 250, 4096


def like_burst(count: int, random: Random) -> BarrierWork:
    """A stand-in for BurstGPT, which the paper uses: log-normal prompts, geometric outputs.

    With 16 workers of 72 slots it gives the load that Table 1's figures imply.
    """
    spread = np.log(1 + (PROMPT_SD / PROMPT_MEAN) ** 2)
    drawn = random.lognormal(np.log(PROMPT_MEAN) - spread / 2, np.sqrt(spread), count)
    return BarrierWork(
        prompt_tokens=np.clip(np.rint(drawn), 1, MAX_PROMPT),
        output_tokens=np.minimum(random.geometric(1 / OUTPUT_MEAN, count), MAX_OUTPUT),
    )


def of_theorem(count: int, random: Random, *, longest: int = 1000) -> BarrierWork:
    """Theorem 2's workload: prompts uniform on [1, longest], outputs geometric."""
    return BarrierWork(
        prompt_tokens=random.integers(1, longest + 1, count).astype(np.float64),
        output_tokens=random.geometric(1 / 100, count),
    )


def of_lengths(prompts: Floats, outputs: Floats) -> BarrierWork:
    """A trace's requests in its order; empty outputs count as one token."""
    return BarrierWork(
        prompt_tokens=np.asarray(prompts, dtype=np.float64),
        output_tokens=np.maximum(np.asarray(outputs, dtype=np.int64), 1),
    )


def poisson(work: BarrierWork, per_s: float, random: Random) -> BarrierWork:
    """The same requests with Poisson arrivals."""
    gaps = random.exponential(1 / per_s, len(work.prompt_tokens))
    return BarrierWork(
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        arrival_s=np.cumsum(gaps),
    )


DRIFTS: Final[dict[str, tuple[float, ...]]] = {
    "constant": (0.0,),
    "one token": (1.0,),
    "speculative": (1.0, 3.0, 2.0, 4.0),
    "throttled": (0.25,),
}
"""Definition 2's kinds: classical jobs; LLM decoding; several accepted tokens a step (delta >= 1);
a cache that is thinned out (delta < 1).
"""
