"""The soak's gateway, its engines, and their state as seen from outside.

Three models: one on C engines, which bears the bulk; one on four mock engines, of which two fail
now and then; one on a mock engine of four slots, so that requests wait.
"""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from bench.common.fleet import read_metrics
from bench.common.gateway_books import gauge, held
from bench.common.tools import (
    MODEL,
    Figures,
    HttpLoad,
    bodies,
    cpu_ns,
    everything,
    rss_kib,
    serve_command,
    start_engines,
    tree,
)
from sluice.children import Children, free_ports

MOCKED: Final = "mocked-model"
TIGHT: Final = "tight-model"
SLOTS: Final = 4
"""Of the tight model's engine."""
WINDOW_TOKENS: Final = 65_536
PREFIXES: Final = 8_192
"""In the indexes of the soak's own models: what few requests can fill (`fill`)."""
FAILS: Final = "500@0.01,reset-before@0.01,reset-mid:4@0.02,stall:4@0.005,busy@0.01"
"""Of each request to the two engines that fail."""
TIMEOUTS: Final = {"connect_s": 1.0, "first_byte_s": 30.0, "idle_s": 2.0}
"""Short, so that an engine's stall is over soon."""
TICK_US: Final = 2000
_ENTITLEMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "visitor": {"model": MOCKED},
    "few": {"model": MOCKED, "max_concurrency": 2},
    "queued": {"model": TIGHT},
    "metered": {"model": TIGHT, "service_class": "elastic", "tokens_per_second": 40},
}


def key_of(entitlement: str) -> str:
    """The API key of one of the soak's own entitlements."""
    return f"sk-{entitlement}"


class GatewaySample(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one moment."""

    at_s: float
    """Since the load began."""
    rss_kib: int
    """Of its process tree."""
    fds: int
    cpu_s: float
    leases: float
    waiting: float


class SoakGateway:
    """One gateway with everything on, and its engines."""

    def __init__(self, folder: Path, children: Children, engine: Path) -> None:
        """Starts them all."""
        self.port, *mock_ports, tight_port = free_ports(6)
        self.url = f"http://127.0.0.1:{self.port}"
        self.failing = [f"127.0.0.1:{port}" for port in mock_ports[:2]]
        """The engines that fail now and then, by the name that the request log gives them."""
        self.engine_ports = start_engines(children, engine, 4, TICK_US)
        for number, port in enumerate(mock_ports):
            fails = ("--fail", FAILS) if number < 2 else ()
            children.start(_mock(port, MOCKED, WINDOW_TOKENS, 64, *fails), quiet=True, silent=True)
        children.start(_mock(tight_port, TIGHT, 8192, SLOTS), quiet=True, silent=True)
        self.mock_urls = [f"http://127.0.0.1:{port}" for port in (*mock_ports, tight_port)]
        for url in self.mock_urls:
            children.wait_for(f"{url}/health")
        urls = [f"http://127.0.0.1:{port}" for port in self.engine_ports]
        file = everything(folder, self.port, urls)
        _extend(file, self.mock_urls)
        self.log = folder / f"requests-{self.port}.jsonl"
        self.usage = folder / f"usage-{self.port}.jsonl"
        self._process = children.start(serve_command(file), quiet=True, silent=True)
        children.wait_for(f"{self.url}/ready")

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def sample(self, at_s: float) -> GatewaySample:
        """What it takes now."""
        page = read_metrics(self.url)
        return GatewaySample(
            at_s=at_s,
            rss_kib=rss_kib(self.pid),
            fds=self.fds(),
            cpu_s=self.cpu_s(),
            leases=held(page),
            waiting=gauge(page, "sluice_queue_depth"),
        )

    def cpu_s(self) -> float:
        """So far, of its process tree."""
        return cpu_ns(self.pid) / 1e9

    def fds(self) -> int:
        """Open in its process tree."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in tree(self.pid))

    def running_at_engines(self) -> int:
        """Sequences running or waiting in the mock engines."""
        found = 0.0
        for url in self.mock_urls:
            for series, value in read_metrics(url).items():
                if series.startswith("vllm:num_requests_"):
                    found += value
        return int(found)


COMPRESSION: Final = {"enabled": True, "when": "any", "only_when_busy": False}
"""The soak's borderline prompts ask no question over passages, and its pools are never full."""


def _extend(file: Path, mock_urls: list[str]) -> None:
    """Add the soak's own models and entitlements to the configuration."""
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    whole, tight = mock_urls[:-1], mock_urls[-1:]
    base = next(model for model in config["models"] if model["name"] == MODEL)
    shared = {name: value for name, value in base.items() if name not in {"name", "pools"}}
    shared["scheduling"] = {**base["scheduling"], "prefix_entries": PREFIXES}
    config["models"] += [
        {**shared, "name": MOCKED, "compression": COMPRESSION, "pools": {
            "short": {"max_model_len": 8192, "max_num_seqs": 64, "workers": whole[:2]},
            "long": {"max_model_len": WINDOW_TOKENS, "max_num_seqs": 64, "workers": whole[2:]},
        }},
        {**shared, "name": TIGHT, "compression": {"enabled": False}, "pools": {
            "only": {"max_model_len": 8192, "max_num_seqs": SLOTS, "workers": tight},
        }},
    ]  # fmt: skip
    for name, terms in _ENTITLEMENTS.items():
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        entry = {"name": name, "tenant": name, "api_keys": [f"sha256:{digest}"], **terms}
        config["entitlements"].append(entry)
    config["timeouts"] = TIMEOUTS
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _mock(port: int, model: str, window: int, slots: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "sluice", "mock", "--port", str(port), "--model", model),
        *("--max-model-len", str(window), "--max-num-seqs", str(slots), "--speed", "4", *more),
    ]


# -- the bulk of the soak's load: whole answers and streams of several lengths, by cheap C programs


UTILISATION: Final = 0.5
"""Of the gateway's process."""
VISITORS_SHARE: Final = 0.2
"""Of that, for the clients of all sorts (`visits`)."""
CAPACITY_S: Final = 3.0
CLOSED_LOOP: Final = 256
"""Requests at once when capacity is measured."""
CONNECTIONS: Final = 256


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request, and its share of the bulk's processor time."""

    name: str
    share: float
    tokens: int
    """Of the answer; a stream has as many chunks."""
    text_bytes: int
    stream: bool


KINDS: Final = (
    Kind(name="whole", share=0.3, tokens=64, text_bytes=1850, stream=False),
    Kind(name="whole of 20 KB", share=0.1, tokens=64, text_bytes=20_000, stream=False),
    Kind(name="16-chunk streams", share=0.2, tokens=16, text_bytes=1850, stream=True),
    Kind(name="64-chunk streams", share=0.25, tokens=64, text_bytes=1850, stream=True),
    Kind(name="400-chunk streams", share=0.15, tokens=400, text_bytes=6000, stream=True),
)


class Bulk(msgspec.Struct, frozen=True, kw_only=True):
    """A kind, and what the gateway serves of it for a core's work."""

    kind: Kind
    body: Path
    capacity_per_s: float
    cores: float
    """In use by the gateway when that was measured."""

    @property
    def rate_per_s(self) -> float:
        """Offered."""
        return self.capacity_per_s * UTILISATION * (1 - VISITORS_SHARE) * self.kind.share


def capacity(gateway: SoakGateway, tool: Path, folder: Path, kind: Kind) -> tuple[Bulk, Figures]:
    """Saturate the gateway with one kind, by itself in a closed loop; also what the run found.

    Requests served per core used do not depend on other load of the machine.
    """
    found_bodies = bodies(folder, MODEL, text_bytes=kind.text_bytes, max_tokens=kind.tokens)
    body = found_bodies["stream" if kind.stream else "whole"]
    before_s = gateway.cpu_s()
    found = HttpLoad(tool, gateway.port, body).run(CLOSED_LOOP, CAPACITY_S)
    used_s = gateway.cpu_s() - before_s
    bulk = Bulk(
        kind=kind,
        body=body,
        capacity_per_s=found["requests"] / max(1e-9, used_s),
        cores=used_s / found["seconds"],
    )
    return bulk, found


async def offer(
    gateway: SoakGateway, tool: Path, bulks: list[Bulk], seconds: float
) -> list[Figures]:
    """All kinds at their rates, for so long; then to their last answer."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                HttpLoad(tool, gateway.port, bulk.body).start(CONNECTIONS, seconds, bulk.rate_per_s)
            )
            for bulk in bulks
        ]
        for run in runs:
            await asyncio.to_thread(run.ready)
        for run in runs:
            run.begin()
        waits: list[Callable[[], Figures]] = [run.found for run in runs]
        return list(await asyncio.gather(*map(asyncio.to_thread, waits)))
