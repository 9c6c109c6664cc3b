"""A client that asks one thing after the other is never refused for what it did before."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI

from bench.common.fleet import MODEL, Fleet, RedisServer
from tests.integration.test_budgets import tenant
from tests.integration.test_tenants import CODER, post, two_models

pytestmark = pytest.mark.redis
ONE: dict[str, Any] = {"name": "web", "max_concurrency": 1}
SHARED: dict[str, Any] = {"name": "code", "tenant": "acme", "model": CODER, "max_concurrency": 1}


def gateways(redis: RedisServer, count: int, **model: Any) -> Fleet:
    """Gateways that share a Redis, with two models and a key of one request at a time."""
    with redis.client() as client:
        client.flushall()
    more = {"state": {"url": redis.url}, **tenant(ONE)}
    fleet = two_models([ONE], more, gateways=count, **model)
    fleet.replicas[0].config["entitlements"][-1].update(SHARED)  # they have one list
    return fleet


@pytest.fixture
def clients(redis_server: RedisServer) -> Iterator[list[OpenAI]]:
    with gateways(redis_server, 2) as fleet, ExitStack() as closing:
        yield [
            closing.enter_context(
                OpenAI(base_url=f"{replica.url}/v1", api_key="sk-web", max_retries=0, timeout=20)
            )
            for replica in fleet.replicas
        ]


def test_over_two_gateways_and_two_models_one_request_at_a_time_always_comes_in(
    clients: list[OpenAI],
) -> None:
    pick = random.Random(7)
    for _ in range(200):
        sent: dict[str, Any] = {
            "model": pick.choice((MODEL, CODER)),
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
        }
        chat = pick.choice(clients).chat.completions
        if pick.random() < 0.5:
            assert list(chat.create(**sent, stream=True))
        else:
            assert chat.create(**sent).choices


def test_a_fallback_takes_the_place_of_what_failed(redis_server: RedisServer) -> None:
    with gateways(redis_server, 1, fallbacks=[CODER]) as fleet:
        fleet.kill_engine(fleet.engines[0])
        for _ in range(10):
            answer = post(fleet, "web", MODEL)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-sluice-model"] == CODER
