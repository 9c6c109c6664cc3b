"""`python -m bench controller`: a controller that starts on a full cluster, and one change.

The API server is emulated, in a process of its own; the controller runs in this one, Redis beside
it. From empty: from the start until the status of each object is written and the gateways can read
all. After a change: until the status of the object that changed is written and read.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from bench.common.fleet import RedisServer
from bench.common.report import Report, Row, at_most
from controller.kube import KubeApi, connection
from controller.loop import Controller
from controller.records import TOKEN_ENTITLEMENTS, TOKEN_POOLS, Call
from gateway.store.redis.cluster import ClusterStore
from tests.controlling import SPACE
from tests.kube.cluster import ADMIN

POOLS: Final = 100
SIZES: Final = (100, 1_000)
EMPTY_S: Final = 60.0
CHANGE_S: Final = 5.0
TARGET: Final = 1_000
"""Entitlements of the rows that have a target."""


def run() -> Report:
    """All sizes."""
    rows: list[Row] = []
    for size in SIZES:
        rows += asyncio.run(_measured(size))
    return Report(name="controller", rows=rows)


async def _measured(size: int) -> list[Row]:
    who = f"{POOLS} pools, {size:,} entitlements"
    with RedisServer() as server, _cluster(size) as url:
        cluster = connection(
            KubeConfig.from_one(cluster=Cluster(server=url), user=User(token=ADMIN))
        )
        api, store = KubeApi(cluster, SPACE), ClusterStore(server.url)
        own_s, began_s = time.process_time(), time.monotonic()
        async with _controlling(KubeApi(cluster, SPACE), ClusterStore(server.url)):

            async def all_written() -> bool:
                pools = (await api.list(TOKEN_POOLS)).objects
                bound = sum(
                    it.get("status", {}).get("entitlements", {}).get("bound", 0) for it in pools
                )
                state = await store.read() if bound == size else None
                return state is not None and len(state.entitlements) == size

            empty_s, own_s = await _until(all_written, began_s), time.process_time() - own_s
            await asyncio.sleep(10 + size / 200)  # events are sent, and a pass finds nothing to do
            rest_s = time.process_time()
            await asyncio.sleep(6)
            rest_s = (time.process_time() - rest_s) / 6
            changed = Call(
                verb="patch",
                resource=TOKEN_ENTITLEMENTS,
                name="entitlement-7",
                body={"spec": {"resources": {"concurrency": 2}}},
            )
            began_s, patched = time.monotonic(), await api.make(changed)
            generation = patched["metadata"]["generation"]

            async def one_written() -> bool:
                found = await api.get(TOKEN_ENTITLEMENTS, "entitlement-7")
                state = await store.read()
                return found["status"]["observedGeneration"] == generation and any(
                    it.name == "entitlement-7" and it.fields["concurrency"] == 2
                    for it in (() if state is None else state.entitlements)
                )

            change_s = await _until(one_written, began_s)
        await api.close()
        await store.close()
    empty = f"{who}: from empty, s", empty_s
    change = f"{who}: after one change, s", change_s
    note = f"CPU of the controller {own_s:.1f} s"
    return [
        at_most(*empty, EMPTY_S, note) if size == TARGET else Row(*empty, note),
        at_most(*change, CHANGE_S) if size == TARGET else Row(*change),
        Row(f"{who}: CPU at rest, ms per s", rest_s * 1e3, "heartbeats and the Lease"),
    ]


async def _until(holds: Callable[[], Awaitable[bool]], began_s: float) -> float:
    while not await holds():  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


@asynccontextmanager
async def _controlling(api: KubeApi, store: ClusterStore) -> AsyncIterator[None]:
    controller = Controller(api, store, allocator="internal", identity="bench")
    running = asyncio.ensure_future(controller.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()
        await store.close()


@contextmanager
def _cluster(size: int) -> Iterator[str]:
    """URL of an emulated API server with so many entitlements."""
    command = [sys.executable, "-m", "bench.controller.cluster", str(POOLS), str(size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        yield process.stdout.readline().strip()
        process.stdin.close()
