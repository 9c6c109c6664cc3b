"""FleetOpt's fleets of Llama-3-70B nodes: engines as the papers count them, and as vLLM runs them.

The papers' engine takes W + h x (reserved tokens of all running sequences) an iteration,
H = 0.65 ms being stated for 8,192 tokens a sequence (section 3.1), and one iteration more a
request than engines do: `OneMore` adds it as an answer token, so windows are a token wider.
"""

from math import ceil
from typing import Final

import msgspec

from simulator.engine.profiles import PROFILES
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.traffic import Ints, Lengths, Random

PAPER: Final = PROFILES["llama-3-70b-a100-reserved"]
WINDOW_TOKENS: Final = 65_536
PAGED_SEQUENCES: Final = 256
"""vLLM's default --max-num-seqs on large GPUs."""


class OneMore:
    """Lengths with one more answer token: the papers count an iteration more than engines do."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        prompts, outputs = self._lengths.sample(count, random)
        return prompts, outputs + 1


def window_slots(window_tokens: int) -> int:
    """n_max: sequences if each is given a whole window of KV cache."""
    return PAPER.kv_blocks // ceil(window_tokens / PAPER.block_tokens)


def slot_pool(
    name: str, instances: int, window_tokens: int, *, boundary_tokens: int | None = None
) -> PoolSpec:
    """A pool of the papers' engines, limited by slots alone (for `OneMore` lengths)."""
    slots = window_slots(window_tokens)
    profile = msgspec.structs.replace(
        PAPER,
        name=f"{PAPER.name}-{window_tokens}",
        timing="kv",
        max_num_seqs=slots,
        max_model_len=window_tokens + 1,
        kv_blocks=slots * ceil((window_tokens + 1) / PAPER.block_tokens),
    )
    boundary = None if boundary_tokens is None else boundary_tokens + 1
    return PoolSpec(name=name, instances=instances, profile=profile, boundary_tokens=boundary)


def by_slots(
    fleet: tuple[int, ...], *, boundary: int, gamma: float = 1.0, compressible: float = 1.0
) -> FleetSpec:
    """The papers' fleet: (n,) for one pool of 65,536-token windows, (short, long) for two."""
    long = slot_pool("long" if len(fleet) > 1 else "all", fleet[-1], WINDOW_TOKENS)
    if len(fleet) == 1:
        return FleetSpec(pools=(long,))
    short = slot_pool("short", fleet[0], boundary, boundary_tokens=boundary)
    return FleetSpec(pools=(short, long), gamma=gamma, compressible=compressible)


def paged(
    fleet: tuple[int, ...], *, boundary: int, gamma: float = 1.0, compressible: float = 1.0
) -> FleetSpec:
    """The same nodes as vLLM runs them: KV is allocated by use, not by window."""
    profile = msgspec.structs.replace(
        PAPER,
        name="llama-3-70b-a100-paged",
        timing="kv",
        load="growing",
        prefill="packed",
        max_num_seqs=PAGED_SEQUENCES,
        max_model_len=WINDOW_TOKENS + 1,
    )
    if len(fleet) == 1:
        return FleetSpec(pools=(PoolSpec(name="all", instances=fleet[0], profile=profile),))
    narrow = msgspec.structs.replace(profile, max_model_len=boundary + 1)
    pools = (
        PoolSpec(name="short", instances=fleet[0], profile=narrow, boundary_tokens=boundary + 1),
        PoolSpec(name="long", instances=fleet[1], profile=profile),
    )
    return FleetSpec(pools=pools, gamma=gamma, compressible=compressible)
