"""4 engines grow to 12 and shrink to 2 by every source under streams; 1,000 reloads, 100 bad.

Engines stream in this process, the gateway is a process of its own.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import yaml

from bench.changing_fleet import fleet
from bench.changing_fleet.fleet import ADMIN, Engines, Streams, gateway, until_workers
from bench.common.fleet import read_metrics
from bench.common.report import Report, Row, at_least, at_most, equals, scaled, scaled_s
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import NodeProfile
from planner.records import Question
from planner.workload.synthetic import synthetic
from sluice.hash_key import hashed_key
from tests.worlds import KINDS, KubeWorld, World, world_of

CLIENTS = 100
"""Each streams one answer of a quarter of a second after another."""
SLOTS = {"max_num_seqs": 64}
"""Of an engine: two take all clients."""
WARM_S = scaled_s(30.0, 8.0)
BAD_EVERY = 10
POLICIES = ("quartz", "least-loaded", "sticky", "quartz", "round-robin")


def sources() -> list[Row]:
    """Growing and shrinking by every kind of source."""
    rows: list[Row] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(grown_and_shrunk(kind, Path(folder)))
    return rows


def reloads() -> list[Row]:
    """The configuration, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(reloaded(scaled(1000, 50), Path(folder)))


async def grown_and_shrunk(kind: str, folder: Path) -> list[Row]:
    """4 engines, then 12, then 2, named by one kind of source."""
    engines = Engines()
    async with engines.listening(12), world_of(kind, folder, engines.port) as world:
        ips = [engines.address(number) for number in range(1, 13)]
        ids = [f"{ip}:{engines.port}" for ip in ips]
        await world.names(ips[:4])
        env = None
        if isinstance(world, KubeWorld):
            world.server.token = ""
            env = {**os.environ, "SLUICE_KUBERNETES_URL": world.server.url}
        async with gateway(folder, world.url, env, SLOTS) as url:
            await until_workers(url, set(ids[:4]))
            async with Streams(url, CLIENTS) as streams:
                began_s = time.monotonic()
                await asyncio.sleep(3)
                # From here on, whenever they are seen: a busy machine sees them late.
                beginning = asyncio.create_task(_share_of_new(engines, ips, 5.0))
                await world.names(ips)
                await until_workers(url, set(ids))
                first = await beginning
                await asyncio.sleep(WARM_S - 5)
                last = await _share_of_new(engines, ips, 5.0)
                await world.names(ips[10:])
                await until_workers(url, set(ids[10:]))
                await asyncio.sleep(2)
                rate_per_s = streams.completed / (time.monotonic() - began_s)
    even = 8 / 12
    return [
        equals(f"{kind}: requests that failed", len(streams.failures), 0),
        Row(f"{kind}: streams/s", rate_per_s, f"aim: 300; {streams.completed} streams"),
        at_most(f"{kind}: share of 8 new workers in their first 5 s", first, even / 2),
        at_least(f"{kind}: their share after 30 s", last, 0.9 * even, f"even is {even:.2f}"),
    ]


async def _share_of_new(engines: Engines, ips: list[str], seconds: float) -> float:
    before = dict(engines.served)
    await asyncio.sleep(seconds)
    served = [engines.served[ip] - before.get(ip, 0) for ip in ips]
    return sum(served[4:]) / max(1, sum(served))


async def reloaded(count: int, folder: Path) -> list[Row]:
    """Reloads that change workers, limits, policies, pools and models; one in ten is bad."""
    engines = Engines()
    path = folder / "sluice.yaml"
    refused = 0
    async with engines.listening(8):
        urls = [f"http://{engines.address(n)}:{engines.port}" for n in range(1, 9)]
        small, other = ({"url": each, "model": "m"} for each in urls[6:])
        async with (
            gateway(folder, urls[:2], decisions_kept=100) as url,
            httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=30) as client,
            Streams(url, CLIENTS) as streams,
        ):
            config = yaml.safe_load(path.read_text())
            served = config["models"][0]
            pool = served["pools"]["all"]
            early_mib = late_mib = 0.0
            for number in range(count):
                pool["workers"] = urls[: 1 + number % 6]
                pool["max_num_seqs"] = 8 + number % 3
                served["scheduling"]["policy"] = POLICIES[number % len(POLICIES)]
                served["pools"] = {"all": pool}
                if number % 4 == 1:
                    served["pools"][f"small-{number}"] = {
                        **pool,
                        "max_model_len": 4096,
                        "workers": [small],
                    }
                config["models"] = [served]
                if number % 3 == 1:
                    pools = {"all": {**pool, "workers": [other]}}
                    config["models"].append({"name": f"other-{number}", "pools": pools})
                text = yaml.safe_dump(config)
                bad = number % BAD_EVERY == BAD_EVERY - 1
                path.write_text(text.replace("max_num_seqs", "max_num_seq") if bad else text)
                answer = await client.post("/admin/reload")
                refused += answer.status_code == 400
                if number == count // 5:
                    early_mib = await _memory_mib(url)
            late_mib = await _memory_mib(url)
    return [
        equals("reloads: requests that failed", len(streams.failures), 0),
        equals("reloads: bad files that were refused", refused, count // BAD_EVERY),
        at_least("reloads: requests", streams.completed, 1000),
        at_most("reloads: MiB more after the last four fifths", late_mib - early_mib, 10),
    ]


async def _memory_mib(url: str) -> float:
    """Resident memory of the gateway that listens there; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0.0
    port = f":{int(url.rpartition(':')[2]):04X} "
    return await asyncio.to_thread(_resident_mib, port)


def _resident_mib(port: str) -> float:
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    inodes = {f"socket:[{line.split()[9]}]" for line in lines if port in line and " 0A " in line}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            owns = any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir())
            status = (process / "status").read_text(encoding="utf-8") if owns else ""
        except OSError:
            continue
        if "VmRSS:" in status:
            return int(status.split("VmRSS:")[1].split()[0]) / 1024
    return 0.0


# -- `bench changing-fleet scaling`: engines follow sluice_pool_desired_replicas, 1x, 4x, 1x


STEP_S: Final = 0.4
"""Between two parts of an answer; 12 parts are an answer."""
SCALED_SLOTS: Final = 8
MAX_WORKERS: Final = 10
RATE: Final = 1.75
SLO_MS: Final = 2_000
COOLDOWN_S: Final = 20.0
PHASES: Final = ((1, 30.0), (4, 70.0), (1, 80.0))
"""Times the rate, for so many seconds."""
POLL_S: Final = 2.0
CLASSES: Final = ("guaranteed", "elastic", "spot")
NODE: Final = NodeProfile(
    name="streaming",
    gpu="none",
    model="m",
    gpus=1,
    w_s=STEP_S,
    h_s_per_token=1e-9,
    kv_tokens=1 << 20,
    max_num_seqs=SCALED_SLOTS,
)


class Seen(msgspec.Struct):
    """What one scaling showed."""

    replicas: list[tuple[float, int]] = []
    """(seconds since the load began, engines), at each poll."""
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    cut: int = 0
    """Streams that ran at an engine when its preStop had answered."""
    slo: dict[str, float] = {}
    """Class -> share of streams within the target."""


def scaling() -> Report:
    """The whole bench."""
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(load_step(Path(folder)))
    return Report(name="changing-fleet scaling", rows=list(rows_of(seen)))


def rows_of(seen: Seen) -> Iterator[Row]:
    """The scaling, judged."""
    refused = ", ".join(f"{name} {seen.refused[name]}" for name in CLASSES)
    yield equals("requests that failed", seen.outcomes["failed"], 0)
    yield at_least("requests", seen.outcomes["done"], 100, f"asked to come again: {refused}")
    yield equals("streams at engines that stopped", seen.cut, 0)
    yield at_most("changes of direction", turns([n for _, n in seen.replicas]), 2)
    begun_s = 0.0
    for times, lasts_s in PHASES:
        settled = [n for at_s, n in seen.replicas if 0 < at_s - begun_s <= lasts_s][-1]
        asked = planned(times * RATE)
        metric = f"at {times}x: engines off the planner's answer"
        yield at_most(metric, abs(settled - asked), 1, f"{settled} engines, planned {asked}")
        begun_s += lasts_s
    for name, share in seen.slo.items():
        yield Row(f"{name}: streams within {SLO_MS} ms, %", 100 * share)


def turns(replicas: list[int]) -> int:
    """How often a series changes its direction."""
    changes = [b - a for a, b in pairwise(replicas) if a != b]
    return sum(a * b < 0 for a, b in pairwise(changes))


def planned(rate_per_s: float) -> int:
    """Engines that the planner asks for."""
    goals = Goals(rate_per_s=rate_per_s, ttft_s=SLO_MS / 1000, least_nodes=1)
    workload = synthetic("prompt=60,answer=12,spread=0.1")
    found = make_plan(Question(workload=workload, goals=goals, nodes=(NODE,), most_pools=1))
    return found.chosen.nodes


async def load_step(folder: Path, phases: tuple[tuple[int, float], ...] = PHASES) -> Seen:
    """The load rises and falls; the scaler follows the metric."""
    fleet.STEP_S = STEP_S
    engines, seen = Engines(), Seen()
    async with engines.listening(MAX_WORKERS), world_of("service", folder, engines.port) as world:
        assert isinstance(world, KubeWorld)
        world.server.token = ""
        await world.names([engines.address(1), engines.address(2)])
        env = {**os.environ, "SLUICE_KUBERNETES_URL": world.server.url}
        async with gateway(folder, world.url, env, entitlements=_entitlements()) as url:
            await until_workers(url, {f"{engines.address(n)}:{engines.port}" for n in (1, 2)})
            await _bound(folder, url)
            scaling = asyncio.create_task(scale(url, world, engines, seen))
            await offer(url, phases, seen)
            scaling.cancel()
            seen.slo = attainment(read_metrics(url))
    return seen


def _entitlements() -> list[dict[str, Any]]:
    """One for each class; what is reserved fits the first two engines."""
    common = {"model": "m", "slo_target_ms": SLO_MS}
    slots = {
        "guaranteed": {"concurrency": 8},
        "elastic": {"concurrency": 2, "max_concurrency": 200},
        "spot": {"max_concurrency": 200},
    }
    return [
        {
            "name": name,
            "tenant": name,
            "service_class": name,
            "api_keys": [hashed_key(f"sk-{name}")],
            **common,
            **slots[name],
        }
        for name in CLASSES
    ]


async def _bound(folder: Path, url: str) -> None:
    """Give the pool bounds and a short cooldown, by a reload."""
    path = folder / "sluice.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    bounds = {"min": 1, "max": MAX_WORKERS, "cooldown_s": COOLDOWN_S}
    config["models"][0]["pools"]["all"]["replicas"] = bounds
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    async with httpx.AsyncClient(base_url=url, headers=ADMIN) as client:
        (await client.post("/admin/reload")).raise_for_status()


async def scale(url: str, world: World, engines: Engines, seen: Seen) -> None:
    """Follow the metric until cancelled."""
    loop = asyncio.get_running_loop()
    begun_s, running = loop.time(), 2
    async with asyncio.TaskGroup() as stopping:
        while True:
            wanted = await _desired(url) or running
            for number in range(wanted + 1, running + 1):
                stopping.create_task(_stop(url, engines, engines.address(number), seen))
            if wanted != running:
                await world.names([engines.address(n) for n in range(1, wanted + 1)])
            running = wanted
            seen.replicas.append((loop.time() - begun_s, running))
            await asyncio.sleep(POLL_S)


async def _desired(url: str) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        page = (await client.get("/metrics")).text
    series = 'sluice_pool_desired_replicas{model="m",pool="all"} '
    return next(int(float(x.split()[-1])) for x in page.splitlines() if x.startswith(series))


async def _stop(url: str, engines: Engines, ip: str, seen: Seen) -> None:
    """preStop, and then the end of an engine."""
    async with httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=60) as client:
        await client.post(f"/admin/workers/{ip}:{engines.port}/drain?wait=1")
    seen.cut += engines.running[ip]


async def offer(url: str, phases: tuple[tuple[int, float], ...], seen: Seen) -> None:
    """Send streams at random times, and wait for the last."""
    loop, draw = asyncio.get_running_loop(), random.Random(1)
    next_s = loop.time()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as clients,
    ):
        for times, lasts_s in phases:
            ends_s = next_s + lasts_s
            while next_s < ends_s:
                next_s += draw.expovariate(times * RATE)
                await asyncio.sleep(next_s - loop.time())
                name = draw.choices(CLASSES, (1, 4, 5))[0]
                clients.create_task(_ask(client, name, draw.random(), seen))


async def _ask(client: httpx.AsyncClient, name: str, salt: float, seen: Seen) -> None:
    """One stream; a refusal is asked again when it says."""
    message = {"role": "user", "content": f"{salt} " + "Tell me about the sea. " * 8}
    body = {"model": "m", "stream": True, "max_tokens": 12, "messages": [message]}
    headers = {"authorization": f"Bearer sk-{name}"}
    for _ in range(10):
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 429:
            break
        seen.refused[name] += 1
        await asyncio.sleep(float(answer.headers["retry-after-ms"]) / 1000)
    whole = answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    seen.outcomes["done" if whole else "failed"] += 1


def attainment(page: Mapping[str, float]) -> dict[str, float]:
    """Class -> share of its streams within the target."""
    found = {}
    for name in CLASSES:
        met, missed = (
            sum(
                value
                for series, value in page.items()
                if series.startswith("sluice_slo_requests_total{")
                and f'entitlement="{name}"' in series
                and f'met="{said}"' in series
            )
            for said in ("true", "false")
        )
        found[name] = met / max(1.0, met + missed)
    return found
