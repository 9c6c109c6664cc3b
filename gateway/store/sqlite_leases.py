"""Keeps the embedded token pools' state across restarts, in the SQLite file of `state.url`.

Rules:
- The state is loaded once, after the entitlements are defined and before the first request.
  Leases of the former process count until they expire, and are then charged their estimate.
- Write-behind: every SAVE_EVERY_S and at shutdown, changes are copied (`lease_snapshot`) and
  written in one transaction by a dedicated thread; no request waits for it. A crash loses the
  last second: requests admitted then are not charged.
- If the file cannot be read, the pools start fresh and the file is left as it is. If it cannot be
  written, everything is written again later. Both are logged once.
- The rules of the file are in `gateway.store.sqlite_estimators`; these tables have their
  own schema number. For one gateway process.
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

from gateway.admission.limit_book import LimitBook
from gateway.admission.token_pool import Journal, TokenPool
from gateway.background_task import PeriodicTask
from gateway.errors import StateFailure
from gateway.store import sqlite_lease_snapshot as lease_snapshot
from gateway.store.sqlite_lease_rows import Rows, forget_models, load, open_tables, write
from gateway.store.sqlite_lease_snapshot import Batch, collect

SAVE_EVERY_S: Final = 1.0
LIMIT_S: Final = 2.0
"""Longest wait for the file at start and at shutdown."""
FORGET_S: Final = 30 * 86_400.0
"""Accounts of removed entitlements and models are dropped after this time."""
MAX_JOURNAL: Final = 100_000
"""Ended leases remembered while the file is not writable; beyond, all leases are rewritten."""

_log = logging.getLogger("sluice.state")


class SqliteLeases:
    """Keeps the token pools of a `MemoryLeases` in a file."""

    def __init__(
        self,
        path: Path,
        token_pools: Mapping[str, TokenPool],
        limits: LimitBook,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`token_pools`: managed ones by model; `limits` is theirs all.

        `wall_clock` in Unix seconds. Opens nothing yet.
        """
        self.up = True
        """Whether the last exchange with the file succeeded."""
        self._path = path
        self._token_pools = token_pools
        self._limits = limits
        self._wall_clock = wall_clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-leases")
        self._file: sqlite3.Connection | None = None
        self._anew = False
        """Whether leases in the file may be stale, so that all must be replaced."""
        self._overflowed = False
        """Whether ended leases were forgotten during a write."""
        self._writing: tuple[asyncio.Future[None], Batch] | None = None
        self._keeps = False
        self._saving = PeriodicTask(self.save, SAVE_EVERY_S)

    async def start(self) -> None:
        """Load, then keep saving. Never raises; without a readable file the pools start fresh."""
        try:
            async with asyncio.timeout(LIMIT_S):
                rows = await asyncio.wrap_future(self._thread.submit(self._open))
        except (StateFailure, TimeoutError) as error:
            self.up = False
            _log.warning(
                "limits are not kept across restarts: %s", str(error) or "the file does not answer"
            )
            return
        for token_pool in self._token_pools.values():
            token_pool.journal = Journal()
        self._limits.changed = set()
        self._keeps = True
        await self._restore(rows)
        self._saving.start()

    def added(self, token_pool: TokenPool) -> None:
        """Keep a further model's token pool, which is among `token_pools` now."""
        if self._keeps:
            token_pool.journal = Journal()

    async def close(self) -> None:
        """Save changes once, within LIMIT_S, and close the file."""
        # Not cancelled: a save must write what it took from the journals.
        if await self._saving.close():
            await self.save()
            for token_pool in self._token_pools.values():
                token_pool.journal = None
            self._limits.changed = None
        closed = asyncio.wrap_future(self._thread.submit(self._close))
        await asyncio.wait([closed], timeout=LIMIT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def save(self) -> None:
        """Write the changes since the last save. Raises nothing except for cancellation."""
        if self._writing is not None and not self._ended(*self._writing):
            for token_pool in self._token_pools.values():
                if token_pool.journal is not None and len(token_pool.journal.leases) > MAX_JOURNAL:
                    self._overflowed = True
                    token_pool.journal.leases.clear()
            return
        if self._anew:
            for token_pool in self._token_pools.values():
                if token_pool.journal is not None:
                    token_pool.journal.leases = {*token_pool.leases, *token_pool.tombstones}
        batch = await collect(self._token_pools)
        if not batch.parts and not batch.limits:
            return
        done = self._thread.submit(self._write, batch, anew=self._anew)
        self._writing = (asyncio.wrap_future(done), batch)
        await asyncio.wait([self._writing[0]], timeout=LIMIT_S)
        self._ended(*self._writing)

    def _ended(self, written: asyncio.Future[None], batch: Batch) -> bool:
        """Note the result of a write; False while it is still running."""
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
        if self._limits.changed is not None:
            self._limits.changed.update(batch.limits)
        for part in batch.parts:
            known = self._token_pools.get(part.model)
            journal = None if known is None else known.journal
            if journal is not None:
                journal.accounts.update(part.accounts)
        if self.up:
            _log.warning("limits cannot be kept across restarts, trying again: %s", error)
        self.up = False
        return True

    async def _restore(self, rows: Rows) -> None:
        now_s = self._wall_clock()
        for limit_id, limit in rows.limits:
            lease_snapshot.restore_limit(self._limits, limit_id, limit)
        for model, pool in rows.pools.items():
            if model in self._token_pools:
                lease_snapshot.restore_pool(self._token_pools[model], pool, now_s)
        for number, (model, name, saved_s, account) in enumerate(rows.accounts):
            token_pool = self._token_pools.get(model)
            known = token_pool is not None and lease_snapshot.restore_account(
                token_pool, name, account, now_s
            )
            if not known and token_pool is not None and saved_s < now_s - FORGET_S:
                token_pool.journal = token_pool.journal or Journal()
                token_pool.journal.accounts.add(name)
            if number % lease_snapshot.SLICE == 0:
                await asyncio.sleep(0)
        for number, (model, record) in enumerate(rows.leases):
            token_pool = self._token_pools.get(model)
            if token_pool is not None and not lease_snapshot.restore_lease(
                token_pool, record, now_s
            ):
                token_pool.journal = token_pool.journal or Journal()
                token_pool.journal.leases.add(record.id)
            if number % lease_snapshot.SLICE == 0:
                await asyncio.sleep(0)
        for model, lease_id, tombstone in rows.tombstones:
            if model in self._token_pools:
                self._token_pools[model].tombstones[lease_id] = msgspec.structs.astuple(tombstone)

    # -- in the thread

    def _open(self) -> Rows:
        try:
            self._file = open_tables(self._path)
            forget_models(self._file, list(self._token_pools), self._wall_clock() - FORGET_S)
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
