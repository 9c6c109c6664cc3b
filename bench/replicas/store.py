"""Admissions per second of one process on a Redis of its own, and where the time goes.

    python -m bench.replicas.store --clients 256 --seconds 5
    python -m bench.replicas.store --rate 3000 --seconds 5

With --clients, each client asks, is admitted and settles in a loop. With --rate, requests come
at random times in an open loop, timed by a separate process (`bench.common.pacer`). Times are
CPU seconds by admission; one admission is one script call, and so is its settlement.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvloop

from bench.common.pacer import arrivals
from bench.common.redis_server import RedisServer
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import TokenPool
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelAdmission, ModelFleet, ModelRuntime
from gateway.ports import Settlement
from gateway.records.attempt import HealthRules, Usage
from gateway.records.entitlement import Entitlement
from gateway.routing.conversations import ResponseAffinity
from gateway.routing.routing_table import PoolShape, Routing
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.leases import RedisLeases

USED = Settlement(usage=Usage(prompt_tokens=60, completion_tokens=30), dispatched=True)


class StoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run showed. CPU in microseconds an admission, and as share of a core."""

    admissions_per_s: float
    p50_ms: float
    p99_ms: float
    own_us: float
    own_share: float
    redis_us: float
    redis_share: float
    others_share: float
    """What else the machine did meanwhile: of a core."""
    failed: int
    """Round trips."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: requests a second")
    parser.add_argument("--entitlements", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args()
    found = measured(
        clients=asked.clients,
        entitlements=asked.entitlements,
        seconds=asked.seconds,
        rate=asked.rate,
    )
    what = f"{asked.rate:,.0f} requests/s" if asked.rate else f"{asked.clients} clients"
    print(
        f"{what}: {found.admissions_per_s:,.0f} admissions/s (each with its settlement)\n"
        f"latency p50 {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms\n"
        f"process {found.own_share:.0%} of a core, {found.own_us:.0f} us each; "
        f"Redis {found.redis_share:.0%}, {found.redis_us:.0f} us each; "
        f"others {found.others_share:.0%}\n"
        f"failed round trips {found.failed}"
    )


def measured(*, clients: int, entitlements: int, seconds: float, rate: float = 0.0) -> StoreFigures:
    """One run: so many clients by turns, or, with a rate, requests at random times."""
    return uvloop.run(_measure(clients, entitlements, seconds, rate))


async def _measure(clients: int, entitlements: int, seconds: float, rate: float) -> StoreFigures:
    async with _store(entitlements) as (store, redis_pid):
        load = _StoreLoad(store, entitlements)
        redis_s, own_s, machine_s = _cpu_s(redis_pid), _own_s(), _machine_s()
        if rate:
            await load.paced(rate, seconds)
        else:
            await load.by_turns(clients, seconds)
        passed_s = time.monotonic() - load.began_s
        redis_s = _cpu_s(redis_pid) - redis_s
        own_s = _own_s() - own_s
        others_s = _machine_s() - machine_s - redis_s - own_s
        latencies = sorted(load.latencies)
        count = len(latencies)
        return StoreFigures(
            admissions_per_s=count / passed_s,
            p50_ms=latencies[count // 2] * 1e3,
            p99_ms=latencies[count * 99 // 100] * 1e3,
            own_us=own_s / count * 1e6,
            own_share=own_s / passed_s,
            redis_us=redis_s / count * 1e6,
            redis_share=redis_s / passed_s,
            others_share=max(0.0, others_s) / passed_s,
            failed=store.failures_total,
        )


class _StoreLoad:
    """Admissions, each settled at once."""

    def __init__(self, store: RedisLeases, entitlements: int) -> None:
        self.latencies: list[float] = []
        self.began_s = 0.0
        self._store = store
        self._entitlements = entitlements
        self._asked = 0

    async def by_turns(self, clients: int, seconds: float) -> None:
        """Each client asks again when it was answered."""
        self.began_s = time.monotonic()
        deadline_s = self.began_s + seconds

        async def client() -> None:
            while (now_s := time.monotonic()) < deadline_s:
                await self._one(now_s)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def paced(self, rate: float, seconds: float) -> None:
        """Requests when the pacer says so."""
        tasks: set[asyncio.Task[None]] = set()
        async for asked_s in arrivals(rate, seconds):
            self.began_s = self.began_s or asked_s
            task = asyncio.create_task(self._one(asked_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self, asked_s: float) -> None:
        n = self._asked = self._asked + 1
        lease = await self._store.admit(
            AdmissionRequest(
                lease_id=f"lease-{n}",
                model="m",
                entitlement=f"e{n % self._entitlements}",
                pool=n % 2,
                alternates=(),
                estimate_tokens=100,
                sequences=1,
            )
        )
        self.latencies.append(time.monotonic() - asked_s)
        self._store.settle(lease, USED)


@asynccontextmanager
async def _store(entitlements: int) -> AsyncIterator[tuple[RedisLeases, int]]:
    """A store with so many entitlements before a Redis of its own, and that one's process id."""
    shapes = (
        PoolShape(name="short", window_tokens=8192, boundary_tokens=8192),
        PoolShape(name="long", window_tokens=65536, boundary_tokens=None),
    )
    served = ModelRuntime(
        name="m",
        routing=Routing(pools=shapes),
        estimator=LengthEstimator(),
        fleet=ModelFleet(
            pools=tuple(PoolState(shape.name, ("w",), 8) for shape in shapes),
            workers=([], []),
            health=HealthRules(),
            response_affinity=ResponseAffinity(),
        ),
        admission=ModelAdmission(spill_queue=0),
    )
    token_pool = TokenPool(Terms(slots=(10_000, 10_000), tokens_per_s=1e6))
    for n in range(entitlements):
        token_pool.define(Entitlement(name=f"e{n}", model="m", baseline=(50, 50), tokens_per_s=1e5))
    with RedisServer() as server:
        store = RedisLeases(
            server.url,
            {"m": served},
            {"m": token_pool},
            time.monotonic,
            local=MemoryLeases({"m": served}, time.monotonic),
            fail_mode="closed",
            owner="bench",
        )
        await store.start()
        assert server.process is not None
        try:
            yield store, server.process.pid
        finally:
            await store.close()


def _own_s() -> float:
    """CPU seconds of this process, and of the pacer once it has ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _machine_s() -> float:
    """CPU seconds of everything that runs here, and what the host took (Linux)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
