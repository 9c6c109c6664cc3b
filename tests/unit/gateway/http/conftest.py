"""A served data plane."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn

from gateway.http.body_bytes import LargeBodies
from gateway.http.data_plane import DataPlane
from gateway.http.protocol import GatewayProtocol
from tests.plane import MAX_HEAD, FakePipeline, Gateway, no_control, until


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
    gateways: list[Gateway] = []

    async def starting(**limits: Any) -> Gateway:
        pipeline = FakePipeline()
        plane = limits.get("data_plane") or DataPlane(
            pipeline.serve, pipeline.know, no_control, new_id=lambda: "new", max_body_bytes=1 << 20
        )
        own = {
            "max_head_bytes": MAX_HEAD,
            "bodies": plane.bodies,
            "large_bodies": LargeBodies(),
            "data_plane": plane,
            **limits,
        }
        bound = type("Bound", (GatewayProtocol,), own)
        server = uvicorn.Server(
            uvicorn.Config(
                cast("Any", plane),
                host="127.0.0.1",
                port=0,
                http=bound,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )
        running.append((server, asyncio.create_task(server.serve())))
        await until(lambda: server.started)
        gateways.append(Gateway(pipeline, plane, server))
        return gateways[-1]

    yield starting
    for gateway in gateways:
        for client in gateway.clients:
            client.writer.transport.abort()
    for server, task in running:
        server.should_exit = True
        server.force_exit = True
        await task


@pytest.fixture
async def gateway(start: Callable[..., Awaitable[Gateway]]) -> Gateway:
    return await start()
