"""What clients do with files and batches: create, read, cancel, delete; and what expires.

A client names files and batches by ids alone, and finds its tenant's only: another's is as if it
did not exist.
"""

import contextlib
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from gateway.batches.contents import Contents
from gateway.batches.intake import ENDPOINTS, UploadForm, file_too_large, receive
from gateway.errors import BadRequest, Conflict, NotFound, RateLimited, StateFailure
from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.plan import find_model
from gateway.ports import Changed, Documents, Full
from gateway.records.batch import ENDED, Batch, LineProblem, StoredFile
from gateway.records.record import Record
from gateway.records.request import Principal
from gateway.records.tenancy import TOKEN_NAME
from gateway.routing.split_alias import SplitAlias
from gateway.tenancy.keyring import entitled

MAX_WINDOW_S: Final = 30 * 86_400
MAX_BATCHES: Final = 5_000
"""Of one tenant, ended ones included: beyond it the oldest of these go."""
MAX_UPLOADS: Final = 4
"""Of one tenant at a time in this process."""
FORM_BYTES: Final = 1 << 16
"""What a form has around its file, at most."""
READ_BYTES: Final = 1 << 20
READ_FILES: Final = 500
"""Of a list, at a time."""
TEND_S: Final = 600.0
"""Between two looks for what has expired; clients see nothing of it from its expiry on."""
UPLOAD_S: Final = 86_400
"""After this time an upload that is not whole is of a process that was killed."""
LATE_S: Final = 7 * 86_400
"""How long a batch may run past its window."""
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86_400}
_OURS: Final = re.compile(r"(file-|batch_)[0-9a-f]{32}\b")
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Short = Annotated[str, msgspec.Meta(max_length=512)]
_log = logging.getLogger("sluice.batches")
_T = TypeVar("_T", Batch, StoredFile)


class Bounds(Record, frozen=True, kw_only=True):
    """Of one tenant."""

    max_file_bytes: int
    max_line_bytes: int
    max_files: int
    """Outputs included."""
    max_open: int
    """Batches that have not ended."""
    keep_s: int
    """From a file's creation to its expiry, unless its creator asks for less."""


class Expiry(Record, frozen=True, kw_only=True):
    """How long a client wants files to be kept."""

    anchor: Literal["created_at"]
    seconds: int


class Wishes(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What no other gateway knows."""

    accept_late: bool = False


class BatchRequest(Record, frozen=True, kw_only=True):
    """What a client sends to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: _Short = "24h"
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
        models: Mapping[str, ModelRuntime],
        splits: Mapping[str, SplitAlias],
        wall_clock: Callable[[], float],
        promise: Callable[[Batch, StoredFile], Awaitable[Batch]] | None = None,
        poke: Callable[[], None] = lambda: None,
    ) -> None:
        """`models` by name and alias. `promise` completes a new batch, or raises Refusal.

        `poke` tells the runner that there is something to do.
        """
        self.store = store
        self.contents = contents
        self.bounds = bounds
        self._models = models
        self._splits = splits
        self._now = wall_clock
        self._promise = promise
        self._poke = poke
        self._uploads = Counter[str]()

    # -- files

    def check_length(self, size: int) -> None:
        """Refuse a form of this length if its file must be too large. Raises TooLarge."""
        if size > self.bounds.max_file_bytes + FORM_BYTES:
            raise file_too_large(self.bounds.max_file_bytes)

    async def upload(
        self,
        tenant: str,
        content_type: str,
        pieces: AsyncIterator[bytes],
        hold: Callable[[int], None],
    ) -> StoredFile:
        """Store the file of a form that comes in pieces. `hold`: see `receive`."""
        form, bounds, now_s = UploadForm(content_type), self.bounds, int(self._now())
        with self._uploading(tenant):
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
                whole = await receive(
                    self.contents,
                    stored,
                    form,
                    pieces,
                    most_bytes=bounds.max_file_bytes,
                    most_line_bytes=bounds.max_line_bytes,
                    hold=hold,
                )
                keep_s = self._keep_s(form.fields.get("expires_after[seconds]"), "expires_after")
            except BaseException:
                with contextlib.suppress(Changed, StateFailure):
                    await self._drop(stored, version)
                raise
            whole = msgspec.structs.replace(whole, expires_unix_s=now_s + keep_s)
            await self.store.put(whole, version)
        return whole

    def _keep_s(self, asked: str | int | None, param: str) -> int:
        """How long a file is kept, as its creator asks (None: as long as may be)."""
        if asked is None:
            return self.bounds.keep_s
        with contextlib.suppress(ValueError):
            if (seconds := int(asked)) >= 3600:
                return min(seconds, self.bounds.keep_s)
        raise BadRequest(
            "Give 'expires_after' as {'anchor': 'created_at', 'seconds': N}, N 3600 or more.",
            reason="invalid_value",
            param=param,
        )

    async def file(self, tenant: str, name: str) -> tuple[StoredFile, int]:
        """A tenant's file, with its version."""
        found = await self._own(StoredFile, tenant, name)
        if found is None or not self._is_there(found[0]):
            raise NotFound(f"No file '{name[:64]}'.", reason="file_not_found", param="id")
        return found

    async def files(
        self, tenant: str, after: str, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> list[StoredFile]:
        """A tenant's files that follow one ("": from the start)."""
        shown: list[StoredFile] = []
        while len(shown) < limit:
            page = await self.store.page(
                StoredFile, tenant, after, READ_FILES, oldest_first=oldest_first
            )
            shown += [
                stored
                for stored, _ in page
                if purpose in {None, stored.purpose} and self._is_there(stored)
            ]
            if len(page) < READ_FILES:
                break
            after = page[-1][0].id
        return shown[:limit]

    def _is_there(self, stored: StoredFile) -> bool:
        return bool(stored.filename) and stored.expires_unix_s > self._now()

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
        stored, version = await self.file(tenant, name)
        if name in {batch.input_file for batch in await self._open_batches()}:
            raise Conflict(
                "An unfinished batch reads this file. Cancel it, or wait for its end.",
                reason="file_in_use",
            )
        with contextlib.suppress(Changed):  # somebody else deleted it
            await self._drop(stored, version)

    # -- batches

    async def create(
        self, principal: Principal, asked: BatchRequest, entitlement: str | None
    ) -> Batch:
        """A batch of an uploaded file; `entitlement` is the one that the client names, if any."""
        stored, _ = await self.file(principal.tenant, asked.input_file_id)
        window_s, now_s = window_of(asked.completion_window), int(self._now())
        if asked.endpoint not in ENDPOINTS:
            raise BadRequest(
                f"Give one of {', '.join(ENDPOINTS)}.", reason="invalid_value", param="endpoint"
            )
        problems = stored.problems or _mismatch(stored, asked.endpoint)
        if not problems:
            entitlement = self._entitlement(principal, stored.model, entitlement)
        expiry = asked.output_expires_after
        keep_s = self._keep_s(expiry and expiry.seconds, "output_expires_after")
        batch = Batch(
            id=_new_id("batch_"),
            tenant=principal.tenant,
            entitlement=entitlement or "",
            key=principal.key,
            endpoint=asked.endpoint,
            model=stored.model,
            input_file=stored.id,
            completion_window=asked.completion_window,
            window_s=window_s,
            metadata=asked.metadata,
            keep_s=keep_s,
            accept_late=asked.sluice.accept_late,
            status="failed" if problems else "validating",
            created_unix_s=now_s,
            failed_unix_s=now_s if problems else None,
            expires_unix_s=now_s + window_s,
            total=0 if problems else stored.lines,
            problems=problems,
        )
        if not problems and self._promise is not None:
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

    async def batch(self, tenant: str, name: str) -> tuple[Batch, int]:
        """A tenant's batch, with its version."""
        found = await self._own(Batch, tenant, name)
        if found is None:
            raise NotFound(f"No batch '{name[:64]}'.", reason="batch_not_found", param="id")
        return found

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
            now_s = int(self._now())
            return msgspec.structs.replace(batch, status="cancelling", cancelling_unix_s=now_s)

        batch, _ = await self.store.change(*await self.batch(tenant, name), cancelled)
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
                    with contextlib.suppress(Changed):
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
        await self.store.delete(stored, version)

    async def _pieces(self, stored: StoredFile) -> list[tuple[str, int]]:
        """Names and lengths of the contents that a file consists of."""
        if not stored.batch:
            return [(stored.id, stored.bytes)]
        suffix = stored.id.rpartition("-")[2]
        found = await self.store.get(Batch, stored.batch)
        parts = found[0].parts if found else ()
        return [(found[0].part_name(p, suffix), p.size(suffix)) for p in parts if found]

    async def _own(self, kind: type[_T], tenant: str, name: str) -> tuple[_T, int] | None:
        found = await self.store.get(kind, name) if _OURS.match(name) and len(name) < 64 else None
        return found if found and found[0].tenant == tenant else None

    async def _open_batches(self) -> list[Batch]:
        names = await self.store.open_names(Batch)
        found = [found[0] for name in names if (found := await self.store.get(Batch, name))]
        return [batch for batch in found if batch.status not in ENDED]  # usage may be unposted

    def _entitlement(self, principal: Principal, model: str, asked: str | None) -> str:
        """The one that is used for the model that a file names; "" for each item's model's own."""
        split = self._splits.get(model)
        names = split.models if split else (find_model(self._models, model).name,)
        opened = [name for name in names if principal.opens(name)] or names
        adapter = "" if split else self._models[opened[0]].adapter(model)
        chosen = entitled(principal, opened[0], self._now(), asked, adapter=adapter).entitlement
        several = split is not None and principal.choices and asked is None
        return "" if several and not principal.key.startswith(TOKEN_NAME) else chosen

    @contextlib.contextmanager
    def _uploading(self, tenant: str) -> Iterator[None]:
        if self._uploads[tenant] >= MAX_UPLOADS:
            raise RateLimited(
                f"{MAX_UPLOADS} files of your tenant are being uploaded, as many as may be at a "
                "time. Wait for the end of one.",
                reason="too_many_uploads",
                retry_after_s=5.0,
            )
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # without tenants that upload nothing


def _new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


def window_of(text: str) -> int:
    """Seconds of a completion window, such as 24h. Raises BadRequest."""
    matched = _WINDOW.fullmatch(text)
    window_s = int(matched[1]) * _UNIT_S[matched[2]] if matched else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise BadRequest(
            "Give a time of up to 30 days, such as 24h, 90m or 7d.",
            reason="invalid_value",
            param="completion_window",
        )
    return window_s


def _mismatch(stored: StoredFile, endpoint: str) -> tuple[LineProblem, ...]:
    if stored.endpoint == endpoint:
        return ()
    message = f"The file's requests are for {stored.endpoint}, the batch is for {endpoint}."
    return (LineProblem(code="mismatched_url", message=message, line=1, param="url"),)
