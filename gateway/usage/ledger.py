"""The ledger: usage summed by day, tenant, entitlement, key and model, in one SQLite file.

Rules:
- A batch of requests is one synced transaction: all of it counts, or none.
- A batch that also goes to the usage export waits in `outbox`, written by the same transaction,
  until the export has it, for as long as that cannot be written. After a crash the next start takes
  it over, so ledger and export hold the same requests, but for lines that the export holds twice.
- Processes of one host share the file. Each transaction takes the write lock for some ms.
- A part of a batch's output counts once: the same transaction notes its name in `counted`.
- Rows older than `keep_days` are removed when a day begins. So the file has at most that many
  rows for each key and model. A day far beyond the newest row removes nothing: it may be a clock
  that is wrong for a moment.
- `application_id` marks the file as a ledger, `user_version` is its schema.

All methods block; call them from a thread. They raise OSError.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Final
from uuid import uuid4

from gateway.records.usage import UsageLine, UsageQuery, UsageReport, UsageSums
from gateway.usage.report import OF_THE_FLEET, PoolBill, day_of, idle_name, summed

SCHEMA: Final = 1
APPLICATION_ID: Final = 0x534C4C47
BUSY_S: Final = 5.0
_AGAIN_S: Final = 0.05
MAX_LEAP_DAYS: Final = 31
"""Days since the newest row before it after which a new day removes nothing."""
DELIVERY_BYTES: Final = 8 << 20
"""Lines for the export are read in parts of about this size; one batch is never divided."""
BY: Final = ("tenant", "day", "entitlement", "key", "model")
"""Columns that tell rows apart, in the order of the primary key: a tenant reads its own rows."""

_TABLES: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
  tenant TEXT, day TEXT, entitlement TEXT, key TEXT, model TEXT,   -- day: YYYY-MM-DD by UTC
  requests INTEGER, input_tokens INTEGER, cached_input_tokens INTEGER, output_tokens INTEGER,
  charge_tokens INTEGER, cost_nano INTEGER,                        -- 1e-9 of the currency
  PRIMARY KEY (tenant, day, entitlement, key, model)
) STRICT, WITHOUT ROWID;
CREATE TABLE fleet (
  day TEXT, model TEXT, pool TEXT, worker_s REAL, cost_nano INTEGER,
  PRIMARY KEY (day, model, pool)
) STRICT, WITHOUT ROWID;
CREATE TABLE outbox (writer TEXT, lines BLOB) STRICT;
"""
_COUNTED: Final = """
CREATE TABLE IF NOT EXISTS counted (name TEXT PRIMARY KEY, day TEXT NOT NULL) STRICT, WITHOUT ROWID
"""
_ADD_USAGE: Final = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET requests = requests + excluded.requests,
  input_tokens = input_tokens + excluded.input_tokens,
  cached_input_tokens = cached_input_tokens + excluded.cached_input_tokens,
  output_tokens = output_tokens + excluded.output_tokens,
  charge_tokens = charge_tokens + excluded.charge_tokens,
  cost_nano = cost_nano + excluded.cost_nano
"""
_ADD_BILL: Final = """
INSERT INTO fleet VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET worker_s = worker_s + excluded.worker_s,
  cost_nano = cost_nano + excluded.cost_nano
"""
_NEWEST_BEFORE: Final = """
SELECT max(day) FROM (SELECT day FROM usage UNION SELECT day FROM fleet) WHERE day < ?
"""


class Ledger:
    """The ledger as a process writes it."""

    def __init__(self, path: Path, *, keep_days: int, currency: str) -> None:
        self.path = path
        self._keep_days = keep_days
        self._currency = currency
        self._file: sqlite3.Connection | None = None
        self._writer = uuid4().hex
        """Tells this process's lines in `outbox` from others'."""
        self._swept_day = ""
        self.id = ""
        """Tells the ledger from others; known once it is open."""

    def open(self) -> None:
        """Create the file, or check that it is a ledger."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._transaction() as file:
            file.execute("INSERT OR REPLACE INTO facts VALUES ('currency', ?)", (self._currency,))
            file.execute("INSERT OR IGNORE INTO facts VALUES ('id', ?)", (uuid4().hex,))
            (self.id,) = file.execute("SELECT value FROM facts WHERE name = 'id'").fetchone()
            file.execute(_COUNTED)

    def commit(
        self,
        lines: Sequence[UsageLine],
        bills: Iterable[PoolBill],
        unix_s: float,
        outbox: bytes = b"",
        part: str = "",
    ) -> bool:
        """Add requests and the fleet's cost; `outbox`: lines that the export must still get.

        `part`: the name under which the requests count once; False if they did before.
        """
        day = day_of(unix_s)
        with self._transaction() as file:
            if part:
                noted = file.execute("INSERT OR IGNORE INTO counted VALUES (?, ?)", (part, day))
                if not noted.rowcount:
                    return False
            if day != self._swept_day:
                today = date.fromisoformat(day)
                newest = file.execute(_NEWEST_BEFORE, (day,)).fetchone()[0]
                leap = newest and today - date.fromisoformat(newest)
                if leap and leap <= timedelta(days=MAX_LEAP_DAYS):
                    last = (today - timedelta(days=self._keep_days)).isoformat()
                    file.execute("DELETE FROM usage WHERE day < ?", (last,))
                    file.execute("DELETE FROM fleet WHERE day < ?", (last,))
                    file.execute("DELETE FROM counted WHERE day < ?", (last,))
            rows = summed(lines, BY)
            file.executemany(_ADD_USAGE, [(*name, *sums) for name, sums in rows.items()])
            file.executemany(
                _ADD_BILL, [(day, b.model, b.pool, b.worker_s, b.cost_nano) for b in bills]
            )
            if outbox:
                file.execute("INSERT INTO outbox VALUES (?, ?)", (self._writer, outbox))
        self._swept_day = day
        return True

    def adopt(self) -> None:
        """Take over the lines that processes which ended may not have written to the export."""
        with self._transaction() as file:
            file.execute("UPDATE outbox SET writer = ?", (self._writer,))

    def undelivered(self) -> tuple[int, bytes]:
        """The first part of this process's lines for the export, and its end for `delivered`."""
        end, parts, size = 0, list[bytes](), 0
        with _as_os_error(self.path):
            waiting = self._connected().execute(
                "SELECT rowid, lines FROM outbox WHERE writer = ? ORDER BY rowid", (self._writer,)
            )
            with contextlib.closing(waiting):
                for rowid, lines in waiting:
                    parts.append(lines)
                    end, size = rowid, size + len(lines)
                    if size >= DELIVERY_BYTES:
                        break
        return end, b"".join(parts)

    def delivered(self, end: int) -> None:
        """The export has this process's lines up to that end."""
        with self._transaction() as file:
            file.execute("DELETE FROM outbox WHERE writer = ? AND rowid <= ?", (self._writer, end))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _as_os_error(self.path), _transaction(self._connected()) as file:
            yield file

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _connected(self) -> sqlite3.Connection:
        if self._file is not None:
            return self._file
        file = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            until_s = time.monotonic() + BUSY_S
            while True:  # SQLite itself does not wait here for processes that begin at once
                try:
                    file.execute("PRAGMA journal_mode = WAL")
                    break
                except sqlite3.OperationalError:
                    if time.monotonic() > until_s:
                        raise
                time.sleep(_AGAIN_S)
            file.execute("PRAGMA synchronous = FULL")
            with _transaction(file):
                (tables,) = file.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if _pragma(file, "user_version") == 0 and not tables:
                    for statement in _TABLES.split(";\n"):
                        file.execute(statement)
                    file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    file.execute(f"PRAGMA user_version = {SCHEMA}")
            check(file, self.path)
        except BaseException:
            file.close()
            raise
        self._file = file
        return file


def check(file: sqlite3.Connection, path: Path) -> None:
    """Raises OSError for a file that is no ledger, or a later version's."""
    if _pragma(file, "application_id") != APPLICATION_ID:
        raise OSError(f"{path} is no ledger: name another file in ledger.path")
    if _pragma(file, "user_version") != SCHEMA:
        raise OSError(f"{path} is another version's ledger: update Sluice, or name another file")


def _pragma(file: sqlite3.Connection, name: str) -> int:
    value: int = file.execute(f"PRAGMA {name}").fetchone()[0]
    return value


@contextlib.contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of the block, synced, or nothing."""
    file.execute("BEGIN IMMEDIATE")
    try:
        yield file
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(0, str(error), str(path)) from error


# -- reports, beside the process that writes

_SUMS: Final = ", ".join(f"SUM({name})" for name in UsageSums._fields)
_DAYS: Final = "day BETWEEN ? AND ?"
_BY_HOUR: Final = "(day, model) IN (SELECT day, model FROM fleet)"


def report(path: Path, query: UsageQuery, most: int = -1) -> UsageReport:
    """The report of one ledger; the first `most` rows, -1 for all. Blocks; raises OSError."""
    days = [query.first_day, query.last_day]
    by, where, values = ", ".join(query.by), _DAYS, [*days]
    if query.tenant is not None:
        where, values = f"{where} AND tenant = ?", [*values, query.tenant]
    group = f"GROUP BY {by} ORDER BY {by} LIMIT {most}"
    with (
        _as_os_error(path),
        # Not opened for writing, so that reports never make a file.
        contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", BUSY_S, uri=True)
        ) as file,
    ):
        file.execute("BEGIN")  # all of it as it is at one moment
        check(file, path)
        (currency,) = file.execute("SELECT value FROM facts WHERE name = 'currency'").fetchone()
        cursor = file.execute(
            f"SELECT {by}, {_SUMS} FROM usage WHERE {where} {group}",  # noqa: S608 - names, a number
            values,
        )
        rows = {row[: len(query.by)]: UsageSums(*row[len(query.by) :]) for row in cursor}
        idle: dict[tuple[str, ...], int] = {}
        if query.tenant is None:  # what the fleet cost beyond the shares of requests
            names = [name for name in query.by if name in OF_THE_FLEET]
            bills = _costs(file, "fleet", names, _DAYS, days)
            shared = _costs(file, "usage", names, f"{_DAYS} AND {_BY_HOUR}", days)
            for name, nano in bills.items():
                idle[idle_name(query.by, name)] = nano - shared.get(name, 0)
    return UsageReport(query=query, rows=rows, idle_nano=idle, currency=currency)


def _costs(
    file: sqlite3.Connection, table: str, by: Sequence[str], where: str, values: Sequence[str]
) -> dict[tuple[str, ...], int]:
    columns = "".join(f"{name}, " for name in by)
    group = f" GROUP BY {', '.join(by)}" if by else ""
    cursor = file.execute(
        f"SELECT {columns}SUM(cost_nano) FROM {table} WHERE {where}{group}",  # noqa: S608 - names
        values,
    )
    return {row[:-1]: row[-1] for row in cursor if row[-1] is not None}
