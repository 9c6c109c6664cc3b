"""Inputs and outputs of a barrier-synchronised group: see simulator.barrier.group."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Pairs = Sequence[tuple[int, int]]
"""(index into the waiting pool, worker)."""

OVERHEAD_S: Final = 4.0e-3
SECONDS_PER_TOKEN: Final = 1.07e-7
"""t_l, which with C gives the throughput and TPOT of the paper's Table 1 for its imbalance."""


class BarrierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group and its router's view. The default is the paper's Table 1."""

    workers: int = 16
    slots: int = 72
    """B: requests active at once on each worker."""
    overhead_s: float = OVERHEAD_S
    seconds_per_token: float = SECONDS_PER_TOKEN
    reveal: int = 128
    """R: waiting requests that the router sees at once."""
    depth: int | None = 0
    """Requests that each worker may queue beyond its slots; None for no limit."""
    drift: tuple[float, ...] = (1.0,)
    """Growth of every active request's workload at each step, in tokens, >= 0, repeated cyclically
    (Definition 2's delta_k); one token for LLM decoding.
    """


class BarrierWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival; arrays of one length."""

    prompt_tokens: Floats
    output_tokens: Ints
    """Steps that each request is active, >= 1."""
    arrival_s: Floats | None = None
    """None: all requests are there from the start, undiscovered until revealed."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """History of a run: arrays by step, and by request (-1 for events that did not happen)."""

    load: Floats
    """Tokens on each worker during each step, shape (steps, workers)."""
    active: Ints
    """Requests active during each step, which is also its number of generated tokens."""
    dt_s: Floats
    at_s: Floats
    """When each step began."""
    revealed_step: Ints
    start_step: Ints
    end_step: Ints
    """The first step in which the request is no longer active."""
    bound_step: Ints
    """The step in which its worker was chosen."""
    worker: Ints
    output_tokens: Ints
    seconds_per_token: float
    """t_l: duration that each token on the fullest worker adds to a step, seconds."""
    arrival_s: Floats
    """When the router could see it: its arrival, or when it was revealed."""
