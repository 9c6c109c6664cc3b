"""Before an llm-d router: requests say whose they are, and what it drops costs nobody anything."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.changing_fleet.fleet import ADMIN, gateway

DROPPED = (
    (429, "rejected-saturated"),
    (429, "rejected-ttl-expired"),
    (429, "evicted-priority"),
    (503, "rejected-no-endpoints"),
)
STEER = {
    "x-llm-d-inference-fairness-id": "somebody",
    "x-llm-d-inference-objective": "premium",
    "x-gateway-inference-fairness-id": "somebody",
    "x-gateway-inference-objective": "premium",
    "x-gateway-destination-endpoint": "10.0.0.1:80",
    "x-llm-d-endpoint-selection-hint": "10.0.0.1:80",
}


class Router:
    """Answers like an llm-d router: with an answer, or with why it dropped the request."""

    def __init__(self) -> None:
        self.url = ""
        self.heads: list[dict[str, str]] = []
        self.drops: tuple[int, str] | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Router"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                first, *lines = head.split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines if line)
                await reader.readexactly(int(headers.get("content-length", "0")))
                writer.write(self._answer(first, headers))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, first: str, headers: dict[str, str]) -> bytes:
        status, more, body = 200, "", json.dumps({"data": [{"id": "m", "max_model_len": 8192}]})
        if first.startswith("post"):
            self.heads.append(headers)
            usage = {"prompt_tokens": 5, "completion_tokens": 2}
            choice = {"index": 0, "finish_reason": "stop", "message": {"content": "x"}}
            body = json.dumps({"id": "1", "choices": [choice], "usage": usage})
            if self.drops is not None:
                status, reason = self.drops
                more = f"x-llm-d-request-dropped-reason: {reason}\r\n"
                body = "inference error: ResourceExhausted"
        head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\n{more}"
        return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


ENTITLEMENT = {
    "name": "e",
    "tenant": "acme",
    "model": "m",
    "service_class": "guaranteed",
    "tokens_per_second": 1000,
    "concurrency": 2,
    "api_keys": [f"sha256:{hashlib.sha256(b'sk-acme').hexdigest()}"],
}


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": "Bearer sk-acme", **STEER}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


def steering(head: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in head.items() if k.startswith(("x-llm-d", "x-gateway"))}


@asynccontextmanager
async def before(tmp_path: Path, router: Router, **pool: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        gateway(tmp_path, [router.url], pool=pool, entitlements=[ENTITLEMENT]) as url,
        httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=30) as client,
    ):
        yield client


async def test_a_request_says_whose_it_is_and_what_clients_say_never_arrives(
    tmp_path: Path,
) -> None:
    async with (
        Router().listening() as router,
        before(tmp_path, router, flow_headers=True) as client,
    ):
        assert (await ask(client)).status_code == 200
        assert steering(router.heads[-1]) == {
            "x-llm-d-inference-fairness-id": "acme",
            "x-llm-d-inference-objective": "guaranteed",
            "x-gateway-inference-fairness-id": "acme",
            "x-gateway-inference-objective": "guaranteed",
        }


async def test_what_gets_leftovers_only_is_told_as_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a budget, and as an item of a batch: engines' routers rank it as the gateway does."""
    spent = {"tokens": 1, "window": "day", "on_exceed": "spot"}
    monkeypatch.setitem(ENTITLEMENT, "budgets", [spent])
    async with (
        Router().listening() as router,
        before(tmp_path, router, flow_headers=True) as client,
    ):
        assert (await ask(client)).status_code == 200
        assert steering(router.heads[-1])["x-gateway-inference-objective"] == "spot"


async def test_without_the_setting_nothing_is_said(tmp_path: Path) -> None:
    async with Router().listening() as router, before(tmp_path, router) as client:
        assert (await ask(client)).status_code == 200
        assert steering(router.heads[-1]) == {}


async def test_what_the_router_drops_is_refunded_and_the_router_stays(tmp_path: Path) -> None:
    async with (
        Router().listening() as router,
        before(tmp_path, router, flow_headers=True) as client,
    ):
        assert (await ask(client)).status_code == 200
        used = (await usage(client))["used_tokens"]
        for router.drops in DROPPED:
            for _ in range(4):  # a failing engine would be ejected by then
                answer = await ask(client)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_busy"
            shown = await usage(client)
            assert (shown["used_tokens"], shown["debt"]) == (used, 0)
            assert shown["debited_tokens"] - shown["refunded_tokens"] == used
            assert shown["inflight"] == {"all": 0}
        router.drops = None
        assert (await ask(client)).status_code == 200
        (model,) = (await client.get("/admin/pools")).json()
        (worker,) = model["pools"][0]["workers"]
        assert worker["in_rotation"]
        assert worker["ejected_for_s"] == 0


async def usage(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/admin/entitlements/e")).json()["usage"]
    return found


async def test_a_503_that_no_router_explains_is_the_engines_failure(tmp_path: Path) -> None:
    async with Router().listening() as router, before(tmp_path, router) as client:
        router.drops = (503, "")
        assert (await ask(client)).json()["error"]["code"] == "engine_error"
