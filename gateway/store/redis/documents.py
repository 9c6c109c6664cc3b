"""Documents in Redis, shared by all gateways.

`lua/documents.lua` makes each change whole. All keys share one hash tag, and contain the number of
their layout. Nothing here retries.
"""

import time
from typing import Any, Final

import msgspec

from gateway.errors import StateFailure
from gateway.ports import Changed, D, Documents, Full
from gateway.records.record import Document
from gateway.store.redis.route import Session, lua, route_of, script

READ_AT_ONCE: Final = 10
"""Documents in one answer, which has to come within TIMEOUT_S."""
_KEY: Final = "sluice:1:{documents}:"


class RedisDocuments(Documents):
    """Documents in Redis."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before the first call."""
        self._session = Session(route_of(url), _KEY)
        self._script = script("documents", lua("documents"))
        self._began_unix_s = time.time() - time.monotonic()
        """When the monotonic clock was 0, by this machine's clock until Redis told its time."""

    async def get(self, kind: type[D], name: str) -> tuple[D, int] | None:
        documents = await self._read(kind, [name])
        return documents[0] if documents else None

    async def put(self, document: Document, version: int, *, most: int = 0) -> int:
        change = (version, int(document.is_open), most, msgspec.json.encode(document))
        new = await self._run(type(document), document.tenant, "put", document.id, *change)
        if new < 0:
            raise Full if new == -2 else Changed
        return int(new)

    async def delete(self, document: Document, version: int) -> None:
        run = self._run(type(document), document.tenant, "delete", document.id, version, 0)
        if await run < 0:
            raise Changed

    async def page(
        self, kind: type[D], tenant: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> list[tuple[D, int]]:
        how = "oldest" if oldest_first else "page"
        return await self._read(kind, await self._run(kind, tenant, how, after, limit))

    async def count(self, kind: type[Document], tenant: str) -> int:
        return int(await self._session.call("ZCARD", f"{_KEY}{kind.__name__}:of:{tenant}"))

    async def open_names(self, kind: type[Document]) -> list[str]:
        names = await self._session.call("ZRANGE", f"{_KEY}{kind.__name__}:open", 0, -1)
        return [name.decode() for name in names]

    def unix_s(self) -> float:
        return self._began_unix_s + time.monotonic()

    async def close(self) -> None:
        await self._session.close()

    async def _read(self, kind: type[D], names: list[Any]) -> list[tuple[D, int]]:
        documents: list[tuple[D, int]] = []
        for at in range(0, len(names), READ_AT_ONCE):
            some = ("HMGET", f"{_KEY}{kind.__name__}", *names[at : at + READ_AT_ONCE])
            (s, us), texts = await self._session.pipeline([("TIME",), some])
            self._began_unix_s = int(s) + int(us) / 1e6 - time.monotonic()
            for text in texts:
                if text is not None:  # else it was deleted meanwhile
                    version, _, value = text.partition(b" ")
                    try:
                        documents.append((msgspec.json.decode(value, type=kind), int(version)))
                    except msgspec.MsgspecError as error:
                        what = f"Redis holds a {kind.__name__} that is not of this version"
                        raise StateFailure(f"{what}: {error}") from error
        return documents

    async def _run(self, kind: type[Document], tenant: str, *arguments: object) -> Any:
        parts = ("", f":of:{tenant}", ":open", f":open:{tenant}", ":place")
        call = (len(parts), *(f"{_KEY}{kind.__name__}{part}" for part in parts), *arguments)
        return (await self._session.run(self._script, [call]))[0]
