"""Gateways of one Redis know what the others sent where."""

import time
from typing import Any

import httpx
import pytest

from bench.fleet import ADMIN_KEY, MODEL, Fleet
from bench.redis_server import RedisServer

pytestmark = pytest.mark.redis


def ask(url: str, text: str) -> dict[str, Any]:
    """The record of a streamed request, when it has ended."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 5,
        "mock_output_tokens": 5,
        "stream": True,
    }
    with httpx.Client(trust_env=False, timeout=30) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            answer.read()
            request_id = answer.headers["x-request-id"]
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        for _ in range(50):
            found = client.get(f"{url}/admin/decisions/{request_id}", headers=headers)
            if found.status_code == 200:
                return dict(found.json())
            time.sleep(0.1)
    raise AssertionError("no decision")


def test_one_gateway_expects_the_hits_of_what_another_sent() -> None:
    with RedisServer() as server:
        config = {"state": {"url": server.url}}
        with Fleet(short=3, long=0, config=config, further=[{}]) as fleet:
            one, two = fleet.replicas
            time.sleep(2.5)  # they have heard of one another
            texts = [f"Document {number}. " * 900 for number in range(4)]
            sent = [ask(one.url, text) for text in texts]
            assert all(record["expected_hit_tokens"] == 0 for record in sent)
            time.sleep(2.5)
            again = [ask(two.url, text) for text in texts]
            for first, second in zip(sent, again, strict=True):
                assert second["worker"] == first["worker"]
                assert second["expected_hit_tokens"] > 0.5 * second["prompt_tokens"]
            metrics = httpx.get(f"{two.url}/metrics", trust_env=False).text
            assert "sluice_store_up 1" in metrics
