"""Algorithm 1 for N pools: which should serve, which could, and when to refuse."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.errors import ContextLengthExceeded
from gateway.fleet import engine_telemetry
from gateway.fleet.engine_telemetry import EngineSample
from gateway.fleet.fleet import PoolState, unreachable
from gateway.routing.routing import (
    CompressionRules,
    Routing,
    can_serve,
    defaulted_cap,
    has_room,
    mostly_new,
    plan_pool,
    promised,
    requested,
    stay,
)
from tests.builders import LONG, SHORT, length_estimate, routing, short_and_long

THREE = routing(("s", 4096, 2048), ("m", 16384, 8192), ("l", 65536, None))


def test_a_habitual_cap_does_not_leave_the_short_pool_when_its_window_holds_it() -> None:
    table = routing(("short", 65536, 8192), ("long", 131072, None))
    plan = plan_pool(table, length_estimate(500, cap=32_768, output=300))
    assert plan.pool == SHORT


def test_over_the_boundary_goes_long_and_may_spill_to_the_short_pool() -> None:
    table = routing(("short", 8192, 4096), ("long", 65536, None))
    plan = plan_pool(table, length_estimate(5000, output=100))
    assert (plan.pool, plan.reason, plan.alternates) == (LONG, "over_boundary", (SHORT,))


@pytest.mark.parametrize(("total", "pool"), [(8192, SHORT), (8193, LONG)])
def test_the_boundary_itself_is_short(total: int, pool: int) -> None:
    table = routing(("short", 65536, 8192), ("long", 131072, None))
    assert plan_pool(table, length_estimate(total - 100, output=100)).pool == pool


def test_without_a_cap_one_token_of_room_is_enough() -> None:
    assert can_serve(length_estimate(8191), 8192)
    assert not can_serve(length_estimate(8192), 8192)


def test_with_a_cap_prompt_and_cap_must_fit() -> None:
    assert can_serve(length_estimate(8000, cap=192), 8192)
    assert not can_serve(length_estimate(8000, cap=193), 8192)


@pytest.mark.parametrize(("total", "pool"), [(2000, 0), (5000, 1), (9000, 2)])
def test_of_three_pools_the_first_whose_boundary_holds_it_serves(total: int, pool: int) -> None:
    assert plan_pool(THREE, length_estimate(total - 100, output=100)).pool == pool


@pytest.mark.parametrize(("total", "alternates"), [(2000, (1, 2)), (3000, (2, 0)), (9000, (1,))])
def test_alternates_are_larger_windows_first_then_smaller_ones_that_hold_it(
    total: int, alternates: tuple[int, ...]
) -> None:
    assert plan_pool(THREE, length_estimate(total - 100, output=100)).alternates == alternates


def test_two_smaller_alternates_come_with_the_larger_first() -> None:
    table = routing(("s", 16384, 100), ("m", 32768, 200), ("l", 65536, None))
    assert plan_pool(table, length_estimate(1000, output=10)).alternates == (1, 0)


def test_what_even_the_lowest_plausible_count_cannot_fit_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        plan_pool(short_and_long(), length_estimate(100_000, lowest=65_537), "prompt")
    assert refused.value.status == 400
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"
    assert "maximum context length is 65536 tokens" in refused.value.message


def test_the_cap_counts_towards_the_refusal() -> None:
    with pytest.raises(ContextLengthExceeded, match="60000 in the prompt, 6000 for the completion"):
        plan_pool(short_and_long(), length_estimate(64_000, cap=6000, lowest=60_000))


def test_a_doubtful_request_goes_to_the_largest_window_and_the_engine_decides() -> None:
    plan = plan_pool(short_and_long(), length_estimate(100_000, lowest=65_536))
    assert (plan.pool, plan.alternates, plan.reason) == (LONG, (), "largest_window_doubtful")


def test_an_absent_limit_is_sent_only_when_a_default_is_configured() -> None:
    assert defaulted_cap(short_and_long(), length_estimate(200), SHORT) is None
    table = short_and_long(default_max_tokens=1024)
    assert defaulted_cap(table, length_estimate(200), SHORT) == 1024


def test_a_default_never_replaces_the_clients_own_limit() -> None:
    table = short_and_long(default_max_tokens=1024)
    assert defaulted_cap(table, length_estimate(200, cap=5000), SHORT) is None


@pytest.mark.parametrize(("pool", "cap"), [(SHORT, 192), (LONG, 4096)])
def test_a_defaulted_limit_shrinks_to_what_fits_the_pool_that_serves(pool: int, cap: int) -> None:
    table = short_and_long(default_max_tokens=4096)
    assert defaulted_cap(table, length_estimate(8000, output=100), pool) == cap


def test_a_defaulted_limit_is_at_least_one_token() -> None:
    table = short_and_long(default_max_tokens=4096)
    assert defaulted_cap(table, length_estimate(9000), SHORT) == 1


@given(
    st.lists(st.integers(16, 200_000), min_size=1, max_size=5, unique=True),
    st.integers(1, 250_000),
    st.none() | st.integers(1, 100_000),
    st.integers(0, 4000),
)
def test_whatever_is_planned_can_serve_it_or_is_the_largest(
    windows: list[int], prompt: int, cap: int | None, output: int
) -> None:
    windows.sort()
    table = routing(
        *((f"p{w}", w, max(1, w // 2)) for w in windows[:-1]), ("last", windows[-1], None)
    )
    estimate = length_estimate(prompt, cap=cap, output=output, lowest=1)
    try:
        plan = plan_pool(table, estimate)
    except ContextLengthExceeded:
        assert 1 + (cap or 0) > windows[-1]
        return
    able = {i for i, w in enumerate(windows) if can_serve(estimate, w)}
    assert plan.pool in able or plan.pool == len(windows) - 1
    assert set(plan.alternates) == able - {plan.pool}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("echo", b"true", "echo"),
        ("echo", b"false", ""),
        ("return_token_ids", b"true", "echo"),
        ("suffix", b'"end"', "suffix"),
        ("suffix", b'""', ""),
        ("prompt_logprobs", b"0", "prompt_logprobs"),
        ("prompt_logprobs", b"null", ""),
        ("continue_final_message", b"true", "prefill"),
        ("cache_control", b'{"type":"ephemeral"}', "cache_control"),
        ("logprobs", b"true", ""),
    ],
)
def test_members_that_promise_the_prompt_as_it_is(name: str, value: bytes, reason: str) -> None:
    assert promised({"model": Raw(b'"m"'), name: Raw(value)}) == reason


@pytest.mark.parametrize(
    ("when", "header", "may"),
    [
        ("asked", None, True),
        ("asked", True, True),
        ("asked", False, False),
        ("any", None, True),
        ("any", False, False),
        ("header", None, False),
        ("header", True, True),
        ("header", False, False),
    ],
)
def test_the_header_forbids_everywhere_and_is_needed_only_where_the_model_says_so(
    when: Literal["asked", "any", "header"], header: bool | None, may: bool
) -> None:
    assert requested(CompressionRules(when=when), header=header) is may


def pool(inflight: int) -> PoolState:
    state = PoolState("long", ("a", "b"), 4)
    state.inflight = inflight
    return state


def test_a_pool_has_room_while_a_slot_is_free() -> None:
    assert has_room(pool(7), 0.0)
    assert not has_room(pool(8), 0.0)


def test_slots_of_engines_that_are_gone_are_no_room() -> None:
    state = pool(4)
    unreachable(state, 1)
    assert not has_room(state, 0.0)


def test_what_other_gateways_run_counts_while_the_reading_is_fresh() -> None:
    state = pool(0)
    for worker in range(2):
        sample = EngineSample(running=3.0, waiting=1.0)
        engine_telemetry.record(state.view, worker, sample, 100.0)
    assert not has_room(state, 101.0)
    assert has_room(state, 100.0 + engine_telemetry.STALE_S + 1)


TABLE = routing(("short", 16_384, 8192), ("middle", 32_768, 24_576), ("long", 131_072, None))


def test_a_conversation_past_its_boundary_stays_where_its_prefix_is() -> None:
    assert stay(1, TABLE, length_estimate(9000, output=300), (8500, 0, 0)) == 0


def test_it_moves_when_the_planned_pool_holds_as_much() -> None:
    assert stay(1, TABLE, length_estimate(9000, output=300), (8500, 8500, 0)) is None


def test_a_system_prompt_alone_does_not_hold_a_request_past_the_boundary() -> None:
    assert stay(1, TABLE, length_estimate(12_000, output=300), (2000, 0, 0)) is None


def test_tokens_past_the_boundary_count_as_a_cost() -> None:
    # 4,108 tokens past it: a hit of as many does not pay.
    estimate = length_estimate(12_000, output=300)
    assert stay(1, TABLE, estimate, (4108, 0, 0)) is None
    assert stay(1, TABLE, estimate, (4109, 0, 0)) == 0


def test_the_cheapest_of_several_pools_is_taken() -> None:
    estimate = length_estimate(14_000, output=300)
    assert stay(2, TABLE, estimate, (13_000, 13_500, 0)) == 1
    assert stay(2, TABLE, estimate, (13_000, 2000, 0)) == 0


@given(st.integers(0, 2), st.integers(1, 140_000), st.tuples(*[st.integers(0, 140_000)] * 3))
def test_whoever_stays_fits_and_saves_prefill(
    planned: int, tokens: int, hits: tuple[int, int, int]
) -> None:
    table: Routing = TABLE
    estimate = length_estimate(tokens)
    pool = stay(planned, table, estimate, hits)
    if pool is not None:
        assert pool < planned
        assert can_serve(estimate, table.pools[pool].window_tokens)
        assert hits[pool] > hits[planned]


def test_a_prompt_is_compressed_while_less_than_three_tenths_of_it_are_cached() -> None:
    assert mostly_new(1000, (200, 290))
    assert not mostly_new(1000, (300, 0))
    assert not mostly_new(1000, (5000,))
    assert mostly_new(0, ())
