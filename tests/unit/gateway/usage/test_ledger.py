"""The ledger: what it adds up, what it keeps, and what a crash between two writes leaves."""

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.background_task import PeriodicTask
from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.records.usage import UsageSums
from gateway.usage import usage_export
from gateway.usage.ledger import Ledger, report
from gateway.usage.report import IDLE, PoolBill, query_of, total
from gateway.usage.usage_export import UsageExport
from tests.builders import decision, usage_line

NOON = 1_700_049_600.0  # 2023-11-15T12:00:00Z
DAY_S = 86_400
BY_ALL = "day,tenant,entitlement,key,model"


def ledger_at(path: Path, keep_days: int = 400) -> Ledger:
    made = Ledger(path, keep_days=keep_days, currency="EUR")
    made.open()
    return made


def rows(path: Path, by: str = BY_ALL, **asked: str) -> dict[tuple[str, ...], UsageSums]:
    query = query_of(by, asked.get("first"), asked.get("last"), asked.get("tenant"))
    return dict(report(path, query).rows)


def charged(lease_id: str) -> DecisionRecord:
    return decision(
        lease_id,
        tenant="acme",
        model="m",
        admission={"lease_id": lease_id, "charge_tokens": 11, "settled_unix_s": NOON},
        usage={"prompt_tokens": 10, "completion_tokens": 3, "source": "engine", "cost_nano": 500},
    )


def test_requests_are_summed_by_day_tenant_entitlement_key_and_model(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "l.db")
    ledger.commit([usage_line(), usage_line(), usage_line(key="cli")], (), NOON)
    ledger.commit([usage_line(), usage_line(time_unix_s=NOON + DAY_S)], (), NOON)
    assert rows(tmp_path / "l.db") == {
        ("2023-11-15", "acme", "chat", "cli", "m"): UsageSums(1, 10, 4, 3, 11, 500),
        ("2023-11-15", "acme", "chat", "web", "m"): UsageSums(3, 30, 12, 9, 33, 1500),
        ("2023-11-16", "acme", "chat", "web", "m"): UsageSums(1, 10, 4, 3, 11, 500),
    }


def test_a_report_has_the_days_and_the_tenant_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    days = [usage_line(time_unix_s=NOON + day * DAY_S) for day in range(4)]
    ledger_at(path).commit([*days, usage_line(tenant="other")], (), NOON)
    found = rows(path, "tenant", first="2023-11-15", last="2023-11-17")
    assert {name: sums.requests for name, sums in found.items()} == {("acme",): 3, ("other",): 1}
    assert rows(path, "tenant", tenant="other").keys() == {("other",)}


def test_sums_older_than_the_days_kept_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = ledger_at(path, keep_days=2)
    for day in range(5):
        at = NOON + day * DAY_S
        ledger.commit([usage_line(time_unix_s=at)], [PoolBill("m", "p", 1.0, 1)], at)
    assert [name for (name,) in rows(path, "day")] == ["2023-11-17", "2023-11-18", "2023-11-19"]


def test_a_glimpse_of_a_wrong_clock_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = ledger_at(path, keep_days=2)
    ledger.commit([usage_line()], (), NOON)
    wrong = NOON + 30_000 * DAY_S
    for day in range(1, 3):
        ledger.commit([usage_line(time_unix_s=wrong)], [PoolBill("m", "p", 1.0, 1)], wrong)
        ledger.commit([usage_line(time_unix_s=NOON + day * DAY_S)], (), NOON + day * DAY_S)
    days = [name for (name,) in rows(path, "day")]
    assert days[:3] == ["2023-11-15", "2023-11-16", "2023-11-17"]
    ledger.commit((), (), NOON + 3 * DAY_S)
    assert next(name for (name,) in rows(path, "day")) == "2023-11-16"


def test_a_gateway_that_rested_for_long_removes_old_rows_a_day_later(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger_at(path, keep_days=2).commit([usage_line()], (), NOON)
    ledger = ledger_at(path, keep_days=2)
    for day in (100, 101):
        ledger.commit([usage_line(time_unix_s=NOON + day * DAY_S)], (), NOON + day * DAY_S)
    assert [name for (name,) in rows(path, "day")] == ["2024-02-23", "2024-02-24"]


def test_what_requests_do_not_hold_of_the_fleet_is_idle(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = ledger_at(path)
    ledger.commit(
        [usage_line(), usage_line(model="priced by tokens")],
        [PoolBill("m", "short", 9.0, 2000), PoolBill("m", "long", 1.0, 1000)],
        NOON,
    )
    found = report(path, query_of("tenant,model", None, None))
    assert found.idle_nano == {(IDLE, "m"): 2500}
    assert total(found).cost_nano == 3000 + 500, "the fleet's bill, and what tokens cost"
    assert report(path, query_of("tenant", None, None)).idle_nano == {(IDLE,): 2500}
    assert report(path, query_of("day", None, None, "acme")).idle_nano == {}


def test_processes_of_one_host_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "l.db"

    def write(_: int) -> None:
        ledger = ledger_at(path)
        for _ in range(20):
            ledger.commit([usage_line()], (), NOON)
        ledger.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [sums.requests for sums in rows(path).values()] == [80]


def test_a_batch_that_fails_counts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = ledger_at(path)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE fleet")
    with pytest.raises(OSError, match="fleet"):
        ledger.commit([usage_line(), usage_line(key="cli")], [PoolBill("m", "p", 1.0, 1)], NOON)
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM usage").fetchone() == (0,)


def test_a_file_that_is_no_ledger_is_left_alone(tmp_path: Path) -> None:
    text, empty, other = (tmp_path / name for name in ("text", "empty", "other"))
    text.write_bytes(b"not a database at all, but some text")
    with pytest.raises(OSError, match="text"):
        ledger_at(text)
    assert text.read_bytes() == b"not a database at all, but some text"
    empty.touch()
    ledger_at(empty).commit([usage_line()], (), NOON)
    assert rows(empty)
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(OSError, match="is no ledger"):
        ledger_at(other)


# -- with an export


def books(folder: Path, metrics: Metrics | None = None) -> tuple[UsageExport, Path, Path]:
    file, path = folder / "u.jsonl", folder / "l.db"
    ledger = Ledger(path, keep_days=400, currency="EUR")
    made = UsageExport(file, metrics or Metrics(), ledger, currency="EUR", wall_clock=lambda: NOON)
    return made, file, path


def charged_bytes(lease_id: str) -> bytes:
    return msgspec.json.encode(usage_line(lease_id)) + b"\n"


def exported(file: Path) -> list[str]:
    return [msgspec.json.decode(text)["id"] for text in file.read_bytes().splitlines()]


def failing(*_: object) -> None:
    raise OSError(28, "no space left")


async def test_what_a_crash_left_between_ledger_and_export_is_exported_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, file, path = books(tmp_path)
    export.open()
    export.append(charged("a"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gateway.usage.usage_export.append_synced", killed)
        with pytest.raises(KeyboardInterrupt):
            await export.flush()
    again, _, _ = books(tmp_path)
    again.open()
    again.append(charged("b"))
    await again.flush()
    assert exported(file) == ["a", "b"]
    assert [sums.requests for sums in rows(path).values()] == [2]
    third, _, _ = books(tmp_path)
    third.open()
    await third.flush()
    assert exported(file) == ["a", "b"], "nothing waited any more"


async def test_the_ledger_counts_a_batch_once_however_often_the_export_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, file, path = books(tmp_path)
    export.open()

    with monkeypatch.context() as patched:
        patched.setattr("gateway.usage.usage_export.append_synced", failing)
        for name in "abc":
            export.append(charged(name))
            await export.flush()
    await export.flush()
    assert exported(file) == ["a", "b", "c"]
    assert [sums.requests for sums in rows(path).values()] == [3]
    await export.close()


async def test_an_export_that_is_stuck_keeps_nothing_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_export, "MAX_PENDING", 2)
    metrics = Metrics()
    export, file, path = books(tmp_path, metrics)
    export.open()
    names = [f"{number:02}" for number in range(10)]

    def full(_: Path, data: bytes) -> None:
        if data:
            raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(usage_export, "append_synced", full)
        for name in names[:8]:
            export.append(charged(name))
            await export.flush()
        assert export.pending == 0
        await export.close()
        assert metrics.usage_dropped.values == {}
        again, _, _ = books(tmp_path)
        again.open()
        again.append(charged(names[8]))
        await again.flush()
    again.append(charged(names[9]))
    await again.flush()
    assert exported(file) == names
    assert [sums.requests for sums in rows(path).values()] == [10]
    await again.flush()
    assert exported(file) == names
    await again.close()


async def test_what_waits_for_the_export_is_delivered_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_at(tmp_path / "l.db")
    for name in "abcde":
        ledger.commit((), (), NOON, charged_bytes(name))
    ledger.close()
    for module in ("ledger", "usage_export"):
        where = f"gateway.usage.{module}.DELIVERY_BYTES"
        monkeypatch.setattr(where, 2 * len(charged_bytes("a")))
    export, file, _ = books(tmp_path)
    export.open()
    for part in ("ab", "abcd", "abcde", "abcde"):
        await export.flush()
        assert exported(file) == list(part)
    await export.close()


async def test_a_ledger_that_cannot_note_a_delivery_delivers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, file, _ = books(tmp_path)
    export.open()
    export.append(charged("a"))

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "delivered", failing)
        for _ in range(3):
            await export.flush()
    export.append(charged("b"))
    await export.flush()
    assert exported(file) == ["a", "b"]
    await export.close()


async def test_a_ledger_that_fails_is_tried_again_with_requests_and_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, _, path = books(tmp_path)
    export.open()

    export.append(charged("a"))
    export.bill(PoolBill("m", "p", 1.0, 700))
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "commit", failing)
        await export.flush()
    export.bill(PoolBill("m", "p", 1.0, 300))
    await export.flush()
    found = report(path, query_of("model", None, None))
    assert found.rows[("m",)].requests == 1
    assert found.idle_nano == {("m",): 500}
    await export.close()


async def test_closing_enters_what_the_fleet_cost_during_the_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, _, path = books(tmp_path)
    export.open()
    commit, entered, go_on = Ledger.commit, threading.Event(), threading.Event()

    def slow(*batch: Any) -> None:
        entered.set()
        assert go_on.wait(10)
        commit(*batch)

    monkeypatch.setattr(Ledger, "commit", slow)
    export._flushing = PeriodicTask(export.flush, 0.0)
    export.start()
    export.append(charged("a"))
    assert await asyncio.to_thread(entered.wait, 10)
    export.bill(PoolBill("m", "p", 1.0, 700))
    closing = asyncio.create_task(export.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert report(path, query_of("model", None, None)).idle_nano == {("m",): 200}


async def test_a_ledger_needs_no_export(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = Ledger(path, keep_days=400, currency="EUR")
    export = UsageExport(None, Metrics(), ledger, wall_clock=lambda: NOON)
    export.open()
    export.append(charged("a"))
    export.bill(PoolBill("m", "p", 1.0, 700))
    await export.close()
    assert [sums.requests for sums in rows(path).values()] == [1]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM outbox").fetchone() == (0,)
