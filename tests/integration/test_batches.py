"""Batches through two replicas with the official client: one is killed, and each item is once."""

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.common.fleet import MODEL, Fleet, RedisServer
from tests.asking import entitlement, until

pytestmark = pytest.mark.redis
ITEMS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    config = {
        "entitlements": [
            entitlement("live", "guaranteed", concurrency=8),
            entitlement("batch"),
        ],
        "batches": {"url": f"file://{folder}/files"},
        "ledger": {"path": str(folder / "ledger.db")},
        "request_log": {"path": str(folder / "log.jsonl")},
    }
    with RedisServer() as redis:
        config["state"] = {"url": redis.url}
        with Fleet(short=1, long=0, short_slots=16, config=config, further=[{}]) as made:
            yield made


def client_of(fleet: Fleet, replica: int, name: str = "batch") -> openai.OpenAI:
    url = fleet.replicas[replica].url + "/v1"
    return openai.OpenAI(
        base_url=url, api_key=f"sk-{name}", max_retries=2, _strict_response_validation=True
    )


def lines(count: int, tokens: int = 40) -> bytes:
    def body(n: int) -> dict[str, Any]:
        text = f"{'A shared system prompt. ' * 20}{n % 5}: tell me about {n}"
        messages = [{"role": "user", "content": text}]
        return {"model": MODEL, "messages": messages, "max_tokens": tokens}

    return b"".join(
        json.dumps(
            {
                "custom_id": f"item-{n}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body(n),
            }
        ).encode()
        + b"\n"
        for n in range(count)
    )


def assert_once(text: str, folder: Path, count: int) -> None:
    """Each item has one line, and the ledger the tokens of exactly these."""
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(f"item-{n}" for n in range(count))
    used = [a["response"]["body"]["usage"] for a in answers]
    query = "SELECT sum(requests), sum(input_tokens), sum(output_tokens) FROM usage"
    with sqlite3.connect(folder / "ledger.db") as ledger:
        posted = ledger.execute(f"{query} WHERE tenant = 'tenant-batch'").fetchone()
    told = [sum(u[name] for u in used) for name in ("prompt_tokens", "completion_tokens")]
    assert posted == (count, *told)


def test_a_batch_outlives_its_replica(fleet: Fleet, folder: Path) -> None:
    first, second = client_of(fleet, 0), client_of(fleet, 1)
    file = first.files.create(file=("in.jsonl", lines(ITEMS)), purpose="batch")
    batch = second.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"run": "1"},
    )

    def done() -> int:
        counts = first.batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    until(lambda: done() > 20)
    owner = max((0, 1), key=lambda n: fleet.replicas[n].metrics().get(ITEMS_RUN, 0))
    fleet.kill_replica(fleet.replicas[owner])
    client = client_of(fleet, 1 - owner)
    began_s = time.monotonic()
    until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    assert time.monotonic() - began_s < 60
    ended = client.batches.retrieve(batch.id)
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (ITEMS, 0)
    assert ended.output_file_id is not None
    assert_once(client.files.content(ended.output_file_id).text, folder, ITEMS)


ITEMS_RUN = f'sluice_batch_items_total{{model="{MODEL}",result="completed"}}'
