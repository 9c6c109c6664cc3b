"""Compressed prompts that an engine counts over its window: the original is served, long.

The gateway counts here with a vocabulary that is not the engine's: whole words, where the
engine has pieces of them. So what it made to fit the short window does not, every time.
"""

import asyncio
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.common.fleet import MODEL, Fleet
from bench.common.texts import document

KEY = "sk-reader"
QUESTION = "What do these pages say about reading files line by line?"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
OUTPUT_TOKENS = 600
ANY = {"when": "any", "only_when_busy": False}


def prompt(seed: int) -> str:
    return document("prose", 8_700, random.Random(seed)).text + "\n\n" + QUESTION


def body(endpoint: str, text: str, **more: Any) -> dict[str, Any]:
    common = {"model": MODEL, "mock_output_tokens": 20, **more}
    if endpoint == "completions":
        return {**common, "prompt": text, "max_tokens": OUTPUT_TOKENS}
    if endpoint == "responses":
        return {**common, "input": text, "max_output_tokens": OUTPUT_TOKENS}
    told = {"messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT_TOKENS}
    return {**common, **told}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path: Path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    words.save(str(path))
    reader = {
        "name": "reader",
        "tenant": "library",
        "service_class": "elastic",
        "model": MODEL,
        "api_keys": ["sha256:" + hashlib.sha256(KEY.encode()).hexdigest()],
    }
    with Fleet(
        short=1,
        long=1,
        # The engine's window is what the gateway takes it for; only their counts differ.
        model={"compression": {"enabled": True, "tokenizer": str(path), "max_cut": 0.9, **ANY}},
        config={"entitlements": [reader], "compressor": {"time_limit_ms": 60_000}},
        mock=("--speed", "10"),
    ) as started:
        yield started


def headers() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def received(fleet: Fleet, pool: str) -> tuple[dict[str, Any], int]:
    """The body that a pool's engine got last, and its size."""
    (engine,) = fleet.pool(pool)
    raw = engine.last()[-1]["body"]
    return orjson.loads(raw), len(raw)


def why_whole(record: dict[str, Any]) -> str | None:
    """Why a prompt in the window went as it came."""
    found: str | None = record.get("compression", {}).get("not_compressed")
    return found


def inflight(fleet: Fleet) -> dict[str, float]:
    found = fleet.metrics()
    return {
        pool: found[f'sluice_pool_inflight{{model="{MODEL}",pool="{pool}"}}']
        for pool in ("short", "long")
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", PATHS)
def test_the_original_is_answered_by_the_long_pool_before_a_byte_was_sent(
    fleet: Fleet, endpoint: str, stream: bool
) -> None:
    asked = body(endpoint, prompt(len(endpoint) + stream), **({"stream": True} if stream else {}))
    answer = httpx.post(fleet.url + PATHS[endpoint], json=asked, headers=headers(), timeout=60)
    assert answer.status_code == 200
    assert "context length" not in answer.text
    assert answer.headers["x-sluice-pool"] == "long"
    assert answer.headers["x-sluice-compressed"] == "none"
    assert answer.headers["x-sluice-spilled"] == "false"
    record = fleet.decision(answer.headers["x-request-id"])
    assert why_whole(record) == "other_pool"
    assert [(a["pool"], a["result"]) for a in record["attempts"]] == [
        ("short", "overflow"),
        ("long", "ok"),
    ]
    assert record["rescued"] is True
    assert "kept_share" not in record
    refused, refused_bytes = received(fleet, "short")
    served, served_bytes = received(fleet, "long")
    assert refused_bytes < served_bytes, "what the short engine refused was the cut one"
    assert refused["model"] == served["model"]
    text_of = {"completions": "prompt", "responses": "input"}.get(endpoint, "messages")
    assert served[text_of] == asked[text_of], "the client's own, whole"
    fleet.wait_until_idle()
    assert inflight(fleet) == {"short": 0, "long": 0}


def test_a_rescued_request_holds_a_place_and_its_whole_cost_in_the_long_pool(
    fleet: Fleet,
) -> None:
    """Compressed, the lease was lowered; the original is served, so it costs what it costs."""
    asked = {**body("chat", prompt(3), stream=True), "mock_output_tokens": OUTPUT_TOKENS}
    with httpx.stream(
        "POST", fleet.url + PATHS["chat"], json=asked, headers=headers(), timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert inflight(fleet) == {"short": 0, "long": 1}
        (short,) = fleet.pool("short")
        assert short.running() == 0
        for _ in lines:
            pass
    record = fleet.decision(answer.headers["x-request-id"])
    whole_tokens = int(answer.headers["x-sluice-estimated-tokens"])
    assert whole_tokens == record["estimate"]["input_tokens"] + OUTPUT_TOKENS
    assert whole_tokens > 8192, "the original's, not the cut one's"
    changes = [(what, value) for _, what, value in record["admission"]["lease_changes"]]
    (cut, moved, whole) = changes
    assert cut[0] == "resize"
    assert cut[1] <= 8192
    assert moved == ("transfer", 1)
    assert whole == ("resize", whole_tokens)
    assert record["admission"]["reserved_tokens"] == whole_tokens
    fleet.wait_until_idle()
    assert inflight(fleet) == {"short": 0, "long": 0}


def test_every_one_of_many_at_once_is_rescued(fleet: Fleet) -> None:
    before = fleet.metrics().get('sluice_misroutes_total{kind="overflow"}', 0)
    count = 24

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        fleet.url + PATHS["chat"],
                        json=body("chat", prompt(100 + n), stream=n % 2 == 0),
                        headers=headers(),
                    )
                    for n in range(count)
                )
            )

    answers = asyncio.run(all_of_them())
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-sluice-pool"] for a in answers} == {"long"}
    assert not any("context length" in a.text for a in answers)
    fleet.wait_until_idle()
    assert inflight(fleet) == {"short": 0, "long": 0}
    records = [fleet.decision(a.headers["x-request-id"]) for a in answers]
    # A full queue of the compressing processes sends a prompt long at once: none was cut then.
    cut = [record for record in records if why_whole(record) == "other_pool"]
    assert cut
    assert all(record["rescued"] for record in cut)
    after = fleet.metrics()['sluice_misroutes_total{kind="overflow"}']
    assert after - before == len(cut)
