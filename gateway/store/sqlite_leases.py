"""Keeps the embedded token pools' state across restarts, in the SQLite file of `state.url`.

Rules:
- The state is loaded once, after the entitlements are defined and before the first request.
  Leases of the former process count until they expire, and are then charged their estimate.
- Write-behind: every SAVE_EVERY_S and at shutdown, the rows of what changed are made (`collect`)
  and written in one transaction by a dedicated thread; no request waits for it. A crash loses the
  last second: requests admitted then are not charged.
- If the file cannot be read, the pools start fresh and the file is left as it is. If it cannot be
  written, everything is written again later. Both are logged once.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from gateway.admission.debt import SETTLED
from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import LEASE_TTL_S, Journal, TokenPool
from gateway.background_task import PeriodicTask
from gateway.errors import StateFailure
from gateway.records.limit import Holding
from gateway.store.sqlite_file import SqliteFile

SAVE_EVERY_S: Final = 1.0
LIMIT_S: Final = 2.0
"""Longest wait for the file at start and at shutdown."""
FORGET_S: Final = 30 * 86_400.0
"""Accounts of removed entitlements and models are dropped after this time."""
MAX_JOURNAL: Final = 100_000
"""Ended leases remembered while the file is not writable; beyond, all leases are rewritten."""
SLICE: Final = 200
"""Accounts and leases read or restored between two pauses for requests."""
ROUNDS: Final = 20
"""Most rounds of a collection; after them the rest is read at once, whatever its size."""
WRITTEN_AT_ONCE: Final = 1_000
PAUSE_S: Final = 0.0005
"""Pause between two parts of a large write, as the thread would retake the interpreter before
the event loop wakes up."""
ACCOUNT: Final = (
    *("level", "level_s", "borrowed", "borrowed_s", "debt", "burst", "promised", "promised_s"),
    *("waiters", "waiters_s", "mean_cost", "debited", "refunded", "used"),
)
"""What is kept of an account; what is in flight follows from the leases."""
_LIMIT: Final = ("total", "warned_s", "added", "added_until_s", "starts", "spent")
# What is reserved of a limit follows from the leases.
_POOL: Final = ("surplus", "surplus_s", "surplus_per_s", "ticked_s", "settled", "refunds")

_SAVE: Final = """
INSERT INTO token_pool VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, model, name)
DO UPDATE SET saved_unix_s = excluded.saved_unix_s, record = excluded.record
"""
_DROP: Final = "DELETE FROM token_pool WHERE kind = ? AND model = ? AND name = ?"
_ANEW: Final = "DELETE FROM token_pool WHERE kind IN ('lease', 'tombstone')"
_FORGET: Final = """
DELETE FROM token_pool WHERE model <> '' AND model NOT IN (SELECT value FROM json_each(?))
  AND model NOT IN (SELECT model FROM token_pool WHERE saved_unix_s >= ?)
"""
_LOAD: Final = "SELECT kind, model, name, saved_unix_s, record FROM token_pool ORDER BY rowid"

_log = logging.getLogger("sluice.state")
_encode: Final = msgspec.json.Encoder().encode
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(
        msgspec.defstruct(kind, [(f, int | float | list[int | float]) for f in fields])
    )
    for kind, fields in (
        ("account", ACCOUNT),
        ("limit", _LIMIT),
        ("pool", (*_POOL, "service_s")),
    )
} | {
    "lease": msgspec.json.Decoder(LeaseRecord),
    "tombstone": msgspec.json.Decoder(tuple[str, int, str, tuple[Holding, ...]]),
}

Rows = dict[tuple[str, str, str], bytes | None]
"""Records by kind, model and name; None for what has ended."""
_Item = tuple[tuple[str, str, str], bytes | None]


class Row(NamedTuple):
    """What the file has of one thing."""

    kind: str
    model: str
    name: str
    saved_unix_s: float
    record: Any


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
        self._token_pools = token_pools
        self._limits = limits
        self._wall_clock = wall_clock
        self._file = SqliteFile(path)
        self._anew = False
        """Whether leases in the file may be stale, so that all must be replaced."""
        self._writing: tuple[asyncio.Future[None], Rows] | None = None
        self._keeps = False
        self._saving = PeriodicTask(self.save, SAVE_EVERY_S)

    async def start(self) -> None:
        """Load, then keep saving. Never raises; without a readable file the pools start fresh."""
        try:
            async with asyncio.timeout(LIMIT_S):
                rows = await self._file.run(self._load)
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
        now_s = self._wall_clock()
        for number, row in enumerate(rows):
            self._restore(row, now_s)
            if number % SLICE == 0:
                await asyncio.sleep(0)
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
        await self._file.close()

    async def save(self) -> None:
        """Write the changes since the last save. Raises nothing except for cancellation."""
        journals = {m: t.journal for m, t in self._token_pools.items() if t.journal is not None}
        if self._writing is not None and not self._ended(*self._writing):
            for journal in journals.values():
                if len(journal.leases) > MAX_JOURNAL:
                    self._anew = True
                    journal.leases.clear()
            return
        anew, self._anew = self._anew, False
        if anew:
            for model, journal in journals.items():
                token_pool = self._token_pools[model]
                journal.leases = {*token_pool.leases, *token_pool.tombstones}
        rows = await collect(self._token_pools, self._limits)
        if rows or anew:
            writing = self._file.begin(lambda file: self._write(file, rows, anew=anew))
            self._writing = writing, rows
            await asyncio.wait([writing], timeout=LIMIT_S)
            self._ended(writing, rows)

    def _ended(self, writing: asyncio.Future[None], rows: Rows) -> bool:
        """Note the result of a write; False while it is still running."""
        if not writing.done():
            return False
        self._writing = None
        error = writing.exception()
        if error is not None:
            self._anew = True
            for kind, model, name in rows:
                token_pool = self._token_pools.get(model)
                if kind == "limit" and self._limits.changed is not None:
                    self._limits.changed.add(name)
                elif kind == "account" and token_pool is not None and token_pool.journal:
                    token_pool.journal.accounts.add(name)
        if self.up and error is not None:
            _log.warning("limits cannot be kept across restarts, trying again: %s", error)
        elif not self.up and error is None:
            _log.warning("limits are kept across restarts again")
        self.up = error is None
        return True

    def _restore(self, row: Row, now_s: float) -> None:
        """Take over a row. Leases must come in the order of their expiry."""
        record, token_pool = row.record, self._token_pools.get(row.model)
        if row.kind == "limit":
            _take_over(self._limits.counter(row.name), record, _LIMIT, inf)
            return
        if token_pool is None:
            return
        journal = token_pool.journal = token_pool.journal or Journal()
        match row.kind:
            case "tombstone":
                token_pool.tombstones[row.name] = record
            case "lease":
                if not _restore_lease(token_pool, record, now_s):
                    journal.leases.add(row.name)
            case "account":
                account = token_pool.accounts.get(row.name)
                if account is not None:
                    _take_over(account, record, ACCOUNT, now_s)
                    elastic = account.terms.service_class == "elastic"
                    account.debt = account.debt if elastic else 0.0
                    account.epoch = -1
                    if abs(account.debt) > SETTLED or account.burst > SETTLED:
                        token_pool.active.add(row.name)
                elif row.saved_unix_s < now_s - FORGET_S:
                    journal.accounts.add(row.name)
            case "pool":
                _take_over(token_pool, record, _POOL, now_s)
                most_per_s = token_pool.terms.tokens_per_s
                token_pool.surplus_per_s = min(record.surplus_per_s, most_per_s)
                for pool, service_s in zip(token_pool.pools, record.service_s, strict=False):
                    pool.service_s = service_s

    # -- in the thread

    def _load(self, file: sqlite3.Connection) -> list[Row]:
        before_s = self._wall_clock() - FORGET_S
        file.execute(_FORGET, (_encode(list(self._token_pools)).decode(), before_s))
        rows = [
            Row(kind, model, name, saved_s, _DECODERS[kind].decode(record))
            for kind, model, name, saved_s, record in file.execute(_LOAD)
        ]
        rows.sort(key=lambda row: row.record.expires_s if row.kind == "lease" else 0.0)
        return rows

    def _write(self, file: sqlite3.Connection, rows: Rows, *, anew: bool) -> None:
        """Write rows in one transaction, and empty them."""
        now_s = self._wall_clock()
        with file:
            file.execute("BEGIN IMMEDIATE")
            if anew:
                file.execute(_ANEW)
            items = iter(rows.items())
            while some := list(islice(items, WRITTEN_AT_ONCE)):
                file.executemany(_DROP, [key for key, record in some if record is None])
                file.executemany(
                    _SAVE, [(*key, now_s, record.decode()) for key, record in some if record]
                )
                if len(some) == WRITTEN_AT_ONCE:
                    time.sleep(PAUSE_S)
        while rows:  # freed here bit by bit, not all at once in the event loop
            rows.popitem()
            if len(rows) % WRITTEN_AT_ONCE == 1:
                time.sleep(PAUSE_S)


def _rows_of(model: str, token_pool: TokenPool, journal: Journal) -> Iterator[_Item]:
    """Rows of what a journal names, each made on demand."""
    for name in journal.accounts:
        yield ("account", model, name), _fields(token_pool.accounts.get(name), ACCOUNT)
    for lease_id in journal.leases:
        lease = token_pool.leases.get(lease_id)
        yield ("lease", model, lease_id), _encode(lease) if lease else None
        tombstone = token_pool.tombstones.get(lease_id)
        yield ("tombstone", model, lease_id), _encode(tombstone) if tombstone else None


async def collect(token_pools: Mapping[str, TokenPool], limits: LimitBook) -> Rows:
    """The rows of what the journals name; None for what has ended. The journals are emptied.

    They are made in slices with pauses for requests. What changes meanwhile is in the journals
    again and read again, until the rest fits one slice, which is read without a pause. So the rows
    are the state at the end: they have the lease of every estimate that an account was charged.
    """
    rows: Rows = {}
    token_pools = dict(token_pools)  # a reload may add and remove some meanwhile
    for turn in range(ROUNDS):
        taken = []
        for model, token_pool in token_pools.items():
            if token_pool.journal is not None:
                taken.append((model, token_pool, token_pool.journal))
                token_pool.journal = Journal()
        count = sum(len(journal.accounts) + len(journal.leases) for _, _, journal in taken)
        last = count <= SLICE or turn == ROUNDS - 1
        some = chain.from_iterable(_rows_of(*journaled) for journaled in taken)
        for number, (key, record) in enumerate(some, start=1):
            rows[key] = record
            if number % SLICE == 0 and not last:
                await asyncio.sleep(0)
        if last:
            break
    if rows:
        for model, token_pool in token_pools.items():
            fields: dict[str, Any] = {field: getattr(token_pool, field) for field in _POOL}
            fields["service_s"] = [pool.service_s for pool in token_pool.pools]
            rows["pool", model, ""] = _encode(fields)
    if limits.changed:
        changed, limits.changed = limits.changed, set()
        for limit_id in changed:
            rows["limit", "", limit_id] = _fields(limits.counters.get(limit_id), _LIMIT)
    return rows


def _fields(counted: object | None, fields: tuple[str, ...]) -> bytes | None:
    """These fields as JSON; None for None."""
    return None if counted is None else _encode({f: getattr(counted, f) for f in fields})


def _take_over(counted: object, record: object, fields: tuple[str, ...], now_s: float) -> None:
    """Restore fields. Times later than now become now: the clock may have been set back."""
    for field in fields:
        value = getattr(record, field)
        is_time = field.endswith("_s") and not field.endswith("per_s")
        setattr(counted, field, min(value, now_s) if is_time else value)


def _restore_lease(token_pool: TokenPool, record: LeaseRecord, now_s: float) -> bool:
    """Count a former process's lease until it expires; False if its pool or entitlement is gone.

    The lease is not evictable, because no process can end it early.
    """
    account = token_pool.accounts.get(record.entitlement)
    if account is None or record.pool >= len(token_pool.pools):
        return False
    account.since_s = now_s
    record.expires_s = min(record.expires_s, now_s + LEASE_TTL_S)
    token_pool.move(account, record.pool, record.sequences, record.kv_bytes)
    token_pool.limits.hold(record.held)
    token_pool.hold(account, record)
    token_pool.pools[record.pool].evictable.pop(record.id, None)
    return True
