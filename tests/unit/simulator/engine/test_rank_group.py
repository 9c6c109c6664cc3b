"""Ranks in lockstep: who waits for whom, in steps and in jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.engine import Engine, EngineProfile, EngineRequest
from simulator.engine.rank_group import RankGroupEngine
from tests.unit.simulator.drive import profile, request

W_S, H_S = 0.004, 1e-6
KV = EngineProfile(
    name="kv",
    w_s=W_S,
    h_s_per_token=H_S,
    timing="kv",
    max_num_batched_tokens=4096,
    prefix_cache_tokens=0,
    max_num_seqs=8,
)


def test_an_iteration_lasts_as_long_as_its_slowest_rank() -> None:
    group = RankGroupEngine(KV, 3)
    for rank, prompt in ((0, 100), (1, 900)):
        group.submit(rank, request("a", prompt, 3), 0.0)
    step = group.begin(0.0)
    assert step is not None
    assert step.end_s == pytest.approx(W_S + H_S * 900)
    assert step.prefill_tokens == 1000
    assert [(rank, e.index) for rank, e in group.finish()] == [(0, 1), (1, 1)]
    assert group.waited_s == pytest.approx([H_S * 800, 0.0, H_S * 900])
    again = group.begin(step.end_s)
    assert again is not None
    assert again.end_s - again.start_s == pytest.approx(W_S + H_S * 901)


def test_an_aborted_rank_no_longer_holds_the_others_up() -> None:
    group = RankGroupEngine(KV, 2)
    group.submit(0, request("short", 10, 50), 0.0)
    group.submit(1, request("long", 3000, 500), 0.0)
    group.begin(0.0)
    assert group.abort(1, "long")
    assert not group.abort(1, "long")
    assert [rank for rank, _ in group.finish()] == [0]
    step = group.begin(1.0)
    assert step is not None
    assert step.end_s - 1.0 == pytest.approx(W_S + H_S * 11)


requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 20), st.integers(0, 12)),
    min_size=1,
    max_size=12,
)


@given(requests=requests, slots=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_one_rank_is_an_engine(requests: list[tuple[int, int, int, int]], slots: int) -> None:
    shape = profile(max_num_seqs=slots, timing="kv")
    engine, group = Engine(shape), RankGroupEngine(shape, 1)
    mine, theirs = [], []
    for number, (_, prompt, output, at_s) in enumerate(sorted(requests, key=lambda r: r[3])):
        asked = EngineRequest(id=str(number), prompt_tokens=prompt, output_tokens=output)
        theirs += engine.run_until(float(at_s), every_token=True)
        mine += group.run_until(float(at_s), every_token=True)
        engine.submit(asked, float(at_s))
        group.submit(0, asked, float(at_s))
    theirs += engine.run_until(1e6, every_token=True)
    mine += group.run_until(1e6, every_token=True)
    assert [(at, e.id, e.index) for at, _, e in mine] == [(at, e.id, e.index) for at, e in theirs]


@given(requests=requests)
@settings(max_examples=60, deadline=None)
def test_jumps_see_the_tokens_of_steps(requests: list[tuple[int, int, int, int]]) -> None:
    """All submitted at once: run_until against begin and finish, by events and in one go."""
    groups = [RankGroupEngine(profile(), 3) for _ in range(3)]
    for group in groups:
        for number, (rank, prompt, output, _) in enumerate(requests):
            asked = EngineRequest(id=str(number), prompt_tokens=prompt, output_tokens=output)
            group.submit(rank, asked, 0.0)
    steps, now_s = [], 0.0
    while (step := groups[0].begin(now_s)) is not None:
        now_s = step.end_s
        steps += [(now_s, rank, e) for rank, e in groups[0].finish()]
    assert groups[1].run_until(1e6, every_token=True) == steps
    events = []
    while (due_s := groups[2].next_event_s()) is not None:
        events += groups[2].run_until(due_s, every_token=True)
    assert events == steps
    assert all(waited >= 0 for waited in groups[0].waited_s)
