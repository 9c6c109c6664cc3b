"""Where entitlements are kept: in memory, or in the SQLite file of `state.url`.

The file's rules are those of `gateway.adapters.store.sqlite`; the directory has two tables of
its own in it, with a schema number of their own, so that either part can change alone. What
was removed leaves its name behind for TOMBSTONE_S, so that another process hears of it.
"""

import asyncio
import contextlib
import importlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from gateway.adapters.store.sqlite import open_file
from gateway.errors import StateFailure
from gateway.ports import Directory, EntitlementEntry

SCHEMA: Final = 1
TOMBSTONE_S: Final = 86_400.0
TOMBSTONES: Final = 10_000
"""Names of removed entitlements that memory remembers."""

_T = TypeVar("_T")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(EntitlementEntry).decode
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS directory (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  schema INTEGER NOT NULL,
  revision INTEGER NOT NULL  -- of the last change
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS entitlement (
  name TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,  -- of this entry's last change
  changed_unix_s REAL NOT NULL,
  entry TEXT                  -- JSON; NULL once removed
) STRICT
""",
    "CREATE INDEX IF NOT EXISTS entitlement_revision ON entitlement (revision)",
    """
CREATE INDEX IF NOT EXISTS entitlement_removed ON entitlement (changed_unix_s)
WHERE entry IS NULL
""",
)
_NEXT: Final = "UPDATE directory SET revision = revision + 1 RETURNING revision"
_PUT: Final = """
INSERT INTO entitlement VALUES (?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET revision = excluded.revision,
  changed_unix_s = excluded.changed_unix_s, entry = excluded.entry
"""
_PRUNE: Final = "DELETE FROM entitlement WHERE entry IS NULL AND changed_unix_s < ?"


def open_directory(url: str) -> Directory:
    """The directory of a checked `state.url`; connects to nothing yet."""
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        return SqliteDirectory(Path(rest.removeprefix("/")))
    if scheme in {"redis", "rediss", "redis+cluster", "redis+sentinel"}:
        # An extra: only who configures Redis needs its client.
        module = importlib.import_module("gateway.adapters.store.redis_directory")
        found: Directory = module.RedisDirectory(url)
        return found
    return MemoryDirectory()


class MemoryDirectory:
    """Directory that ends with the process."""

    def __init__(self) -> None:
        self._revision = 0
        self._entries: OrderedDict[str, tuple[int, EntitlementEntry]] = OrderedDict()
        self._removed: OrderedDict[str, int] = OrderedDict()
        """Both in order of their last change, with its revision."""

    async def load(self) -> tuple[int, list[EntitlementEntry]]:
        """See Directory."""
        return self._revision, [entry for _, entry in self._entries.values()]

    async def changes(self, since: int) -> tuple[int, list[EntitlementEntry], list[str]]:
        """See Directory."""
        entries, removed = [], []
        for revision, entry in reversed(self._entries.values()):
            if revision <= since:
                break
            entries.append(entry)
        for name, revision in reversed(self._removed.items()):
            if revision <= since:
                break
            removed.append(name)
        return self._revision, entries[::-1], removed

    async def put(self, *entries: EntitlementEntry) -> int:
        """See Directory."""
        self._revision += 1
        for entry in entries:
            self._entries[entry.terms.name] = (self._revision, entry)
            self._entries.move_to_end(entry.terms.name)
            self._removed.pop(entry.terms.name, None)
        return self._revision

    async def delete(self, name: str) -> int:
        """See Directory."""
        self._revision += 1
        if self._entries.pop(name, None) is not None:
            self._removed[name] = self._revision
            if len(self._removed) > TOMBSTONES:
                self._removed.popitem(last=False)
        return self._revision

    async def close(self) -> None:
        """See Directory."""


class SqliteDirectory:
    """Directory in a file. All access is in one thread of its own."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        """Nothing is opened before the first call."""
        self._path = path
        self._wall_clock = wall_clock
        self._file: sqlite3.Connection | None = None
        self._running: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-directory")

    async def load(self) -> tuple[int, list[EntitlementEntry]]:
        """See Directory."""
        revision, entries, _ = await self._do(lambda file: self._since(file, -1))
        return revision, entries

    async def changes(self, since: int) -> tuple[int, list[EntitlementEntry], list[str]]:
        """See Directory."""
        return await self._do(lambda file: self._since(file, since))

    async def put(self, *entries: EntitlementEntry) -> int:
        """See Directory."""

        def write(file: sqlite3.Connection) -> int:
            return self._write(file, [(e.terms.name, _encode(e).decode()) for e in entries])

        return await self._do(write)

    async def delete(self, name: str) -> int:
        """See Directory."""

        def write(file: sqlite3.Connection) -> int:
            known = file.execute("SELECT 1 FROM entitlement WHERE name = ?", (name,)).fetchone()
            return self._write(file, [(name, None)] if known else [])

        return await self._do(write)

    async def close(self) -> None:
        """See Directory."""
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
            # One that was given up by its caller; no other is put behind it.
            with contextlib.suppress(StateFailure):
                await asyncio.shield(asyncio.wrap_future(self._running))
        self._running = future = self._thread.submit(run)
        # Shielded: a thread cannot be cancelled, and its file is to be left whole.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _open(self) -> sqlite3.Connection:
        file = open_file(self._path)
        try:
            file.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                file.execute(statement)
            file.execute("INSERT INTO directory VALUES (1, ?, 0) ON CONFLICT DO NOTHING", (SCHEMA,))
            (schema,) = file.execute("SELECT schema FROM directory").fetchone()
            file.execute("COMMIT")
            if schema > SCHEMA:
                raise StateFailure(
                    f"{self._path} holds entitlements of a newer version (schema {schema}, this "
                    f"one reads {SCHEMA}); left as it is"
                )
        except BaseException:
            file.close()
            raise
        return file

    def _since(
        self, file: sqlite3.Connection, since: int
    ) -> tuple[int, list[EntitlementEntry], list[str]]:
        file.execute("BEGIN")  # one snapshot for both queries
        try:
            (newest,) = file.execute("SELECT revision FROM directory").fetchone()
            rows: list[tuple[str, str | None]] = []
            if newest > since:
                query = "SELECT name, entry FROM entitlement WHERE revision > ? ORDER BY revision"
                rows = file.execute(query, (since,)).fetchall()
        finally:
            file.execute("COMMIT")
        try:
            entries = [_decode(entry) for _, entry in rows if entry is not None]
        except msgspec.MsgspecError as error:
            raise StateFailure(f"{self._path} is damaged ({error}); left as it is") from error
        return newest, entries, [name for name, entry in rows if entry is None]

    def _write(self, file: sqlite3.Connection, rows: Sequence[tuple[str, str | None]]) -> int:
        """Keep these rows (None: removed) as one change, and forget old removals."""
        now_s = self._wall_clock()
        file.execute("BEGIN IMMEDIATE")
        (revision,) = file.execute(_NEXT).fetchone()
        file.executemany(_PUT, [(name, revision, now_s, entry) for name, entry in rows])
        file.execute(_PRUNE, (now_s - TOMBSTONE_S,))
        file.execute("COMMIT")
        return int(revision)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
