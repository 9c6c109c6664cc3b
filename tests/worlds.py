"""What sources of engines look at, in tests: a file, a DNS server, a Kubernetes API."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from gateway.fleet.discovery import sets_of_file
from gateway.fleet.discovery_dns import sets_of_dns
from gateway.fleet.kubernetes import PODS, POOLS, SLICES, KubernetesApi, sets_of_kubernetes
from gateway.ports import Sets
from gateway.records.attempt import ClusterAccess
from gateway.settings.worker import source_of
from tests.kube.discovery import KubeServer, pod, slice_of
from tests.name_server import NameServer

NAMESPACE = "ns"


class World(Protocol):
    """What a source looks at."""

    url: str
    """The discovery URL."""

    def sets(self) -> Sets:
        """What the source names from now on."""

    async def names(self, ips: Sequence[str]) -> None:
        """Have the source name exactly the engines at these addresses."""

    async def away(self, *, on: bool) -> None:
        """Have the source fail, or answer again."""


class FileWorld:
    """A file of engines."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self.port = port
        self.url = f"file://{path}"
        self.content = "[]"

    def sets(self) -> Sets:
        """See World."""
        return sets_of_file(str(self.path), every_s=0.01)

    async def names(self, ips: Sequence[str]) -> None:
        """See World."""
        self.content = json.dumps([f"http://{ip}:{self.port}" for ip in ips])
        self.path.write_text(self.content)

    async def away(self, *, on: bool) -> None:
        """See World."""
        self.path.write_text("{" if on else self.content)


class DnsWorld:
    """A DNS name, with SRV records or without."""

    def __init__(self, server: NameServer, port: int, *, srv: bool) -> None:
        self.server = server
        self.port = port
        self.srv = srv
        name = "_http._tcp.engines.test" if self.srv else f"engines.test:{port}"
        self.url = f"dns://{name}?server=127.0.0.1:{server.port}"

    def sets(self) -> Sets:
        """See World."""
        return sets_of_dns(source_of(self.url), "http")

    async def names(self, ips: Sequence[str]) -> None:
        """See World."""
        records = self.server.records
        records.clear()
        if self.srv and ips:
            hosts = {f"{ip.replace('.', '-')}.engines.test": ip for ip in ips}
            records["_http._tcp.engines.test", "SRV"] = [
                f"0 0 {self.port} {host}." for host in hosts
            ]
            records.update({(host, "A"): [ip] for host, ip in hosts.items()})
        elif ips:
            records["engines.test", "A"] = list(ips)

    async def away(self, *, on: bool) -> None:
        """See World."""
        self.server.away = on


class KubeWorld:
    """A service, pods or an InferencePool of a Kubernetes API."""

    def __init__(self, server: KubeServer, token: Path, url: str, port: int) -> None:
        self.server = server
        self.port = port
        self.url = url
        self.ips: set[str] = set()
        access = ClusterAccess(url=server.url, namespace=NAMESPACE, token_file=str(token))
        self.api = KubernetesApi(access, watch_s=1)

    def sets(self) -> Sets:
        """See World."""
        return sets_of_kubernetes(self.api, source_of(self.url), "http")

    async def names(self, ips: Sequence[str]) -> None:
        """See World."""
        if "service" in self.url:
            path = SLICES.format(NAMESPACE)
            await self.server.put(path, slice_of("engines-a", "engines", *ips, port=self.port))
            return
        path = PODS.format(NAMESPACE)
        for ip in self.ips - set(ips):
            await self.server.delete(path, f"pod-{ip}")
        for ip in sorted(set(ips) - self.ips):
            await self.server.put(path, pod(f"pod-{ip}", ip, port=self.port))
        self.ips = set(ips)

    async def away(self, *, on: bool) -> None:
        """See World."""
        self.server.away = on
        await self.server.cut()


KUBE = {
    "service": "k8s://service/engines.ns:http",
    "pods": "k8s://pods?selector=app%3Dvllm&port=http&namespace=ns",
    "inferencepool": "inferencepool://engines.ns",
}
KINDS = ("file", "a", "srv", *KUBE)


def inference_pool(port: int) -> dict[str, Any]:
    """An InferencePool that selects all pods of app vllm."""
    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": port}]}
    return {"metadata": {"name": "engines"}, "spec": spec}


@asynccontextmanager
async def world_of(kind: str, tmp_path: Path, port: int) -> AsyncIterator[World]:
    """A world whose engines listen on this port."""
    async with AsyncExitStack() as stack:
        if kind == "file":
            yield FileWorld(tmp_path / "workers.yaml", port)
        elif kind in ("a", "srv"):
            server = await stack.enter_async_context(NameServer().serving())
            yield DnsWorld(server, port, srv=kind == "srv")
        else:
            kube = await stack.enter_async_context(KubeServer().serving())
            token = tmp_path / "token"
            token.write_text(kube.token)
            await kube.put(POOLS.format(NAMESPACE), inference_pool(port))
            world = KubeWorld(kube, token, KUBE[kind], port)
            stack.push_async_callback(world.api.close)
            yield world
