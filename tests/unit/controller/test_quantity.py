"""Quantities as the API writes them, and amounts in whole units."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.quantity import amounts_of, parse_quantity, resources_of


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("240", 240),
        (7, 7),
        ("1k", 1000),
        ("1.5k", 1500),
        ("2M", 2_000_000),
        ("1Ki", 1024),
        ("1.5Gi", 1_610_612_736),
        ("100m", Fraction(1, 10)),
        ("5u", Fraction(5, 1_000_000)),
        ("1E", 10**18),
        ("1E3", 1000),
        ("2e-1", Fraction(1, 5)),
        ("+.5", Fraction(1, 2)),
        ("-1n", Fraction(-1, 10**9)),
        ("3.", 3),
    ],
)
def test_every_form_of_a_quantity(written: object, number: Fraction) -> None:
    assert parse_quantity(written) == number


@pytest.mark.parametrize("wrong", ["", "k", "1 k", "1kk", "0x10", "1e", "one", None, "1e3k"])
def test_anything_else_is_none(wrong: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(wrong)


@given(st.integers(0, 1_000_000_000), st.integers(0, 1_000_000_000), st.integers(0, 1_000_000))
def test_amounts_come_back_from_an_object_as_they_went(rate: int, kv: int, sequences: int) -> None:
    assert amounts_of(resources_of((rate, kv, sequences))) == (rate, kv, sequences)


@given(st.integers(1, 10_000_000))
def test_a_request_is_rounded_up_to_whole_mib(thousandths: int) -> None:
    kv_mib = amounts_of({"kvCacheGiB": thousandths / 1000})[1]
    assert 0 <= kv_mib * 1000 - thousandths * 1024 < 1000
