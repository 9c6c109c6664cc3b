"""Times and rules of the engine model, worked out by hand. W = 1 s, H = 0.1 s, blocks of 4."""

import pytest

from simulator.engine.engine import PROFILES, Emission, Engine, EngineRequest
from tests.unit.simulator.drive import Token, profile, request, token


def run(engine: Engine, *requests: EngineRequest) -> list[Token]:
    """All requests at once, at time 0; every token."""
    for r in requests:
        engine.submit(r, 0.0)
    return [token(t, e) for t, e in engine.run_until(1e6, every_token=True)]


def times(tokens: list[Token], name: str) -> list[float]:
    return [round(t, 9) for t, i, _, _ in tokens if i == name]


# Time


def test_kv_timing_counts_resident_tokens_when_load_grows() -> None:
    engine = Engine(profile(timing="kv"))
    tokens = run(engine, request("a", 8, 4))

    # 8 tokens in the first iteration, then 9, 10 and 11: the newest token has no KV yet.
    assert times(tokens, "a") == [1.08, 2.17, 3.27, 4.38]


def test_the_papers_constants_give_the_papers_iteration() -> None:
    engine = Engine(PROFILES["llama-3-70b-a100-reserved"])
    engine.submit(request("a", 1200, 100), 0.0)
    found = engine.run_until(1e6)

    # Three chunks of 512 and 99 more tokens at 8.65 ms.
    assert [round(t / 0.00865, 6) for t, _ in found] == [3.0, 102.0]
    assert found[1][1].index == 100


# Joining


def test_an_arrival_joins_at_the_next_boundary_and_its_wait_is_measured() -> None:
    engine = Engine(profile(h_s=0.0))
    engine.submit(request("a", 4, 5), 10.0)
    assert [token(*x) for x in engine.run_until(11.25)] == [(11.0, "a", 1, False)]
    engine.submit(request("b", 4, 1), 11.25)

    (b,) = (e for t, e in engine.run_until(13.0) if t == 13.0)

    assert (b.id, b.finished, b.queue_s) == ("b", True, 0.75)


def test_an_idle_engine_starts_when_the_request_comes() -> None:
    engine = Engine(profile(h_s=0.0))
    assert run(engine, request("a", 4, 1)) == [(1.0, "a", 1, True)]
    assert engine.next_event_s() is None
    assert engine.begin(50.0) is None
    engine.submit(request("b", 4, 1), 100.5)
    assert [token(*x) for x in engine.run_until(200.0)] == [(101.5, "b", 1, True)]


def test_a_late_caller_moves_everything_behind_by_its_lateness() -> None:
    engine = Engine(profile(timing="kv"))
    engine.submit(request("a", 8, 4), 0.0)
    ends = []
    now_s = 0.0
    while (iteration := engine.begin(now_s)) is not None:
        assert iteration.start_s == now_s
        ends.append(round(iteration.end_s, 9))
        engine.finish()
        now_s = iteration.end_s + 0.5
    assert ends == [1.08, 2.67, 4.27, 5.88]


def test_iterations_do_not_overlap() -> None:
    engine = Engine(profile())
    with pytest.raises(RuntimeError, match="begin one"):
        engine.finish()
    engine.submit(request("a", 4, 9), 0.0)
    engine.begin(0.0)
    with pytest.raises(RuntimeError, match="finish it"):
        engine.begin(0.5)


# Ending


def test_output_stops_at_the_window() -> None:
    engine = Engine(profile())  # 64 tokens
    engine.submit(request("cut", 60, 9), 0.0)
    engine.submit(request("fits", 60, 4), 0.0)
    last = {e.id: e for _, e in engine.run_until(1e6) if e.finished}

    assert (last["cut"].index, last["cut"].reason) == (4, "length")
    assert (last["fits"].index, last["fits"].reason) == (4, "stop")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", 64, 1), "1 to 63 tokens"),
        (request("a", 0, 1), "1 to 63 tokens"),
        (request("a", 4, 0), "at least 1"),
        (request("twice", 4, 1), "in use"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(bad: EngineRequest, message: str) -> None:
    engine = Engine(profile())
    engine.submit(request("twice", 4, 1), 0.0)
    with pytest.raises(ValueError, match=message):
        engine.submit(bad, 0.0)
    assert engine.waiting == 1


def test_an_abort_frees_the_blocks_at_once_and_the_sequence_emits_nothing() -> None:
    engine = Engine(profile(h_s=0.0, prefix_cache_tokens=0))
    engine.submit(request("a", 8, 9), 0.0)
    engine.submit(request("b", 8, 1), 0.0)
    iteration = engine.begin(0.0)
    assert iteration is not None
    assert engine.kv_usage == 4 / 32

    assert engine.abort("a")
    assert (engine.running, engine.kv_usage, engine.kv_tokens) == (1, 2 / 32, 8)
    assert [e.id for e in engine.finish()] == ["b"]
    assert not engine.abort("a")
    assert (engine.kv_usage, engine.begin(iteration.end_s)) == (0.0, None)


# Order


def test_lower_priority_numbers_enter_first_and_ties_keep_their_order() -> None:
    engine = Engine(profile(max_num_seqs=1, scheduling="priority"))
    tokens = run(
        engine,
        request("late", 4, 1, priority=5),
        request("x", 4, 1, priority=1),
        request("y", 4, 1, priority=1),
        request("vip", 4, 1, priority=-3),
    )
    assert [name for _, name, _, _ in tokens] == ["vip", "x", "y", "late"]


# Preemption


@pytest.mark.parametrize(("scheduling", "loser"), [("fcfs", "b"), ("priority", "a")])
def test_when_blocks_run_out_the_worst_is_preempted_and_loses_no_token(
    scheduling: str, loser: str
) -> None:
    engine = Engine(
        profile(
            h_s=0.0, kv_blocks=8, max_model_len=32, scheduling=scheduling, prefix_cache_tokens=0
        )
    )
    tokens = run(engine, request("a", 12, 8, priority=2), request("b", 12, 8, priority=1))
    winner = "ab".replace(loser, "")

    # 8 blocks, 3 each at first, 4 each from the second token. The fifth would be taken for the
    # sixth token (17 tokens resident): the loser goes with 5 tokens made.
    assert times(tokens, winner) == [1, 2, 3, 4, 5, 6, 7, 8]
    # Its 12 + 5 tokens need 5 blocks, free when the winner has ended; then one pass over
    # them all gives its sixth.
    assert times(tokens, loser) == [1, 2, 3, 4, 5, 9, 10, 11]
    assert [i for _, name, i, _ in tokens if name == loser] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert engine.preemptions_total == 1
    assert (engine.prompt_tokens_total, engine.generation_tokens_total) == (24, 16)


# Prefix cache

PREFIX = (1, 2, 3, 4)


def cached(engine: Engine, r: EngineRequest, at_s: float) -> Emission:
    """Run one request alone; its last emission."""
    engine.submit(r, at_s)
    return engine.run_until(at_s + 100.0)[-1][1]


def test_a_prefix_is_found_the_second_time_and_not_computed_again() -> None:
    engine = Engine(profile(h_s=0.0, prefill_s_per_token=1.0))
    engine.submit(request("first", 19, 1, PREFIX), 0.0)
    engine.run_until(100.0)
    engine.submit(request("second", 19, 1, PREFIX), 100.0)
    ((at_s, second),) = engine.run_until(200.0)

    assert second.cached_tokens == 16
    assert at_s == 100.0 + 1.0 + 3.0
    assert (engine.prefix_queries_total, engine.prefix_hits_total) == (38, 16)


def test_the_cache_forgets_what_was_freed_longest_ago_tail_first() -> None:
    engine = Engine(profile(prefix_cache_tokens=24))  # six blocks
    cached(engine, request("a", 17, 1, (1, 2, 3, 4)), 0.0)
    cached(engine, request("b", 17, 1, (5, 6, 7, 8)), 100.0)

    assert cached(engine, request("a2", 17, 1, (1, 2, 3, 4)), 200.0).cached_tokens == 8
    # a2 was freed last and kept whole; of b, its first two blocks fit beside it.
    assert cached(engine, request("b2", 17, 1, (5, 6, 7, 8)), 300.0).cached_tokens == 8
