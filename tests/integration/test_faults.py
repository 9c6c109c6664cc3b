"""Engines that die, break, stall and fail under load, and clients that leave.

Requests whose answer has not begun all succeed; a started stream that breaks ends in an in-band
error event, never in silence or a faked stop; the broken engine returns without a restart of the
gateway; cancelled requests are gone from the engines within a second; no lease is left.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.common.fleet import MODEL, EngineProcess, Fleet

CHAT = "/v1/chat/completions"
NUMBERS = itertools.count()
TIMEOUTS = {"connect_s": 1.0, "first_byte_s": 4.0, "idle_s": 1.5}
HEALTH = {
    "interval_s": 0.25,
    "timeout_s": 1.0,
    "eject_after": 3,
    "eject_s": 0.5,
    "max_eject_s": 1.0,
}
CLIENTS = 8
BROKEN_S = 1.5
BACK_S = 10.0


def body(text: str, tokens: int, *, stream: bool) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "mock_output_tokens": tokens,
        "stream": stream,
    }


async def one(client: httpx.AsyncClient, url: str, *, stream: bool) -> str:
    """How a request ended for its client."""
    # Each another prompt: else all would go where the first one is cached.
    asked = body(f"{next(NUMBERS)}: a few words about rivers.", 60, stream=stream)
    text = ""
    try:
        async with client.stream("POST", url + CHAT, json=asked) as answer:
            async for part in answer.aiter_text():
                text += part
    except httpx.HTTPError as error:
        if not stream:
            return f"failed: {error!r}"
    else:
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {text[:160]}"
    if not stream:
        return "whole"
    finished = '"finish_reason":"' in text
    if finished and text.endswith("data: [DONE]\n\n"):
        return "stream"
    told = 'data: {"error"' in text and not finished and "[DONE]" not in text
    return "stream broken, told so" if told else f"silent: {text[-160:]}"


def until(holds: Callable[[], object], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            if holds():
                return True
        time.sleep(0.05)
    return False


def mended(victim: EngineProcess) -> bool:
    victim.fail("")
    return True


def broken(fleet: Fleet, victim: EngineProcess, fault: str) -> bool:
    """Break an engine, mend it; whether it serves again what it gets from then on."""
    time.sleep(1.0)
    if fault == "kill -9":
        fleet.kill_engine(victim)
        time.sleep(BROKEN_S)
        fleet.start_engine(victim)
    else:
        victim.fail(fault)
        time.sleep(BROKEN_S)
        until(lambda: mended(victim), 15.0)
    assert until(victim.metrics, 15.0)
    finished = victim.finished()
    return until(lambda: victim.finished() > finished, BACK_S)


async def under_load(fleet: Fleet, fault: str) -> tuple[Counter[str], bool]:
    ends: Counter[str] = Counter()
    stop = asyncio.Event()

    async def asking(client: httpx.AsyncClient, number: int) -> None:
        while not stop.is_set():
            ends[await one(client, fleet.url, stream=number % 2 == 1)] += 1
            number += 1

    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        clients = [asyncio.create_task(asking(client, number)) for number in range(CLIENTS)]
        back = await asyncio.to_thread(broken, fleet, fleet.pool("short")[0], fault)
        await asyncio.sleep(1.0)
        stop.set()
        await asyncio.gather(*clients)
    return ends, back


@pytest.mark.parametrize(
    "fault",
    [
        *("kill -9", "refuse", "reset-before", "reset-mid:5", "stall:0", "stall:5", "slow:10"),
        *("500:0.5", "503:0.5", "no-done", "no-finish", "usage-none"),
    ],
)
def test_clients_survive_an_engine_that_breaks(fault: str) -> None:
    config = {"timeouts": TIMEOUTS, "health": HEALTH}
    with Fleet(short=2, long=1, mock=("--speed", "20"), config=config) as fleet:
        ends, back = asyncio.run(under_load(fleet, fault))
        fleet.wait_until_idle(10.0)
        assert fleet.leases() == 0
    assert set(ends) <= {"whole", "stream", "stream broken, told so"}
    assert back


def test_requests_at_a_frozen_engine_are_taken_to_another() -> None:
    """Its health checks are good, and its first_byte_s is minutes away."""
    health = {"interval_s": 0.25, "timeout_s": 1.0, "stall_s": 0.5}
    with Fleet(short=2, long=0, config={"health": health}) as fleet, ThreadPoolExecutor(8) as pool:
        fleet.engines[0].fail("stall:0")

        def ask(number: int) -> httpx.Response:
            asked = body("hi", 8, stream=number % 2 == 0)
            return httpx.post(fleet.url + CHAT, json=asked, timeout=30)

        answers = list(pool.map(ask, range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        moved = [fleet.decision(answer.headers["x-request-id"]) for answer in answers]
        results = [[each["result"] for each in record["attempts"]] for record in moved]
        assert ["frozen", "ok"] in results
        # And who comes next does not go there.
        assert {ask(0).headers["x-sluice-worker"] for _ in range(6)} == {fleet.engines[1].id}


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_requests_are_gone_from_the_engines(stream: bool) -> None:
    asked = body("Write without end.", 2000, stream=stream)

    async def cancel(fleet: Fleet, count: int) -> tuple[int, float]:
        """How many ran at the engines, and seconds until they were gone."""
        limits = httpx.Limits(max_connections=count + 8)
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
            posts = (client.post(fleet.url + CHAT, json=asked) for _ in range(count))
            tasks = [asyncio.create_task(post) for post in posts]
            end_s, running = time.monotonic() + 30, 0
            while running < count and time.monotonic() < end_s:
                await asyncio.sleep(0.2)
                running = sum(engine.running() for engine in fleet.engines)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return running, await asyncio.to_thread(fleet.wait_until_idle)

    with Fleet(short=2, long=1, mock=("--speed", "1")) as fleet:
        running, gone_s = asyncio.run(cancel(fleet, 40))
        assert fleet.leases() == 0
    assert running == 40
    assert gone_s <= 1.0
