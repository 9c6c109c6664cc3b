"""Quotes and the queue's status over real sockets, with the official client."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import MODEL, Fleet, RedisServer
from tests.asking import CHAT, bearer, chat, get, post, until_waiting
from tests.integration.test_tenants import hashed, two_models

KEYS: list[dict[str, Any]] = [{"name": "web", "requests_per_minute": 9}, {"name": "lone"}]
WAITS = {"x-sluice-queue-status": "on"}


def client_of(fleet: Fleet, key: str = "sk-web") -> openai.OpenAI:
    return openai.OpenAI(base_url=fleet.url + "/v1", api_key=key, max_retries=0)


def quote(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
    answer = client.post("/sluice/quote", body={"model": MODEL, **body}, cast_to=httpx.Response)
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A key with 9 requests a minute, and one of a tenant that has 400 tokens a day."""
    more: dict[str, Any] = {}
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        more = {"state": {"url": server.url}}
    made = two_models(KEYS, more, price={"input": 2.0, "output": 10.0})
    made.replicas[0].config["tenants"][0]["budgets"] = [{"tokens": 400, "window": "day"}]
    with made:
        yield made


def test_a_quote_tells_what_would_come_and_costs_a_request_alone(fleet: Fleet) -> None:
    with client_of(fleet) as client:
        before = get(fleet.url, "sk-web", "/v1/sluice/me").json()
        asked = chat(tokens=20, text="How are you? " * 20)
        quoted = quote(client, **asked)
        assert (quoted["object"], quoted["admitted"], quoted["pool"]) == (
            *("sluice.quote", True, "only"),
        )
        assert quoted["wait_s"] == {"p50": None, "p95": None}, "nothing is known yet"
        tokens, cost = quoted["tokens"], quoted["cost"]
        assert tokens["output_most"] == 20
        assert cost["most"] == pytest.approx((2 * tokens["input"] + 10 * 20) / 1e6)
        answer = client.chat.completions.create(
            model=MODEL, messages=asked["messages"], max_tokens=20, extra_body=asked
        )
        assert answer.usage is not None
        assert tokens["input"] == pytest.approx(answer.usage.prompt_tokens, rel=0.2)
        # By tokens alone, and beyond what is left of the budget.
        plain = quote(client, input_tokens=40, max_tokens=5)
        assert (plain["admitted"], plain["tokens"]["input"]) == (True, 40)
        over = quote(client, input_tokens=390, max_tokens=5)
        assert (over["admitted"], over["reason"], over["wait_s"]["p95"]) == (False, "budget", None)
        enters = datetime.fromisoformat(over["enters_at"])
        assert (enters - datetime.now(UTC)).total_seconds() <= 86_401
        never = quote(client, input_tokens=900, max_tokens=5)
        assert (never["reason"], never["enters_at"]) == ("exceeds_entitlement", None)
        long = quote(client, input_tokens=9_000_000)
        assert long["reason"] == "context_length_exceeded"
        after = get(fleet.url, "sk-web", "/v1/sluice/me").json()
        (budget,) = after["entitlements"][0]["limits"][1:]
        assert (budget["used"], budget["reserved"]) == (answer.usage.total_tokens, 0)
        assert before["entitlements"][0]["refused"] == after["entitlements"][0]["refused"]
        # 4 quotes and a request so far, of 9: what no window holds is refused before it counts.
        few = {"input_tokens": 5, "max_tokens": 5}
        assert [quote(client, **few)["reason"] for _ in range(4)] == [None] * 3 + ["key_requests"]
        with pytest.raises(openai.RateLimitError, match="requests a minute"):
            quote(client, **few)


def test_a_quote_is_refused_as_a_request_that_is_malformed_or_not_allowed(fleet: Fleet) -> None:
    path = "/v1/sluice/quote"
    cases: list[tuple[str, Any, int, str]] = [
        ("sk-nobody", {"model": MODEL, "input_tokens": 1}, 401, "invalid_api_key"),
        ("sk-lone", {"model": "none", "input_tokens": 1}, 404, "model_not_found"),
        ("sk-lone", {"model": MODEL}, 400, "missing_required_parameter"),
        ("sk-lone", {"model": MODEL, "input_tokens": -1}, 400, "invalid_value"),
        ("sk-lone", {"model": MODEL, "input_tokens": 1, "maxtokens": 1}, 400, ""),
        ("sk-lone", {"model": MODEL, "prompt": "x", "endpoint": "audio"}, 400, "invalid_value"),
        ("sk-lone", {"model": MODEL, "prompt": "x" * 1_100_000}, 413, "request_too_large"),
    ]
    for key, body, status, code in cases:
        refused = post(fleet.url, key, body, path)
        assert refused.status_code == status, (body, refused.text)
        assert code in ("", refused.json()["error"]["code"]), refused.text
    for shape in ({"prompt": "hi"}, {"input": "hi"}, {"input": "hi", "endpoint": "responses"}):
        assert post(
            fleet.url,
            "sk-lone",
            {"model": MODEL, "max_tokens": 5, "max_output_tokens": 5, **shape},
            path,
        ).json()["admitted"]


def test_what_streams_saw_is_quoted() -> None:
    with two_models([{"name": "web"}]) as fleet, client_of(fleet) as client:
        for _ in range(70):
            body = chat(stream=True, text="Tell me more. " * 20)
            assert post(fleet.url, "sk-web", body).status_code == 200
        ttft = quote(client, **chat(text="Tell me more. " * 20))["ttft_s"]
        assert 0 < ttft["p50"] <= ttft["p95"] < 5


# -- the queue's status


def one_slot(**scheduling: Any) -> Fleet:
    """Two ranks of a slot take two requests each, and others wait in the gateway."""
    fleet = Fleet(
        short=1,
        long=0,
        short_slots=1,
        mock=("--speed", "2", "--dp-ranks", "2"),
        model={"scheduling": {"policy": "bfio", **scheduling}},
    )
    config: Any = fleet.replicas[0].config
    config["models"][0]["pools"]["short"]["workers"] = [{"url": fleet.engines[0].url, "ranks": 2}]
    return fleet


async def fill(client: httpx.AsyncClient, fleet: Fleet, tokens: int) -> list[asyncio.Task[Any]]:
    body = chat(tokens=tokens, stream=True, ignore_eos=True)
    running = [asyncio.create_task(client.post(fleet.url + CHAT, json=body)) for _ in range(4)]
    while fleet.engines[0].running() < 4:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)
    return running


async def test_a_stream_that_waits_tells_its_place_if_asked_to() -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        with one_slot() as fleet:
            running = await fill(client, fleet, 4_000)
            stream = chat(stream=True)
            silent = asyncio.create_task(client.post(fleet.url + CHAT, json=stream))
            await until_waiting(fleet, 1)
            whole = asyncio.create_task(client.post(fleet.url + CHAT, json=chat(), headers=WAITS))
            official = asyncio.create_task(from_official_client(fleet))
            async with client.stream("POST", fleet.url + CHAT, json=stream, headers=WAITS) as told:
                lines = [line async for line in first(told, ": sluice queued", running)]
            place = re.match(r": sluice queued position=(\d+)", lines[0])
            # Behind `silent`; the three that came after it are in any order.
            assert place is not None
            assert int(place[1]) in {2, 3, 4}
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert told.headers["content-type"].startswith("text/event-stream")
            assert "sluice queued" not in (await silent).text
            assert (await whole).json()["choices"]
            assert (await official).choices[0].finish_reason
            waited_ms = fleet.decision(told.headers["x-request-id"])["timing"]["queue_ms"]
            assert len([line for line in lines if "queued" in line]) <= waited_ms / 1000
            fleet.wait_until_idle()


async def first(
    answer: httpx.Response, beginning: str, running: Sequence[asyncio.Task[Any]]
) -> AsyncIterator[str]:
    """Its lines; what runs is left once one begins so."""
    async for line in answer.aiter_lines():
        if line.startswith(beginning):
            for task in running:
                task.cancel()
        yield line


async def from_official_client(fleet: Fleet) -> Any:
    """Its last chunk."""
    url = fleet.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", default_headers=WAITS) as client:
        return [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=4,
                stream=True,
            )
        ][-1]


async def test_a_stream_that_was_told_of_its_wait_ends_in_an_event_if_it_waits_too_long() -> None:
    """Its key has it told, and the header takes that back."""
    made = one_slot(queue_timeout_s=1.5)
    key = {"name": "told", "queue_status": True}
    made.replicas[0].config |= {
        "entitlements": [{"name": "chat", "tenant": "acme", "model": MODEL}],
        "tenants": [{"name": "acme", "keys": [{**key, **hashed(key)}]}],
    }
    headers, silent = bearer("sk-told"), {"x-sluice-queue-status": "off"}
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
        with made as fleet:
            running = await fill(client, fleet, 2_000)
            late, refused = await asyncio.gather(
                client.post(fleet.url + CHAT, json=chat(stream=True)),
                client.post(fleet.url + CHAT, json=chat(stream=True), headers=silent),
            )
            assert refused.status_code == 429
            assert (late.status_code, late.text.count("sluice queued")) == (200, 1)
            assert '"code":"rate_limit_exceeded"' in late.text
            assert "[DONE]" not in late.text
            record = fleet.decision(late.headers["x-request-id"])
            assert (record["reason"], record["status"]) == ("queue_timeout", 429)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            fleet.wait_until_idle()
