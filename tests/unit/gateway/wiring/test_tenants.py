"""Limits of keys at run time are refused in OpenAI's shape, with what to change."""

import pytest

from gateway.errors import BadRequest
from gateway.settings import parse
from gateway.wiring.tenants import checked_limits, tenant_file

FILE = """
version: 1
currency: EUR
state: {url: redis+cluster://a:1}
models:
  - {name: m, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://a"]}}}
"""


def test_on_a_cluster_the_answer_names_the_stores_that_count_them() -> None:
    config = parse(FILE, "f", {})
    with pytest.raises(BadRequest) as caught:
        checked_limits(config, {"budgets": [{"tokens": 5}]})
    assert (caught.value.status, caught.value.param) == (400, "budgets")
    assert caught.value.message == (
        "budgets: a limit of a tenant or a key counts over all models, which a cluster spreads "
        "over servers; use one server (redis:// or redis+sentinel://), or give budgets to "
        "entitlements."
    )
    assert tenant_file(config).currency == "EUR"
