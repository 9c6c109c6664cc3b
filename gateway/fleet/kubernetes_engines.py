"""Kubernetes objects -> engines: EndpointSlices of a service, pods, and InferencePools.

Ready endpoints and pods are in. One that terminates is out, so that it drains: what it serves
goes on while its process does. One that is gone is out, too.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from itertools import islice
from typing import Any, Final

from gateway.fleet.kubernetes import KubernetesApi, Object
from gateway.ports import DiscoveryFailure
from gateway.records.attempt import DiscoverySource, FoundEngine

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

Sets = AsyncGenerator[tuple[FoundEngine, ...], None]


class KubernetesDiscovery:
    """The Discovery of a service, of pods or of an InferencePool."""

    def __init__(self, api: KubernetesApi, source: DiscoverySource, scheme: str) -> None:
        self._api = api
        self._source = source
        self._scheme = scheme
        self._namespace = source.namespace or api.namespace

    def sets(self) -> Sets:
        if self._source.kind == "service":
            return self._service()
        if self._source.kind == "pods":
            return self._pods(self._source.selector, (self._source.port,))
        return self._pool()

    async def _service(self) -> Sets:
        name = self._source.name
        path = SLICES.format(self._namespace)
        labels = f"kubernetes.io/service-name={name}"
        async with aclosing(self._api.follow(path, labels=labels)) as sets:
            async for slices in sets:
                yield engines_of_slices(slices.values(), self._source.port, self._scheme)

    async def _pods(self, selector: str, ports: tuple[str, ...]) -> Sets:
        path = PODS.format(self._namespace)
        async with aclosing(self._api.follow(path, labels=selector)) as sets:
            async for pods in sets:
                found: list[FoundEngine] = []
                lacking: list[str] = []
                left = iter(sorted(pods.values(), key=_name_of))
                while part := list(islice(left, SLICE)):
                    engines, without = engines_of_pods(part, ports, self._scheme)
                    found += engines
                    lacking += without
                    await asyncio.sleep(0)  # requests run in between
                named = ", ".join(lacking[:LACKING_SHOWN])
                if lacking and not found:  # else a wrong name would take all engines out
                    raise DiscoveryFailure(f"no ready pod has a port {ports[0]}: {named}")
                if lacking:
                    _log.warning("%d ready pods lack port %s: %s", len(lacking), ports[0], named)
                yield tuple(found)

    async def _pool(self) -> Sets:
        """The pods that an InferencePool selects; anew when its specification changes."""
        path = POOLS.format(self._namespace)
        fields = f"metadata.name={self._source.name}"
        pools = self._api.follow(path, fields=fields)
        found: Sets | None = None
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
                    named = next_pool.result().get(self._source.name)
                    next_pool = asyncio.ensure_future(anext(pools))
                    if named is None:
                        raise DiscoveryFailure(f"no InferencePool {self._source.name}")
                    if named["spec"] != spec:
                        spec = named["spec"]
                        await _end(next_set, found)
                        found = self._pods(*pool_selects(named))
                        next_set = asyncio.ensure_future(anext(found))
                elif next_set is not None and found is not None:
                    engines = next_set.result()
                    next_set = asyncio.ensure_future(anext(found))
                    yield engines
        finally:
            await _end(next_set, found)
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
    found: dict[str, str] = {}
    for one in sorted(slices, key=lambda each: str(each.get("addressType"))):
        number = _port_of(one.get("ports") or (), port)
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            address = endpoint["addresses"][0]
            target = endpoint.get("targetRef") or {}
            name = str(target.get("uid") or target.get("name") or address)
            found.setdefault(name, f"{scheme}://{_host(address)}:{number}")
    return tuple(FoundEngine(urls=(url,)) for url in sorted(set(found.values())))


def _port_of(ports: Iterable[Object], wanted: str) -> int:
    """The port of that name or number; the only one if there is one: a service's may differ."""
    known = [(str(port.get("name") or ""), int(port.get("port") or 0)) for port in ports]
    for name, number in known:
        if wanted and wanted in (name, str(number)):
            return number
    if len(known) == 1:
        return known[0][1]
    if not known:
        return int(wanted) if wanted.isdigit() else 0
    listed = ", ".join(f"{name}:{number}" for name, number in known)
    raise DiscoveryFailure(f"which port? the service has {listed}: add :PORT to the URL")


def engines_of_pods(
    pods: Iterable[Object], ports: tuple[str, ...], scheme: str
) -> tuple[tuple[FoundEngine, ...], list[str]]:
    """The ready pods, and the names of those that lack a port.

    Each port is a rank, if there are several.
    """
    found, lacking = [], []
    for pod in sorted(pods, key=_name_of):
        status, metadata = pod.get("status") or {}, pod["metadata"]
        address = status.get("podIP")
        if not address or metadata.get("deletionTimestamp") or not _ready(status):
            continue
        numbers = [_number(pod, port) for port in ports]
        if None in numbers:
            lacking.append(_name_of(pod))
            continue
        notes = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        found.append(
            FoundEngine(
                urls=tuple(f"{scheme}://{_host(address)}:{number}" for number in numbers),
                model=notes.get(MODEL),
                ranks=_ranks(str(notes.get(RANKS, ""))),
            )
        )
    return tuple(found), lacking


def _ranks(text: str) -> int:
    """A number up to 256; 0, which is the configuration's, for anything else."""
    wellformed = len(text) <= 3 and text.isascii() and text.isdigit()
    return int(text) if wellformed and int(text) <= 256 else 0


def _name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def pool_selects(pool: Object) -> tuple[str, tuple[str, ...]]:
    """(label selector, ports) of an InferencePool. Raises DiscoveryFailure."""
    spec = pool["spec"]
    selector = spec.get("selector") or {}
    labels = selector.get("matchLabels", selector)
    targets = spec.get("targetPorts") or [{"number": spec.get("targetPortNumber")}]
    ports = tuple(str(_pool_port(target)) for target in targets)
    if not labels or "None" in ports:
        raise DiscoveryFailure("the InferencePool has no selector or no target port")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())), ports


def _pool_port(target: Object) -> object:
    nested = target.get("port")
    if isinstance(nested, Mapping):
        return nested.get("number")
    return target.get("number") or target.get("portNumber")


def _ready(status: Object) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )


def _number(pod: Object, port: str) -> str | None:
    """A port's number; a name is looked up in the pod's containers. None if it has none."""
    if port.isdigit():
        return port
    for container in (pod.get("spec") or {}).get("containers") or ():
        for named in container.get("ports") or ():
            if named.get("name") == port:
                return str(named["containerPort"])
    return None


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
