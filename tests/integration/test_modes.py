"""Observe mode, one pool, three pools, spillover, admin and readiness over real sockets."""

import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from bench.common.fleet import MODEL, Fleet
from simulator.mock_server.tokenizer import count
from sluice.children import Children, free_ports
from tests import asking
from tests.asking import chat

CHAT = "/v1/chat/completions"
PIECE = "The quick brown fox jumps over the lazy dog while seven wise owls watch the river. "


def words(tokens: int) -> str:
    return PIECE * -(-tokens * 100 // count(PIECE * 100))


def post(fleet: Fleet, tokens: int, **more: object) -> httpx.Response:
    return asking.post(fleet.url, "", {**chat(8, words(tokens)), **more})


def test_observe_mode_computes_the_boundary_and_does_not_touch_the_body() -> None:
    with Fleet(short=1, long=1, model={"mode": "observe"}) as fleet:
        answer = post(fleet, 100, stream=True)
        record = fleet.decision(answer.headers["x-request-id"])
        assert record["mode"] == "observe"
        assert record["plan"]["pool"] == "short"
        scheduling = record["scheduling"]
        assert scheduling["would_bind"] == record["worker"]  # the pool's only one
        assert 0 < scheduling["predicted_prefill_s"] < scheduling["predicted_prefill_q_s"]
        engine = next(e for e in fleet.engines if e.id == answer.headers["x-sluice-worker"])
        assert "stream_options" not in json.loads(engine.last()[-1]["body"])
        if record["pool"] != "short":
            assert record["plan"]["would_route"] == "short"
            assert fleet.metrics()['sluice_would_total{what="route"}'] == 1


def test_a_fleet_of_one_pool_serves_everything() -> None:
    with Fleet(short=0, long=2) as fleet:
        for tokens in (50, 20_000):
            answer = post(fleet, tokens)
            assert answer.status_code == 200
            assert answer.headers["x-sluice-pool"] == "long"


def test_three_pools_are_chosen_by_their_boundaries() -> None:
    ports = free_ports(3)
    windows = {"small": 8192, "middle": 32768, "large": 65536}
    pools = {
        name: {
            "max_model_len": window,
            "max_num_seqs": 64,
            "workers": [f"http://127.0.0.1:{port}"],
        }
        for (name, window), port in zip(windows.items(), ports, strict=True)
    }
    # Without a scheduler no pool is preferred because it holds the prefix.
    scheduling = {"policy": "least-loaded"}
    model = {"pools": pools, "boundary": {"b_short": [4096, 16384]}, "scheduling": scheduling}
    with Children() as engines:
        for window, port in zip(windows.values(), ports, strict=True):
            engines.start(
                [
                    *(sys.executable, "-m", "sluice", "mock", "--port", str(port)),
                    *("--model", MODEL, "--max-model-len", str(window), "--speed", "20"),
                ],
                quiet=True,
            )
        for port in ports:
            engines.wait_for(f"http://127.0.0.1:{port}/health")
        with Fleet(short=0, long=0, model=model) as fleet:
            assert post(fleet, 100).headers["x-sluice-pool"] == "small"
            assert post(fleet, 6_000).headers["x-sluice-pool"] == "middle"
            assert post(fleet, 20_000).headers["x-sluice-pool"] == "large"
            assert post(fleet, 100, max_tokens=20_000).headers["x-sluice-pool"] == "middle"


def test_a_full_pool_spills_to_the_long_one_and_says_so() -> None:
    with (
        Fleet(short=1, long=1, short_slots=2, mock=("--speed", "1")) as fleet,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(
            threads.map(lambda _: post(fleet, 50, max_tokens=60, mock_output_tokens=60), range(8))
        )
        assert all(a.status_code == 200 for a in answers)
        spilled = [a for a in answers if a.headers["x-sluice-spilled"] == "true"]
        assert spilled
        assert all(a.headers["x-sluice-pool"] == "long" for a in spilled)
        series = f'sluice_spillovers_total{{model="{MODEL}",pool="long"}}'
        assert fleet.metrics()[series] == len(spilled)


def test_readiness_follows_the_engines() -> None:
    with Fleet(short=1, long=0) as fleet:
        assert httpx.get(fleet.url + "/ready").status_code == 200
        fleet.kill_engine(fleet.engines[0])
        answer = post(fleet, 20)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker_ready"
        assert int(answer.headers["retry-after"]) >= 1
        ready = httpx.get(fleet.url + "/ready")
        assert ready.status_code == 503
        ((worker, why),) = ready.json()["workers"].items()
        assert worker == f"{MODEL}/short/{fleet.engines[0].id}"
        assert "refuse" in why


def test_an_engine_that_misses_probes_still_serves() -> None:
    """As real engines do while they prefill: its pool has no other."""
    health = {"interval_s": 0.2, "timeout_s": 0.1}
    with Fleet(short=1, long=0, config={"health": health}) as fleet, ThreadPoolExecutor() as pool:
        (engine,) = fleet.engines
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        asked = [pool.submit(post, fleet, 20) for _ in range(4)]
        time.sleep(0.2)
        engine.process.send_signal(signal.SIGCONT)
        assert [each.result().status_code for each in asked] == [200] * 4
