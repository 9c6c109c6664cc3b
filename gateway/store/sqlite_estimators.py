"""Keeps what estimators learned across restarts, in one SQLite file.

Rules:
- The first exchange loads the file. It is saved every INTERVAL_S if something was learned, and at
  shutdown. There is one row per model and estimator profile; saving is one transaction.
- One dedicated thread does all file access, so a hanging disk delays no request.
- `application_id` marks the file as Sluice's, `user_version` is its schema. A file that is damaged,
  newer or another program's is left as it is: StateFailure gives the reason, and the gateway
  serves without it and tries again later.
- Write-ahead log, synchronous NORMAL: a crash of the machine may lose the last save, never the
  file.
- For one gateway process. With several, the last to save wins.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gateway.errors import StateFailure
from gateway.estimate.merge import Learned, PartState, PeerRecord
from gateway.ports import ExchangeResult

INTERVAL_S: Final = 5.0
SCHEMA: Final = 1
APPLICATION_ID: Final = 0x534C4345
BUSY_S: Final = 1.0

_decode: Final = msgspec.json.Decoder(dict[str, PartState]).decode
_encode: Final = msgspec.json.Encoder().encode
_MAGIC: Final = b"SQLite format 3\0"
_TABLE: Final = """
CREATE TABLE learned (
  subject TEXT PRIMARY KEY,   -- estimator profile:model
  saved_unix_s REAL NOT NULL,
  record TEXT NOT NULL        -- JSON: part -> {epoch, n, rate, sums}
) STRICT
"""
_SAVE: Final = """
INSERT INTO learned (subject, saved_unix_s, record) VALUES (?, ?, ?)
ON CONFLICT (subject) DO UPDATE SET saved_unix_s = excluded.saved_unix_s, record = excluded.record
"""


class SqliteState:
    """EstimatorState in a file."""

    interval_s = INTERVAL_S

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        """Nothing is opened before the first exchange."""
        self._path = path
        self._wall_clock = wall_clock
        self._loaded = False
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-state")
        self._running: Future[ExchangeResult] | None = None

    async def exchange(self, records: Mapping[str, Learned | None]) -> ExchangeResult:
        if self._running is not None and not self._running.done():
            # Wait for an exchange that its caller gave up, so that they do not queue up.
            with contextlib.suppress(StateFailure):
                await asyncio.shield(asyncio.wrap_future(self._running))
        self._running = self._thread.submit(self._exchange, dict(records))
        # Shielded: a thread cannot be cancelled, and must leave the file whole.
        return await asyncio.shield(asyncio.wrap_future(self._running))

    async def close(self) -> None:
        """See EstimatorState. Does not wait for a running exchange; its file is closed, too."""
        running, self._running = self._running, None
        if running is not None:
            closing = self._thread.submit(self._close)
            if running.done():
                await asyncio.wrap_future(closing)
        self._thread.shutdown(wait=False)

    def _exchange(self, records: dict[str, Learned | None]) -> ExchangeResult:
        try:
            opened = self._file is None
            if self._file is None:
                self._file = open_file(self._path)
            if not self._loaded:
                received = self._load(self._file, set(records))
                self._loaded = True
                return received
            self._save(self._file, records)
        except StateFailure:
            raise
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise StateFailure(f"{self._path}: {error}") from error
        # A reopened file may be another one: everything must be saved again.
        return ExchangeResult(missing=frozenset(records)) if opened else ExchangeResult()

    def _load(self, file: sqlite3.Connection, subjects: set[str]) -> ExchangeResult:
        peers: dict[str, tuple[PeerRecord, ...]] = {}
        now_s = self._wall_clock()
        for subject, saved_s, record in file.execute("SELECT * FROM learned"):
            if subject not in subjects:
                continue
            try:
                parts = _decode(record)
            except msgspec.MsgspecError as error:
                self._close()
                raise StateFailure(f"{self._path} is damaged ({error}); left as it is") from error
            peers[subject] = (PeerRecord(age_s=max(0.0, now_s - saved_s), parts=parts),)
        return ExchangeResult(peers=peers, missing=frozenset(subjects))

    def _save(self, file: sqlite3.Connection, records: dict[str, Learned | None]) -> None:
        now_s = self._wall_clock()
        rows = [
            (subject, now_s, _encode(record).decode())
            for subject, record in records.items()
            if record
        ]
        if rows:
            file.execute("BEGIN IMMEDIATE")
            file.executemany(_SAVE, rows)
            file.execute("COMMIT")

    def _close(self) -> ExchangeResult:
        if self._file is not None:
            self._file.close()
            self._file = None
        return ExchangeResult()


def open_file(path: Path) -> sqlite3.Connection:
    """Open or create the state file. Raises StateFailure if it is not usable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with path.open("rb") as start:
            # SQLite treats a file of a few bytes as empty.
            if start.read(len(_MAGIC)) not in {b"", _MAGIC}:
                raise StateFailure(f"{path}: file is not a database; left as it is")
    file = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        _check(path, file)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        file.close()
        raise
    return file


def _check(path: Path, file: sqlite3.Connection) -> None:
    """Check that the file is a readable state file; marks an empty one. Raises StateFailure."""
    if _number(file, "SELECT count(*) FROM sqlite_schema") == 0:
        file.execute("BEGIN IMMEDIATE")
        if _number(file, "SELECT count(*) FROM sqlite_schema") == 0:
            file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            file.execute(f"PRAGMA user_version = {SCHEMA}")
            file.execute(_TABLE)
        file.execute("COMMIT")
    if _number(file, "PRAGMA application_id") != APPLICATION_ID:
        raise StateFailure(f"{path} is not a state file of this program; left as it is")
    schema = _number(file, "PRAGMA user_version")
    if schema > SCHEMA:
        raise StateFailure(
            f"{path} was written by a newer version (schema {schema}, this one reads "
            f"{SCHEMA}); left as it is"
        )
    (verdict,) = file.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StateFailure(f"{path} is damaged ({verdict}); left as it is")


def _number(file: sqlite3.Connection, query: str) -> int:
    (found,) = file.execute(query).fetchone()
    return int(found)
