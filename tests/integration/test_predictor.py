"""From a least-loaded fleet's own log to a trained predictor in use: train, restart, predict."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import TimedLoad, TimedRequest, text, write_profile
from predictor import PrefillPredictor, features, load
from simulator.engine.engine import EngineProfile
from tests.running import sluice

CHAT = "/v1/chat/completions"
ENGINE = EngineProfile(
    name="steps",
    w_s=0.2,
    h_s=0.0,
    max_num_batched_tokens=1024,
    prefill_s_per_token=1e-6,
    kv_blocks=32_768,
    max_model_len=8192,
    max_num_seqs=128,
    prefix_cache_tokens=160_000,
)
"""A prefill takes whole steps, whatever a step holds: no line fits that, and a tree does."""
LENGTHS = (60, 900, 1200, 1900)
REQUESTS = 1100
RATE_PER_S = 70.0

pytestmark = pytest.mark.timed
"""Other tests' load would be most of what there is to predict."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictor") / "requests.jsonl"


@pytest.fixture(scope="module")
def fleet(log: Path) -> Iterator[Fleet]:
    """Three engines behind a least-loaded gateway that has served enough to train on."""
    profile = write_profile(log.parent, ENGINE)
    with Fleet(
        short=3,
        long=0,
        mock=("--profile-file", str(profile), "--speed", "6"),
        model={"scheduling": {"policy": "least-loaded"}},
        config={"request_log": {"path": str(log)}},
    ) as started:
        asks = [
            TimedRequest(
                at_s=number / RATE_PER_S, client=f"c{number % 5}", body=body(number), slo_s=9.0
            )
            for number in range(REQUESTS)
        ]
        load_ = TimedLoad([started.url])
        asyncio.run(load_.open_loop(asks))
        assert all(answer.whole for answer in load_.seen)
        yield started


def body(number: int) -> bytes:
    said = text(f"prompt {number}", LENGTHS[number % len(LENGTHS)])
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": said}],
            "max_tokens": 2,
            "mock_output_tokens": 2,
            "stream": True,
        }
    )


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def predicted_by(predictor: PrefillPredictor, record: dict[str, Any]) -> float:
    """The mean that this predictor gives for what the record says was known."""
    scheduling, estimate = record["scheduling"], record["estimate"]
    x = features(
        prompt_tokens=estimate["input_tokens"],
        hit_tokens=scheduling.get("expected_hit_tokens", 0),
        cap_tokens=estimate["cap_tokens"],
        output_tokens=estimate["output_tokens"],
        active=scheduling.get("worker_active", 0),
        backlog_tokens=scheduling.get("backlog_tokens", 0),
        kv_usage=scheduling.get("worker_kv_usage", 0.0),
        stream=record["stream"],
    )
    return predictor.predict(0, x)[0]


def test_a_least_loaded_fleet_logs_what_quartz_would_do(fleet: Fleet, log: Path) -> None:
    fleet.wait_until_idle()
    coverage = fleet.metrics()[f'sluice_predictor_coverage{{model="{MODEL}",pool="short"}}']
    assert 0.8 < coverage <= 1.0
    workers = {engine.id for engine in fleet.engines}
    found = records(log)
    would = {record["scheduling"]["would_bind"] for record in found}
    assert would == workers
    for record in found[-100:]:
        scheduling = record["scheduling"]
        assert 0 < scheduling["predicted_prefill_s"] < scheduling["predicted_prefill_q_s"]
        assert scheduling["would_prefill_s"] > 0
        assert scheduling["prefill_s"] > 0


def test_a_trained_tree_predicts_after_a_restart(fleet: Fleet, log: Path) -> None:
    replica = fleet.replicas[0]
    fleet.kill_replica(replica, signal.SIGTERM)
    file = log.parent / "predictor.json"
    result = sluice("train", "--log", log, "-o", file, "--json")
    assert result.exit_code == 0, result.output[:900]
    (section,) = load(file).sections
    assert section.name == f"{MODEL}/short"

    replica.config["models"][0]["scheduling"]["predictor"] = str(file)
    config = Path(replica.command[replica.command.index("-c") + 1])
    config.write_text(yaml.safe_dump(replica.config, sort_keys=False))
    fleet.start_replica(replica)
    fleet.wait_ready(replica)
    answer = httpx.post(fleet.url + CHAT, content=body(1), trust_env=False, timeout=30)
    record = fleet.decision(answer.headers["x-request-id"])
    told = record["scheduling"]["predicted_prefill_s"]
    tree, prior = PrefillPredictor(section, workers=1), PrefillPredictor(workers=1)
    assert told == pytest.approx(predicted_by(tree, record))
    assert told != pytest.approx(predicted_by(prior, record), rel=0.01)
