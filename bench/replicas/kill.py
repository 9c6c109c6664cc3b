"""A gateway is killed while it holds 50 leases: when they return, and the effect on clients.

Fifty streams, far longer than the bench, run through one of four gateways, which is killed. Its
leases expire because nobody renews them; each is charged its estimate. Meanwhile a guaranteed
entitlement's clients ask the other three gateways, and none of their requests may fail.
Afterwards the fifty places are used again.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from bench.common.fleet import Fleet
from bench.common.report import Row, at_least, at_most, equals
from bench.replicas.books import (
    Books,
    ClientLoad,
    LoadShape,
    SentRequest,
    books_rows,
    entitlement,
    ledger,
    most_at_once,
    on_redis,
    settled,
)
from gateway.admission.token_pool import LEASE_TTL_S

GATEWAYS: Final = 4
HELD: Final = 50
SERVED: Final = 8
_SHORT: Final = LoadShape(output_tokens=16, pause_s=(0.1, 0.3))
_ENDLESS: Final = LoadShape(output_tokens=30_000, pause_s=(0.5, 1.0), streamed=1.0)
_ASKED_LIMIT_S: Final = 20.0


class Death(msgspec.Struct, kw_only=True):
    """What a killed gateway left behind."""

    held: int = 0
    """Its leases when it died."""
    estimates: int = 0
    """Tokens these had reserved."""
    first_s: float = 0.0
    last_s: float = 0.0
    """From its death until the first and the last of them was back."""
    survivors: list[SentRequest] = msgspec.field(default_factory=list)
    again: int = 0
    """Most that were served at once in their places afterwards."""


def rows() -> Iterator[Row]:
    """All rows."""
    entitlements = [
        entitlement("holder", "elastic", concurrency=HELD, max_concurrency=HELD),
        entitlement("guaranteed", "guaranteed", concurrency=SERVED),
    ]
    with on_redis(entitlements, GATEWAYS, window_tokens=65_536) as (fleet, files, books):
        found = asyncio.run(_scenario(fleet, books))
        after, entries = settled(fleet, books, 15.0), ledger(fleet.replicas[1], files)
    yield equals("killed: leases that it held", found.held, HELD)
    note = f"the first after {found.first_s:.1f} s; leases live {LEASE_TTL_S:g} s"
    yield at_most("killed: s until all were back", found.last_s, LEASE_TTL_S, note)
    failed = sum(s.status != 200 for s in found.survivors)
    slowest_s = max((s.length_s for s in found.survivors), default=0.0)
    note = f"of {len(found.survivors):,}; the slowest {slowest_s:.2f} s"
    yield equals("killed: requests to the others that failed", failed, 0, note)
    yield at_least("killed: of its places used at once afterwards", found.again, HELD * 0.9)
    yield from books_rows("killed", after, entries)
    holder = next(e for e in entries if e.name == "holder")
    metric = "killed: tokens charged but not exported, less the dead one's estimates"
    note = (
        f"{found.estimates:,} tokens of {found.held} expired leases: nobody was left to say what "
        "they used"
    )
    yield equals(metric, holder.used - holder.exported - found.estimates, 0, note)


async def _scenario(fleet: Fleet, books: Books) -> Death:
    found = Death()
    urls = [replica.url for replica in fleet.replicas]
    holding, serving = ClientLoad(urls, _ENDLESS), ClientLoad(urls, _SHORT)
    serving.start(("guaranteed", 1 + n % (GATEWAYS - 1)) for n in range(SERVED))
    holding.start(("holder", 0) for _ in range(HELD))
    until_s = time.monotonic() + _ASKED_LIMIT_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        if books.snapshot().tenants.get("holder", 0) == HELD:
            break
    await asyncio.sleep(2.0)
    # Nobody asks in its name any more: what is in flight then was in flight before.
    stopping = asyncio.create_task(holding.stop())
    await asyncio.to_thread(fleet.kill_replica, fleet.replicas[0])
    died_s = time.monotonic()
    leases = [e for e in books.leases().values() if e["entitlement"] == "holder"]
    found.held = len(leases)
    found.estimates = sum(lease["estimate_tokens"] for lease in leases)
    await stopping
    while left := books.snapshot().tenants["holder"]:
        if left < found.held and not found.first_s:
            found.first_s = time.monotonic() - died_s
        if time.monotonic() - died_s > 2 * LEASE_TTL_S:
            break
        await asyncio.sleep(0.05)
    found.last_s = time.monotonic() - died_s
    again = ClientLoad(urls, _SHORT)
    again.start(("holder", 1 + n % (GATEWAYS - 1)) for n in range(HELD))
    await asyncio.sleep(4.0)
    await again.stop()
    await serving.stop()
    found.survivors, found.again = serving.sent, most_at_once(again.sent)
    return found
