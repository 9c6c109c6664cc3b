"""`python -m bench usage`: CPU that prices, the ledger and the export add to a request.

Requests of 40 keys end a thousand a second, as far as the writer can tell: it gets 500 at a time.
Rounds without and with take turns in this process, interpreted unless COMPILED=1. The time is that
of the whole process, so the writer's thread counts; waiting for the disk does not.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from bench.common.report import Report, Row
from gateway.metrics import Metrics
from gateway.pipeline.decision_record import usage_section
from gateway.pipeline.settle import count
from gateway.records.attempt import Usage
from gateway.records.decision import (
    DECISION_SCHEMA,
    AdmissionSection,
    DecisionRecord,
    TimingSection,
)
from gateway.records.usage import TokenPrice, cost_nano, token_price
from gateway.usage.ledger import Ledger
from gateway.usage.request_log import DecisionRing, Records
from gateway.usage.usage_export import UsageExport

BATCH: Final = 500
KEYS: Final = 40
_BATCHES: Final = 20
_ROUNDS: Final = 7
_REQUEST_US: Final = 90.0
"""CPU of a whole request, compiled (docs/performance.md)."""
PRICE: Final = token_price(0.6, 1.8, 0.15)
_USED: Final = Usage(prompt_tokens=1200, completion_tokens=180, cached_tokens=700, source="engine")


def run() -> Report:
    """All of it."""
    return Report(name="usage", rows=asyncio.run(_rows()))


async def _rows() -> list[Row]:
    kinds = {"off": (False, False), "ledger": (True, False), "ledger and export": (True, True)}
    seen: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(_ROUNDS):
        for name, (ledger, export) in kinds.items():
            seen[name].append(await _round(ledger=ledger, export=export))
    least = {name: min(us) for name, us in seen.items()}
    added = {name: us - least["off"] for name, us in least.items()}
    note = f"least of {_ROUNDS} rounds"
    return [
        Row(metric="end of a request, without, us", measured=least["off"], note=note),
        Row(metric="prices and ledger add, us", measured=added["ledger"], note=note),
        Row(
            metric="prices and ledger, CPU of a whole request over one without",
            measured=1 + added["ledger"] / _REQUEST_US,
            note=f"of {_REQUEST_US:g} us",
        ),
        Row(metric="with the export as well, us", measured=added["ledger and export"], note=note),
    ]


async def _round(*, ledger: bool, export: bool) -> float:
    """CPU of the end of one request, in us."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, books = Metrics(), None
        if ledger:
            kept = Ledger(Path(folder, "ledger.db"), keep_days=400, currency="USD")
            file = Path(folder, "usage.jsonl") if export else None
            books = UsageExport(file, metrics, kept, currency="USD")
            books.open()
        records = Records(DecisionRing(10_000), None, *([] if books is None else [books]))
        end = ending(metrics, records, PRICE if ledger else None)
        began_s = time.process_time()
        for _ in range(_BATCHES):
            for number in range(BATCH):
                end(number)
            if books is not None:
                await books.flush()
        spent_s = time.process_time() - began_s
        if books is not None:
            await books.close()
    return spent_s * 1e6 / (_BATCHES * BATCH)


def ending(metrics: Metrics, records: Records, price: TokenPrice | None) -> Callable[[int], None]:
    """What settlement does of usage, for one request by its number."""
    made = [_record(key) for key in range(KEYS)]

    def end(number: int) -> None:
        cost = None
        if price is not None:
            cost = cost_nano(
                price, _USED.prompt_tokens, _USED.completion_tokens, _USED.cached_tokens
            )
        record = msgspec.structs.replace(
            made[number % KEYS], usage=usage_section(_USED, cost), time_unix_s=float(number)
        )
        count(metrics, record, None, None, None)
        records.append(record)

    return end


def _record(key: int) -> DecisionRecord:
    tenant = f"tenant-{key // 4}"
    return DecisionRecord(
        schema=DECISION_SCHEMA,
        time_unix_s=0.0,
        request_id=f"request-{key}",
        endpoint="chat",
        outcome="ok",
        status=200,
        model="llama-3-70b",
        tenant=tenant,
        entitlement=f"{tenant}-chat",
        key=f"key-{key}",
        stream=True,
        admission=AdmissionSection(
            lease_id=f"lease-{key}", charge_tokens=1030, settled_unix_s=time.time()
        ),
        timing=TimingSection(ttft_s=0.2, tpot_s=0.01, duration_s=2.0),
    )
