"""`bench changing-fleet scaling`: engines follow sluice_pool_desired_replicas, 1x, 4x, 1x.

A gateway finds engines by the EndpointSlices of a Kubernetes API. A scaler reads the metric as
KEDA does, and adds or removes endpoints; an engine that goes first asks the gateway to drain it, as
its preStop hook does. Clients of three classes send streams at random times, and come again as a
refusal's retry-after says. The planner says how many engines each load needs.
"""

import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import yaml

from bench.changing_fleet import fleet
from bench.changing_fleet.fleet import ADMIN, Engines, gateway, until_workers
from bench.common.fleet import read_metrics
from bench.common.report import Report, Row, at_least, at_most, equals
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import NodeProfile
from planner.records import Question
from planner.workload.synthetic import synthetic
from sluice.hash_key import hashed_key
from tests.worlds import KubeWorld, World, world_of

STEP_S: Final = 0.4
"""Between two parts of an answer; 12 parts are an answer."""
SLOTS: Final = 8
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
    max_num_seqs=SLOTS,
)


class Seen(msgspec.Struct):
    """What one run showed."""

    replicas: list[tuple[float, int]] = []
    """(seconds since the load began, engines), at each poll."""
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    cut: int = 0
    """Streams that ran at an engine when its preStop had answered."""
    slo: dict[str, float] = {}
    """Class -> share of streams within the target."""


def run() -> Report:
    """The whole bench."""
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(load_step(Path(folder)))
    return Report(name="changing-fleet scaling", rows=list(rows_of(seen)))


def rows_of(seen: Seen) -> Iterator[Row]:
    """The run, judged."""
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
