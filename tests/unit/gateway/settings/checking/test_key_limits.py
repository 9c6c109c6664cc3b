"""Limits of a key that an administrator sends: refused where they could not be counted."""

import pytest

from gateway.records.limit import UNLIMITED, Budget, KeyLimits
from gateway.settings import ConfigError, parse
from gateway.settings.checking.key_limits import read_key_limits

FILE = """
version: 1
state: {url: URL}
models:
  - {name: m, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://a"]}}}
"""
ONE = parse(FILE.replace("URL", "memory://"), "f", {})
CLUSTER = parse(FILE.replace("URL", "redis+cluster://a:1"), "f", {})


def test_fields_become_a_record() -> None:
    fields = {"requests_per_minute": 5, "budgets": [{"money": 1, "on_exceed": "spot"}]}
    assert read_key_limits(ONE, fields) == KeyLimits(
        requests_per_minute=5, budgets=(Budget(money=1.0, on_exceed="spot"),)
    )


def test_on_a_cluster_a_key_has_no_limits_for_the_reason_that_the_file_is_given() -> None:
    assert read_key_limits(CLUSTER, {}) == UNLIMITED
    with pytest.raises(ConfigError) as sent:
        read_key_limits(CLUSTER, {"max_concurrency": 4})
    tenants = 'tenants: [{name: t, keys: [{name: k, sha256: "HEX", max_concurrency: 4}]}]'
    text = FILE.replace("URL", "redis+cluster://a:1") + tenants.replace("HEX", "ab" * 32)
    with pytest.raises(ConfigError) as of_file:
        parse(text, "f", {})
    (here,) = sent.value.problems
    (there,) = [each for each in of_file.value.problems if each.path == "state.url"]
    assert (here.message, here.fix) == (there.message, there.fix)
    assert here.path == "max_concurrency"
