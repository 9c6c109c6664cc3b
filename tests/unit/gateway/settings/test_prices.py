"""Prices in the file: read exactly, and refused with the fix."""

import pytest

from gateway.records.usage import cost_nano
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


def test_a_models_price_reaches_what_settles_its_requests() -> None:
    config = read(FILE)
    price = served_model(config, config.models[0]).price
    assert price is not None
    assert cost_nano(price, 1000, 10, cached_tokens=400) == 600 * 600 + 400 * 150 + 10 * 1800
    assert config.currency == "EUR"


HOURLY = """\
version: 1
models:
  - name: m
    pools:
      short: {max_model_len: 1000, max_num_seqs: 4, gpu_hour: 2.21, gpus: 2, workers: ["http://a:1"]}
      long: {max_model_len: 9000, max_num_seqs: 2, gpu_hour: 3.00, workers: ["http://b:1"]}
"""


def test_a_price_by_the_hour_reaches_every_worker_of_a_pool() -> None:
    config = read(HOURLY)
    served = served_model(config, config.models[0])
    assert served.by_hour
    hours = [pool.slot_clock.nano_per_s * 3600 for pool in served.fleet.pools if pool.slot_clock]
    assert hours == [pytest.approx(4_420_000_000), pytest.approx(3_000_000_000)]


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (FILE, "input: 0.60, c", "input: -1, c", "at least 0"),
        (FILE, "output: 1.80", "output: 0.0000006", "prices of tokens are for a million"),
        (FILE, "cached_input: 0.15", "cached_input: 0.75", "input costs more than other input"),
        (FILE, ", output: 1.80", "", "required key `output` is missing"),
        (FILE, "input: 0.60, c", 'input: "0.60", c', "expected a number"),
        (FILE, "currency: EUR", "currency: a b", "currency"),
        (HOURLY, "- name: m", "- name: m\n    price: {input: 1, output: 1}", "have two costs"),
        (HOURLY, "gpu_hour: 3.00, ", "", "and this one has none"),
        (HOURLY, "gpu_hour: 3.00, ", "gpus: 2, ", "which this pool has not"),
        (HOURLY, "gpus: 2", "gpus: 0", "at least 1"),
    ],
)
def test_prices_that_cannot_be_meant_are_refused(text: str, old: str, new: str, said: str) -> None:
    assert text.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(text.replace(old, new))
    assert said in str(caught.value)
