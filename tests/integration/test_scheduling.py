"""QUARTZ in a real gateway: locality, the queue, dead workers and clients that leave."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import text, write_profile
from bench.quartz.live import ENGINE
from tests.asking import until_waiting

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines that prefill 9,000 tokens a second of model time, five times as fast."""
    folder: Path = tmp_path_factory.mktemp("scheduling")
    profile = write_profile(folder, ENGINE)
    with Fleet(
        short=2,
        long=1,
        short_window=32_768,
        long_window=65_536,
        mock=("--profile-file", str(profile), "--speed", "5"),
        model={"scheduling": {"policy": "quartz"}, "boundary": {"b_short": 8192}},
    ) as started:
        # A worker's gate is open until its first token was seen.
        with ThreadPoolExecutor(4) as threads:
            warm = [body(("user", text(f"warm {n}", 3000))) for n in range(4)]
            assert all(a.is_success for a in threads.map(post, [started] * 4, warm))
        yield started


def body(*said: tuple[str, str], output: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": role, "content": content} for role, content in said],
        "max_tokens": output,
        "mock_output_tokens": output,
        "stream": True,
        **more,
    }


def post(fleet: Fleet, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(fleet.url + CHAT, json=asked, timeout=60, trust_env=False)


async def flood(fleet: Fleet, asked: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        return list(await asyncio.gather(*(client.post(fleet.url + CHAT, json=a) for a in asked)))


def test_a_conversation_returns_to_the_worker_that_holds_its_prefix(fleet: Fleet) -> None:
    told: list[tuple[str, str]] = [("system", text("returning", 1200))]
    workers = []
    for turn in range(4):
        told.append(("user", text(f"turn {turn}", 80)))
        answer = post(fleet, body(*told))
        assert answer.status_code == 200
        workers.append(answer.headers["x-sluice-worker"])
        told.append(("assistant", text(f"answer {turn}", 20)))
    assert len(set(workers)) == 1
    record = fleet.decision(answer.headers["x-request-id"])
    cached, scheduling = record["usage"]["cached_tokens"], record["scheduling"]
    assert cached > 1000
    assert scheduling["expected_hit_tokens"] == pytest.approx(cached, rel=0.25)
    assert scheduling["predicted_prefill_q_s"] > scheduling["predicted_prefill_s"] > 0
    assert scheduling["prefill_s"] > 0
    assert scheduling["worker_active"] == 0
    assert 0 <= scheduling["worker_kv_usage"] < 1


def test_a_conversation_that_outgrows_the_boundary_stays_with_its_prefix(fleet: Fleet) -> None:
    told = [("system", text("outgrown", 7600)), ("user", text("first", 60))]
    answer = post(fleet, body(*told))
    assert answer.headers["x-sluice-pool"] == "short"
    more = [*told, ("assistant", text("said", 400)), ("user", text("second", 3000))]
    answer = post(fleet, body(*more))
    assert fleet.decision(answer.headers["x-request-id"])["estimate"]["total_tokens"] > 8192
    assert answer.headers["x-sluice-pool"] == "short"
    assert fleet.decision(answer.headers["x-request-id"])["plan"]["reason"] == "prefix_held"
    stranger = [("system", text("a stranger", 12_000)), ("user", text("third", 500))]
    assert post(fleet, body(*stranger)).headers["x-sluice-pool"] == "long"


async def test_more_than_the_gate_holds_waits_in_the_gateway_and_is_all_served(
    fleet: Fleet,
) -> None:
    # Two gates hold about 20 of these: half a second of prefill each.
    asked = [body(("user", text(f"flood {n}", 3000))) for n in range(64)]
    answers = await flood(fleet, asked)
    assert [answer.status_code for answer in answers] == [200] * 64
    assert all("[DONE]" in answer.text for answer in answers)
    waited = [int(answer.headers["x-sluice-queue-ms"]) for answer in answers]
    assert max(waited) > 50
    assert min(waited) < max(waited) / 4
    served = {answer.headers["x-sluice-worker"] for answer in answers}
    assert served == {engine.id for engine in fleet.pool("short")}
    fleet.wait_until_idle()
    metrics = fleet.metrics()
    assert not any(v for k, v in metrics.items() if k.startswith("sluice_queue_depth"))


async def test_a_short_request_overtakes_long_ones_that_wait(fleet: Fleet) -> None:
    long = [body(("user", text(f"long {n}", 6000))) for n in range(24)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        running = [asyncio.create_task(client.post(fleet.url + CHAT, json=a)) for a in long]
        await until_waiting(fleet, 6)
        short = await client.post(fleet.url + CHAT, json=body(("user", "What is the time?")))
        rest = await asyncio.gather(*running)
    assert left_queue_unix_s(fleet, short) < sorted(left_queue_unix_s(fleet, r) for r in rest)[-2]


def left_queue_unix_s(fleet: Fleet, answer: httpx.Response) -> float:
    record = fleet.decision(answer.headers["x-request-id"])
    received_unix_s: float = record["time_unix_s"]
    queue_ms: float = record["timing"]["queue_ms"]
    return received_unix_s + queue_ms / 1000


async def test_who_leaves_while_waiting_never_reaches_an_engine(fleet: Fleet) -> None:
    asked = [body(("user", text(f"leaver {n}", 6000))) for n in range(24)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        running = [asyncio.create_task(client.post(fleet.url + CHAT, json=a)) for a in asked]
        await until_waiting(fleet, 8)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    fleet.wait_until_idle()
    page = fleet.admin("/admin/decisions?limit=24").json()
    records = page["decisions"] if isinstance(page, dict) else page
    left = [r for r in records if r["outcome"] == "disconnected"]
    assert len(left) >= 8
    assert any(not r.get("attempts") for r in left)


async def test_the_queue_of_a_worker_that_dies_goes_to_another(fleet: Fleet) -> None:
    dying = fleet.pool("short")[0]
    asked = [body(("user", text(f"orphan {n}", 6000))) for n in range(24)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        running = [asyncio.create_task(client.post(fleet.url + CHAT, json=a)) for a in asked]
        await until_waiting(fleet, 8)
        fleet.kill_engine(dying)
        answers = await asyncio.gather(*running)
    try:
        # A stream that had begun there may break; whoever waited is served elsewhere.
        assert sum("[DONE]" in answer.text for answer in answers) >= 20
        assert all(answer.status_code == 200 for answer in answers)
    finally:
        fleet.start_engine(dying)
    await until_ready(dying.url)
    fleet.wait_until_idle()


async def until_ready(url: str) -> None:
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def test_where_no_answer_is_streamed_nothing_waits_in_the_gateway(tmp_path: Path) -> None:
    profile = write_profile(tmp_path, ENGINE)
    mock = ("--profile-file", str(profile), "--speed", "5")
    with Fleet(short=1, long=0, mock=mock) as started:  # quartz by default
        asked = [body(("user", text(f"whole {n}", 600)), stream=False) for n in range(50)]
        answers = await flood(started, asked)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-sluice-queue-ms"] for answer in answers} == {"0"}
        record = started.decision(answers[0].headers["x-request-id"])
        assert record["scheduling"]["predicted_prefill_s"] > 0
