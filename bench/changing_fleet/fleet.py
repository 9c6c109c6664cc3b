"""A gateway process, engines in this one, and clients that stream, for fleets that change."""

import asyncio
import json
import secrets
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from bench.common.raw_client import RawClient

CHUNK = 'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":%s}]}\n\n'
OK = b"HTTP/1.1 200 OK\r\n"
STEP_S = 0.02


class Engines:
    """Engines on 127.0.1.1, 127.0.1.2 and so on, all on one port of this process."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.1.1", 0))
            self.port = int(free.getsockname()[1])
        self.served: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def address(self, number: int) -> str:
        """Address of the engine with this number, from 1."""
        return f"127.0.1.{number}"

    @asynccontextmanager
    async def listening(self, count: int) -> AsyncIterator["Engines"]:
        """Have so many engines listen during the block."""
        async with AsyncExitStack() as stack:
            for number in range(1, count + 1):
                server = await asyncio.start_server(
                    self._connected, self.address(number), self.port
                )
                await stack.enter_async_context(server)
            yield self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = writer.get_extra_info("sockname")[0]
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                await reader.readexactly(length)
                if head.startswith("post"):
                    await self._stream(own, writer)
                else:
                    data = [{"id": "m", "max_model_len": 8192}]
                    body = json.dumps({"data": data}).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
                    )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, own: str, writer: asyncio.StreamWriter) -> None:
        self.running[own] += 1
        writer.write(OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        usage = '{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":10}}'
        parts = [CHUNK % '{"content":"x"}'] * 10
        parts += [CHUNK.replace("}]}", '},"finish_reason":"stop"}]}').replace("%s}", "{}")]
        parts += [f"data: {usage}\n\n", "data: [DONE]\n\n"]
        try:
            for part in parts:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part.encode()))
                await writer.drain()
                await asyncio.sleep(STEP_S)
            writer.write(b"0\r\n\r\n")
        finally:
            self.running[own] -= 1
        self.served[own] += 1


@asynccontextmanager
async def gateway(
    tmp_path: Path,
    workers: object,
    env: dict[str, str] | None = None,
    pool: Mapping[str, object] | None = None,
    **more: object,
) -> AsyncIterator[str]:
    """A gateway as its own process; gives its URL. Its file is sluice.yaml, `more` its sections.

    `pool`: further settings of its pool.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "version": 1,
        "server": {"host": "127.0.0.1", "port": port, "admin_key": "sk-admin"},
        "health": {"interval_s": 0.3},
        **more,
        "models": [
            {
                "name": "m",
                "scheduling": {"queue_timeout_s": 20},
                "pools": {
                    "all": {
                        "max_model_len": 8192,
                        "max_num_seqs": 8,
                        "workers": workers,
                        **(pool or {}),
                    }
                },
            }
        ],
    }
    path = tmp_path / "sluice.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice", "serve", "-c", str(path)), env=env
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{url}/health")
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                else:
                    break
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Streams:
    """Clients that stream one answer after another until they are ended; failures are kept."""

    def __init__(self, url: str, clients: int = 12, key: str = "sk-any") -> None:
        self.failures: list[str] = []
        self.completed = 0
        self._url = url
        self._key = key
        self._clients = clients
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        async with RawClient(self._url, self._key) as client:
            while not self._ending:
                # A prompt of its own each time: one prompt would stay where it is cached.
                message = {"role": "user", "content": secrets.token_hex(50)}
                body = json.dumps({"model": "m", "stream": True, "messages": [message]}).encode()
                try:
                    async with asyncio.timeout(30):
                        answer = await client.post("/v1/chat/completions", body)
                except (OSError, EOFError, TimeoutError) as error:
                    self.failures.append(repr(error))
                    continue
                if answer.status != 200 or not answer.body.rstrip().endswith(b"[DONE]"):
                    self.failures.append(f"{answer.status} {answer.body[-200:].decode()}")
                    await asyncio.sleep(0.05)
                else:
                    self.completed += 1


ADMIN = {"authorization": "Bearer sk-admin"}


async def workers_of(client: httpx.AsyncClient, url: str) -> dict[str, dict[str, Any]]:
    """The workers of the gateway's only pool, by id, as the admin route shows them."""
    (model,) = (await client.get(f"{url}/admin/pools", headers=ADMIN)).json()
    return {worker["id"]: worker for worker in model["pools"][0]["workers"]}


async def until_workers(url: str, ids: set[str]) -> None:
    """Wait until exactly these workers are there, all in the rotation."""
    async with asyncio.timeout(30), httpx.AsyncClient() as client:
        while True:
            workers = await workers_of(client, url)
            if set(workers) == ids and all(each["in_rotation"] for each in workers.values()):
                return
            await asyncio.sleep(0.05)
