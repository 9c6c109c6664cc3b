"""Results for clients, and leftovers, when engines break under load or requests are cancelled.

Targets: requests whose answer has not begun all succeed; a started stream that breaks ends in
an in-band error event, never in silence or a faked stop; the broken engine returns without a
restart of the gateway; cancelled requests are gone from the engines within a second; no lease
is left.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
from rich.console import Console
from rich.progress import track

from bench.common.fleet import MODEL, EngineProcess, Fleet
from bench.common.report import Report, Row, at_most, equals

CHAT = "/v1/chat/completions"
FAULTS = (
    "refuse",
    "reset-before",
    "reset-mid:5",
    "stall:0",
    "stall:5",
    "slow:10",
    "500:0.5",
    "503:0.5",
    "no-done",
    "no-finish",
    "usage-none",
)
_NUMBERS = itertools.count()
_TIMEOUTS = {"connect_s": 1.0, "first_byte_s": 4.0, "idle_s": 1.5}
_RETURN_LIMIT_S = 10.0
_HEALTH = {
    "interval_s": 0.25,
    "timeout_s": 1.0,
    "eject_after": 3,
    "eject_s": 0.5,
    "max_eject_s": 1.0,
}


def run() -> Report:
    """All scenarios at full size."""
    rows = cancel_rows(200)
    names = ["kill -9", *FAULTS]
    for name in track(names, description="breaking engines", console=Console(stderr=True)):
        rows += fault_rows(name)
    return Report(name="gateway-faults", rows=rows)


# Cancelling


def cancel_rows(count: int) -> list[Row]:
    """Cancel `count` streams and `count` whole answers midway; how fast are they gone?"""
    rows = []
    with Fleet(short=2, long=1, mock=("--speed", "1")) as fleet:
        for name, stream in (("streams", True), ("non-streams", False)):
            running, gone_s = asyncio.run(_cancel(fleet, count, stream=stream))
            rows.append(
                Row(
                    metric=f"{name}: at the engines before the cancel",
                    measured=running,
                    target=f"= {count}",
                    holds=running == count,
                )
            )
            rows.append(at_most(f"{count} {name} cancelled: seconds until gone", gone_s, 1.0))
        rows.append(equals("leases after the cancels", fleet.leases(), 0))
    return rows


async def _cancel(fleet: Fleet, count: int, *, stream: bool) -> tuple[int, float]:
    limits = httpx.Limits(max_connections=count + 8)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
        tasks = [asyncio.create_task(_long_request(client, fleet, stream)) for _ in range(count)]
        deadline = time.monotonic() + 30
        running = 0
        while running < count and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            running = sum(e.running() for e in fleet.engines)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return running, await asyncio.to_thread(fleet.wait_until_idle)


async def _long_request(client: httpx.AsyncClient, fleet: Fleet, stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write without end."}],
        "max_tokens": 2000,
        "mock_output_tokens": 2000,
        "stream": stream,
    }
    async with client.stream("POST", fleet.url + CHAT, json=body) as answer:
        async for _ in answer.aiter_raw():
            pass


# Breaking


class ClientView:
    """What the clients of one scenario saw."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    def add(self, what: str, example: str = "") -> None:
        """Count one request's end."""
        self.counts[what] += 1
        if example and len(self.examples) < 3:
            self.examples.append(example)


def fault_rows(name: str, *, concurrency: int = 24, fault_s: float = 3.0) -> list[Row]:
    """Break one of two short engines under load, mend it, and report."""
    config = {"timeouts": _TIMEOUTS, "health": _HEALTH}
    seen = ClientView()
    with Fleet(short=2, long=1, mock=("--speed", "20"), config=config) as fleet:
        victim = fleet.pool("short")[0]
        back_s = asyncio.run(_under_load(fleet, victim, name, seen, concurrency, fault_s))
        fleet.wait_until_idle(10.0)
        leases = fleet.leases()
    counts = seen.counts
    note = ", ".join(f"{k} {v}" for k, v in sorted(counts.items()))
    return [
        equals(
            f"{name}: requests failed before their first byte",
            counts["failed"],
            0,
            note + "".join(f" [{e}]" for e in seen.examples),
        ),
        equals(f"{name}: started streams that ended in silence", counts["silent"], 0),
        at_most(f"{name}: seconds until the mended engine serves again", back_s, _RETURN_LIMIT_S),
        equals(f"{name}: leases at the end", leases, 0),
    ]


async def _under_load(
    fleet: Fleet,
    victim: EngineProcess,
    name: str,
    seen: ClientView,
    concurrency: int,
    fault_s: float,
) -> float:
    stop = asyncio.Event()
    limits = httpx.Limits(max_connections=concurrency + 4)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        clients = [
            asyncio.create_task(_client(client, fleet, seen, stop, i)) for i in range(concurrency)
        ]
        await asyncio.sleep(1.0)
        if name == "kill -9":
            fleet.kill_engine(victim)
            await asyncio.sleep(fault_s)
            fleet.start_engine(victim)
        else:
            await asyncio.to_thread(victim.fail, name)
            await asyncio.sleep(fault_s)
            await asyncio.to_thread(_until, lambda: victim.fail(""))
        await asyncio.to_thread(_until, victim.metrics)
        back_s = await _seconds_until_it_serves(victim)
        await asyncio.sleep(1.0)
        stop.set()
        await asyncio.gather(*clients)
    return back_s


async def _seconds_until_it_serves(engine: EngineProcess) -> float:
    """From now until the engine finishes a request it got from now on; inf after the limit."""
    begin = time.monotonic()
    finished = engine.finished()
    while time.monotonic() - begin < _RETURN_LIMIT_S:
        if await asyncio.to_thread(engine.finished) > finished:
            return time.monotonic() - begin
        await asyncio.sleep(0.05)
    return math.inf


def _until(attempt: Callable[[], object], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            attempt()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


async def _client(
    client: httpx.AsyncClient, fleet: Fleet, seen: ClientView, stop: asyncio.Event, index: int
) -> None:
    kinds: list[Callable[[httpx.AsyncClient, Fleet, ClientView], Awaitable[None]]] = [
        _whole,
        _stream,
    ]
    turn = index
    while not stop.is_set():
        await kinds[turn % 2](client, fleet, seen)
        turn += 1


def _body(stream: bool) -> dict[str, object]:
    return {
        "model": MODEL,
        # Each another prompt: else all would go where the first one is cached.
        "messages": [{"role": "user", "content": f"{next(_NUMBERS)}: a few words about rivers."}],
        "max_tokens": 60,
        "mock_output_tokens": 60,
        "stream": stream,
    }


async def _whole(client: httpx.AsyncClient, fleet: Fleet, seen: ClientView) -> None:
    try:
        answer = await client.post(fleet.url + CHAT, json=_body(stream=False))
    except httpx.HTTPError as error:
        seen.add("failed", repr(error))
        return
    if answer.status_code == 200:
        seen.add("whole ok")
    else:
        seen.add("failed", f"{answer.status_code} {answer.text[:160]}")


async def _stream(client: httpx.AsyncClient, fleet: Fleet, seen: ClientView) -> None:
    text = ""
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", fleet.url + CHAT, json=_body(stream=True)) as answer:
            if answer.status_code != 200:
                await answer.aread()
                seen.add("failed", f"{answer.status_code} {answer.text[:160]}")
                return
            async for part in answer.aiter_text():
                text += part
    finished = '"finish_reason":"' in text
    if finished and text.endswith("data: [DONE]\n\n"):
        seen.add("stream ok")
    elif 'data: {"error"' in text and not finished and "[DONE]" not in text:
        seen.add("stream broken, told so")
    else:
        seen.add("silent", text[-160:] or "no bytes")
