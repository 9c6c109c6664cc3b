"""Three gateways on one Redis are restarted one after another under 200 clients with streams.

Each gets SIGTERM, ends by itself, is started again and is ready before the next one's turn. As
behind a balancer, a client whose connection is refused, or that gets 503 `shutting_down`, asks
the next gateway. A few streams last longer than the drain time-out: those may be cut off.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from random import Random
from typing import Final

from bench.common.fleet import Fleet
from bench.common.raw_client import RawClient
from bench.common.report import Row, at_least, equals
from bench.replicas.books import (
    HUNG_S,
    ClientLoad,
    LoadShape,
    SentRequest,
    body_of,
    books_rows,
    entitlement,
    exported_row,
    ledger,
    on_redis,
    settled,
)

GATEWAYS: Final = 3
CLIENTS: Final = 192
LONG: Final = 8
"""Clients whose streams last longer than DRAIN_S."""
DRAIN_S: Final = 8.0
_SLOTS: Final = 128
_SPARE: Final = 16
"""Clients ask again, elsewhere too, before the last answer is settled."""
_BETWEEN_S: Final = 2.0
_SHORT: Final = LoadShape(output_tokens=24, pause_s=(0.1, 0.3), streamed=1.0)
_LONG: Final = LoadShape(output_tokens=300, pause_s=(0.1, 0.3), streamed=1.0)
_ELSEWHERE: Final = frozenset({(0, "ConnectionRefusedError"), (503, "shutting_down")})


class _Balanced(ClientLoad):
    """Clients that ask the next gateway where one does not take their request."""

    async def _client(self, tenant: str, gateway: int, draw: Random) -> None:
        await asyncio.sleep(draw.uniform(0, 0.5))
        body = body_of(self._shape.output_tokens, stream=True)
        clients = [RawClient(url, f"key-of-{tenant}") for url in self._urls]
        while not self._stop.is_set():
            for _ in clients:
                found = await self._ask(clients[gateway], tenant, gateway, body, HUNG_S)
                if (found.status, found.reason) not in _ELSEWHERE:
                    break
                clients[gateway].close()
                gateway = (gateway + 1) % len(clients)
            if found.status != 200:
                await asyncio.sleep(draw.uniform(*self._shape.pause_s))
        for client in clients:
            client.close()


def rows() -> Iterator[Row]:
    """All rows."""
    entitlements = [
        entitlement("short", "guaranteed", concurrency=CLIENTS + _SPARE),
        entitlement("long", "guaranteed", concurrency=LONG + _SPARE),
    ]
    server = {"drain_timeout_s": DRAIN_S}
    with on_redis(entitlements, GATEWAYS, slots=_SLOTS, server=server) as (fleet, files, books):
        sent, ended_s, statuses = asyncio.run(_scenario(fleet))
        after, entries = settled(fleet, books, 15.0), ledger(fleet.replicas[0], files)
    name = "rolling restart"
    asked = [s for s in sent if (s.status, s.reason) not in _ELSEWHERE]
    failed = [s for s in asked if s.status != 200]
    cut = [s for s in failed if s.tenant == "long" and s.length_s > DRAIN_S]
    others = [s for s in failed if s not in cut]
    told = sorted({f"{s.tenant} {s.status} {s.reason} after {s.length_s:.2f} s" for s in others})
    note = ", ".join(told) or (
        f"of {len(asked):,}; {len(cut)} longer streams were cut off; "
        f"{len(sent) - len(asked):,} times the next gateway was asked"
    )
    metric = f"{name}: failed requests but streams longer than the drain time-out"
    yield equals(metric, len(others), 0, note)
    yield at_least(f"{name}: requests answered", len(asked) - len(failed), CLIENTS)
    note = f"aim: {DRAIN_S + 3.0:g}; " + ", ".join(f"{s:.1f}" for s in ended_s)
    yield Row(f"{name}: s from SIGTERM until a gateway was gone", max(ended_s), note)
    metric = f"{name}: gateways that ended otherwise than by themselves"
    yield equals(metric, sum(status != 0 for status in statuses), 0)
    yield from books_rows(name, after, entries)
    yield exported_row(name, entries)


async def _scenario(fleet: Fleet) -> tuple[list[SentRequest], list[float], list[int]]:
    """What was sent, how long each took from SIGTERM to its end, and how it ended."""
    urls = [replica.url for replica in fleet.replicas]
    loads = [_Balanced(urls, _SHORT), _Balanced(urls, _LONG)]
    for load, (tenant, count) in zip(loads, (("short", CLIENTS), ("long", LONG)), strict=True):
        load.start((tenant, n % GATEWAYS) for n in range(count))
    ended_s, statuses = [], []
    await asyncio.sleep(_BETWEEN_S)
    for replica in fleet.replicas:
        process = replica.process
        assert process is not None
        began_s = time.monotonic()
        await asyncio.to_thread(fleet.kill_replica, replica, signal.SIGTERM, 3 * DRAIN_S)
        ended_s.append(time.monotonic() - began_s)
        statuses.append(process.returncode)
        fleet.start_replica(replica)  # not on a thread: a process ends with the one that began it
        await asyncio.to_thread(fleet.wait_ready, replica)
        await asyncio.sleep(_BETWEEN_S)
    for load in loads:
        await load.stop()
    return [one for load in loads for one in load.sent], ended_s, statuses
