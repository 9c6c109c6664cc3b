"""Small fleets and traffic for tests of the fleet simulator."""

from collections.abc import Sequence

import msgspec
import numpy as np
from hypothesis import strategies as st

from simulator.engine.engine import EngineProfile
from simulator.fleet.fleet import FleetSpec, Outage, PoolSpec
from simulator.fleet.traffic import Traffic

SECOND = EngineProfile(
    name="second",
    w_s=1.0,
    h_s=0.0,
    kv_blocks=1 << 17,
    max_model_len=1 << 20,
    max_num_seqs=1,
    chunk_tokens=512,
    prefill="independent",
    load="reserved",
    prefix_cache_tokens=0,
)
"""One iteration a second, whatever runs; one slot."""


def second(**changes: object) -> EngineProfile:
    return msgspec.structs.replace(SECOND, **changes)


def requests(*rows: tuple[float, int, int]) -> Traffic:
    """(arrival, prompt, output) each."""
    at_s, prompts, outputs = zip(*rows, strict=True)
    return Traffic(
        arrival_s=np.array(at_s, dtype=np.float64),
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )


def one_pool(profile: EngineProfile, instances: int = 1, dispatch: str = "jsq") -> FleetSpec:
    pool = PoolSpec(name="only", instances=instances, profile=profile)
    return FleetSpec(pools=(pool,), dispatch=dispatch)


@st.composite
def closed_profiles(draw: st.DrawFn, *, window: int = 64) -> EngineProfile:
    """Profiles with a closed form whose times are exact in binary."""
    return EngineProfile(
        name="closed",
        w_s=draw(st.sampled_from([1 / 128, 1.0])),
        h_s=draw(st.sampled_from([0.0, 1 / 1024, 0.25])),
        h_s_per_token=draw(st.sampled_from([0.0, 1 / 64, 0.375])),
        timing=draw(st.sampled_from(["slots", "kv"])),
        prefill="independent",
        chunk_tokens=draw(st.integers(1, 16)),
        kv_blocks=-(-window // 4) + draw(st.integers(0, 16)),
        block_tokens=4,
        max_model_len=window,
        max_num_seqs=draw(st.integers(1, 6)),
        prefix_cache_tokens=0,
        load="reserved",
    )


@st.composite
def traffics(draw: st.DrawFn, *, unit_s: float = 1.0, longest: int = 40) -> Traffic:
    """Up to 40 requests whose times are eighths of `unit_s`; some come at once."""
    steps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=40))
    count = len(steps)
    lengths = st.lists(st.integers(1, longest), min_size=count, max_size=count)
    return Traffic(
        arrival_s=np.cumsum(steps) / 8 * unit_s,
        prompt_tokens=np.array(draw(lengths), dtype=np.int64),
        output_tokens=np.array(draw(lengths), dtype=np.int64),
    )


@st.composite
def outage_lists(draw: st.DrawFn, workers: Sequence[int]) -> list[Outage]:
    """At most one outage an instance; `workers` are numbers of instances by pool."""
    found = []
    for pool, count in enumerate(workers):
        for worker in range(count):
            if draw(st.booleans()):
                down_s = draw(st.integers(0, 800)) / 8
                up_s = down_s + draw(st.integers(1, 400)) / 8
                found.append(Outage(pool=pool, worker=worker, down_s=down_s, up_s=up_s))
    return found
