"""Documents in Redis, shared by all gateways.

`lua/documents.lua` makes each change whole. All keys share one hash tag, and contain the number of
their layout. Nothing here retries.
"""

from typing import Any, Final

from gateway.errors import StateFailure
from gateway.ports import Changed, Document, Full
from gateway.store.redis.route import Session, lua, route_of, script

READ_AT_ONCE: Final = 10
"""Documents in one answer, which has to come within TIMEOUT_S."""
_KEY: Final = "sluice:1:{documents}:"


class RedisDocuments:
    """Documents in Redis."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before the first call."""
        self._session = Session(route_of(url), _KEY)
        self._script = script("documents", lua("documents"))

    async def get(self, kind: str, name: str) -> Document | None:
        text = await self._session.call("HGET", f"{_KEY}{kind}", name)
        return None if text is None else _document(name, text)

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
        new = await self._run(kind, tenant, "put", tenant, name, version, int(is_open), most, value)
        if new == -2:
            raise Full
        if new < 0:
            raise Changed
        return int(new)

    async def delete(self, kind: str, tenant: str, name: str, version: int) -> None:
        if await self._run(kind, tenant, "delete", tenant, name, version) < 0:
            raise Changed

    async def page(
        self, kind: str, tenant: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> list[Document]:
        how = "oldest" if oldest_first else "page"
        found = await self._run(kind, tenant, how, after, limit)
        documents: list[Document] = []
        for at in range(0, len(found), READ_AT_ONCE):
            names = found[at : at + READ_AT_ONCE]
            texts = await self._session.call("HMGET", f"{_KEY}{kind}", *names)
            # One may have been deleted meanwhile.
            pairs = zip(names, texts, strict=True)
            documents += [_document(name.decode(), text) for name, text in pairs if text]
        return documents

    async def count(self, kind: str, tenant: str) -> int:
        return int(await self._session.call("ZCARD", f"{_KEY}{kind}:of:{tenant}"))

    async def open_names(self, kind: str) -> list[str]:
        names = await self._session.call("ZRANGE", f"{_KEY}{kind}:open", 0, -1)
        return [name.decode() for name in names]

    async def close(self) -> None:
        await self._session.close()

    async def _run(self, kind: str, tenant: str, *arguments: object) -> Any:
        keys = ("", f":of:{tenant}", ":open", ":opened", ":place")
        call = (len(keys), *(f"{_KEY}{kind}{key}" for key in keys), *arguments)
        return (await self._session.run(self._script, [call]))[0]


def _document(name: str, text: bytes) -> Document:
    version, _, value = text.split(b" ", 2)
    try:
        return Document(id=name, version=int(version), value=value)
    except ValueError as error:
        raise StateFailure("Redis holds documents that are not of this version") from error
