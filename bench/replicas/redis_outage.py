"""Redis is killed, or hangs, while requests run: no request may fail or wait.

Targets: none fails, none spends more than 50 ms in the gateway before it is sent on, the gateway
reports that the store is away and, without a restart, that it is back. The same load with a
healthy Redis is measured for comparison, since a busy machine delays requests too.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from bench.common.fleet import MODEL, Fleet
from bench.common.redis_server import RedisServer, redis_program
from bench.common.report import Report, Row, at_most, equals

CHAT = "/v1/chat/completions"
DELAYED_MS = 50.0
TEXT = "The river rose in the night and by morning the lower road was gone. " * 24
_CLIENTS = 4
_PAUSE_S = 0.02
_BACK_LIMIT_S = 15.0


class RedisOutageResult(msgspec.Struct, kw_only=True):
    """What one scenario showed."""

    requests: int = 0
    failed: int = 0
    overheads_ms: list[float] = msgspec.field(default_factory=list)
    seen_away: bool = False
    back_s: float = 0.0
    """From Redis being well until the gateway says so."""
    ratio: float = 0.0

    @property
    def delayed(self) -> int:
        """Requests that the gateway held longer than DELAYED_MS."""
        return sum(ms > DELAYED_MS for ms in self.overheads_ms)


def run() -> Report:
    """Healthy, killed, hanging."""
    if redis_program() is None:
        row = Row(metric="redis-server", measured="missing", target="on PATH", holds=False)
        return Report(name="redis-outage", rows=[row])
    rows: list[Row] = []
    for kind in ("none", "killed", "hanging"):
        found = outage(kind)
        worst = f"slowest {max(found.overheads_ms, default=0):.1f} ms"
        rows += [
            Row(metric=f"{kind}: requests", measured=found.requests),
            equals(f"{kind}: failed", found.failed, 0),
            equals(f"{kind}: delayed > {DELAYED_MS:g} ms", found.delayed, 0, worst),
        ]
        if kind != "none":
            rows += [
                equals(f"{kind}: gateway says the store is away", int(found.seen_away), 1),
                at_most(f"{kind}: seconds until it is back", found.back_s, _BACK_LIMIT_S),
            ]
    return Report(name="redis-outage", rows=rows)


def outage(kind: str, *, before_s: float = 2.0, away_s: float = 3.0) -> RedisOutageResult:
    """Break Redis under load (`none`, `killed`, `hanging`), mend it, wait for it to be back."""
    found = RedisOutageResult()
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        config = {"state": {"url": redis.url}, "request_log": {"path": str(log)}}
        with Fleet(short=1, long=1, mock=("--speed", "100"), config=config) as fleet:
            asyncio.run(_under_load(fleet, redis, kind, found, before_s, away_s))
            fleet.wait_until_idle()
            state = 'category="prose"'
            found.ratio = next(
                v
                for k, v in fleet.metrics().items()
                if k.startswith("sluice_bytes_per_token") and state in k
            )
        records = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    timings = [record.get("timing", {}) for record in records]
    found.overheads_ms = [t["overhead_ms"] for t in timings if "overhead_ms" in t]
    return found


async def _under_load(
    fleet: Fleet,
    redis: RedisServer,
    kind: str,
    found: RedisOutageResult,
    before_s: float,
    away_s: float,
) -> None:
    stop = asyncio.Event()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        clients = [
            asyncio.create_task(_client(client, fleet, found, stop)) for _ in range(_CLIENTS)
        ]
        try:
            await asyncio.sleep(before_s)
            breaking, mending = _ways(redis)[kind]
            await asyncio.to_thread(breaking)
            until_s = time.monotonic() + away_s
            while time.monotonic() < until_s:
                await asyncio.sleep(0.1)
                found.seen_away |= not await _up(client, fleet)
            await asyncio.to_thread(mending)
            begin_s = time.monotonic()
            while not await _up(client, fleet) and found.back_s < 2 * _BACK_LIMIT_S:
                await asyncio.sleep(0.1)
                found.back_s = time.monotonic() - begin_s
            await asyncio.sleep(1.0)
        finally:
            stop.set()
            await asyncio.gather(*clients)


def _ways(redis: RedisServer) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    return {
        "none": (lambda: None, lambda: None),
        "killed": (redis.kill, redis.start),
        "hanging": (redis.hang, redis.resume),
    }


async def _up(client: httpx.AsyncClient, fleet: Fleet) -> bool:
    page = await client.get(fleet.url + "/metrics")
    return "\nsluice_store_up 1.0" in page.text


async def _client(
    client: httpx.AsyncClient, fleet: Fleet, found: RedisOutageResult, stop: asyncio.Event
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 8,
        "mock_output_tokens": 4,
    }
    while not stop.is_set():
        found.requests += 1
        try:
            answer = await client.post(fleet.url + CHAT, json=body)
        except httpx.HTTPError:
            found.failed += 1
        else:
            found.failed += answer.status_code != 200
        await asyncio.sleep(_PAUSE_S)
