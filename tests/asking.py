"""What tests say to a running gateway, and how they wait for what other processes do."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from sluice.hash_key import hashed_key

CHAT: Final = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {key}"}


ADMIN: Final = bearer(ADMIN_KEY)


def entitlement(name: str, service_class: str = "elastic", **more: Any) -> dict[str, Any]:
    """An entry of the file, of tenant-NAME; its key is sk-NAME."""
    return {
        "name": name,
        "tenant": f"tenant-{name}",
        "model": MODEL,
        "service_class": service_class,
        "api_keys": [hashed_key(f"sk-{name}")],
        **more,
    }


def chat(tokens: int = 4, text: str = "hello there", **more: Any) -> dict[str, Any]:
    """A chat whose answer has so many tokens."""
    messages = [{"role": "user", "content": text}]
    sizes = {"max_tokens": tokens, "mock_output_tokens": tokens}
    return {"model": MODEL, "messages": messages, **sizes, **more}


def post(url: str, key: str, body: Any = None, path: str = CHAT, **headers: str) -> httpx.Response:
    """Ask with a key."""
    body = chat() if body is None else body
    told = {**(bearer(key) if key else {}), **headers}
    return httpx.post(url + path, json=body, headers=told, timeout=60, trust_env=False)


def get(url: str, key: str, path: str = "", **headers: str) -> httpx.Response:
    """GET with a key."""
    told = {**bearer(key), **headers}
    return httpx.get(url + path, headers=told, timeout=30, trust_env=False)


def admin(url: str, method: str, path: str, **more: Any) -> httpx.Response:
    """What an administrator asks."""
    return httpx.request(method, url + path, headers=ADMIN, trust_env=False, timeout=30, **more)


def until(true: Callable[[], object], limit_s: float = 15.0) -> None:
    """Wait for it."""
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "it did not come about in time"
        time.sleep(0.02)


async def eventually(true: Callable[[], object], limit_s: float = 20.0) -> None:
    """The same beside other tasks."""
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what other processes do is no event
            await asyncio.sleep(0.005)


def children(pid: int) -> list[int]:
    """Processes that one started; none of one that has ended."""
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody has looked at yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until_waiting(fleet: Fleet, count: int) -> None:
    """Until so many requests wait in the gateway's queues."""
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as client:
        while True:
            page = (await client.get(fleet.url + "/metrics")).text
            lines = [line for line in page.splitlines() if line.startswith("sluice_queue_depth{")]
            if sum(float(line.rpartition(" ")[2]) for line in lines) >= count:
                return
            await asyncio.sleep(0.02)
