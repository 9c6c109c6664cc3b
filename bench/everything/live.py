"""The trace through a real gateway before mock engines, in real time."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import yaml

from bench.common.fleet import MODEL, read_metrics
from bench.everything.figures import RunFigures, figures
from bench.everything.scene import (
    ENGINE,
    RANKS,
    REPLICAS,
    TENANTS,
    TraceRequest,
    key_of,
)
from bench.everything.systems import Switches, config_of
from sluice.children import Children, free_ports

_SLUICE = (sys.executable, "-m", "sluice")
CHAT = "/v1/chat/completions"
_BUSY = ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")
_LATEST_S = 120.0


class Seen(msgspec.Struct, kw_only=True):
    """What a client saw of one request."""

    status: int = 0
    ttft_s: float = float("nan")
    ended_s: float = float("nan")
    compressed: bool = False


def live(switches: Switches, requests: list[TraceRequest]) -> RunFigures:
    """One system with fresh engines and a fresh gateway."""
    ports = free_ports(REPLICAS + 2)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:-1]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = stack.enter_context(Children())
        profile = folder / "engine.json"
        profile.write_bytes(msgspec.json.encode(ENGINE))
        for number, port in enumerate(ports[:-1]):
            ranks = RANKS if number == REPLICAS else 1
            children.start(_mock(port, profile, ranks), quiet=True)
        config = config_of(switches, urls[:REPLICAS], urls[REPLICAS:], RANKS)
        config["server"] = {"host": "127.0.0.1", "port": ports[-1]}
        file = folder / "sluice.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        for url in urls:
            children.wait_for(f"{url}/health")
        children.start([*_SLUICE, "serve", "-c", str(file), "--log-level", "error"])
        gateway = f"http://127.0.0.1:{ports[-1]}"
        children.wait_for(f"{gateway}/ready")
        found = asyncio.run(_Client(gateway).run(requests))
        engines = [read_metrics(url) for url in urls]
    return _figures(requests, found, engines)


def _figures(
    requests: list[TraceRequest], found: Sequence[Seen], engines: Sequence[dict[str, float]]
) -> RunFigures:
    ended = [seen.ended_s for seen in found if seen.status == 200]
    return figures(
        requests,
        np.array([seen.ttft_s if seen.status == 200 else np.nan for seen in found]),
        busy_s=sum(v for page in engines for k, v in page.items() if k.startswith(_BUSY)),
        length_s=max(ended),
        workers=REPLICAS + RANKS,
        compressed=sum(seen.compressed for seen in found),
        lag_s=max(
            v for page in engines for k, v in page.items() if k.startswith("mock_lag_p99_seconds")
        ),
    )


class _Client:
    """Sends every request when it is due, whatever became of earlier ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begin_s = 0.0

    async def run(self, requests: list[TraceRequest]) -> list[Seen]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx.AsyncClient(timeout=_LATEST_S, limits=limits, trust_env=False) as client:
            self._begin_s = time.monotonic() + 0.5
            return await asyncio.gather(*(self._send(client, r) for r in requests))

    async def _send(self, client: httpx.AsyncClient, request: TraceRequest) -> Seen:
        due_s = self._begin_s + request.at_s
        await asyncio.sleep(due_s - time.monotonic())
        headers = {
            "authorization": f"Bearer {key_of(TENANTS[request.tenant].name)}",
            "content-type": "application/json",
        }
        seen = Seen()
        try:
            async with client.stream(
                "POST", self._url + CHAT, content=request.body, headers=headers
            ) as answer:
                seen.status = answer.status_code
                seen.compressed = answer.headers.get("x-sluice-compressed", "none") != "none"
                async for chunk in answer.aiter_raw():
                    if np.isnan(seen.ttft_s) and b'"content"' in chunk:
                        seen.ttft_s = time.monotonic() - due_s
                seen.ended_s = time.monotonic() - self._begin_s
        except httpx.HTTPError:
            seen.status = 0
        return seen


def _mock(port: int, profile: Path, ranks: int) -> list[str]:
    more: list[Any] = ["--profile-file", str(profile), "--dp-ranks", str(ranks)]
    return [*_SLUICE, "mock", "--port", str(port), "--model", MODEL, *more]
