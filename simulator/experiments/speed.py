"""The load for which the simulator's speed is stated; the caller times `simulate` on it."""

import msgspec
import numpy as np

from simulator.engine.profiles import PROFILES
from simulator.fleet import arrivals
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.traffic import Breakpoints, CdfLengths, Traffic, traffic

INSTANCES = 44
SLOTS = 256
WINDOW_TOKENS = 4096
RATE_PER_S = 900.0


def stated_load(
    breakpoints: Breakpoints, requests: int = 100_000, seed: int = 0
) -> tuple[FleetSpec, Traffic]:
    """Reserved load, no prefix cache, JSQ; totals of at most 4,096 tokens, linear between."""
    profile = msgspec.structs.replace(
        PROFILES["llama-3-70b-a100-reserved"],
        timing="kv",
        max_num_seqs=SLOTS,
        max_model_len=WINDOW_TOKENS,
    )
    inside = [(tokens, share) for tokens, share in breakpoints if tokens <= WINDOW_TOKENS]
    scaled = [(tokens, share / inside[-1][1]) for tokens, share in inside]
    random = np.random.default_rng(seed)
    at_s = arrivals.poisson(RATE_PER_S, requests, random)
    pool = PoolSpec(name="short", instances=INSTANCES, profile=profile)
    return FleetSpec(pools=(pool,)), traffic(CdfLengths(scaled), at_s, random)
