"""The SQLite file of `state.url`, and the lasting notes that it keeps across restarts.

Rules:
- Each user has a connection of its own. One dedicated thread does all its access, so a hanging
  disk delays no request. Each save is one transaction.
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
from typing import Any, Final, TypeVar

import msgspec

from gateway.errors import StateFailure, StorageFull
from gateway.replicas.bus import LASTING, Received

SCHEMA: Final = 1
APPLICATION_ID: Final = 0x534C4345
BUSY_S: Final = 1.0

_T = TypeVar("_T")
_MAGIC: Final = b"SQLite format 3\0"
# Records are JSON, notes opaque.
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS note (
  name TEXT PRIMARY KEY,
  saved_unix_s REAL NOT NULL,
  payload BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS directory_write (revision INTEGER PRIMARY KEY, mark TEXT) STRICT;
CREATE TABLE IF NOT EXISTS directory_row (
  name TEXT PRIMARY KEY,      -- kind and name
  revision INTEGER NOT NULL,
  row TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS directory_denial (
  id TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,
  denial TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS directory_row_revision ON directory_row (revision);
CREATE INDEX IF NOT EXISTS directory_denial_revision ON directory_denial (revision);
CREATE TABLE IF NOT EXISTS token_pool (
  kind TEXT NOT NULL,         -- pool, account, lease, tombstone (oldest first by rowid) or limit
  model TEXT NOT NULL,        -- empty for limits
  name TEXT NOT NULL,
  saved_unix_s REAL NOT NULL,
  record TEXT NOT NULL,
  PRIMARY KEY (kind, model, name)
) STRICT;
CREATE TABLE IF NOT EXISTS document (
  place INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of creation
  kind TEXT NOT NULL,
  tenant TEXT NOT NULL,
  name TEXT NOT NULL,
  version INTEGER NOT NULL,
  open INTEGER NOT NULL,
  value BLOB NOT NULL,
  UNIQUE (kind, name)
) STRICT;
CREATE INDEX IF NOT EXISTS document_tenant ON document (kind, tenant, place);
CREATE INDEX IF NOT EXISTS document_open ON document (kind, tenant) WHERE open;
"""


class SqliteFile:
    """A connection to the file, or to a database in memory, and the thread that uses it."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is opened before the first call. None: in memory."""
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._running: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-state")

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Work in the thread, after what ran there. Raises StateFailure.

        On a full disk that is StorageFull. Other failures close the file; the next call opens it.
        """
        if self._running is not None and not self._running.done():
            # Wait for a call that its caller gave up, so that calls do not queue up. How it ends
            # is its own caller's.
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wrap_future(self._running))
        # Shielded: a thread cannot be cancelled, and must leave the file whole.
        return await asyncio.shield(self.begin(work))

    def begin(self, work: Callable[[sqlite3.Connection], _T]) -> asyncio.Future[_T]:
        """Work in the thread; the future raises StateFailure."""
        self._running = running = self._thread.submit(self._run, work)
        return asyncio.wrap_future(running)

    async def close(self) -> None:
        """Close the file, and wait for that unless a call is running. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            closing = self._thread.submit(self._close)
            if running.done():
                await asyncio.wrap_future(closing)
        self._thread.shutdown(wait=False)

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._connection is None:
                self._connection = open_file(self._path)
            return work(self._connection)
        except msgspec.MsgspecError as error:
            self._close()
            raise StateFailure(f"{self._path} is damaged ({error}); left as it is") from error
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StorageFull(f"{self._path}: {error}") from error
            if self._path is not None:
                self._close()
            raise StateFailure(f"{self._path}: {error}") from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_file(path: Path | None) -> sqlite3.Connection:
    """Open or create the state file. Raises StateFailure if it is not usable."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb") as start:
                # SQLite treats a file of a few bytes as empty.
                if start.read(len(_MAGIC)) not in {b"", _MAGIC}:
                    raise StateFailure(f"{path}: file is not a database; left as it is")
    file = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None)

    def number(query: str) -> int:
        (value,) = file.execute(query).fetchone()
        return int(value)

    new = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA};"
    try:
        if number("SELECT count(*) FROM sqlite_schema"):
            new = ""  # that it can be read on a full disk
            if number("PRAGMA application_id") != APPLICATION_ID:
                raise StateFailure(f"{path} is not a state file of this program; left as it is")
            schema = number("PRAGMA user_version")
            if schema > SCHEMA:
                raise StateFailure(
                    f"{path} was written by a newer version (schema {schema}, this one reads "
                    f"{SCHEMA}); left as it is"
                )
            (verdict,) = file.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise StateFailure(f"{path} is damaged ({verdict}); left as it is")
        file.executescript(f"BEGIN IMMEDIATE; {new} {_TABLES} COMMIT;")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        file.close()
        raise
    return file


class SqliteNotes:
    """NoteStore in the file, of lasting notes; others' are those of this gateway's past."""

    every_s = 5.0
    away = "the state store is away, learning goes on in this process"
    back = "the state store is back"

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        """Nothing is opened before the first exchange."""
        self._file = SqliteFile(path)
        self._wall_clock = wall_clock
        self._read: set[str] = set()
        self._saved: tuple[sqlite3.Connection | None, set[str]] = None, set()
        """The names that were saved to a connection; a reopened file may be another one."""

    async def exchange(self, notes: Mapping[str, bytes]) -> dict[str, Received]:
        notes = dict(notes)  # read in the thread

        def work(file: sqlite3.Connection) -> dict[str, Received]:
            now_s = self._wall_clock()
            if self._saved[0] is not file:
                self._saved = file, set()
            past: dict[str, list[tuple[float, bytes]]] = {}
            query = "SELECT saved_unix_s, payload FROM note WHERE name = ?"
            for name in notes.keys() - self._read:
                saved = file.execute(query, (name,))
                past[name] = [(max(0.0, now_s - saved_s), payload) for saved_s, payload in saved]
            self._read |= past.keys()
            rows = [(n, now_s, note) for n, note in notes.items() if note and n.startswith(LASTING)]
            if rows:
                with file:
                    file.execute("BEGIN IMMEDIATE")
                    file.executemany("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", rows)
                self._saved[1].update(name for name, _, _ in rows)
            return {n: Received(n in self._saved[1], past.get(n, [])) for n in notes}

        return await self._file.run(work)

    async def close(self) -> None:
        """See NoteStore. Does not wait for a running exchange; its file is closed, too."""
        await self._file.close()
