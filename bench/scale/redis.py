"""`bench scale`, entitlements on Redis: CPU of both sides, the server's memory, its slowest call.

One process enters the entitlements into the bench's own redis-server. Then requests are admitted
and settled, first by 64 clients that ask again when they are answered (saturated: the calls of
one loop iteration share a script), then at random times, 500 a second (paced: most calls have a
script of their own).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from random import Random
from typing import Final

import uvloop
from redis import Redis

from bench.common.fleet import RedisServer
from bench.scale.entitlements import USED
from bench.scale.traffic import SLOTS, Size, entitlements, fleet_of, quantile, token_pool_of
from gateway.admission.terms import AdmissionRequest
from gateway.records.entitlement import PROFILES
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.leases import RedisLeases

WORKERS: Final = 64
TICK_S: Final = PROFILES["default"].tick_s
_CLIENTS: Final = 64
PACED_PER_S: Final = 500.0
_PACED_S: Final = 6.0
_PATIENCE: Final = 600
_SLOW_US: Final = 1_000
Figures = dict[str, float]


def redis_point(size: Size) -> Figures:
    """One store with so many entitlements."""
    return uvloop.run(_measure(size))


async def _measure(size: Size) -> Figures:
    with RedisServer() as server, server.client() as client:
        client.config_set("slowlog-log-slower-than", _SLOW_US)
        client.config_set("slowlog-max-len", 1_000)
        empty = _memory(client)
        began_s = _redis_s(client)
        async with _store(server.url, size) as store:
            found: Figures = {
                "enter_redis_ms": (_redis_s(client) - began_s) * 1e3,
                "bytes_each": (_memory(client) - empty) / size.entitlements,
            }
            asks = _Asks(store, size)
            await store.tick()  # from now on ticks are due each TICK_S
            ticked_s = time.monotonic()
            await asks.answered(max(500, size.active or size.entitlements))
            found["active_bytes_each"] = (_memory(client) - empty) / size.entitlements
            client.slowlog_reset()
            found |= await _costs(client, asks, asks.answered(size.requests))
            found["call_hold_ms"] = _slowest_ms(client)
            paced = await _costs(client, asks, asks.paced(PACED_PER_S, _PACED_S))
            found |= {f"paced_{name}": value for name, value in paced.items()}
            client.slowlog_reset()
            await asyncio.sleep(max(0.0, ticked_s + TICK_S + 0.1 - time.monotonic()))
            own_s, redis_s = time.process_time(), _redis_s(client)
            await store.tick()
            found["tick_own_ms"] = (time.process_time() - own_s) * 1e3
            found["tick_redis_ms"] = (_redis_s(client) - redis_s) * 1e3
            found["tick_hold_ms"] = _slowest_ms(client)
            found["failed"] = store.failures_total
            return found


async def _costs(client: Redis, asks: "_Asks", load: Awaitable[None]) -> Figures:
    """CPU of both sides and scripts by request under a load, and how long admissions took."""
    asks.latencies_ms.clear()
    own_s, redis_s, scripts = time.process_time(), _redis_s(client), _scripts(client)
    began_s = time.monotonic()
    await load
    count = len(asks.latencies_ms)
    return {
        "per_s": count / (time.monotonic() - began_s),
        "own_us": (time.process_time() - own_s) / count * 1e6,
        "redis_us": (_redis_s(client) - redis_s) / count * 1e6,
        "scripts": (_scripts(client) - scripts) / count,
        "p50_ms": quantile(asks.latencies_ms, 0.5),
        "p99_ms": quantile(asks.latencies_ms, 0.99),
    }


class _Asks:
    """Requests that are admitted and settled at once."""

    def __init__(self, store: RedisLeases, size: Size) -> None:
        self._store = store
        self._active = size.active or size.entitlements
        self._asked = 0
        self.latencies_ms: list[float] = []

    async def answered(self, requests: int) -> None:
        """Return when so many more were admitted and settled, by turns."""
        until = self._asked + requests

        async def client() -> None:
            while self._asked < until:
                await self._one(time.monotonic())

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
        await self._settled()

    async def paced(self, rate: float, seconds: float) -> None:
        """Requests at random times, whatever became of earlier ones; late ones count as late."""
        draw, due_s = Random(f"paced/{rate:.0f}"), time.monotonic()
        end_s = due_s + seconds
        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + draw.expovariate(rate)) < end_s:
                await asyncio.sleep(due_s - time.monotonic())
                tasks.create_task(self._one(due_s))
        await self._settled()

    async def _one(self, asked_s: float) -> None:
        number = self._asked = self._asked + 1
        lease = await self._store.admit(
            AdmissionRequest(
                lease_id=f"lease-{number}",
                model="m",
                entitlement=f"entitlement-{number % self._active}",
                pool=0,
                alternates=(),
                estimate_tokens=500,
                sequences=1,
            )
        )
        self.latencies_ms.append((time.monotonic() - asked_s) * 1e3)
        self._store.settle(lease, USED)

    async def _settled(self) -> None:
        """Settlements are posted: those before this call are done after it."""
        await self._store.pools("m")


@asynccontextmanager
async def _store(url: str, size: Size) -> AsyncIterator[RedisLeases]:
    served = {"m": fleet_of("least-loaded", WORKERS)}
    pool = token_pool_of(SLOTS * WORKERS)
    for terms in entitlements(size.entitlements):
        pool.define(terms)
    store = RedisLeases(
        url,
        served,
        {"m": pool},
        time.monotonic,
        local=MemoryLeases(served, time.monotonic),
        fail_mode="closed",
        owner="bench",
    )
    await store.start()
    try:
        for _ in range(_PATIENCE):  # the first attempt may have been too short for so many
            if store.up:
                break
            await asyncio.sleep(0.05)
        yield store
    finally:
        await store.close()


def _memory(client: Redis) -> int:
    return int(client.info("memory")["used_memory"])


def _redis_s(client: Redis) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def _scripts(client: Redis) -> int:
    told = client.info("commandstats")
    return sum(int(told.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))


def _slowest_ms(client: Redis) -> float:
    """The longest call that was noted; 0 when all were below a millisecond."""
    scripts = (e for e in client.slowlog_get(1_000) if e["command"].startswith(b"EVAL"))
    return max((e["duration"] for e in scripts), default=0) / 1e3
