"""Prices in the file: read exactly, and refused with the fix."""

import pytest

from gateway.policy.prices import cost_nano
from gateway.settings import Config, ConfigError, parse
from gateway.wiring.models import served_model

FILE = """\
version: 1
currency: EUR
models:
  - name: m
    price: {input: 0.60, cached_input: 0.15, output: 1.80}
    pools: {all: {max_model_len: 1000, max_num_seqs: 4, workers: ["http://h:1"]}}
"""


def read(text: str) -> Config:
    return parse(text, "sluice.yaml", {})


def refused(old: str, new: str) -> str:
    assert FILE.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(FILE.replace(old, new))
    return str(caught.value)


def test_a_models_price_reaches_what_settles_its_requests() -> None:
    config = read(FILE)
    price = served_model(config, config.models[0]).price
    assert price is not None
    assert cost_nano(price, 1000, 10, cached_tokens=400) == 600 * 600 + 400 * 150 + 10 * 1800
    assert config.currency == "EUR"


def test_without_a_price_usage_has_no_cost() -> None:
    config = read(FILE.replace("    price: {input: 0.60, cached_input: 0.15, output: 1.80}\n", ""))
    assert served_model(config, config.models[0]).price is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("input: 0.60, c", "input: -1, c", "at least 0"),
        ("output: 1.80", "output: 0.0000006", "give the price of a million tokens"),
        ("cached_input: 0.15", "cached_input: 0.75", "cached input costs more than other input"),
        (", output: 1.80", "", "required key `output` is missing"),
        ("input: 0.60, c", 'input: "0.60", c', "expected a number"),
        ("currency: EUR", "currency: a b", "currency"),
    ],
)
def test_a_price_that_cannot_be_meant_is_refused(old: str, new: str, said: str) -> None:
    assert said in refused(old, new)
