"""The embedded token pools' state, kept in the SQLite file of `state.url` across restarts.

Rules:
- Loaded once, before the first request, after the entitlements are defined. Leases of the
  former process are counted until they expire, and then charged their estimate.
- Write-behind: what changed is copied (`lease_snapshot`) and written every SAVE_EVERY_S and at
  the end, one transaction each, in a thread of its own; no request waits for it. A crash loses
  the last second: what was admitted then is not charged.
- A file that cannot be read leaves the pools without a past, and is left as it is. One that
  cannot be written is tried again, with everything; both are logged once.
- The file's own rules are those of `gateway.adapters.store.sqlite.estimators`; the tables here
  have a schema number of their own. For one gateway process.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gateway.adapters.background_task import PeriodicTask
from gateway.adapters.store.sqlite import lease_snapshot
from gateway.adapters.store.sqlite.lease_rows import Rows, load, open_tables, write
from gateway.adapters.store.sqlite.lease_snapshot import Batch, collect
from gateway.errors import StateFailure
from gateway.policy.token_pool.token_pool import Journal, TokenPool

SAVE_EVERY_S: Final = 1.0
LIMIT_S: Final = 2.0
"""How long a start or an end waits for the file."""
FORGET_S: Final = 30 * 86_400.0
"""Accounts of entitlements that are no more are forgotten after this."""
JOURNAL_MOST: Final = 100_000
"""Ended leases remembered while the file does not answer; beyond, all is written anew."""

_log = logging.getLogger("sluice.state")


class SqliteLeases:
    """Keeps the books of a `MemoryLeases` in a file."""

    def __init__(
        self,
        path: Path,
        books: Mapping[str, TokenPool],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`books` by model, managed ones; `wall_clock` Unix seconds. Nothing is opened yet."""
        self.up = True
        """Whether the last exchange with the file succeeded."""
        self._path = path
        self._books = books
        self._wall_clock = wall_clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-leases")
        self._file: sqlite3.Connection | None = None
        self._anew = False
        """Leases in the file may be stale: all are to be replaced."""
        self._overflowed = False
        """Ended leases were forgotten while a write was under way."""
        self._writing: tuple[asyncio.Future[None], Batch] | None = None
        self._saving = PeriodicTask(self.save, SAVE_EVERY_S)

    async def start(self) -> None:
        """Load, then keep saving. Never raises: without a readable file there is no past."""
        try:
            async with asyncio.timeout(LIMIT_S):
                rows = await asyncio.wrap_future(self._thread.submit(self._open))
        except (StateFailure, TimeoutError) as error:
            self.up = False
            _log.warning(
                "limits are not kept across restarts: %s", str(error) or "the file does not answer"
            )
            return
        for book in self._books.values():
            book.journal = Journal()
        await self._restore(rows)
        self._saving.start()

    async def close(self) -> None:
        """Save what is new, once and briefly, and let go of the file."""
        # Not cancelled: what a save has taken from the journals it has to write.
        if await self._saving.close():
            await self.save()
            for book in self._books.values():
                book.journal = None
        closed = asyncio.wrap_future(self._thread.submit(self._close))
        await asyncio.wait([closed], timeout=LIMIT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def save(self) -> None:
        """Write what changed since the last time. Never raises but for cancellation."""
        if self._writing is not None and not self._ended(*self._writing):
            self._bound_journals()
            return
        if self._anew:
            self._note_all_leases()
        batch = await collect(self._books)
        if not batch.parts:
            return
        done = self._thread.submit(self._write, batch, anew=self._anew)
        self._writing = (asyncio.wrap_future(done), batch)
        await asyncio.wait([self._writing[0]], timeout=LIMIT_S)
        self._ended(*self._writing)

    def _ended(self, written: asyncio.Future[None], batch: Batch) -> bool:
        """Take note of a write that ended; False while it has not."""
        if not written.done():
            return False
        self._writing = None
        error = written.exception()
        self._anew, self._overflowed = error is not None or self._overflowed, False
        if error is None:
            if not self.up:
                _log.warning("limits are kept across restarts again")
            self.up = True
            return True
        for part in batch.parts:
            journal = self._books[part.model].journal
            if journal is not None:
                journal.accounts.update(part.accounts)
        if self.up:
            _log.warning("limits cannot be kept across restarts, trying again: %s", error)
        self.up = False
        return True

    def _note_all_leases(self) -> None:
        for book in self._books.values():
            if book.journal is not None:
                book.journal.leases = {*book.leases, *book.tombstones}

    def _bound_journals(self) -> None:
        for book in self._books.values():
            if book.journal is not None and len(book.journal.leases) > JOURNAL_MOST:
                self._overflowed = True
                book.journal.leases.clear()

    async def _restore(self, rows: Rows) -> None:
        now_s = self._wall_clock()
        for model, pool in rows.pools.items():
            if model in self._books:
                lease_snapshot.restore_pool(self._books[model], pool, now_s)
        for number, (model, name, saved_s, account) in enumerate(rows.accounts):
            book = self._books.get(model)
            known = book is not None and lease_snapshot.restore_account(book, name, account, now_s)
            if not known and book is not None and saved_s < now_s - FORGET_S:
                book.journal = book.journal or Journal()
                book.journal.accounts.add(name)
            if number % lease_snapshot.SLICE == 0:
                await asyncio.sleep(0)
        for number, (model, held) in enumerate(rows.leases):
            book = self._books.get(model)
            if book is not None and not lease_snapshot.restore_lease(book, held, now_s):
                book.journal = book.journal or Journal()
                book.journal.leases.add(held.id)
            if number % lease_snapshot.SLICE == 0:
                await asyncio.sleep(0)
        for model, lease_id, grave in rows.graves:
            if model in self._books:
                self._books[model].tombstones[lease_id] = msgspec.structs.astuple(grave)

    # -- in the thread

    def _open(self) -> Rows:
        try:
            self._file = open_tables(self._path)
            return load(self._file)
        except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
            self._close()
            raise StateFailure(f"{self._path}: {error}") from error

    def _write(self, batch: Batch, *, anew: bool) -> None:
        if self._file is None:
            self._file = open_tables(self._path)
        try:
            write(self._file, batch, self._wall_clock(), anew=anew)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
