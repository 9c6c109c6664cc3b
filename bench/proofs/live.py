"""Cycles of the scene on real processes: mock engines, a gateway, and clients over sockets."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import httpx
import msgspec
import orjson

from bench.common.fleet import ADMIN_KEY, MODEL
from bench.common.raw_client import TimedAnswer, TimedLoad, TimedRequest
from bench.common.report import quantile
from bench.proofs.scene import ENGINE, LOADS, Mutation, demand, written
from gateway.records.entitlement import BACKFILL, OWN_LIMITS
from planner.profile import NodeProfile
from sluice.children import Children, free_ports

LATE_S: Final = 0.3
LATE_AT: Final = 0.95
"""Beyond this delay (P95) of clients, gateway or engines a cycle tells nothing, and is repeated."""
TRIES: Final = 4
PROBE_S: Final = 0.4
JOINED_S: Final = 2.0
"""Until new engines have been probed."""
LOGGED_S: Final = 0.5
"""Until the last request is in the log."""


class Attainment(msgspec.Struct, frozen=True):
    """An entitlement in live cycles."""

    requests: int
    lost: Mapping[str, int]
    """Not served in time, by reason."""

    @property
    def losses(self) -> int:
        """Over all reasons."""
        return sum(self.lost.values())

    @property
    def share(self) -> float:
        """Served in time."""
        return 1 - self.losses / max(1, self.requests)

    def __add__(self, other: "Attainment") -> "Attainment":
        lost = dict(Counter(self.lost) + Counter(other.lost))
        return Attainment(self.requests + other.requests, lost)


NOTHING: Final = Attainment(0, {})


class Site:
    """Engines and a gateway, kept from cycle to cycle."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._engines: dict[tuple[str, int, int], str] = {}
        """(pool, slots, place) -> URL."""
        self._served: dict[str, list[str]] = {}
        """The engines of the gateway that runs, by pool."""
        self._gateway: subprocess.Popen[bytes] | None = None
        self._port = free_ports(1)[0]
        self._repeat = count()
        self.recorded = b""
        """The request log of the last cycle."""
        self.starved: list[str] = []
        """Cycles that were repeated, and how late they were."""

    def __enter__(self) -> Self:
        self._children = self._stack.enter_context(Children())
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._log, self.profile = self.folder / "log.jsonl", self.folder / "node.json"
        self._log.touch()
        names = ("name", "w_s", "h_s_per_token", "prefill_s_per_token")
        timing = {name: getattr(ENGINE, name) for name in names}
        kv_tokens = ENGINE.kv_blocks * ENGINE.block_tokens
        node = NodeProfile(gpu="mock", model="mock", gpus=1, kv_tokens=kv_tokens, **timing)
        document = {**msgspec.structs.asdict(node), "engine": ENGINE}
        self.profile.write_bytes(msgspec.json.encode(document))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, mutation: Mutation, cycle: int) -> dict[str, Attainment]:
        """What each entitlement got in a cycle."""
        config, rate = mutation.config(), mutation.rate
        self._configure(config)
        for _ in range(TRIES):
            logged = self._log.stat().st_size
            asks = [
                msgspec.structs.replace(ask, at_s=ask.at_s / rate)
                for ask in demand(cycle, next(self._repeat))
            ]
            seen, late_s = asyncio.run(self._once(asks))
            if late_s <= LATE_S:
                break
            self.starved.append(f"{mutation.name}: {late_s:.2f} s late")
        time.sleep(LOGGED_S)
        self.recorded = self._log.read_bytes()[logged:]
        terms = config["entitlements"]
        return {
            owner: _attainment(terms.get(owner), [a for a in seen if a.ask.client == owner])
            for owner in LOADS
        }

    async def _once(self, asks: Sequence[TimedRequest]) -> tuple[list[TimedAnswer], float]:
        """The answers, and how slow clients, gateway and engines were meanwhile."""
        urls = [self._url, *(url for pool in self._served.values() for url in pool)]
        load = TimedLoad([self._url])
        probes = [asyncio.create_task(_probe(int(url.rpartition(":")[2]))) for url in urls]
        await load.open_loop(asks)
        for probe in probes:
            probe.cancel()
        delays = [[a.sent_s - a.ask.at_s for a in load.seen], *await asyncio.gather(*probes)]
        return load.seen, max(quantile(each, LATE_AT) for each in delays)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _configure(self, config: Mapping[str, Any]) -> None:
        """Have the configuration in force, by a reload: the gateway keeps what it has learned."""
        urls = self._start_engines(config["model"]["pools"])
        server = {"host": "127.0.0.1", "port": self._port, "admin_key": ADMIN_KEY}
        more = {"server": server, "request_log": {"path": str(self._log)}}
        file, new = self.folder / "sluice.yaml", self.folder / "new.yaml"
        new.write_text(written({**config, **more}, urls), "utf-8")
        new.replace(file)
        changed, self._served = urls != self._served, urls
        if self._gateway is None:
            command = [sys.executable, "-m", "sluice", "serve", "-c", str(file)]
            self._gateway = self._children.start([*command, "--log-level", "error"], quiet=True)
        else:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            address = f"{self._url}/admin/reload"
            httpx.post(address, headers=headers, timeout=60.0, trust_env=False).raise_for_status()
            time.sleep(JOINED_S * changed)
        self._children.wait_for(f"{self._url}/ready")

    def _start_engines(self, pools: Mapping[str, Any]) -> dict[str, list[str]]:
        for name, pool in pools.items():
            for place in range(pool["workers"]):
                key = (name, pool["max_num_seqs"], place)
                if key not in self._engines:
                    self._engines[key] = self._start_engine(pool)
                    self._children.wait_for(f"{self._engines[key]}/health")
        return {
            name: [self._engines[name, pool["max_num_seqs"], i] for i in range(pool["workers"])]
            for name, pool in pools.items()
        }

    def _start_engine(self, pool: Mapping[str, Any]) -> str:
        (port,) = free_ports(1)
        command = [
            *(sys.executable, "-m", "sluice", "mock", "--port", str(port)),
            *("--model", MODEL, "--profile-file", str(self.profile)),
            *("--max-model-len", str(pool["max_model_len"])),
            *("--max-num-seqs", str(pool["max_num_seqs"])),
        ]
        self._children.start(command, quiet=True)
        return f"http://127.0.0.1:{port}"


async def _probe(port: int) -> list[float]:
    """How long a process took each time to answer that it lives, until this is cancelled."""
    took_s: list[float] = []
    try:
        while True:
            begin_s = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: proofs\r\nconnection: close\r\n\r\n")
            await reader.read()
            writer.close()
            took_s.append(time.monotonic() - begin_s)
            await asyncio.sleep(PROBE_S)
    except asyncio.CancelledError:
        return took_s


def _attainment(
    entitlement: Mapping[str, Any] | None, answers: Sequence[TimedAnswer]
) -> Attainment:
    """By the promise of `sluice prove`: served in time; backfill is promised no capacity."""
    if entitlement is None:
        return Attainment(len(answers), {"not in the file": len(answers)})
    lost = Counter(_loss(entitlement, answer) for answer in answers)
    if entitlement.get("service_class") in BACKFILL:
        promised = {"", "late", "context_length_exceeded", *OWN_LIMITS}
        lost = Counter({why: count for why, count in lost.items() if why in promised})
    requests = lost.total()
    del lost[""]
    return Attainment(requests, dict(lost))


def _loss(entitlement: Mapping[str, Any], answer: TimedAnswer) -> str:
    """Why a request was not served in time; empty if it was."""
    if answer.status != 200 or not answer.whole or answer.first_s is None:
        _, given, value = answer.head.partition(b"x-sluice-reason: ")
        return value.split(b"\r")[0].decode() if given else f"status {answer.status}"
    tokens = orjson.loads(answer.ask.body)["mock_output_tokens"]
    tpot_s = (answer.ended_s - answer.first_s) / max(1, tokens - 1)
    late = answer.first_s > entitlement["slo_target_ms"] / 1000
    return "late" if late or tpot_s > entitlement.get("slo_tpot_ms", 1e9) / 1000 else ""
