"""A model's configuration -> its run-time objects."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.model_runtime import ModelRuntime
from gateway.settings import parse
from gateway.wiring.models import served_model
from predictor.artifact import Artifact, encode
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
    assert [predictor.trained for predictor in served.scheduling.predictors] == [True, False]
    told: Any = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "pool long" in told[0]
    assert "has no section for it" in told[0]
