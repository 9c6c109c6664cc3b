"""Algorithm 1 for N pools: which should serve, which could, and when to refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ContextLengthExceeded
from gateway.routing.routing import can_serve, defaulted_cap, larger_pools, plan_pool
from tests.builders import LONG, SHORT, length_estimate, routing, short_and_long

THREE = routing(("s", 4096, 2048), ("m", 16384, 8192), ("l", 65536, None))


def test_a_prompt_of_200_tokens_is_short() -> None:
    plan = plan_pool(short_and_long(), length_estimate(200))
    assert (plan.pool, plan.reason) == (SHORT, "within_boundary")


def test_a_prompt_of_20000_tokens_is_long() -> None:
    plan = plan_pool(short_and_long(), length_estimate(20_000))
    assert (plan.pool, plan.reason, plan.alternates) == (LONG, "over_window", ())


def test_a_prompt_of_7000_with_max_tokens_4000_is_long_though_its_expected_output_is_small() -> (
    None
):
    """The engine would refuse 11,000 tokens in a window of 8,192: the cap is a hard constraint."""
    plan = plan_pool(short_and_long(), length_estimate(7000, cap=4000, output=50))
    assert (plan.pool, plan.alternates) == (LONG, ())


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


def test_the_only_pool_says_so() -> None:
    plan = plan_pool(routing(("all", 8192, None)), length_estimate(200))
    assert (plan.pool, plan.alternates, plan.reason) == (0, (), "only_pool")


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


def test_larger_pools_are_those_after_it() -> None:
    assert list(larger_pools(THREE, 0)) == [1, 2]
    assert list(larger_pools(THREE, 2)) == []


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
