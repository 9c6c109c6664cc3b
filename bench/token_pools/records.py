"""Records of the token-pool experiments, and the engine that they run on."""

import math
from collections.abc import Sequence

import msgspec

from simulator.engine.engine import EngineProfile

SLOTS = 16
ITERATION_S = 16 * (64 + 64) / 240 / 64
"""16 slots that hold 64 + 64 tokens each make 240 tokens/s (token-pools paper, section 5.1)."""
PER_SLOT_S = 0.001
POOL_REASONS = ("low priority", "overshoot", "headroom")
"""Why the pool, not the entitlement, refuses; the first is the paper's "low-priority denial"."""


class AdmittedJob(msgspec.Struct, kw_only=True):
    """One request that was let in. Times in seconds of the experiment; -1 before they are known."""

    id: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    asked_s: float
    reserved_tokens: int
    engine: int = 0
    emitted: int = 0
    first_s: float = -1.0
    done_s: float = -1.0
    queue_s: float = -1.0
    evicted: bool = False

    @property
    def ttft_s(self) -> float:
        """From asking to the first token; infinite when none came."""
        return self.first_s - self.asked_s if self.first_s >= 0 else math.inf


class RefusedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One 429."""

    at_s: float
    tenant: str
    reason: str
    """As admission names it; `priority` is told apart as in POOL_REASONS."""
    retry_after_s: float


class PoolMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one moment. Mappings by tenant."""

    at_s: float
    slots: int
    running: int
    waiting: int
    inflight: dict[str, int]
    debt: dict[str, float]
    weight: dict[str, float]
    kv_bytes: int = 0
    kv_used: float = 0.0
    """Share of the engines' blocks in use."""
    generated: int = 0
    """Output tokens so far."""


def spark(slots: int = SLOTS) -> EngineProfile:
    """An engine of the paper's pace: an iteration lasts ITERATION_S with all slots taken."""
    return EngineProfile(
        name="spark",
        w_s=ITERATION_S - slots * PER_SLOT_S,
        h_s=PER_SLOT_S,
        max_num_seqs=slots,
        prefix_cache_tokens=0,
    )


def quantile(values: Sequence[float], q: float) -> float:
    """By nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan
