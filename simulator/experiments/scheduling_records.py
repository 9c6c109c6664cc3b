"""Inputs and results of schedulers in virtual time: requests, troubles, gateways."""

from typing import Final, Literal, Protocol

import msgspec
import numpy as np

from gateway.fleet.fleet import PoolState
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import ExpectedHit
from gateway.scheduling.scheduler import Match, Points, Scheduler
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
prefix cache of 160,000 tokens: the engine behind the figures of bench quartz.
"""


class Demand(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One request."""

    arrival_s: float
    client: str
    prompt_tokens: int
    output_tokens: int
    cap_tokens: int
    slo_s: float
    """Its target for the time to first token."""
    kind: str
    blocks: tuple[int, ...]
    """Chained hashes of its full prompt blocks."""
    ends_tokens: tuple[int, ...] = ()
    """Prompt tokens at the end of each earlier turn."""
    priority_class: int = 1
    told_slo_s: float = 0.0
    """The target that schedulers are told; 0 for none."""
    stream: bool = True
    """False: the gateway sees no first token, and learns of the cache at the end."""
    expected_output_tokens: int = 0
    """The gateway's estimate of the output; 0: it is `output_tokens`."""


class Trouble(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A disturbance of a worker."""

    at_s: float
    worker: int
    what: Literal["stall", "restart", "cold"]
    """stall: it makes no progress and answers nothing; restart: it loses everything and is known to
    be away; cold: it silently loses its cache.
    """
    lasts_s: float = 0.0


class Prefixes(Protocol):
    """The part of `gateway.scheduling.prefix_index.PrefixIndex` in use; points are in tokens."""

    workers: int

    def match(self, points: Points, tokens_per_byte: float = 1.0) -> Match:
        """Workers that hold a prefix, and its length."""
        ...

    def insert(self, points: Points, worker: int, tokens_per_byte: float = 1.0) -> ExpectedHit:
        """Record a prompt sent to a worker."""
        ...

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """Correct by the tokens that the engine found."""
        ...

    def forget(self, worker: int) -> None:
        """Drop a restarted worker's prefixes."""
        ...


class SimulatedGateway:
    """One gateway process: its scheduler, pool state and indexes."""

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
        self.prefix_gossip = PrefixGossip()
        self.kv_usage = [0.0] * len(pool.workers)
        """Share of each worker's KV cache in use at the last reading of its metrics."""


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Results by request, in order of arrival; NaN for events that did not happen."""

    ttft_s: np.ndarray
    wait_s: np.ndarray
    """From arrival to the first service in the engine."""
    queue_s: np.ndarray
    """Time waited in the gateway, which is part of `wait_s`."""
    end_s: np.ndarray
    worker: np.ndarray
    cached_tokens: np.ndarray
    within: np.ndarray
    """1 if the prefill was within its predicted quantile, else 0; NaN without a prediction."""
    lost: int
    """Number of requests that were not answered."""
