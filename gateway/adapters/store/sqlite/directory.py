"""A directory, of entitlements or of tenants, in the SQLite file of `state.url`.

The rules of the file are in `gateway.adapters.store.sqlite.estimators`. Each directory has two
tables with their own schema number, so that each part can change alone. A removal leaves a
tombstone for TOMBSTONE_S, so that other processes learn of it.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from gateway.adapters.store.sqlite.estimators import open_file
from gateway.errors import StateFailure
from gateway.ports import DirectoryState, Entry, Removal, StoredEntry, Written

SCHEMA: Final = 1
TOMBSTONE_S: Final = 86_400.0

_T = TypeVar("_T")
_encode: Final = msgspec.json.Encoder().encode
_TABLES_OF: Final = {
    "entitlements": ("directory", "entitlement"),
    "tenants": ("tenant_directory", "tenant"),
}
"""Names of the two tables, `head` and `rows` in the statements below."""
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS {head} (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  schema INTEGER NOT NULL,
  revision INTEGER NOT NULL  -- of the last change
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS {rows} (
  name TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,  -- of this entry's last change
  changed_unix_s REAL NOT NULL,
  entry TEXT                  -- JSON; NULL once removed
) STRICT
""",
    "CREATE INDEX IF NOT EXISTS {rows}_revision ON {rows} (revision)",
    """
CREATE INDEX IF NOT EXISTS {rows}_removed ON {rows} (changed_unix_s)
WHERE entry IS NULL
""",
)
_SINCE: Final = "SELECT name, revision, entry FROM {rows} WHERE revision > ? ORDER BY revision"
_PUT: Final = """
INSERT INTO {rows} VALUES (?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET revision = excluded.revision,
  changed_unix_s = excluded.changed_unix_s, entry = excluded.entry
"""
_BEGIN: Final = "INSERT INTO {head} VALUES (1, ?, 0) ON CONFLICT DO NOTHING"
_REVISION: Final = "SELECT revision FROM {head}"
_KEPT: Final = "SELECT revision FROM {rows} WHERE name = ? AND entry IS NOT NULL"
_GONE: Final = "SELECT name FROM {rows} WHERE name BETWEEN ? AND ? AND entry IS NULL"
_PRUNE: Final = "DELETE FROM {rows} WHERE entry IS NULL AND changed_unix_s < ?"


class SqliteDirectory(Generic[Entry]):
    """Directory in a file. One dedicated thread does all file access."""

    def __init__(
        self,
        path: Path,
        kind: type[Entry],
        *,
        of: str = "entitlements",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is opened before the first call. `of` names the tables."""
        self._of = of
        self._tables = _TABLES_OF[of]
        self._decode = msgspec.json.Decoder(kind).decode
        self._path = path
        self._wall_clock = wall_clock
        self._file: sqlite3.Connection | None = None
        self._running: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-directory")

    async def load(self) -> DirectoryState[Entry]:
        return await self._do(lambda file: self._since(file, -1))

    async def changes(self, since: int, mark: str) -> DirectoryState[Entry] | None:
        found = await self._do(lambda file: self._since(file, since))
        return None if found.revision < since else found

    async def put(self, *entries: Entry, floor: int = 0, after: str = "") -> Written:
        return await self._do(lambda file: self._write(file, entries, floor, removed=False))

    async def delete(self, entry: Entry, floor: int = 0, after: str = "") -> Written:
        return await self._do(lambda file: self._write(file, [entry], floor, removed=True))

    async def close(self) -> None:
        if self._file is not None and (self._running is None or self._running.done()):
            await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _do(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def run() -> _T:
            try:
                if self._file is None:
                    self._file = self._open()
                return work(self._file)
            except (sqlite3.Error, OSError) as error:
                self._close()
                raise StateFailure(f"{self._path}: {error}") from error

        if self._running is not None and not self._running.done():
            # Wait for a call that its caller gave up, so that calls do not queue up.
            with contextlib.suppress(StateFailure):
                await asyncio.shield(asyncio.wrap_future(self._running))
        self._running = future = self._thread.submit(run)
        # Shielded: a thread cannot be cancelled, and must leave the file whole.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _open(self) -> sqlite3.Connection:
        file = open_file(self._path)
        try:
            file.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                file.execute(self._sql(statement))
            file.execute(self._sql(_BEGIN), (SCHEMA,))
            (schema,) = file.execute(self._sql("SELECT schema FROM {head}")).fetchone()
            file.execute("COMMIT")
            if schema > SCHEMA:
                raise StateFailure(
                    f"{self._path} holds {self._of} of a newer version (schema {schema}, this "
                    f"one reads {SCHEMA}); left as it is"
                )
        except BaseException:
            file.close()
            raise
        return file

    def _since(self, file: sqlite3.Connection, since: int) -> DirectoryState[Entry]:
        file.execute("BEGIN")  # one snapshot for both queries
        try:
            (newest,) = file.execute(self._sql(_REVISION)).fetchone()
            rows: list[tuple[str, int, str | None]] = []
            if newest > since:
                rows = file.execute(self._sql(_SINCE), (since,)).fetchall()
        finally:
            file.execute("COMMIT")
        try:
            entries = [
                msgspec.structs.replace(self._decode(entry), version=revision)
                for _, revision, entry in rows
                if entry is not None
            ]
        except msgspec.MsgspecError as error:
            raise StateFailure(f"{self._path} is damaged ({error}); left as it is") from error
        removals = [_removal(*row[:2]) for row in rows if row[2] is None]
        return DirectoryState(revision=newest, mark="", entries=entries, removals=removals)

    def _write(
        self,
        file: sqlite3.Connection,
        entries: Sequence[Entry],
        floor: int,
        *,
        removed: bool,
    ) -> Written:
        """Write these entries, or their removal, as one change, and drop old tombstones."""
        now_s = self._wall_clock()
        file.execute("BEGIN IMMEDIATE")
        try:
            taken = {e.name: e for e in entries if not self._stale(file, e, removed=removed)}
            (revision,) = file.execute(self._sql(_REVISION)).fetchone()
            if taken:
                revision = max(revision, floor) + 1
                file.execute(self._sql("UPDATE {head} SET revision = ?"), (revision,))
            for name, entry in taken.items():
                text = None if removed else _encode(entry).decode()
                if removed:
                    file.execute(self._sql("DELETE FROM {rows} WHERE name = ?"), (name,))
                row = _tombstone(entry) if removed else name
                file.execute(self._sql(_PUT), (row, revision, now_s, text))
            file.execute(self._sql(_PRUNE), (now_s - TOMBSTONE_S,))
        except BaseException:
            file.execute("ROLLBACK")
            raise
        file.execute("COMMIT")
        names = tuple(entry.name for entry in entries if entry.name not in taken)
        return Written(revision=revision, mark="", conflicts=names)

    def _stale(self, file: sqlite3.Connection, entry: Entry, *, removed: bool) -> bool:
        """Whether the file holds another version of an entry, or the entry was deleted."""
        kept = file.execute(self._sql(_KEPT), (entry.name,)).fetchone()
        if (kept[0] if kept else 0) != entry.version:
            return True
        if removed:
            return not entry.version
        start = f"\x01{entry.id}\x01"
        rows = file.execute(self._sql(_GONE), (start, start + "\x7f")).fetchall()
        return any(_removal(name, 0).name == entry.name for (name,) in rows)

    def _sql(self, statement: str) -> str:
        head, rows = self._tables
        return statement.replace("{head}", head).replace("{rows}", rows)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# A tombstone's name holds the entry's name and id and the removing file's time, after a byte that
# no name begins with.


def _tombstone(entry: StoredEntry) -> str:
    return f"\x01{entry.id}\x01{entry.file_unix_s!r}\x01{entry.name}"


def _removal(name: str, revision: int) -> Removal:
    _, entry_id, file_unix_s, name = name.split("\x01", 3)
    return Removal(name=name, id=entry_id, revision=revision, file_unix_s=float(file_unix_s))
