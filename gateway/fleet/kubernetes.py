"""Lists and watches objects of the Kubernetes API over httpx: the part that discovery needs.

Kubernetes' rules, as its API concepts describe them: a list comes in pages and has a resource
version; a watch from there gives every later change. Bookmarks move the version on without a
change. A watch ends by its own time limit and is begun again at the last version. 410 (or an ERROR
event with that code) says that the version, or a list's next page, is too old: then the objects are
listed anew.

The service account's token is read anew for each call, since Kubernetes replaces it.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import httpx
import orjson

from gateway.ports import DiscoveryFailure
from gateway.records.attempt import ClusterAccess

WATCH_S: Final = 300
"""Time limit of one watch; each is up to a tenth longer, so that they do not end together."""
SILENCE_S: Final = 30.0
"""After its limit, a watch that says nothing is given up."""
LIST_S: Final = 15.0
RETRY_PAUSE_S: Final = 1.0
"""Before a watch is begun again or objects are listed anew: a proxy may end each watch at once."""
PAGE: Final = 50
"""Objects in one page of a list: each is read between two turns of the requests."""
PAGE_PAUSE_S: Final = 0.01
MAX_PAGES: Final = 1000
"""A page may have few objects where selectors leave most out."""
TOGETHER_S: Final = 0.1
"""Changes that come within this time make one set, since each set is looked through as a whole."""
MAX_OBJECTS: Final = 10_000
MAX_OBJECT_BYTES: Final = 4 * 1024 * 1024
"""Of one object or one page; etcd stores 1.5 MB of an object at most."""

Object = dict[str, Any]
Objects = Mapping[str, Object]
"""By name."""


class _Expired(Exception):
    """The resource version is too old."""


class KubernetesApi:
    """The API server, with the rights of this process's service account."""

    def __init__(self, access: ClusterAccess | None, *, watch_s: int = WATCH_S) -> None:
        """`access` None: this process runs outside a cluster, and every call fails."""
        self.namespace = "default" if access is None else access.namespace
        self._access = access
        self._watch_s = watch_s
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def follow(
        self, path: str, *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[Objects, None]:
        """The objects of a collection that the selectors match: now, and after each change.

        Raises DiscoveryFailure.
        """
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        params = {name: text for name, text in selectors.items() if text}
        while True:
            try:
                objects, version = await self._list(path, params)
                yield objects
                async with (
                    aclosing(self._changes(path, params, version)) as changes,
                    aclosing(_together(changes)) as batches,
                ):
                    async for batch in batches:
                        for kind, changed in batch:
                            _apply(objects, kind, changed)
                        yield objects
            except _Expired:
                await _pause()

    async def _list(self, path: str, params: Mapping[str, str]) -> tuple[dict[str, Object], str]:
        objects: dict[str, Object] = {}
        asked = {**params, "limit": str(PAGE)}
        try:
            for _ in range(MAX_PAGES):
                found = await self._page(path, asked)
                for item in found.get("items") or ():
                    _apply(objects, "ADDED", item)
                metadata = found["metadata"]
                if not metadata.get("continue"):
                    return objects, str(metadata["resourceVersion"])
                asked["continue"] = str(metadata["continue"])
                await asyncio.sleep(PAGE_PAUSE_S)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _failure(path, error) from error
        raise DiscoveryFailure(f"{path} has more than {MAX_PAGES} pages")

    async def _page(self, path: str, asked: Mapping[str, str]) -> Object:
        body = bytearray()
        async with (
            asyncio.timeout(LIST_S),
            self._http().stream(
                "GET", path, params=dict(asked), headers=self._headers()
            ) as response,
        ):
            _check(path, response.status_code)
            async for data in response.aiter_bytes():
                body += data
                if len(body) > PAGE * MAX_OBJECT_BYTES:
                    raise DiscoveryFailure(f"{path} answers too much")
        found: Object = orjson.loads(body)
        return found

    async def _changes(
        self, path: str, params: Mapping[str, str], version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Changes since a version, over as many watches as it takes. Raises _Expired."""
        while True:
            limit_s = self._watch_s + random.randint(0, self._watch_s // 10)
            asked = {
                **params,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(limit_s),
            }
            timeout = httpx.Timeout(LIST_S, read=limit_s + SILENCE_S)
            try:
                async with self._http().stream(
                    "GET", path, params=asked, headers=self._headers(), timeout=timeout
                ) as response:
                    _check(path, response.status_code)
                    async for line in _lines(path, response, limit_s + SILENCE_S):
                        event = orjson.loads(line)
                        kind, changed = event["type"], event["object"]
                        if kind == "ERROR":
                            _check(path, int(changed.get("code", 500)))
                            raise DiscoveryFailure(f"the watch of {path} ended with an error")
                        version = changed["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            yield kind, changed
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise _failure(path, error) from error
            await _pause()

    def _headers(self) -> dict[str, str]:
        token_file = None if self._access is None else self._access.token_file
        if token_file is None:
            return {}
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise DiscoveryFailure(f"no service account token: {error.strerror}") from error
        return {"authorization": f"Bearer {token}"}

    def _http(self) -> httpx.AsyncClient:
        if self._access is None:
            raise DiscoveryFailure(
                "no Kubernetes API here: run as a pod with a service account, or start "
                "`kubectl proxy` and set SLUICE_KUBERNETES_URL to its URL"
            )
        if self._client is None:
            ca_file = self._access.ca_file
            try:
                verify = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                raise DiscoveryFailure(f"{ca_file}: {error.strerror}") from error
            self._client = httpx.AsyncClient(
                base_url=self._access.url,
                verify=verify,
                timeout=LIST_S,
                limits=httpx.Limits(max_connections=None),  # each source holds one, or two
                trust_env=False,
            )
        return self._client


def _apply(objects: dict[str, Object], kind: str, changed: Object) -> None:
    """Raises DiscoveryFailure when there are too many objects, KeyError for what is none."""
    name = changed["metadata"]["name"]
    if kind == "DELETED":
        objects.pop(name, None)
        return
    changed["metadata"].pop("managedFields", None)  # the largest part, which nobody reads here
    objects[name] = changed
    if len(objects) > MAX_OBJECTS:
        raise DiscoveryFailure(f"more than {MAX_OBJECTS} objects match: select fewer")


async def _lines(path: str, response: httpx.Response, most_s: float) -> AsyncGenerator[bytes, None]:
    """The lines of a watch, which ends after `most_s` even if the server goes on."""
    ends_s = asyncio.get_running_loop().time() + most_s
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_OBJECT_BYTES:
            raise DiscoveryFailure(f"the watch of {path} names an object that is too large")
        if asyncio.get_running_loop().time() > ends_s:
            return


async def _together(
    changes: AsyncGenerator[tuple[str, Object], None],
) -> AsyncGenerator[list[tuple[str, Object]], None]:
    """Changes that come within TOGETHER_S, as one."""
    loop = asyncio.get_running_loop()
    step = asyncio.ensure_future(anext(changes))
    try:
        while True:
            batch = [await step]
            ends_s = loop.time() + TOGETHER_S
            step = asyncio.ensure_future(anext(changes))
            while (left_s := ends_s - loop.time()) > 0:
                done, _ = await asyncio.wait({step}, timeout=left_s)
                if not done or step.exception() is not None:
                    break
                batch.append(step.result())
                step = asyncio.ensure_future(anext(changes))
            yield batch
    finally:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)


async def _pause() -> None:
    await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))


def _check(path: str, status: int) -> None:
    """Raise for a status that is no success."""
    if status == 410:
        raise _Expired
    if status in (401, 403):
        raise DiscoveryFailure(
            f"{path} answered {status}: the service account needs a Role with get, list and watch"
        )
    if status != 200:
        raise DiscoveryFailure(f"{path} answered {status}")


def _failure(path: str, error: Exception) -> DiscoveryFailure:
    if isinstance(error, httpx.HTTPError):
        return DiscoveryFailure(f"no answer for {path}: {type(error).__name__}")
    return DiscoveryFailure(f"no sense in the answer for {path}: {type(error).__name__}")
