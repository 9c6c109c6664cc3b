"""A model's configuration -> its run-time objects."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet import members, model_runtime
from gateway.fleet.model_runtime import ModelRuntime
from gateway.scheduling.baselines import LeastLoaded
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.schedulers import Shadow
from gateway.settings import parse
from gateway.wiring.models import equip, equipment, served_model
from predictor.artifact import Artifact, encode
from tests.builders import address
from tests.unit.gateway.scheduling.test_prefix_index import prompt
from tests.unit.predictor.made import small_section

FILE = """\
version: 1
models:
  - name: m
    mode: MODE
    scheduling: {SCHEDULING}
    pools:
      short: {max_model_len: 8192, max_num_seqs: 4, workers: ["http://10.0.0.1:8000"]}
      long: {max_model_len: 65536, max_num_seqs: 4, workers: ["http://10.0.0.2:8000"]}
"""


def model_with(scheduling: str, mode: str = "enforce") -> ModelRuntime:
    text = FILE.replace("SCHEDULING", scheduling).replace("MODE", mode)
    config = parse(text, "sluice.yaml", {})
    return served_model(config, config.models[0])


def test_each_pool_is_predicted_by_its_own_section_and_the_rest_by_the_prior(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "predictor.json"
    file.write_bytes(encode(Artifact(sections=(small_section(),))))
    with caplog.at_level(logging.WARNING, "sluice"):
        served = model_with(f"policy: quartz, predictor: {file}")
    assert [p.predictor is not None and p.predictor.trained for p in served.fleet.pools] == [
        True,
        False,
    ]
    told: Any = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "pool long" in told[0]
    assert "has no section for it" in told[0]


@pytest.mark.parametrize(
    ("scheduling", "mode", "follows"),
    [
        ("policy: least-loaded", "enforce", False),
        ("policy: round-robin", "enforce", False),
        ("policy: sticky", "enforce", True),
        ("policy: quartz", "observe", False),
    ],
)
def test_quartz_predicts_in_the_shadow_of_any_other_policy(
    scheduling: str, mode: str, *, follows: bool
) -> None:
    served = model_with(scheduling, mode)
    for pool in served.fleet.pools:
        assert isinstance(pool.scheduler, Shadow)
        assert pool.predictor is not None
        assert pool.prefixes is not None
        assert pool.follows_prefixes == follows
    alone = model_with(scheduling + ", shadow: false", mode)
    for pool in alone.fleet.pools:
        assert not isinstance(pool.scheduler, Shadow)
        assert (pool.predictor, pool.prefixes is not None) == (None, follows)


def test_ranks_have_no_shadow_and_pools_of_one_model_differ() -> None:
    text = FILE.replace("SCHEDULING", "policy: least-loaded").replace("MODE", "enforce")
    text = text.replace('["http://10.0.0.1:8000"]', '[{url: "http://10.0.0.1:8000", ranks: 2}]')
    config = parse(text, "sluice.yaml", {})
    ranked, plain = served_model(config, config.models[0]).fleet.pools
    assert isinstance(ranked.scheduler, LeastLoaded)
    assert isinstance(plain.scheduler, Shadow)
    assert (ranked.prefixes is None, plain.prefixes is None) == (True, False)


def test_an_index_made_at_a_reload_counts_the_workers_that_are_there() -> None:
    before, after = (
        parse(FILE.replace("SCHEDULING", text).replace("MODE", "enforce"), "sluice.yaml", {})
        for text in ("policy: least-loaded", "policy: sticky")
    )
    served = served_model(before, before.models[0])
    pool = served.fleet.pools[0]
    (gone,) = served.fleet.pools[0].join((address("gone"),), 0.0, up=True)
    members.leave(pool, gone)
    model_runtime.vacate(served, served.fleet.pools[0], [gone], 0.0)
    equip(equipment(after, after.models[0], served, None))
    made, grown = pool.prefixes, PrefixIndex(1)
    assert made is not None
    for number in range(20):
        for index in (made, grown):
            index.insert(prompt(number, 60_000), 0)
    for number in range(20):
        points = prompt(number, 60_000)
        assert list(made.match(points)) == list(grown.match(points))
