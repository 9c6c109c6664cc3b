"""What schedulers in virtual time are given and give: requests, troubles, gateways, results."""

from typing import Final, Literal, Protocol

import msgspec
import numpy as np

from gateway.policy.fleet.fleet import PoolState
from gateway.policy.prefix.cache_estimate import Expected
from gateway.policy.prefix.gossip import PrefixNews
from gateway.policy.scheduling.scheduler import Match, Points, Scheduler
from predictor.online import PrefillPredictor
from simulator.engine.engine import EngineProfile

BLOCK_TOKENS: Final = 64

WORKER: Final = EngineProfile(
    name="quartz-worker",
    w_s=0.024,
    h_s=0.0004,
    prefill_s_per_token=1 / 9000,
    max_num_batched_tokens=2048,
    block_tokens=BLOCK_TOKENS,
    kv_blocks=480_000 // BLOCK_TOKENS,
    prefix_cache_tokens=160_000,
    max_model_len=131_072,
    max_num_seqs=256,
)
"""24 ms a step and .4 ms a sequence, 9,000 prefill tokens/s in chunks of 2,048, and an LRU
prefix cache of 160,000 tokens: the engine that the figures of bench quartz are for."""


class Demand(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One request as it arrives."""

    arrival_s: float
    client: str
    prompt_tokens: int
    output_tokens: int
    cap_tokens: int
    slo_s: float
    """Time to first token that it asks for."""
    kind: str
    blocks: tuple[int, ...]
    """Chained hashes of its full prompt blocks."""
    ends_tokens: tuple[int, ...] = ()
    """Ends of the earlier turns within the prompt."""
    band: int = 1


class Trouble(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something that happens to a worker."""

    at_s: float
    worker: int
    what: Literal["stall", "restart", "cold"]
    """stall: it does nothing and answers nothing; restart: it loses all and is known to be
    away; cold: only its cache is lost, and nobody is told."""
    lasts_s: float = 0.0


class Prefixes(Protocol):
    """What of `gateway.policy.prefix.index.PrefixIndex` is used; points are in tokens."""

    workers: int

    def match(self, points: Points, tokens_per_byte: float = 1.0) -> Match:
        """Who holds how much."""
        ...

    def insert(self, points: Points, worker: int, tokens_per_byte: float = 1.0) -> Expected:
        """A prompt goes to a worker."""
        ...

    def correct(self, worker: int, expected: Expected, cached_tokens: int) -> None:
        """What the engine found."""
        ...

    def forget(self, worker: int) -> None:
        """A worker begins anew."""
        ...


class Gateway:
    """One gateway process: its scheduler with what belongs to it."""

    def __init__(
        self,
        pool: PoolState,
        scheduler: Scheduler,
        prefixes: Prefixes | None = None,
        predictor: PrefillPredictor | None = None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.prefixes = prefixes
        self.predictor = predictor
        self.news = PrefixNews()


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests: an entry each, in order of arrival; NaN for what was not."""

    ttft_s: np.ndarray
    wait_s: np.ndarray
    """From arrival to the first service in the engine."""
    queue_s: np.ndarray
    """Of that, in the gateway."""
    end_s: np.ndarray
    worker: np.ndarray
    cached_tokens: np.ndarray
    within: np.ndarray
    """1 where the prefill was within its predicted quantile, 0 where not, NaN if none was made."""
    lost: int
    """Requests that were not answered."""
