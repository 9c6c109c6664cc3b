"""The directory of tenancy in the SQLite file of `state.url`, or in memory.

The rules of the file are in `gateway.store.sqlite_estimators`. Rows are deleted; denials
never are, since what was denied must not come back.
"""

import asyncio
import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from gateway.errors import StateFailure
from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, Written
from gateway.store.sqlite_estimators import open_file
from gateway.tenancy.known import later_denial, later_row

SCHEMA: Final = 2
MARKS: Final = 10_000
"""Names of the last writes that are kept."""

_T = TypeVar("_T")
_encode: Final = msgspec.json.Encoder().encode
_row: Final = msgspec.json.Decoder(Row).decode
_denial: Final = msgspec.json.Decoder(Denial).decode
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS directory (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  schema INTEGER NOT NULL,
  revision INTEGER NOT NULL  -- of the last change
) STRICT
""",
    "CREATE TABLE IF NOT EXISTS directory_write (revision INTEGER PRIMARY KEY, mark TEXT) STRICT",
    """
CREATE TABLE IF NOT EXISTS directory_row (
  name TEXT PRIMARY KEY,     -- kind and name
  revision INTEGER NOT NULL,
  row TEXT NOT NULL          -- JSON
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS directory_denial (
  id TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,
  denial TEXT NOT NULL       -- JSON
) STRICT
""",
    "CREATE INDEX IF NOT EXISTS directory_row_revision ON directory_row (revision)",
    "CREATE INDEX IF NOT EXISTS directory_denial_revision ON directory_denial (revision)",
)
_BEGIN: Final = "INSERT INTO directory VALUES (1, ?, 0) ON CONFLICT DO NOTHING"
_FORGET: Final = """
DELETE FROM directory_write WHERE revision <=
  (SELECT revision FROM directory_write ORDER BY revision DESC LIMIT 1 OFFSET ?)
"""
_NEWEST: Final = "SELECT revision, mark FROM directory_write ORDER BY revision DESC LIMIT 1"
_KNOWN: Final = "SELECT 1 FROM directory_write WHERE mark = ? AND revision >= ?"
_ROWS: Final = "SELECT row FROM directory_row WHERE revision > ? ORDER BY revision"
_DENIALS: Final = "SELECT denial FROM directory_denial WHERE revision > ? ORDER BY revision"


class SqliteDirectory:
    """Directory in a file, or in memory. One dedicated thread does all access."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is opened before the first call. None: in memory."""
        self._path = path
        self._file: sqlite3.Connection | None = None
        self._running: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-directory")

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        return await self._do(lambda file: self._since(file, since, mark))

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        def work(file: sqlite3.Connection) -> Written:
            known = not after or file.execute(_KNOWN, (after, 0)).fetchone()
            based = all(_based(file, row) for row in (*change.puts, *change.removes))
            if not (known and based and all(_counts(file, each) for each in change.denials)):
                return Written(conflict=True)
            return _write(file, change.puts, change.removes, change.denials, floor)

        return await self._transact(work)

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        def work(file: sqlite3.Connection) -> Written:
            denials = [denial for denial in state.denials if _counts(file, denial)]
            written = _write(file, (), (), denials, floor)
            rows, losers = [], []
            for row in state.rows:
                kept = _kept(file, row)
                if _gone(file, row) or kept == row:
                    continue
                if kept is None or later_row(kept, row) is row:
                    rows.append(row)
                if kept is not None and kept.uid != row.uid:
                    loser = kept if later_row(kept, row) is row else row
                    losers.append(Denial(what="gone", subject=loser.uid, changed=loser.changed))
            return _write(file, rows, (), losers, floor) if rows or losers else written

        return await self._transact(work)

    async def close(self) -> None:
        if self._file is not None and (self._running is None or self._running.done()):
            await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _transact(self, work: Callable[[sqlite3.Connection], Written]) -> Written:
        def run(file: sqlite3.Connection) -> Written:
            file.execute("BEGIN IMMEDIATE")
            try:
                found = work(file)
            except BaseException:
                file.execute("ROLLBACK")
                raise
            file.execute("COMMIT")
            return found

        return await self._do(run)

    async def _do(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def run() -> _T:
            try:
                if self._file is None:
                    self._file = self._open()
                return work(self._file)
            except msgspec.MsgspecError as error:
                raise StateFailure(f"{self._path} is damaged ({error}); left as it is") from error
            except (sqlite3.Error, OSError) as error:
                if self._path is not None:
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
        if self._path is None:
            file = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        else:
            file = open_file(self._path)
        try:
            file.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                file.execute(statement)
            file.execute(_BEGIN, (SCHEMA,))
            (schema,) = file.execute("SELECT schema FROM directory").fetchone()
            file.execute("COMMIT")
            if schema > SCHEMA:
                raise StateFailure(
                    f"{self._path} holds tenants of a newer version (schema {schema}, this one "
                    f"reads {SCHEMA}); left as it is"
                )
        except BaseException:
            file.close()
            raise
        return file

    def _since(self, file: sqlite3.Connection, since: int, mark: str) -> DirectoryState | None:
        file.execute("BEGIN")  # one snapshot for all queries
        try:
            newest, name = file.execute(_NEWEST).fetchone() or (0, "")
            if (since or mark) and not file.execute(_KNOWN, (mark, since)).fetchone():
                return None
            return DirectoryState(
                revision=newest,
                mark=name,
                rows=tuple(_row(text) for (text,) in file.execute(_ROWS, (since,))),
                denials=tuple(_denial(text) for (text,) in file.execute(_DENIALS, (since,))),
            )
        finally:
            file.execute("COMMIT")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _gone(file: sqlite3.Connection, row: Row) -> bool:
    gone = "SELECT 1 FROM directory_denial WHERE id = ?"
    return file.execute(gone, (f"gone {row.uid}",)).fetchone() is not None


def _kept(file: sqlite3.Connection, row: Row) -> Row | None:
    """The row that is kept under a row's name, unless its uid is gone."""
    known = "SELECT row FROM directory_row WHERE name = ?"
    found = file.execute(known, (" ".join(row.id),)).fetchone()
    kept = None if found is None else _row(found[0])
    return None if kept is None or _gone(file, kept) else kept


def _based(file: sqlite3.Connection, row: Row) -> bool:
    """Whether a change of a row is based on the one that is kept."""
    kept = _kept(file, row)
    return row.revision == (0 if kept is None else kept.revision) and not _gone(file, row)


def _counts(file: sqlite3.Connection, denial: Denial) -> bool:
    known = "SELECT denial FROM directory_denial WHERE id = ?"
    found = file.execute(known, (denial.id,)).fetchone()
    return found is None or later_denial(kept := _denial(found[0]), denial) is not kept


def _write(
    file: sqlite3.Connection,
    puts: Iterable[Row],
    removes: Iterable[Row],
    denials: Iterable[Denial],
    floor: int,
) -> Written:
    (last,) = file.execute("SELECT revision FROM directory").fetchone()
    revision, mark = max(last, floor) + 1, secrets.token_hex(8)
    file.execute("UPDATE directory SET revision = ?", (revision,))
    file.execute("INSERT INTO directory_write VALUES (?, ?)", (revision, mark))
    file.execute(_FORGET, (MARKS,))
    for row in removes:
        file.execute("DELETE FROM directory_row WHERE name = ?", (" ".join(row.id),))
    for row in puts:
        text = _encode(msgspec.structs.replace(row, revision=revision)).decode()
        put = "INSERT OR REPLACE INTO directory_row VALUES (?, ?, ?)"
        file.execute(put, (" ".join(row.id), revision, text))
    for denial in denials:
        text = _encode(msgspec.structs.replace(denial, revision=revision)).decode()
        put = "INSERT OR REPLACE INTO directory_denial VALUES (?, ?, ?)"
        file.execute(put, (denial.id, revision, text))
    return Written(revision=revision, mark=mark)
