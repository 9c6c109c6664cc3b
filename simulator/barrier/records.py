"""What is told to a barrier-synchronised group and what it tells: see simulator.barrier.group."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Pairs = Sequence[tuple[int, int]]
"""(place in the waiting pool, worker)."""

OVERHEAD_S: Final = 4.0e-3
SECONDS_PER_TOKEN: Final = 1.07e-7
"""C and t_l behind the paper's Table 1: they give its throughput and TPOT for its imbalance."""


class BarrierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group and what its router sees. The paper's Table 1 is the default."""

    workers: int = 16
    slots: int = 72
    """B: requests active at once on each worker."""
    overhead_s: float = OVERHEAD_S
    seconds_per_token: float = SECONDS_PER_TOKEN
    reveal: int = 128
    """R: waiting requests that the router sees at once."""
    depth: int | None = 0
    """Requests that each worker may hold queued beyond its slots; None for no limit."""
    drift: tuple[float, ...] = (1.0,)
    """What every active request's workload grows by at each step, in tokens, >= 0, over and over
    (Definition 2's delta_k); a token for LLM decoding."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival; arrays of one length."""

    prompt_tokens: Floats
    output_tokens: Ints
    """>= 1: steps that each is active."""
    arrival_s: Floats | None = None
    """None: all are there from the start, undiscovered but for `reveal`."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What happened: arrays by step, and by request (-1 where it did not happen)."""

    load: Floats
    """Tokens on each worker during each step, shape (steps, workers)."""
    active: Ints
    """Requests active during each step: tokens made by it."""
    dt_s: Floats
    at_s: Floats
    """When each step began."""
    revealed_step: Ints
    start_step: Ints
    end_step: Ints
    """The first step in which it was active no more."""
    bound_step: Ints
    """When its worker was chosen."""
    worker: Ints
    output_tokens: Ints
    seconds_per_token: float
    """t_l: what a token on the fullest worker costs a step."""
    arrival_s: Floats
    """When it was there to be seen: its own arrival, or when it was revealed."""
