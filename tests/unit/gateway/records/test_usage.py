"""Costs are exact: what people write per million tokens is what a million tokens cost."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.usage import NANO, TokenPrice, cost_nano, decimals_of, in_units, token_price

PRICE = token_price(0.60, 1.80, 0.15)
MILLION = 1_000_000
prices = st.integers(0, 10**9).map(lambda micro: micro / MILLION)
tokens = st.integers(0, 1 << 40)


@pytest.mark.parametrize(
    ("price", "tokens", "cost"),
    [
        pytest.param(PRICE, (0, MILLION, 0), 1_800_000_000, id="as the file says"),
        pytest.param(PRICE, (MILLION, 0, MILLION), 150_000_000, id="cached"),
        pytest.param(PRICE, (1000, 10, 400), 600 * 600 + 400 * 150 + 10 * 1800, id="partly cached"),
        pytest.param(PRICE, (10, 0, 400), 10 * 150, id="more cached than there is"),
        pytest.param(token_price(0.6, 1.8, None), (10, 0, 10), 10 * 600, id="no price of its own"),
    ],
)
def test_cached_tokens_are_a_part_of_the_prompts(
    price: TokenPrice, tokens: tuple[int, int, int], cost: int
) -> None:
    assert cost_nano(price, *tokens) == cost


def test_a_fraction_of_a_nano_unit_is_rounded_up() -> None:
    assert cost_nano(token_price(0.0001, 0.0, None), 1, 0) == 1
    assert cost_nano(token_price(0.0001, 0.0, None), 11, 0) == 2


@given(prices, prices, tokens, tokens)
def test_costs_are_exact_to_the_nano_unit(
    input_price: float, output_price: float, prompt: int, completion: int
) -> None:
    exact = Fraction(repr(input_price)) * prompt + Fraction(repr(output_price)) * completion
    found = cost_nano(token_price(input_price, output_price, None), prompt, completion)
    assert found == ceil(exact * NANO / MILLION)


@given(st.integers(0, 10**6), st.lists(tokens, max_size=20))
def test_with_three_decimals_the_sum_of_requests_is_the_cost_of_the_sum(
    thousandths: int, requests: list[int]
) -> None:
    price = token_price(thousandths / 1000, 0.0, None)
    assert sum(cost_nano(price, n, 0) for n in requests) == cost_nano(price, sum(requests), 0)


@pytest.mark.parametrize(
    ("price", "decimals"), [(3.0, 0), (0.15, 2), (100.0, 0), (1e-06, 6), (2.5e-07, 8)]
)
def test_decimals_are_those_that_the_price_was_written_with(price: float, decimals: int) -> None:
    assert decimals_of(price) == decimals


@pytest.mark.parametrize(
    ("nano", "shown"),
    [(0, "0.00"), (1, "0.000000001"), (1_500_000_000, "1.50"), (-20_000_000, "-0.02")],
)
def test_amounts_are_shown_exactly(nano: int, shown: str) -> None:
    assert in_units(nano) == shown
