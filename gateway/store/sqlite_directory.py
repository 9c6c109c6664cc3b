"""The directory of tenancy in the SQLite file of `state.url`, or in memory.

The rules of the file are in `gateway.store.sqlite_file`. Rows are deleted; denials
never are, since what was denied must not come back.
"""

import secrets
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, Written
from gateway.store.sqlite_file import SqliteFile
from gateway.tenancy.known import later_denial, later_row

MARKS: Final = 10_000
"""Names of the last writes that are kept."""

_encode: Final = msgspec.json.Encoder().encode
_row: Final = msgspec.json.Decoder(Row).decode
_denial: Final = msgspec.json.Decoder(Denial).decode
_FORGET: Final = """
DELETE FROM directory_write WHERE revision <=
  (SELECT revision FROM directory_write ORDER BY revision DESC LIMIT 1 OFFSET ?)
"""
_NEWEST: Final = "SELECT revision, mark FROM directory_write ORDER BY revision DESC LIMIT 1"
_KNOWN: Final = "SELECT 1 FROM directory_write WHERE mark = ? AND revision >= ?"
_ROWS: Final = "SELECT row FROM directory_row WHERE revision > ? ORDER BY revision"
_DENIALS: Final = "SELECT denial FROM directory_denial WHERE revision > ? ORDER BY revision"


class SqliteDirectory:
    """Directory in a file, or in memory."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is opened before the first call. None: in memory."""
        self._file = SqliteFile(path)

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        def work(file: sqlite3.Connection) -> DirectoryState | None:
            with file:
                file.execute("BEGIN")  # one snapshot for all queries
                newest, name = file.execute(_NEWEST).fetchone() or (0, "")
                if (since or mark) and not file.execute(_KNOWN, (mark, since)).fetchone():
                    return None
                return DirectoryState(
                    revision=newest,
                    mark=name,
                    rows=tuple(_row(text) for (text,) in file.execute(_ROWS, (since,))),
                    denials=tuple(_denial(text) for (text,) in file.execute(_DENIALS, (since,))),
                )

        return await self._file.run(work)

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        def work(file: sqlite3.Connection) -> Written:
            pairs = [(row, _stored(file, row)) for row in (*change.puts, *change.removes)]
            if (
                (after and not file.execute(_KNOWN, (after, 0)).fetchone())
                or any(row.revision != (0 if k is None else k.revision) for row, k in pairs)
                or any(_gone(file, row) for row, _ in pairs)
                or not all(_counts(file, denial) for denial in change.denials)
            ):
                return Written(conflict=True)
            return _write(file, change.puts, change.removes, change.denials, floor)

        return await self._transact(work)

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        def work(file: sqlite3.Connection) -> Written:
            denials = [denial for denial in state.denials if _counts(file, denial)]
            written = _write(file, (), (), denials, floor)
            rows, losers = [], []
            for row in state.rows:
                stored = _stored(file, row)
                if _gone(file, row) or stored == row:
                    continue
                if stored is None or later_row(stored, row) is row:
                    rows.append(row)
                if stored is not None and stored.uid != row.uid:
                    loser = stored if later_row(stored, row) is row else row
                    losers.append(Denial(what="gone", subject=loser.uid, changed=loser.changed))
            return _write(file, rows, (), losers, floor) if rows or losers else written

        return await self._transact(work)

    async def close(self) -> None:
        await self._file.close()

    async def _transact(self, work: Callable[[sqlite3.Connection], Written]) -> Written:
        def run(file: sqlite3.Connection) -> Written:
            with file:
                file.execute("BEGIN IMMEDIATE")
                return work(file)

        return await self._file.run(run)


def _gone(file: sqlite3.Connection, row: Row) -> bool:
    gone = "SELECT 1 FROM directory_denial WHERE id = ?"
    return file.execute(gone, (f"gone {row.uid}",)).fetchone() is not None


def _stored(file: sqlite3.Connection, row: Row) -> Row | None:
    """The row that is kept under a row's name, unless its uid is gone."""
    query = "SELECT row FROM directory_row WHERE name = ?"
    record = file.execute(query, (" ".join(row.id),)).fetchone()
    stored = None if record is None else _row(record[0])
    return None if stored is None or _gone(file, stored) else stored


def _counts(file: sqlite3.Connection, denial: Denial) -> bool:
    query = "SELECT denial FROM directory_denial WHERE id = ?"
    record = file.execute(query, (denial.id,)).fetchone()
    return record is None or later_denial(stored := _denial(record[0]), denial) is not stored


def _write(
    file: sqlite3.Connection,
    puts: Iterable[Row],
    removes: Iterable[Row],
    denials: Iterable[Denial],
    floor: int,
) -> Written:
    last, _ = file.execute(_NEWEST).fetchone() or (0, "")
    revision, mark = max(last, floor) + 1, secrets.token_hex(8)
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
