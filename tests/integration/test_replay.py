"""`sluice replay` through a gateway before mock engines: from a log, judged by the SLO."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.common.fleet import MODEL, Fleet
from tests.running import sluice

KEY = "sk-replay"


def replay(fleet: Fleet, *arguments: object) -> tuple[int, Any]:
    """(exit code, what --json printed)."""
    result = sluice("replay", "--url", fleet.url, "--json", *arguments)
    assert result.stdout, result.output
    return result.exit_code, json.loads(result.stdout)


def test_a_log_of_the_gateway_s_own_traffic_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    config = {"request_log": {"path": str(log)}}
    with Fleet(short=1, long=1, mock=("--speed", "20"), config=config) as fleet:
        code, first = replay(
            fleet,
            *("--workload", "synthetic:prompt=600,answer=12,spread=0.5"),
            *("--rate", 15, "--duration", 4, "--slo-ttft-ms", 60_000),
        )
        assert (code, first["failed"], first["holds"]) == (0, 0, True)
        assert first["prompt_ratio"] == pytest.approx(1.0, abs=0.05)
        assert set(first["pools"]) <= {"short", "long"}
        time.sleep(1.5)  # the log is written every half second
        logged = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
        kept = [one for one in logged if one["endpoint"] == "completions"]
        code, again = replay(fleet, "--log", log, "--speed", 1.5, "--slo-ttft-ms", 60_000)
        assert (code, again["failed"]) == (0, 0)
        # Counting tokens computes nothing, so there is nothing to replay.
        assert again["requests"] == sum(one["outcome"] == "ok" for one in kept)
        # Nobody answers within a microsecond.
        code, violated = replay(fleet, "--log", log, "--duration", 2, "--slo-ttft-ms", 0.001)
        assert (code, violated["holds"]) == (1, False)
        assert "over" in violated["all"]["faults"][0]
    assert len(kept) >= first["requests"]


def test_ctrl_c_stops_the_sending_and_reports() -> None:
    with Fleet(short=1, long=0, mock=("--speed", "20")) as fleet:
        command = [sys.executable, "-m", "sluice", "replay", "--url", fleet.url, "--json"]
        command += ["--workload", "synthetic:prompt=300,answer=10", "--rate", "10"]
        process = subprocess.Popen(
            [*command, "--duration", "600", "--slo-ttft-ms", "60000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            deadline = time.monotonic() + 40
            while time.monotonic() < deadline and fleet.engines[0].finished() < 15:
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=40)
        finally:
            process.kill()
    found = json.loads(out)
    assert process.returncode == 0
    assert found["stopped"]
    assert found["failed"] == 0
    assert 0 < found["requests"] < 1000
    assert "stopped early" in found["notes"]


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = json.loads(sluice("hash-key", "--json", stdin=KEY).stdout)["hash"]
    entitlement = {"name": "e", "tenant": "t", "model": MODEL, "api_keys": [digest]}
    config = {"entitlements": [entitlement]}
    model = {"aliases": ["gpt-4o-mini"]}  # the same model: no --model is needed
    arguments = ("--workload", "azure", "--rate", 5, "--duration", 1, "--slo-ttft-ms", 60_000)
    with Fleet(short=1, long=1, mock=("--speed", "20"), model=model, config=config) as fleet:
        code, refused = replay(fleet, *arguments)
        assert (code, refused["problem"]) == (2, "the gateway refuses the key")
        assert refused["fix"] == "give --api-key-env"
        monkeypatch.setenv("REPLAY_KEY", KEY)
        code, found = replay(fleet, *arguments, "--api-key-env", "REPLAY_KEY")
        assert (code, found["failed"]) == (0, 0)
