"""The port of a controller: health, readiness, metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from controller.health import Figures, HealthPort


@asynccontextmanager
async def shown(*, healthy: bool = True, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    figures = Figures()
    figures.calls.labels("create", "Pod", "done").inc()
    port = HealthPort(
        healthy=lambda: healthy, ready=lambda: ready, metrics=lambda: figures.registry
    )
    number = await port.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{number}") as client:
        yield client
    await port.close()


async def test_health_and_readiness_are_told_apart() -> None:
    async with shown(ready=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
    async with shown(healthy=False) as client:
        assert (await client.get("/health?x=1")).status_code == 503
        assert (await client.get("/ready")).status_code == 200


async def test_metrics_are_shown_as_prometheus_reads_them() -> None:
    async with shown() as client:
        answer = await client.get("/metrics")
        line = 'sluice_controller_calls_total{kind="Pod",result="done",verb="create"} 1.0'
        assert line in answer.text.splitlines()
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_other_requests_are_refused_and_garbage_ends_the_connection() -> None:
    async with shown() as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/health")).status_code == 405
        host, number = client.base_url.host, client.base_url.port
        for garbage in (b"x" * 20_000, b"\r\n\r\n", b"GET\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, number)
            writer.write(garbage)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await client.get("/health")).status_code == 200
