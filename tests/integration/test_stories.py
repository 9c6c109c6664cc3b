"""The story of a refused request, from the records of a running gateway: told as it was."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from bench.common.fleet import MODEL, Fleet, RedisServer
from gateway.records.decision import DecisionRecord
from gateway.records.story import story_of
from tests.asking import CHAT, entitlement, until
from tests.integration.test_token_pools import fleet_of, post

SLOTS = 4


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_of(
        entitlement("rate", tokens_per_second=1.0, max_tokens_per_second=1.0),
        entitlement("one", max_concurrency=1),
        entitlement("kv", max_kv_cache_gib=0.0001, max_concurrency=4),
        entitlement("paid", budgets=[{"tokens": 30, "window": "day"}]),
        entitlement("money", budgets=[{"money": 0.00004, "window": "day"}]),
        entitlement("base", "guaranteed", concurrency=SLOTS - 1),
        entitlement("spot", "spot"),
        config={"currency": "EUR"},
        model={"kv_bytes_per_token": 1000, "price": {"input": 1.0, "output": 1.0}},
        mock=("--speed", "0.5"),
        short_slots=SLOTS,
        short_window=256,
    ) as fleet:
        yield fleet


@contextlib.contextmanager
def held(fleet: Fleet, name: str, tokens: int = 200) -> Iterator[None]:
    """A stream that stays open."""
    body = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": tokens,
        "mock_output_tokens": tokens,
    }
    headers = {"authorization": f"Bearer sk-{name}"}
    with httpx.stream(
        "POST", fleet.url + CHAT, json=body, headers=headers, timeout=30, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_raw()  # closes the answer where nobody holds it
        next(chunks)
        yield


def refused(fleet: Fleet, name: str, tokens: int = 8, **more: Any) -> httpx.Response:
    """The first refusal of requests one after the other."""
    end_s = time.monotonic() + 20
    while (answer := post(fleet, name, tokens, **more)).status_code == 200:
        assert time.monotonic() < end_s, "nothing was refused"
    return answer


def assert_told_as_it_was(fleet: Fleet, answer: httpx.Response, reason: str) -> str:
    """The story that an operator reads agrees with the answer that the client read."""
    assert (answer.headers["x-sluice-reason"], answer.status_code >= 400) == (reason, True)
    found = fleet.decision(answer.headers["x-request-id"])
    story = " ".join(story_of(msgspec.convert(found, DecisionRecord)))
    assert f" {answer.status_code}: " in story
    assert "; nothing was charged." in story
    assert "served it" not in story
    assert "granted" not in story
    assert "the reason is" not in story
    said = answer.json()["error"]["message"]
    if figures := re.search(r"limit \d.*, used \d.*, requested \d[^.]*", said):
        assert f"({figures[0]})" in story
    if "retry-after" in answer.headers:
        assert f"try again in {answer.headers['retry-after']} s." in story
    return story


def test_a_refusal_by_a_limit_is_told_with_its_figures_and_its_wait(fleet: Fleet) -> None:
    with held(fleet, "rate"):
        rate = assert_told_as_it_was(fleet, post(fleet, "rate", 100), "tokens")
    assert "the entitlement's token rate is used up (limit " in rate
    with held(fleet, "one"):
        one = assert_told_as_it_was(fleet, post(fleet, "one"), "concurrency")
    assert "(limit 1, used 1, requested 1); it was told to try again in " in one
    with held(fleet, "kv", 60):
        kv = assert_told_as_it_was(fleet, post(fleet, "kv", 60), "kv")
    assert "the bytes of KV cache of the entitlement or of the pool are taken (limit " in kv
    budget = assert_told_as_it_was(fleet, refused(fleet, "paid"), "budget")
    assert "is spent (limit 30 tokens, used " in budget
    money = assert_told_as_it_was(fleet, refused(fleet, "money"), "budget")
    assert "is spent (limit 0.00004 EUR, used 0.0000" in money
    with contextlib.ExitStack() as streams:
        for _ in range(SLOTS):
            streams.enter_context(held(fleet, "base" if _ else "spot"))
        spot = assert_told_as_it_was(fleet, post(fleet, "spot"), "priority")
    assert "the pool is full of work of at least this priority (limit 4, used " in spot


def test_a_refusal_for_good_is_told_without_a_wait(fleet: Fleet) -> None:
    misfit = refused(fleet, "one", 100_000)
    told = assert_told_as_it_was(fleet, misfit, "context_length_exceeded")
    assert "refused the request with 400: it is too long for the largest window." in told
    large = assert_told_as_it_was(fleet, post(fleet, "kv", 150), "exceeds_entitlement")
    assert "so waiting does not help (limit 107374, used 0, " in large
    model = assert_told_as_it_was(fleet, post(fleet, "one", model="other"), "model_not_found")
    assert "with 404: no model has that name." in model
    key = assert_told_as_it_was(fleet, post(fleet, "unknown"), "invalid_api_key")
    assert "with 401: its API key is unknown." in key


def test_engines_that_failed_are_told_with_what_became_of_each_try(fleet: Fleet) -> None:
    engine = fleet.engines[0]
    engine.fail("500")
    try:
        broken = post(fleet, "one")
    finally:
        engine.fail("")
    found = fleet.decision(broken.headers["x-request-id"])
    story = " ".join(story_of(msgspec.convert(found, DecisionRecord)))
    assert f"The gateway tried in vain {engine.id} (answered with a server error)" in story
    assert f"The client got {broken.status_code}: every attempt failed before the first" in story
    assert "served it" not in story
    engine.fail("reset-mid:2")
    try:
        cut = post(fleet, "one", 20, stream=True)
    finally:
        engine.fail("")
    found = fleet.decision(cut.headers["x-request-id"])
    assert f'"code":"{found["reason"]}"' in cut.text
    story = " ".join(story_of(msgspec.convert(found, DecisionRecord)))
    assert "The client got 502: the engine's stream broke off, and an error event ended" in story
    fleet.kill_engine(engine)
    away = refused(fleet, "one")
    found = fleet.decision(away.headers["x-request-id"])
    story = " ".join(story_of(msgspec.convert(found, DecisionRecord)))
    assert f"The gateway tried in vain {engine.id} (refused the connection)." in story
    assert "The gateway refused the request with 503: no worker was in the rotation" in story
    assert "served it" not in story


def complaints(fleet: Fleet) -> str:
    """What the page and `sluice top` show as wrong."""
    found = fleet.admin("/dashboard/snapshot").json()["shared"]["wrong"]
    return " ".join(one["text"] for one in found)


def test_a_store_that_is_away_is_told_to_all_who_look(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        RedisServer() as redis,
        fleet_of(
            entitlement("one", max_concurrency=1),
            config={"state": {"url": redis.url, "fail_mode": "closed"}},
        ) as fleet,
    ):
        assert post(fleet, "one").status_code == 200
        redis.kill()
        told = assert_told_as_it_was(fleet, refused(fleet, "one"), "state_unavailable")
        assert "with 503: the state store was away" in told
        until(lambda: "The state store is away" in complaints(fleet))
        redis.start()
        until(lambda: complaints(fleet) == "")
    logged = capfd.readouterr().err
    assert logged.count("ERROR sluice: the state store is away: ") == 1
    assert logged.count("the state store is back") == 1
