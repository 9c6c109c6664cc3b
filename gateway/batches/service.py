"""What clients do with files and batches: create, read, cancel, delete; and what expires.

A client names files and batches by ids alone, and finds its tenant's only: another's is as if it
did not exist.
"""

import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from gateway.batches.contents import Contents
from gateway.batches.intake import (
    Bounds,
    Endpoint,
    KeepSeconds,
    UploadForm,
    receive,
)
from gateway.batches.rights import BatchModels
from gateway.errors import Conflict, NotFound, RateLimited, StateFailure
from gateway.payload.schema import invalid
from gateway.ports import Changed, Documents, Full
from gateway.records.batch import ENDED, LATE_S, Batch, LineProblem, StoredFile
from gateway.records.record import Record
from gateway.records.request import Principal

MAX_WINDOW_S: Final = 30 * 86_400
MAX_BATCHES: Final = 5_000
"""Of one tenant, ended ones included: beyond it the oldest of these go."""
READ_BYTES: Final = 1 << 20
READ_FILES: Final = 500
"""Of a list, at a time."""
TEND_S: Final = 600.0
"""Between two looks for what has expired; clients see nothing of it from its expiry on."""
UPLOAD_S: Final = 86_400
"""After this time an upload that is not whole is of a process that was killed."""
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86_400}
_OURS: Final = re.compile(r"(file-|batch_)[0-9a-f]{32}\b")
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Short = Annotated[str, msgspec.Meta(max_length=512)]
_log = logging.getLogger("sluice.batches")
_T = TypeVar("_T", Batch, StoredFile)
_NAMES: Final = {Batch: "batch", StoredFile: "file"}


class Expiry(Record, frozen=True, kw_only=True):
    """How long a client wants files to be kept."""

    anchor: Literal["created_at"]
    seconds: KeepSeconds


class Wishes(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What no other gateway knows."""

    accept_late: bool = False


class BatchRequest(Record, frozen=True, kw_only=True):
    """What a client sends to create a batch."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,4}[mhd]\Z")] = "24h"
    metadata: Annotated[dict[_Name, _Short], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: Expiry | None = None
    sluice: Wishes = Wishes()


class BatchService:
    """Files and batches of all tenants. Methods raise Refusal and StateFailure."""

    def __init__(
        self,
        store: Documents,
        contents: Contents,
        bounds: Bounds,
        *,
        models: BatchModels,
        wall_clock: Callable[[], float],
        promise: Callable[[Batch, StoredFile], Awaitable[Batch]] | None = None,
        poke: Callable[[], None] = lambda: None,
    ) -> None:
        """`promise` completes a new batch, or raises Refusal; `poke` makes the runner look."""
        self.store = store
        self.contents = contents
        self.bounds = bounds
        self._models = models
        self._now = wall_clock
        self._promise = promise
        self._poke = poke

    # -- files

    async def upload(
        self,
        tenant: str,
        content_type: str,
        pieces: AsyncIterator[bytes],
        hold: Callable[[int], None],
    ) -> StoredFile:
        """Store the file of a form that comes in pieces. `hold`: see `receive`."""
        form, bounds, now_s = UploadForm(content_type), self.bounds, int(self._now())
        # Its document comes first, so that nothing of it is lost sight of.
        stored = StoredFile(
            id=_new_id("file-"),
            tenant=tenant,
            purpose="batch",
            filename="",
            bytes=0,
            created_unix_s=now_s,
            expires_unix_s=now_s + UPLOAD_S,
        )
        try:
            version = await self.store.put(stored, 0, most=bounds.max_files)
        except Full:
            raise RateLimited(
                f"Your tenant has {bounds.max_files} files, as many as it may "
                "(batches.max_files), the outputs of batches included. Delete some.",
                reason="too_many_files",
                should_retry=False,
            ) from None
        try:
            whole = await receive(self.contents, stored, form, pieces, bounds, hold)
        except BaseException:
            with contextlib.suppress(StateFailure):  # else it goes when it has expired
                await self._drop(stored, version)
            raise
        await self.store.put(whole, version)
        return whole

    async def own(self, kind: type[_T], tenant: str, name: str) -> tuple[_T, int]:
        """A tenant's file or batch, with its version. Raises NotFound."""
        found = await self.store.get(kind, name) if _OURS.match(name) and len(name) < 64 else None
        if found is None or found[0].tenant != tenant or not self._is_there(found[0]):
            what = _NAMES[kind]
            reason = "batch_not_found" if what == "batch" else "file_not_found"
            raise NotFound(f"No {what} '{name[:64]}'.", reason=reason, param="id")
        return found

    def _is_there(self, stored: Batch | StoredFile) -> bool:
        if isinstance(stored, Batch):
            return True
        return bool(stored.filename) and stored.expires_unix_s > self._now()

    async def files(
        self, tenant: str, after: str, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> list[StoredFile]:
        """A tenant's files that follow one ("": from the start)."""
        shown: list[StoredFile] = []
        while len(shown) < limit:
            page = await self.store.page(
                StoredFile, tenant, after, READ_FILES, oldest_first=oldest_first
            )
            shown += [f for f, _ in page if purpose in {None, f.purpose} and self._is_there(f)]
            if len(page) < READ_FILES:
                break
            after = page[-1][0].id
        return shown[:limit]

    async def content(self, stored: StoredFile, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes of a file from `start` up to `end`, piece by piece."""
        at = 0
        for name, size in await self._pieces(stored):
            first, last = max(start, at), min(end, at + size)
            for begin in range(first, last, READ_BYTES):
                until = min(begin + READ_BYTES, last)
                yield await self.contents.read(name, begin - at, until - at)
            at += size

    async def delete_file(self, tenant: str, name: str) -> None:
        """Delete a file that no unfinished batch reads."""
        stored, version = await self.own(StoredFile, tenant, name)
        if name in {batch.input_file for batch in await self._open_batches()}:
            raise Conflict(
                "An unfinished batch reads this file. Cancel it, or wait for its end.",
                reason="file_in_use",
            )
        await self._drop(stored, version)

    # -- batches

    async def create(
        self, principal: Principal, asked: BatchRequest, entitlement: str | None
    ) -> Batch:
        """A batch of an uploaded file; `entitlement` is the one that the client names, if any."""
        stored, _ = await self.own(StoredFile, principal.tenant, asked.input_file_id)
        now_s, window = int(self._now()), asked.completion_window
        window_s = int(window[:-1]) * _UNIT_S[window[-1]]
        if window_s > MAX_WINDOW_S:
            raise invalid("completion_window", "give at most 30d.")
        problems = stored.problems
        if not problems and stored.endpoint != asked.endpoint:
            text = f"The file's requests are for {stored.endpoint}, the batch for {asked.endpoint}."
            problems = (LineProblem(code="mismatched_url", message=text, line=1, param="url"),)
        if not problems:
            entitlement = self._models.entitlement(principal, stored.model, entitlement, now_s)
        keeping, keep_s = asked.output_expires_after, self.bounds.keep_s
        batch = Batch(
            id=_new_id("batch_"),
            tenant=principal.tenant,
            entitlement=entitlement or "",
            key=principal.key,
            endpoint=asked.endpoint,
            model=stored.model,
            input_file=stored.id,
            completion_window=asked.completion_window,
            metadata=asked.metadata,
            keep_s=keep_s if keeping is None else min(keep_s, keeping.seconds),
            accept_late=asked.sluice.accept_late,
            created_unix_s=now_s,
            expires_unix_s=now_s + window_s,
            total=0 if problems else stored.lines,
            problems=problems,
        )
        if problems:
            batch = batch.moved("failed", now_s)
        elif self._promise is not None:
            batch = await self._promise(batch, stored)
        await self._drop_old_batches(principal.tenant)
        try:
            await self.store.put(batch, 0, most=self.bounds.max_open)
        except Full:
            raise RateLimited(
                f"Your tenant has {self.bounds.max_open} unfinished batches, as many as it may "
                "(batches.max_open). Wait for the end of one, or cancel one.",
                reason="too_many_batches",
                should_retry=False,
            ) from None
        self._poke()
        return batch

    async def batches(self, tenant: str, after: str, limit: int) -> list[Batch]:
        """A tenant's batches, newest first, that follow one ("": from the start)."""
        return [batch for batch, _ in await self.store.page(Batch, tenant, after, limit)]

    async def cancel(self, tenant: str, name: str) -> Batch:
        """Have a batch end; what it has done stays. Cancelling again changes nothing."""

        def cancelled(batch: Batch) -> Batch:
            if batch.status in {"cancelling", "cancelled"}:
                return batch
            if batch.status in ENDED:
                raise Conflict(f"The batch has ended: {batch.status}.", reason="batch_ended")
            return batch.moved("cancelling", self._now(), batch.message)

        batch, _ = await self.store.change(*await self.own(Batch, tenant, name), cancelled)
        self._poke()
        return batch

    # -- what expires

    async def tend(self) -> None:
        """Delete files that have expired, and uploads that never ended. Logs failures."""
        try:
            used = {batch.input_file for batch in await self._open_batches()}
            for name in await self.store.open_names(StoredFile):
                found = await self.store.get(StoredFile, name)
                if found and found[0].expires_unix_s <= self._now() and name not in used:
                    await self._drop(*found)
        except StateFailure as error:
            _log.warning("expired files stay for now: %s", error)

    async def _drop_old_batches(self, tenant: str) -> None:
        """A tenant's oldest batches go as it makes new ones, with their outputs."""
        many = await self.store.count(Batch, tenant) >= MAX_BATCHES
        looked = 10 + self.bounds.max_open * many  # beyond those that stay because they are open
        for batch, version in await self.store.page(Batch, tenant, "", looked, oldest_first=True):
            gone_unix_s = batch.expires_unix_s + LATE_S + batch.keep_s
            if batch.is_open or not (many or gone_unix_s < self._now()):
                continue
            with contextlib.suppress(Changed):
                for output in batch.outputs(now_unix_s=0):
                    if found := await self.store.get(StoredFile, output.id):
                        await self.store.delete(*found)
                await self.contents.delete(batch.id)
                await self.store.delete(batch, version)

    async def _drop(self, stored: StoredFile, version: int) -> None:
        for name, _ in await self._pieces(stored):
            await self.contents.delete(name)
        with contextlib.suppress(Changed):  # somebody else deleted it
            await self.store.delete(stored, version)

    async def _pieces(self, stored: StoredFile) -> list[tuple[str, int]]:
        """Names and lengths of the contents that a file consists of."""
        if not stored.batch:
            return [(stored.id, stored.bytes)]
        suffix = stored.id.rpartition("-")[2]
        found = await self.store.get(Batch, stored.batch)
        parts = found[0].parts if found else ()
        return [(found[0].part_name(p, suffix), p.size(suffix)) for p in parts if found]

    async def _open_batches(self) -> list[Batch]:
        names = await self.store.open_names(Batch)
        found = [found[0] for name in names if (found := await self.store.get(Batch, name))]
        return [batch for batch in found if batch.status not in ENDED]  # usage may be unposted


def _new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"
