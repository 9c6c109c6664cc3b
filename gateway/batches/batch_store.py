"""Batches and files as records, over documents and contents."""

import secrets
from typing import Final, TypeVar

import msgspec

from gateway.batches.contents import Contents
from gateway.errors import StateFailure
from gateway.ports import Document, Documents
from gateway.records.batch import Batch, StoredFile

Stored = TypeVar("Stored", Batch, StoredFile)
_KINDS: Final = {Batch: "batch", StoredFile: "file"}
_encode: Final = msgspec.json.Encoder().encode
_DECODE: Final = {kind: msgspec.json.Decoder(kind).decode for kind in _KINDS}


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


class BatchStore:
    """The batches and files of all tenants. Methods raise StateFailure, as the two stores do."""

    def __init__(self, documents: Documents, contents: Contents) -> None:
        self.documents = documents
        self.contents = contents

    async def get(self, kind: type[Stored], name: str) -> tuple[Stored, int] | None:
        """A batch or file with its version."""
        found = await self.documents.get(_KINDS[kind], name)
        return None if found is None else (_read(kind, found), found.version)

    async def put(self, stored: Batch | StoredFile, version: int, *, most: int = 0) -> int:
        """Write it as `Documents.put` does; an ended batch is not open. Raises Changed, Full."""
        unfinished = isinstance(stored, StoredFile) or stored.is_open
        return await self.documents.put(
            _KINDS[type(stored)],
            stored.tenant,
            stored.id,
            _encode(stored),
            version,
            is_open=unfinished,
            most=most,
        )

    async def delete(self, stored: Batch | StoredFile, version: int) -> None:
        """Delete it. Raises Changed."""
        await self.documents.delete(_KINDS[type(stored)], stored.tenant, stored.id, version)

    async def page(
        self,
        kind: type[Stored],
        tenant: str,
        after: str,
        limit: int,
        *,
        oldest_first: bool = False,
    ) -> list[tuple[Stored, int]]:
        """A tenant's, in the order of their creation, with their versions."""
        name = _KINDS[kind]
        page = await self.documents.page(name, tenant, after, limit, oldest_first=oldest_first)
        return [(_read(kind, found), found.version) for found in page]

    async def count(self, kind: type[Stored], tenant: str) -> int:
        """How many a tenant has, unfinished or not."""
        return await self.documents.count(_KINDS[kind], tenant)

    async def open_names(self, kind: type[Batch] | type[StoredFile]) -> list[str]:
        """Ids of the unfinished batches, or of all files, of all tenants."""
        return await self.documents.open_names(_KINDS[kind])

    async def close(self) -> None:
        """Close files and connections. Idempotent."""
        self.contents.close()
        await self.documents.close()


def _read(kind: type[Stored], found: Document) -> Stored:
    try:
        return _DECODE[kind](found.value)  # type: ignore[no-any-return]
    except msgspec.MsgspecError as error:
        raise StateFailure(f"{_KINDS[kind]} {found.id} is not of this version: {error}") from error
