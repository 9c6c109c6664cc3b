"""Costs are exact: what people write per million tokens is what a million tokens cost."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.usage import NANO, cost_nano, decimals_of, in_units, token_price

PRICE = token_price(0.60, 1.80, 0.15)
MILLION = 1_000_000
prices = st.integers(0, 10**9).map(lambda micro: micro / MILLION)
tokens = st.integers(0, 1 << 40)


def test_a_million_tokens_cost_what_the_file_says() -> None:
    assert cost_nano(PRICE, MILLION, 0) == 600_000_000
    assert cost_nano(PRICE, 0, MILLION) == 1_800_000_000
    assert cost_nano(PRICE, MILLION, 0, cached_tokens=MILLION) == 150_000_000


def test_cached_tokens_are_a_part_of_the_prompts() -> None:
    assert cost_nano(PRICE, 1000, 10, cached_tokens=400) == 600 * 600 + 400 * 150 + 10 * 1800
    assert cost_nano(PRICE, 10, 0, cached_tokens=400) == 10 * 150


def test_cached_input_costs_as_other_input_without_a_price_of_its_own() -> None:
    assert cost_nano(token_price(0.6, 1.8, None), 10, 0, cached_tokens=10) == 10 * 600


def test_a_free_model_costs_nothing() -> None:
    assert cost_nano(token_price(0.0, 0.0, None), MILLION, MILLION) == 0


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
