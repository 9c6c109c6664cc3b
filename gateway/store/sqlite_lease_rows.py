"""The SQLite tables of the token pools' state, and their rows."""

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import TOMBSTONES
from gateway.errors import StateFailure
from gateway.store.sqlite_estimators import open_file
from gateway.store.sqlite_lease_snapshot import (
    AccountCopy,
    Batch,
    LimitCopy,
    PoolCopy,
    SnapshotSlice,
    Tombstone,
)

SCHEMA: Final = 1
PAUSE_S: Final = 0.0005
"""Pause between two parts of a large write."""
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS pool_schema (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  schema INTEGER NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS pool_state (
  model TEXT PRIMARY KEY,
  record TEXT NOT NULL  -- JSON, as all records here
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS pool_account (
  model TEXT NOT NULL,
  entitlement TEXT NOT NULL,
  saved_unix_s REAL NOT NULL,
  record TEXT NOT NULL,
  PRIMARY KEY (model, entitlement)
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS pool_lease (
  model TEXT NOT NULL,
  id TEXT NOT NULL,
  record TEXT NOT NULL,
  PRIMARY KEY (model, id)
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS pool_tombstone (  -- expired leases, oldest first by rowid
  model TEXT NOT NULL,
  id TEXT NOT NULL,
  record TEXT NOT NULL,
  PRIMARY KEY (model, id)
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS limit_counter (
  id TEXT PRIMARY KEY,
  saved_unix_s REAL NOT NULL,
  record TEXT NOT NULL
) STRICT
""",
)
_DROP: Final = (
    "DELETE FROM pool_lease WHERE model = ? AND id = ?",
    "DELETE FROM pool_tombstone WHERE model = ? AND id = ?",
)
_KEEP: Final = (
    ("INSERT OR REPLACE INTO pool_lease VALUES (?, ?, ?)", LeaseRecord),
    ("INSERT OR REPLACE INTO pool_tombstone VALUES (?, ?, ?)", Tombstone),
)
_PRUNE: Final = """
DELETE FROM pool_tombstone WHERE rowid <= (SELECT max(rowid) - ? FROM pool_tombstone)
"""
_FORGET: Final = (
    """
DELETE FROM pool_account WHERE saved_unix_s < :before_s
  AND model NOT IN (SELECT value FROM json_each(:models))
""",
    """
DELETE FROM pool_state WHERE model NOT IN (SELECT value FROM json_each(:models))
  AND model NOT IN (SELECT model FROM pool_account)
""",
    """
DELETE FROM pool_lease WHERE model NOT IN (SELECT value FROM json_each(:models))
  AND model NOT IN (SELECT model FROM pool_account)
""",
    """
DELETE FROM pool_tombstone WHERE model NOT IN (SELECT value FROM json_each(:models))
  AND model NOT IN (SELECT model FROM pool_account)
""",
)

_encode: Final = msgspec.json.Encoder().encode


class Rows:
    """The content of a file."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolCopy] = {}
        self.accounts: list[tuple[str, str, float, AccountCopy]] = []
        """(model, entitlement, when saved in Unix seconds, account)."""
        self.leases: list[tuple[str, LeaseRecord]] = []
        """In the order of their expiry."""
        self.tombstones: list[tuple[str, str, Tombstone]] = []
        """(model, id, expired lease), oldest first."""
        self.limits: list[tuple[str, LimitCopy]] = []
        """(id, counter)."""


def open_tables(path: Path) -> sqlite3.Connection:
    """Open the state file with these tables. Raises StateFailure if it is not usable."""
    file = open_file(path)
    try:
        file.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            file.execute(statement)
        file.execute("INSERT OR IGNORE INTO pool_schema VALUES (1, ?)", (SCHEMA,))
        (schema,) = file.execute("SELECT schema FROM pool_schema").fetchone()
        file.execute("COMMIT")
        if schema > SCHEMA:
            raise StateFailure(
                f"{path}: its limits were written by a newer version (schema {schema}, this one "
                f"reads {SCHEMA}); left as they are"
            )
    except BaseException:
        file.close()
        raise
    return file


def forget_models(file: sqlite3.Connection, models: Iterable[str], before_s: float) -> None:
    """Drop what others than these models saved before then, in Unix seconds."""
    named = {"models": _text(list(models)), "before_s": before_s}
    for statement in _FORGET:
        file.execute(statement, named)


def load(file: sqlite3.Connection) -> Rows:
    """Read everything. Raises sqlite3.Error, msgspec.MsgspecError."""
    rows = Rows()
    pool, account = msgspec.json.Decoder(PoolCopy), msgspec.json.Decoder(AccountCopy)
    lease, tombstone = msgspec.json.Decoder(LeaseRecord), msgspec.json.Decoder(Tombstone)
    for model, record in file.execute("SELECT * FROM pool_state"):
        rows.pools[model] = pool.decode(record)
    for model, name, saved_s, record in file.execute("SELECT * FROM pool_account"):
        rows.accounts.append((model, name, saved_s, account.decode(record)))
    for model, record in file.execute("SELECT model, record FROM pool_lease"):
        rows.leases.append((model, lease.decode(record)))
    rows.leases.sort(key=lambda row: row[1].expires_s)
    for model, lease_id, record in file.execute("SELECT * FROM pool_tombstone ORDER BY rowid"):
        rows.tombstones.append((model, lease_id, tombstone.decode(record)))
    limit = msgspec.json.Decoder(LimitCopy)
    for limit_id, record in file.execute("SELECT id, record FROM limit_counter"):
        rows.limits.append((limit_id, limit.decode(record)))
    return rows


def write(file: sqlite3.Connection, batch: Batch, now_s: float, *, anew: bool) -> None:
    """Write a batch in one transaction and empty it; `anew` replaces all leases.

    Raises sqlite3.Error.
    """
    file.execute("BEGIN IMMEDIATE")
    if anew:
        file.execute("DELETE FROM pool_lease")
        file.execute("DELETE FROM pool_tombstone")
    file.executemany(
        "INSERT OR REPLACE INTO pool_state VALUES (?, ?)",
        [(model, _text(pool)) for model, pool in batch.pools.items()],
    )
    for part in batch.parts:
        _write_slice(file, part, now_s)
        if len(batch.parts) > 1:
            # Without it, this thread retakes the interpreter before the event loop wakes up.
            time.sleep(PAUSE_S)
    file.executemany(
        "INSERT OR REPLACE INTO limit_counter VALUES (?, ?, ?)",
        [(limit_id, now_s, _text(copy)) for limit_id, copy in batch.limits.items() if copy],
    )
    file.executemany(
        "DELETE FROM limit_counter WHERE id = ?",
        [(limit_id,) for limit_id, copy in batch.limits.items() if copy is None],
    )
    file.execute(_PRUNE, (TOMBSTONES,))
    file.execute("COMMIT")
    while batch.parts:  # freed here bit by bit, not all at once in the event loop
        batch.parts.pop()
        if len(batch.parts) % 20 == 1:
            time.sleep(PAUSE_S)


def _write_slice(file: sqlite3.Connection, part: SnapshotSlice, now_s: float) -> None:
    file.executemany(
        "INSERT OR REPLACE INTO pool_account VALUES (?, ?, ?, ?)",
        [(part.model, name, now_s, _text(copy)) for name, copy in part.accounts.items() if copy],
    )
    file.executemany(
        "DELETE FROM pool_account WHERE model = ? AND entitlement = ?",
        [(part.model, name) for name, copy in part.accounts.items() if copy is None],
    )
    for statement in _DROP:
        file.executemany(
            statement,
            [
                (part.model, i)
                for i, copy in part.leases.items()
                if not isinstance(copy, LeaseRecord)
            ],
        )
    for statement, kind in _KEEP:
        file.executemany(
            statement,
            [
                (part.model, lease_id, _text(copy))
                for lease_id, copy in part.leases.items()
                if isinstance(copy, kind)
            ],
        )


def _text(record: object) -> str:
    return _encode(record).decode()
