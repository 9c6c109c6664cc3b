"""4 engines grow to 12 and shrink to 2 by every source under streams; 1,000 reloads, 100 bad.

Engines stream in this process, the gateway is a process of its own.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx
import yaml

from bench.changing_fleet.fleet import ADMIN, Engines, Streams, gateway, until_workers
from bench.common.report import Row, at_least, at_most, equals
from bench.common.steps import scaled, scaled_s
from tests.worlds import KINDS, KubeWorld, world_of

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
