"""Algorithm 1 for N pools: which should serve, which could, and when to refuse."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.errors import ContextLengthExceeded
from gateway.fleet import engine_metrics
from gateway.fleet.engine_metrics import EngineSample
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


HABITUAL = routing(("short", 65536, 8192), ("long", 131072, None))


@pytest.mark.parametrize(
    ("table", "prompt", "output", "pool", "alternates"),
    [
        pytest.param(HABITUAL, 8092, 100, SHORT, (LONG,), id="the boundary itself is short"),
        pytest.param(HABITUAL, 8093, 100, LONG, (SHORT,), id="over it goes long, or spills"),
        pytest.param(THREE, 1900, 100, 0, (1, 2), id="the first whose boundary holds it"),
        pytest.param(THREE, 2900, 100, 1, (2, 0), id="larger windows first, then smaller ones"),
        pytest.param(THREE, 4900, 100, 1, (2,), id="only smaller ones that hold it"),
        pytest.param(THREE, 8900, 100, 2, (1,), id="the last has no boundary"),
        pytest.param(
            routing(("s", 16384, 100), ("m", 32768, 200), ("l", 65536, None)),
            *(1000, 10, 2, (1, 0)),
            id="two smaller ones come with the larger first",
        ),
    ],
)
def test_which_pool_serves_and_which_could(
    table: Routing, prompt: int, output: int, pool: int, alternates: tuple[int, ...]
) -> None:
    plan = plan_pool(table, length_estimate(prompt, output=output))
    assert (plan.pool, plan.alternates) == (pool, alternates)


def test_a_habitual_cap_does_not_leave_the_short_pool_when_its_window_holds_it() -> None:
    plan = plan_pool(HABITUAL, length_estimate(500, cap=32_768, output=300))
    assert (plan.pool, plan.reason) == (SHORT, "within_boundary")


@pytest.mark.parametrize(
    ("prompt", "cap", "may"),
    [(8191, None, True), (8192, None, False), (8000, 192, True), (8000, 193, False)],
)
def test_prompt_and_cap_or_one_token_must_fit(prompt: int, cap: int | None, *, may: bool) -> None:
    assert can_serve(length_estimate(prompt, cap=cap), 8192) is may


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


@pytest.mark.parametrize(
    ("default", "prompt", "cap", "pool", "sent"),
    [
        pytest.param(None, 200, None, SHORT, None, id="only where a default is configured"),
        pytest.param(1024, 200, None, SHORT, 1024, id="the default"),
        pytest.param(1024, 200, 5000, SHORT, None, id="never over the client's own"),
        pytest.param(4096, 8000, None, SHORT, 192, id="what fits the pool that serves"),
        pytest.param(4096, 8000, None, LONG, 4096, id="what fits the larger pool"),
        pytest.param(4096, 9000, None, SHORT, 1, id="at least one token"),
    ],
)
def test_the_limit_that_is_sent_where_the_client_set_none(
    default: int | None, prompt: int, cap: int | None, pool: int, sent: int | None
) -> None:
    table = short_and_long(default_max_tokens=default)
    assert defaulted_cap(table, length_estimate(prompt, cap=cap), pool) == sent


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
        engine_metrics.record(state.view, worker, sample, 100.0)
    assert not has_room(state, 101.0)
    assert has_room(state, 100.0 + engine_metrics.STALE_S + 1)


TABLE = routing(("short", 16_384, 8192), ("middle", 32_768, 24_576), ("long", 131_072, None))


@pytest.mark.parametrize(
    ("planned", "tokens", "hits", "stays"),
    [
        pytest.param(1, 9000, (8500, 0, 0), 0, id="where its prefix is"),
        pytest.param(1, 9000, (8500, 8500, 0), None, id="not where the planned pool holds as much"),
        pytest.param(1, 12_000, (2000, 0, 0), None, id="not for a system prompt alone"),
        pytest.param(1, 12_000, (4108, 0, 0), None, id="4,108 tokens past the boundary cost"),
        pytest.param(1, 12_000, (4109, 0, 0), 0, id="a longer hit pays"),
        pytest.param(2, 14_000, (13_000, 13_500, 0), 1, id="the cheapest of several"),
        pytest.param(2, 14_000, (13_000, 2000, 0), 0, id="the cheapest is the smallest"),
    ],
)
def test_a_conversation_past_its_boundary_may_stay(
    planned: int, tokens: int, hits: tuple[int, int, int], stays: int | None
) -> None:
    assert stay(planned, TABLE, length_estimate(tokens, output=300), hits) == stays


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
