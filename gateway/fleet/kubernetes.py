"""Engines by the Kubernetes API: EndpointSlices of a service, pods, and InferencePools.

Ready endpoints and pods are in. One that terminates is out, so that it drains: what it serves
goes on while its process does. One that is gone is out, too.

Kubernetes' rules, as its API concepts describe them: a list comes in pages and has a resource
version; a watch from there gives every later change. Bookmarks move the version on without a
change. A watch ends by its own time limit and is begun again at the last version. 410 (or an ERROR
event with that code) says that the version, or a list's next page, is too old: then the objects are
listed anew.

The service account's token is read anew for each call, since Kubernetes replaces it.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx
import orjson

from gateway.fleet.discovery import MAX_RANKS
from gateway.ports import DiscoveryFailure, Sets
from gateway.records.attempt import ClusterAccess, DiscoverySource, FoundEngine

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

SLICES: Final = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
PODS: Final = "/api/v1/namespaces/{}/pods"
POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
MODEL: Final = "sluice/model"
RANKS: Final = "sluice/ranks"
"""Annotations or labels of a pod that say what the configuration cannot for all pods."""

SLICE: Final = 100
"""Pods read between two turns of the requests."""

LACKING_SHOWN: Final = 5
"""Of a set, pods that the log names because they lack a port."""

_log = logging.getLogger("sluice.discovery")

Object = dict[str, Any]
Objects = Mapping[str, Object]
"""By name."""


class _Expired(Exception):
    """The resource version is too old."""


class _Collection:
    """The objects that match, by name, and the resource version that they are of."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = ""

    def apply(self, kind: str, changed: Object) -> None:
        """Raises DiscoveryFailure when there are too many objects, KeyError for what is none."""
        name = changed["metadata"]["name"]
        if kind == "DELETED":
            self.objects.pop(name, None)
            return
        changed["metadata"].pop("managedFields", None)  # the largest part, which nobody reads here
        self.objects[name] = changed
        if len(self.objects) > MAX_OBJECTS:
            raise DiscoveryFailure(f"more than {MAX_OBJECTS} objects match: select fewer")


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
                collection = await self._list(path, params)
                yield collection.objects
                changed = asyncio.Event()
                watching = asyncio.create_task(self._watch(path, params, collection, changed))
                watching.add_done_callback(partial(_set, changed))
                try:
                    while not watching.done():  # it may end during the pause
                        await changed.wait()
                        if watching.done():
                            break
                        await asyncio.sleep(TOGETHER_S)
                        changed.clear()
                        yield collection.objects
                    await watching
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
            except _Expired:
                await _pause()
            except (httpx.HTTPError, TimeoutError) as error:
                raise DiscoveryFailure(f"no answer for {path}: {type(error).__name__}") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = "no sense in the answer"
                raise DiscoveryFailure(f"{what} for {path}: {type(error).__name__}") from error

    async def _list(self, path: str, params: Mapping[str, str]) -> _Collection:
        """The objects now. Raises _Expired."""
        collection = _Collection()
        asked = {**params, "limit": str(PAGE)}
        for _ in range(MAX_PAGES):
            body = bytearray()
            async with asyncio.timeout(LIST_S), self._get(path, asked, LIST_S) as response:
                _check(path, response.status_code)
                async for data in response.aiter_bytes():
                    body += data
                    if len(body) > PAGE * MAX_OBJECT_BYTES:
                        raise DiscoveryFailure(f"{path} answers too much")
            page = orjson.loads(body)
            for item in page.get("items") or ():
                collection.apply("ADDED", item)
            metadata = page["metadata"]
            if not metadata.get("continue"):
                collection.version = metadata["resourceVersion"]
                return collection
            asked["continue"] = str(metadata["continue"])
            await asyncio.sleep(PAGE_PAUSE_S)
        raise DiscoveryFailure(f"{path} has more than {MAX_PAGES} pages")

    async def _watch(
        self,
        path: str,
        params: Mapping[str, str],
        collection: _Collection,
        changed: asyncio.Event,
    ) -> None:
        """Apply the changes since the collection's version, over as many watches as it takes.

        Raises _Expired.
        """
        loop = asyncio.get_running_loop()
        while True:
            limit_s = self._watch_s + random.randint(0, self._watch_s // 10)
            asked = {
                **params,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": collection.version,
                "timeoutSeconds": str(limit_s),
            }
            ends_s, rest = loop.time() + limit_s + SILENCE_S, b""
            async with self._get(path, asked, limit_s + SILENCE_S) as response:
                _check(path, response.status_code)
                async for data in response.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in filter(bytes.strip, lines):
                        event = orjson.loads(line)
                        if event["type"] == "ERROR":
                            _check(path, int(event["object"].get("code", 500)))
                            raise DiscoveryFailure(f"the watch of {path} ended with an error")
                        collection.version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            collection.apply(event["type"], event["object"])
                            changed.set()
                    if len(rest) > MAX_OBJECT_BYTES:
                        why = "names an object that is too large"
                        raise DiscoveryFailure(f"the watch of {path} {why}")
                    if loop.time() > ends_s:  # even if the server goes on
                        break
            await _pause()

    def _get(
        self, path: str, params: Mapping[str, str], read_s: float
    ) -> AbstractAsyncContextManager[httpx.Response]:
        access = self._access
        if access is None:
            raise DiscoveryFailure(
                "no Kubernetes API here: run as a pod with a service account, or start "
                "`kubectl proxy` and set SLUICE_KUBERNETES_URL to its URL"
            )
        headers = {}
        if access.token_file is not None:
            try:
                token = Path(access.token_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise DiscoveryFailure(f"no service account token: {error.strerror}") from error
            headers["authorization"] = f"Bearer {token}"
        if self._client is None:
            try:
                verify = ssl.create_default_context(cafile=access.ca_file)
            except OSError as error:
                raise DiscoveryFailure(f"{access.ca_file}: {error.strerror}") from error
            self._client = httpx.AsyncClient(
                base_url=access.url,
                verify=verify,
                limits=httpx.Limits(max_connections=None),  # each source holds one, or two
                trust_env=False,
            )
        timeout = httpx.Timeout(LIST_S, read=read_s)
        return self._client.stream(
            "GET", path, params=dict(params), headers=headers, timeout=timeout
        )


def _set(changed: asyncio.Event, _watching: asyncio.Task[None]) -> None:
    changed.set()


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


def sets_of_kubernetes(api: KubernetesApi, source: DiscoverySource, scheme: str) -> Sets:
    """The engines of a service, of pods or of an InferencePool."""
    namespace = source.namespace or api.namespace
    if source.kind == "service":
        return _of_service(api, source, namespace, scheme)
    if source.kind == "pods":
        return _of_pods(api, namespace, source.selector, (source.port,), scheme)
    return _of_pool(api, source.name, namespace, scheme)


async def _of_service(
    api: KubernetesApi, source: DiscoverySource, namespace: str, scheme: str
) -> Sets:
    labels = f"kubernetes.io/service-name={source.name}"
    async with aclosing(api.follow(SLICES.format(namespace), labels=labels)) as sets:
        async for slices in sets:
            yield engines_of_slices(slices.values(), source.port, scheme)


async def _of_pods(
    api: KubernetesApi, namespace: str, selector: str, ports: tuple[str, ...], scheme: str
) -> Sets:
    async with aclosing(api.follow(PODS.format(namespace), labels=selector)) as sets:
        async for pods in sets:
            engines: list[FoundEngine] = []
            lacking: list[str] = []
            left = iter([pod for _, pod in sorted(pods.items())])
            while part := list(islice(left, SLICE)):
                some, without = engines_of_pods(part, ports, scheme)
                engines += some
                lacking += without
                await asyncio.sleep(0)  # requests run in between
            named = ", ".join(lacking[:LACKING_SHOWN])
            if lacking and not engines:  # else a wrong name would take all engines out
                raise DiscoveryFailure(f"no ready pod has a port {ports[0]}: {named}")
            if lacking:
                _log.warning("%d ready pods lack port %s: %s", len(lacking), ports[0], named)
            yield tuple(engines)


async def _of_pool(api: KubernetesApi, name: str, namespace: str, scheme: str) -> Sets:
    """The pods that an InferencePool selects; anew when its specification changes."""
    pools = api.follow(POOLS.format(namespace), fields=f"metadata.name={name}")
    sets: Sets | None = None
    spec: Mapping[str, Any] | None = None
    next_pool = asyncio.ensure_future(anext(pools))
    next_set: asyncio.Future[tuple[FoundEngine, ...]] | None = None
    try:
        while True:
            waiting: set[asyncio.Future[Any]] = {next_pool}
            if next_set is not None:
                waiting.add(next_set)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if next_pool.done():
                named = next_pool.result().get(name)
                next_pool = asyncio.ensure_future(anext(pools))
                if named is None:
                    raise DiscoveryFailure(f"no InferencePool {name}")
                if named["spec"] != spec:
                    spec = named["spec"]
                    await _end(next_set, sets)
                    sets = _of_pods(api, namespace, *pool_selects(named), scheme)
                    next_set = asyncio.ensure_future(anext(sets))
            elif next_set is not None and sets is not None:
                engines = next_set.result()
                next_set = asyncio.ensure_future(anext(sets))
                yield engines
    finally:
        await _end(next_set, sets)
        await _end(next_pool, pools)


async def _end(step: asyncio.Future[Any] | None, steps: AsyncGenerator[Any, None] | None) -> None:
    """Cancel a step of a generator, and close it."""
    if step is not None:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    if steps is not None:
        await steps.aclose()


def engines_of_slices(slices: Iterable[Object], port: str, scheme: str) -> tuple[FoundEngine, ...]:
    """The ready endpoints of a service's EndpointSlices; a pod with both IPs counts by IPv4."""
    urls: dict[str, str] = {}
    for part in sorted(slices, key=lambda part: str(part.get("addressType"))):
        number = _port_of(part.get("ports") or (), port)
        for endpoint in part.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            address = endpoint["addresses"][0]
            target = endpoint.get("targetRef") or {}
            name = str(target.get("uid") or target.get("name") or address)
            urls.setdefault(name, f"{scheme}://{_host(address)}:{number}")
    return tuple(FoundEngine(urls=(url,)) for url in sorted(set(urls.values())))


def _port_of(ports: Iterable[Object], wanted: str) -> int:
    """The port of that name or number; the only one if there is one: a service's may differ."""
    named = [(str(port.get("name") or ""), int(port.get("port") or 0)) for port in ports]
    for name, number in named:
        if wanted and wanted in (name, str(number)):
            return number
    if len(named) == 1:
        return named[0][1]
    if not named:
        return int(wanted) if wanted.isdigit() else 0
    listed = ", ".join(f"{name}:{number}" for name, number in named)
    raise DiscoveryFailure(f"which port? the service has {listed}: add :PORT to the URL")


def engines_of_pods(
    pods: Iterable[Object], ports: tuple[str, ...], scheme: str
) -> tuple[tuple[FoundEngine, ...], list[str]]:
    """The ready pods, and the names of those that lack a port.

    Each port is a rank, if there are several.
    """
    engines, lacking = [], []
    for pod in pods:
        status, metadata = pod.get("status") or {}, pod["metadata"]
        address = status.get("podIP")
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        if not address or metadata.get("deletionTimestamp") or not ready:
            continue
        containers = (pod.get("spec") or {}).get("containers") or ()
        opened = [named for container in containers for named in container.get("ports") or ()]
        numbers = {named.get("name"): named.get("containerPort") for named in reversed(opened)}
        wanted = [port if port.isdigit() else numbers.get(port) for port in ports]
        if None in wanted:
            lacking.append(str(metadata["name"]))
            continue
        notes = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        text = str(notes.get(RANKS, ""))
        ranks = int(text) if len(text) <= 3 and text.isascii() and text.isdigit() else 0
        engines.append(
            FoundEngine(
                urls=tuple(f"{scheme}://{_host(address)}:{number}" for number in wanted),
                model=notes.get(MODEL),
                ranks=ranks if ranks <= MAX_RANKS else 0,  # 0: as the configuration says
            )
        )
    return tuple(engines), lacking


def pool_selects(pool: Object) -> tuple[str, tuple[str, ...]]:
    """(label selector, ports) of an InferencePool. Raises DiscoveryFailure."""
    spec = pool["spec"]
    selector = spec.get("selector") or {}
    labels = selector.get("matchLabels", selector)
    targets = spec.get("targetPorts") or [{"number": spec.get("targetPortNumber")}]
    ports = []
    for target in targets:
        nested = target.get("port")
        flat = target.get("number") or target.get("portNumber")
        ports.append(str(nested.get("number") if isinstance(nested, Mapping) else flat))
    if not labels or "None" in ports:
        raise DiscoveryFailure("the InferencePool has no selector or no target port")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())), tuple(ports)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
