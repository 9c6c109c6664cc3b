"""Where a conversation stays: by what moving it would have to prefill anew."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.routing import Routing, can_serve, mostly_new, stay
from tests.builders import length_estimate, routing

TABLE = routing(("short", 16_384, 8192), ("middle", 32_768, 24_576), ("long", 131_072, None))


def test_a_conversation_past_its_boundary_stays_where_its_prefix_is() -> None:
    assert stay(1, TABLE, length_estimate(9000, output=300), (8500, 0, 0)) == 0


def test_it_moves_when_it_does_not_fit() -> None:
    assert stay(1, TABLE, length_estimate(9000, cap=8000), (8500, 0, 0)) is None
    assert stay(2, TABLE, length_estimate(16_384, output=300), (16_000, 0, 0)) is None


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


def test_a_larger_pool_never_holds_what_belongs_in_a_smaller_one() -> None:
    assert stay(0, TABLE, length_estimate(5000), (0, 4900, 4900)) is None


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
