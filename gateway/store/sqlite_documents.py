"""Documents in the SQLite file of `state.url`, or in memory.

The rules of the file are in `gateway.store.sqlite_file`.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from gateway.ports import Changed, Document, Full
from gateway.store.sqlite_file import SqliteFile

_T = TypeVar("_T")
_GET: Final = "SELECT version, value FROM document WHERE kind = ? AND name = ?"
_PAGE: Final = """
SELECT name, version, value FROM document WHERE kind = ?1 AND tenant = ?2 AND (?3 = '' OR place {}
  (SELECT place FROM document WHERE kind = ?1 AND tenant = ?2 AND name = ?3))
ORDER BY place {} LIMIT ?4
"""
_OPEN: Final = "SELECT name FROM document WHERE kind = ? AND open ORDER BY place"
_COUNT: Final = "SELECT count(*) FROM document WHERE kind = ? AND tenant = ? AND open AND name != ?"
_NUMBER: Final = "SELECT count(*) FROM document WHERE kind = ? AND tenant = ?"
_UPDATE: Final = "UPDATE document SET version = version + 1, open = ?, value = ? WHERE kind = ? "
_NEW: Final = (
    "INSERT INTO document (kind, tenant, name, version, open, value) VALUES (?, ?, ?, 1, ?, ?)"
)


class SqliteDocuments:
    """Documents in a file, or in memory."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is opened before the first call. None: in memory."""
        self._file = SqliteFile(path)

    async def get(self, kind: str, name: str) -> Document | None:
        def work(file: sqlite3.Connection) -> Document | None:
            found = file.execute(_GET, (kind, name)).fetchone()
            return found and Document(id=name, version=found[0], value=found[1])

        return await self._file.run(work)

    async def put(
        self,
        kind: str,
        tenant: str,
        name: str,
        value: bytes,
        version: int,
        *,
        is_open: bool = True,
        most: int = 0,
    ) -> int:
        def work(file: sqlite3.Connection) -> int:
            if _version(file, kind, name) != version:
                raise Changed
            if (
                is_open
                and most
                and file.execute(_COUNT, (kind, tenant, name)).fetchone()[0] >= most
            ):
                raise Full
            if version:
                update = _UPDATE + "AND name = ?"
                file.execute(update, (int(is_open), value, kind, name))
            else:
                file.execute(_NEW, (kind, tenant, name, int(is_open), value))
            return version + 1

        return await self._transact(work)

    async def delete(self, kind: str, tenant: str, name: str, version: int) -> None:
        def work(file: sqlite3.Connection) -> None:
            if not version or _version(file, kind, name) != version:
                raise Changed
            file.execute("DELETE FROM document WHERE kind = ? AND name = ?", (kind, name))

        await self._transact(work)

    async def page(
        self, kind: str, tenant: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> list[Document]:
        query = _PAGE.format(*((">", "ASC") if oldest_first else ("<", "DESC")))

        def work(file: sqlite3.Connection) -> list[Document]:
            found = file.execute(query, (kind, tenant, after, limit))
            return [Document(id=name, version=v, value=value) for name, v, value in found]

        return await self._file.run(work)

    async def count(self, kind: str, tenant: str) -> int:
        def work(file: sqlite3.Connection) -> int:
            (number,) = file.execute(_NUMBER, (kind, tenant)).fetchone()
            return int(number)

        return await self._file.run(work)

    async def open_names(self, kind: str) -> list[str]:
        def work(file: sqlite3.Connection) -> list[str]:
            return [name for (name,) in file.execute(_OPEN, (kind,))]

        return await self._file.run(work)

    async def close(self) -> None:
        await self._file.close()

    async def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def run(file: sqlite3.Connection) -> _T:
            with file:
                file.execute("BEGIN IMMEDIATE")
                return work(file)

        return await self._file.run(run)


def _version(file: sqlite3.Connection, kind: str, name: str) -> int:
    found = file.execute(_GET, (kind, name)).fetchone()
    return found[0] if found else 0
