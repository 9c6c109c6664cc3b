"""Which reported usage is believed, and what usage costs, cached prompts among it."""

from typing import Any

import pytest

from gateway.admission.admission import believed, beyond_window, charge_tokens
from gateway.records.attempt import Usage
from gateway.records.entitlement import PROFILES
from tests.builders import length_estimate

PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]


def test_cached_prompt_tokens_cost_a_tenth_except_in_the_paper() -> None:
    assert charge_tokens(DEFAULT, 100, 20, 50) == 75
    assert charge_tokens(PAPER, 100, 20, 50) == 120
    assert charge_tokens(DEFAULT, 100, 20, 5000) == 30
    assert charge_tokens(DEFAULT, 101, 0, 101) == 11


WINDOW = 8192


def usage(prompt: int, completion: int = 5, cached: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


@pytest.mark.parametrize(
    "reported",
    [
        usage(0),
        usage(10, cached=999_999),
        usage(10, completion=51),
        usage(8193),
        usage(8150, completion=50),
        usage(10**9),
    ],
    ids=[
        *("no prompt", "cached beyond prompt", "beyond the limit", "beyond the window"),
        *("beyond the window together", "absurd"),
    ],
)
def test_what_cannot_be_true_is_replaced_by_the_gateways_own_count(reported: Usage) -> None:
    found = believed(reported, length_estimate(100, cap=50), WINDOW)
    assert found.source == "counted"
    assert (found.prompt_tokens, found.cached_tokens) == (100, 0)
    assert found.completion_tokens <= 50


@pytest.mark.parametrize("reported", [usage(1), usage(8142, 50), usage(100, 0, cached=100)])
def test_what_can_be_true_is_believed(reported: Usage) -> None:
    assert believed(reported, length_estimate(100, cap=50), WINDOW) is reported


def test_an_engine_that_served_more_than_its_configured_window_is_believed() -> None:
    reported = usage(9_500, 11)
    assert believed(reported, length_estimate(7_900), WINDOW) is reported
    assert beyond_window(reported, 1, WINDOW)
    assert not beyond_window(usage(8_000, 11), 1, WINDOW)


def test_what_is_counted_instead_fits_the_window_together() -> None:
    found = believed(usage(10**9, completion=10**9), length_estimate(8_000), WINDOW)
    assert (found.prompt_tokens, found.completion_tokens) == (8_000, 192)


def test_the_limit_is_of_each_sequence() -> None:
    three: dict[str, Any] = {"input_tokens": 100, "cap": 50, "sequences": 3}
    assert believed(usage(100, 150), length_estimate(**three), WINDOW).source == "engine"
    assert believed(usage(100, 151), length_estimate(**three), WINDOW).source == "counted"
