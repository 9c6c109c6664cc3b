"""Data-parallel ranks over real sockets: the gateway fills a mock's ranks from one line."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import MODEL, Fleet

CHAT = "/v1/chat/completions"
RANKS, SLOTS = 3, 2
KEY = "sk-test-ranks"
TENANT = {
    "name": "t",
    "tenant": "t",
    "model": MODEL,
    "api_keys": ["sha256:" + sha256(KEY.encode()).hexdigest()],
}


def fleet_of(rank_by: str = "header", **scheduling: Any) -> Fleet:
    fleet = Fleet(
        short=1,
        long=0,
        short_slots=SLOTS,
        mock=("--speed", "10", "--dp-ranks", str(RANKS)),
        model={"scheduling": {"policy": "bfio", **scheduling}},
    )
    config: Any = fleet.replicas[0].config
    worker = {"url": fleet.engines[0].url, "ranks": RANKS, "rank_by": rank_by}
    config["models"][0]["pools"]["short"]["workers"] = [worker]
    return fleet


def body(number: int, tokens: int = 30, **more: Any) -> dict[str, Any]:
    text = f"number {number}: " + "a word " * (40 * (number % 5))
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": number % 2 == 0,
        **more,
    }


async def ask(client: httpx.AsyncClient, fleet: Fleet, number: int, **more: Any) -> httpx.Response:
    return await client.post(fleet.url + CHAT, json=body(number, **more))


@pytest.mark.parametrize("rank_by", ["header", "body"])
async def test_every_rank_works_and_none_is_sent_more_than_its_slots(rank_by: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        with fleet_of(rank_by) as fleet:
            asked = [asyncio.create_task(ask(client, fleet, n)) for n in range(40)]
            most = 0.0
            while not all(task.done() for task in asked):
                values = fleet.engines[0].metrics()
                for rank in range(RANKS):
                    labels = f'{{engine="{rank}",model_name="{MODEL}"}}'
                    running = values[f"vllm:num_requests_running{labels}"]
                    most = max(most, running + values[f"vllm:num_requests_waiting{labels}"])
                await asyncio.sleep(0.02)
            answers = [task.result() for task in asked]
            assert [answer.status_code for answer in answers] == [200] * 40
            seen = {answer.headers["x-sluice-worker"] for answer in answers}
            assert seen == {f"{fleet.engines[0].id}#{rank}" for rank in range(RANKS)}
            made = fleet.engines[0].metrics()
            shares = [
                made[f'vllm:generation_tokens_total{{engine="{rank}",model_name="{MODEL}"}}']
                for rank in range(RANKS)
            ]
            assert sum(shares) == 40 * 30
            assert min(shares) > 0
            assert most <= SLOTS + 1, "a rank is sent its slots and one more"
            fleet.wait_until_idle()


async def test_who_finds_no_slot_in_time_is_told_so() -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        with fleet_of(queue_timeout_s=0.2) as fleet:
            limits = RANKS * (SLOTS + 1)
            long = [asyncio.create_task(ask(client, fleet, 2, tokens=2000)) for _ in range(limits)]
            await asyncio.sleep(0.3)
            late = await ask(client, fleet, 1)
            assert late.status_code == 429
            assert late.headers["x-sluice-reason"] == "queue_timeout"
            engine = f'engine="{fleet.engines[0].id}"'
            async with asyncio.timeout(20):
                while True:
                    busy = [
                        value
                        for name, value in fleet.metrics().items()
                        if name.startswith("sluice_barrier_busy_seconds_total") and engine in name
                    ]
                    if any(busy):
                        break
                    await asyncio.sleep(0.1)
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            fleet.wait_until_idle()
            assert (await ask(client, fleet, 1)).status_code == 200


async def test_a_dead_engines_waiting_requests_are_refused_and_it_comes_back() -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        with fleet_of() as fleet:
            engine = fleet.engines[0]
            asked = [
                asyncio.create_task(ask(client, fleet, n, tokens=400))
                for n in range(RANKS * (SLOTS + 1) + 6)
            ]
            await asyncio.sleep(0.3)
            fleet.kill_engine(engine)
            answers = await asyncio.gather(*asked)
            refused = [a.status_code for a in answers if a.status_code != 200]
            assert len(refused) >= 6
            assert set(refused) <= {502, 503}
            fleet.start_engine(engine)
            for _ in range(100):
                if (again := await ask(client, fleet, 1)).status_code == 200:
                    break
                await asyncio.sleep(0.1)
            assert again.status_code == 200


@pytest.fixture(scope="module")
def mixed() -> Iterator[Fleet]:
    """One model: a pool of one engine, and a pool of an engine with two ranks. No policy stated."""
    mock = ("--speed", "3")
    fleet = Fleet(short=1, long=1, long_slots=SLOTS, mock=mock, config={"entitlements": [TENANT]})
    engine = fleet.pool("long")[0]
    engine.command += ["--dp-ranks", "2"]
    config: Any = fleet.replicas[0].config
    config["models"][0]["pools"]["long"]["workers"] = [{"url": engine.url, "ranks": 2}]
    with fleet:
        yield fleet


def decision(fleet: Fleet, client: openai.OpenAI, text: str, tokens: int = 8) -> dict[str, Any]:
    """The decision record of a streamed answer that was read to its end."""
    asked = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=tokens,
        stream=True,
    )
    assert "".join(c.choices[0].delta.content or "" for c in asked.parse() if c.choices)
    return fleet.decision(asked.headers["x-request-id"])


def test_quartz_and_bfio_serve_side_by_side_in_one_model(mixed: Fleet) -> None:
    long = [f"Number {n}. " + "Read this long text. " * 2400 for n in range(2 * (SLOTS + 1) + 4)]
    with (
        openai.OpenAI(base_url=f"{mixed.url}/v1", api_key=KEY) as client,
        ThreadPoolExecutor(len(long)) as threads,
    ):
        told = "You answer in one word. " * 120
        decision(mixed, client, told + "First question?")
        short = decision(mixed, client, told + "Second question?")
        ranked = list(threads.map(lambda text: decision(mixed, client, text, 64), long))
    assert short["plan"]["pool"] == "short"
    assert short["scheduling"]["predicted_prefill_q_s"] > 0, "quartz predicted the prefill"
    assert short["scheduling"]["expected_hit_tokens"] > 100, "and knew the prefix"
    assert {record["plan"]["pool"] for record in ranked} == {"long"}
    engine = mixed.pool("long")[0].id
    assert {record["worker"] for record in ranked} == {f"{engine}#0", f"{engine}#1"}
    chosen = [dict(record["scheduling"]["candidates"]) for record in ranked]
    assert all(set(loads) == {f"{engine}#0", f"{engine}#1"} for loads in chosen)
    assert not any("predicted_prefill_q_s" in record["scheduling"] for record in ranked)
    assert max(record["timing"]["queue_ms"] for record in ranked) > 0, "one line for both ranks"
