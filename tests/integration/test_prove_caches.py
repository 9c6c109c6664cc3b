"""Prefix caches in a proof, against the same requests before mock engines that have them."""

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import pytest

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import TimedLoad, TimedRequest, text, write_profile
from planner.profile import NodeProfile
from simulator.engine.profiles import EngineProfile
from tests.asking import entitlement
from tests.running import sluice

pytestmark = pytest.mark.timed

ENGINE: Final = EngineProfile(
    name="caching",
    w_s=0.004,
    h_s=0.0001,
    prefill_s_per_token=1e-4,
    kv_blocks=4096,
    max_model_len=8192,
    max_num_seqs=32,
    prefix_cache_tokens=24_000,
)
"""A new prompt takes it 220 ms, one of which it holds the beginning 20."""
BEGINNINGS: Final = 16
"""Of 2,000 tokens each; two engines hold them all, or half of them."""
SLO_MS: Final = 120
REQUESTS: Final = 110
RATE_PER_S: Final = 8.0


def asks() -> list[TimedRequest]:
    draw = random.Random(4)
    at_s, made = 0.0, []
    for number in range(REQUESTS):
        at_s += draw.expovariate(RATE_PER_S)
        messages = [
            {"role": "system", "content": text(f"beginning {draw.randrange(BEGINNINGS)}", 2_000)},
            {"role": "user", "content": text(f"question {number}", 100)},
        ]
        body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 4}
        made.append(
            TimedRequest(at_s=at_s, client="e", body=orjson.dumps(body), slo_s=SLO_MS / 1000)
        )
    return made


def live(folder: Path, engine: EngineProfile) -> tuple[float, Path]:
    """The share of requests with their first token in time, and the log."""
    log = folder / f"{engine.prefix_cache_tokens}.jsonl"
    with Fleet(
        short=2,
        long=0,
        short_slots=engine.max_num_seqs,
        mock=("--profile-file", str(write_profile(folder, engine)), "--speed", "1"),
        config={
            "entitlements": [entitlement("e", concurrency=64, slo_target_ms=SLO_MS)],
            "request_log": {"path": str(log)},
        },
    ) as fleet:
        (folder / "sluice.yaml").write_text(fleet.replicas[0].file.read_text())
        load = TimedLoad([fleet.url])
        asyncio.run(load.open_loop(asks()))
        assert all(answer.whole for answer in load.seen)
        fleet.wait_until_idle()
        fleet.kill_replica(fleet.replicas[0], signal.SIGTERM)  # it writes the last lines
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if "outcome" in line]
    assert len(requests) == REQUESTS
    warm_s = min(line["time_unix_s"] for line in requests) + 0.2 * load.seen[-1].ask.at_s
    waits_s = [line["timing"]["ttft_s"] for line in requests if line["time_unix_s"] >= warm_s]
    return sum(wait_s <= SLO_MS / 1000 for wait_s in waits_s) / len(waits_s), log


def proved(folder: Path, log: Path, engine: EngineProfile) -> dict[str, Any]:
    """The verdict on the entitlement, if the engines were like this."""
    node = NodeProfile(
        name=engine.name,
        gpu="mock",
        model=MODEL,
        gpus=1,
        w_s=engine.w_s,
        h_s_per_token=0.0,
        kv_tokens=engine.kv_blocks * engine.block_tokens,
    )
    file = folder / "profile.json"
    file.write_bytes(msgspec.json.encode({**msgspec.structs.asdict(node), "engine": engine}))
    config = folder / "sluice.yaml"
    result = sluice("prove", "-c", config, "--log", log, "--profile", file, "--json")
    findings = json.loads(result.stdout)["findings"]
    (finding,) = [each for each in findings if each["kind"] == "entitlement"]
    return dict(finding)


def test_a_proof_has_the_hits_that_engines_have_and_sees_a_smaller_cache(tmp_path: Path) -> None:
    half = msgspec.structs.replace(ENGINE, prefix_cache_tokens=12_000)
    none = msgspec.structs.replace(ENGINE, prefix_cache_tokens=0)
    for engine in (ENGINE, half):  # with half of it, requests that come first decide who holds what
        share, log = live(tmp_path, engine)
        assert (share > 0.95) == (engine is ENGINE)
        assert proved(tmp_path, log, engine)["kept"]["value"] == pytest.approx(share, abs=0.05)
        if engine is ENGINE:
            assert proved(tmp_path, log, half)["verdict"] == "breaks"
            assert proved(tmp_path, log, none)["kept"]["value"] < 0.1
