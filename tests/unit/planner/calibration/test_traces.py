"""Streams of the engine model, cut into windows."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibration.fit import Fit, fit_windows
from planner.calibration.limits import Overhead, chunk_tokens, overhead, plateau, settled
from planner.calibration.traces import (
    Injection,
    StreamTrace,
    decode_windows,
    held_back,
    in_bursts,
    injection,
)
from simulator.engine.engine import Engine, EngineProfile, EngineRequest

ENGINE = EngineProfile(
    name="e",
    w_s=0.0137,
    h_s=0.00041,
    prefill_s_per_token=2.3e-5,
    max_num_batched_tokens=1024,
    max_num_seqs=24,
    prefix_cache_tokens=0,
)
Asked = tuple[float, int, int]
"""(submitted, prompt tokens, output tokens)."""


def run(
    asked: list[Asked], profile: EngineProfile = ENGINE, before_s: float = 0.0
) -> list[StreamTrace]:
    """What a client sees of these requests."""
    engine = Engine(profile)
    events = []
    for index, (at_s, prompt, output) in enumerate(asked):
        events += engine.run_until(at_s + before_s, every_token=True)
        engine.submit(
            EngineRequest(id=str(index), prompt_tokens=prompt, output_tokens=output),
            at_s + before_s,
        )
    events += engine.run_until(1e6, every_token=True)
    return [
        StreamTrace(
            submit_s=at_s,
            times_s=tuple(t for t, e in events if e.id == str(index)),
            tokens=tuple(e.index for _, e in events if e.id == str(index)),
            prompt_tokens=prompt,
        )
        for index, (at_s, prompt, _) in enumerate(asked)
    ]


def exact(profile: EngineProfile = ENGINE) -> Fit:
    return Fit(
        timing="slots",
        w_s=profile.w_s,
        h_s=profile.h_s,
        h_s_per_token=0.0,
        prefill_s_per_token=profile.prefill_s_per_token,
        attention_s_per_pair=profile.attention_s_per_pair,
        errors=(0.0, 0.0, 0.0, 0.0),
        residuals=(0.0,),
        other_residual=0.0,
    )


def prefills(
    profile: EngineProfile, lengths: tuple[int, ...] = (246, 491, 737, 983, 1475, 1966, 2949, 3932)
) -> tuple[list[Injection], list[StreamTrace]]:
    """Prompts beside one stream, and each alone."""
    asked = [(0.5 + 1.5 * i, n, 2) for i, n in enumerate(lengths)]
    clock, *injected = run([(0.0, 32, 3000), *asked], profile)
    found = [injection([clock], trace) for trace in injected]
    alone = [run([(0.0, n, 2)], profile)[0] for n in lengths]
    return [one for one in found if one is not None], alone


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 20), prompt=st.integers(10, 400))
def test_a_window_is_what_the_engine_took(count: int, prompt: int) -> None:
    found = decode_windows(run([(0.0, prompt, 60)] * count))
    assert found
    for window in found:
        assert window.sequences == pytest.approx(window.iterations * count)
        assert window.duration_s == pytest.approx(exact().seconds(window), rel=1e-9)


def test_what_attention_costs_is_recovered() -> None:
    engine = msgspec.structs.replace(ENGINE, attention_s_per_pair=4e-8)
    found = [w for n in (1, 2, 4, 8, 16) for w in decode_windows(run([(0.0, 40, 60)] * n, engine))]
    injections, alone = prefills(engine)
    fit = fit_windows([*found, *(one.window for one in injections)])
    assert chunk_tokens(injections, alone, fit) == 1024
    fit = fit_windows([*found, *(settled(one, 1024) for one in injections)])
    assert fit.prefill_s_per_token == pytest.approx(2.3e-5, rel=0.02)
    assert fit.attention_s_per_pair == pytest.approx(4e-8, rel=0.02)
    longest = alone[-1]
    assert overhead(alone, fit, 1024).seconds(longest.prompt_tokens) < 0.01 * longest.ttft_s


@pytest.mark.parametrize("chunk", [512, 768, 1024, 2048])
@pytest.mark.parametrize(("prefill_s", "pair_s"), [(0.0, 0.0), (2.3e-5, 0.0), (2.3e-5, 4e-8)])
def test_the_chunk_is_found(chunk: int, prefill_s: float, pair_s: float) -> None:
    profile = EngineProfile(
        name="e",
        max_num_batched_tokens=chunk,
        prefill_s_per_token=prefill_s,
        attention_s_per_pair=pair_s,
        h_s=0.0004,
    )
    injections, alone = prefills(profile)
    found = chunk_tokens(injections, alone, exact(profile))
    assert found is not None
    # Without a cost of its own a prompt shows only how many iterations it took.
    assert found == chunk if prefill_s else 0.75 * chunk <= found <= 1.34 * chunk


def test_a_chunk_above_every_prompt_is_not_claimed() -> None:
    profile = EngineProfile(name="e", max_num_batched_tokens=8192, prefill_s_per_token=2e-5)
    injections, alone = prefills(profile)
    assert chunk_tokens(injections, alone, exact(profile)) is None
    assert chunk_tokens([], [], exact()) is None


def test_streams_that_come_in_bursts_are_told_from_those_of_an_engine() -> None:
    (alone,) = run([(0.0, 32, 60)])
    together = run([(0.0, 32, 60)] * 32)  # 24 at once; the rest wait
    assert not in_bursts([alone, *together], alone.gap_s)
    at_once = [
        msgspec.structs.replace(trace, times_s=(trace.last_s,) * len(trace.times_s))
        for trace in together
    ]
    assert not in_bursts([*together[3:], *at_once[:3]], alone.gap_s)
    assert in_bursts([*together[4:], *at_once[:4]], alone.gap_s)
    few = msgspec.structs.replace(alone, times_s=(1.0,) * 2, tokens=(1, 2))
    assert not in_bursts([few], alone.gap_s)


def test_a_stream_alone_that_a_proxy_collects_is_told_from_a_slow_start() -> None:
    (alone,) = run([(0.0, 32, 60)])
    (short,) = run([(0.0, 32, 2)])
    assert alone.gap_s > 0 == short.gap_s
    assert not held_back(alone)
    assert not held_back(msgspec.structs.replace(alone, submit_s=-5 * alone.last_s))
    at_once = msgspec.structs.replace(alone, times_s=(alone.last_s,) * len(alone.times_s))
    assert held_back(at_once)


def test_slots_are_where_others_wait() -> None:
    assert plateau(run([(0.0, 32, 60)] * 32)) == 24
    assert plateau(run([(0.0, 32, 60)] * 24)) is None


def test_what_passes_before_the_engine_is_told_apart() -> None:
    lengths = (123, 246, 491, 983, 1966)
    alone = [run([(0.0, n, 2)], before_s=0.003 + 1e-6 * n)[0] for n in lengths]
    found = overhead(alone, exact(), 1024)
    assert found.fixed_s == pytest.approx(0.003, abs=1e-4)
    assert found.per_token_s == pytest.approx(1e-6, abs=3e-7)
    assert found.seconds(1000) == pytest.approx(0.004, abs=3e-4)
    assert overhead([], exact(), 1024) == Overhead()
