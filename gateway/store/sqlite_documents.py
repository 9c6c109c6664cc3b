"""Documents in the SQLite file of `state.url`, or in memory.

The rules of the file are in `gateway.store.sqlite_file`.
"""

import sqlite3
import time
from pathlib import Path
from typing import Final

import msgspec

from gateway.ports import Changed, D, Documents, Full
from gateway.records.record import Document
from gateway.store.sqlite_file import SqliteFile

_READ: Final = "SELECT value, version FROM document WHERE kind = ?1 AND "
_PAGE: Final = """tenant = ?2 AND (?3 = '' OR place {}
  (SELECT place FROM document WHERE kind = ?1 AND tenant = ?2 AND name = ?3))
ORDER BY place {} LIMIT ?4"""
_NEW: Final = """INSERT INTO document (kind, name, version, tenant, open, value)
VALUES (?1, ?2, ?3 + 1, ?4, ?5, ?6) ON CONFLICT DO NOTHING"""
_UPDATE: Final = """UPDATE document SET version = ?3 + 1, open = ?5, value = ?6
WHERE kind = ?1 AND name = ?2 AND version = ?3"""
_DELETE: Final = "DELETE FROM document WHERE kind = ? AND name = ? AND version = ?"
_COUNT: Final = "SELECT count(*) FROM document WHERE kind = ? AND tenant = ?"
_OPEN: Final = "SELECT name FROM document WHERE kind = ? AND open ORDER BY place"


class SqliteDocuments(Documents):
    """Documents in a file, or in memory."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is opened before the first call. None: in memory."""
        self._file = SqliteFile(path)

    async def get(self, kind: type[D], name: str) -> tuple[D, int] | None:
        documents = await self._read(kind, "name = ?2", name)
        return documents[0] if documents else None

    async def put(self, document: Document, version: int, *, most: int = 0) -> int:
        kind, tenant, is_open = type(document).__name__, document.tenant, document.is_open
        row = (kind, document.id, version, tenant, is_open, msgspec.json.encode(document))

        def work(file: sqlite3.Connection) -> int:
            with file:
                file.execute("BEGIN IMMEDIATE")
                if not file.execute(_UPDATE if version else _NEW, row).rowcount:
                    raise Changed
                if is_open and most:
                    opened = file.execute(f"{_COUNT} AND open", (kind, tenant))
                    if opened.fetchone()[0] > most:
                        raise Full
            return version + 1

        return await self._file.run(work)

    async def delete(self, document: Document, version: int) -> None:
        row = (type(document).__name__, document.id, version)
        if not await self._file.run(lambda file: file.execute(_DELETE, row).rowcount):
            raise Changed

    async def page(
        self, kind: type[D], tenant: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> list[tuple[D, int]]:
        how = (">", "ASC") if oldest_first else ("<", "DESC")
        return await self._read(kind, _PAGE.format(*how), tenant, after, limit)

    async def count(self, kind: type[Document], tenant: str) -> int:
        names = (kind.__name__, tenant)
        return int(await self._file.run(lambda file: file.execute(_COUNT, names).fetchone()[0]))

    async def open_names(self, kind: type[Document]) -> list[str]:
        names = (kind.__name__,)
        return await self._file.run(lambda file: [n for (n,) in file.execute(_OPEN, names)])

    def unix_s(self) -> float:
        return time.time()

    async def close(self) -> None:
        await self._file.close()

    async def _read(self, kind: type[D], which: str, *parameters: object) -> list[tuple[D, int]]:
        def work(file: sqlite3.Connection) -> list[tuple[D, int]]:
            rows = file.execute(_READ + which, (kind.__name__, *parameters))
            return [(msgspec.json.decode(value, type=kind), v) for value, v in rows]

        return await self._file.run(work)
