"""Compression end to end: the short pool answers, the sentence that matters arrived there."""

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from bench.common.fleet import MODEL, Fleet
from simulator.mock_server.tokenizer import count

FACT = "The vault of the harbour museum opens with the code seven-four-two."
QUESTION = "What is the code that opens the vault of the harbour museum?"
SUBJECTS = ("mill", "orchard", "lighthouse", "ferry", "quarry", "chapel", "market", "station")


def passages(tokens: int, *, fact_at: float) -> str:
    """Retrieved documents of about so many tokens, one of which answers."""
    found: list[str] = []
    size, number = 0, 0
    while size < tokens:
        number += 1
        subject = SUBJECTS[number % len(SUBJECTS)]
        sentences = [
            f"The {subject} number {number} was built in {1700 + number} by the river.",
            f"Visitors to {subject} {number} find a garden, a bench and an old well.",
            f"Its keeper writes that winter {number} was long and the {subject} stood empty.",
        ]
        if found and size >= tokens * fact_at and FACT not in "".join(found):
            sentences.insert(1, FACT)
        text = f"[{number}] Notes on {subject} {number}\n" + " ".join(sentences)
        found.append(text)
        size += count(text) + 1
    return "\n\n".join(found)


def rag(tokens: int = 9_500, *, max_tokens: int = 500, fact_at: float = 0.5) -> dict[str, Any]:
    text = passages(tokens, fact_at=fact_at)
    return {
        "model": MODEL,
        "max_tokens": max_tokens,
        "mock_output_tokens": 5,
        "temperature": 0.25,
        "messages": [
            {"role": "system", "content": "Answer from the documents. Never guess."},
            {"role": "user", "content": f"{text}\n\n{QUESTION}"},
        ],
    }


UNHURRIED = {"compressor": {"time_limit_ms": 60_000}}
"""No prompt is given up because the machine is busy."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    # Without a scheduler no pool is preferred because it holds the prefix.
    model = {
        "compression": {"enabled": True, "only_when_busy": False},
        "scheduling": {"policy": "least-loaded"},
    }
    with Fleet(short=1, long=1, model=model, config=UNHURRIED) as started:
        yield started


def post(fleet: Fleet, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(
        fleet.url + "/v1/chat/completions",
        json=body,
        headers={k.replace("_", "-"): v for k, v in headers.items()},
        timeout=60,
    )


def received(fleet: Fleet, pool: str) -> dict[str, Any]:
    (engine,) = fleet.pool(pool)
    found: dict[str, Any] = orjson.loads(engine.last()[-1]["body"])
    return found


@pytest.mark.parametrize("fact_at", [0.0, 0.5, 0.95])
def test_a_borderline_rag_prompt_is_answered_by_the_short_pool(
    fleet: Fleet, fact_at: float
) -> None:
    answer = post(fleet, rag(fact_at=fact_at))
    assert answer.status_code == 200
    assert answer.headers["x-sluice-pool"] == "short"
    before, after = map(int, answer.headers["x-sluice-compressed"].split("->"))
    assert before > 8192 - 500 >= after
    sent = received(fleet, "short")
    assert FACT in sent["messages"][1]["content"]
    assert sent["messages"][1]["content"].endswith(QUESTION)
    assert sent["messages"][0] == rag()["messages"][0]
    assert (sent["temperature"], sent["max_tokens"]) == (0.25, 500)
    assert answer.json()["usage"]["prompt_tokens"] <= 8192 - 500
    record = fleet.decision(answer.headers["x-request-id"])
    assert record["rescued"] is False if "rescued" in record else True
    assert 0.5 <= record["compression"]["kept_share"] < 1.0


def test_a_code_prompt_of_that_size_goes_long(fleet: Fleet) -> None:
    line = (
        "def handler_{0}(request, *, retries=3):\n    return [f(x) for x in request if x > {0}]\n"
    )
    code = "".join(line.format(n) for n in range(420))
    answer = post(fleet, {**rag(), "messages": [{"role": "user", "content": code}]})
    assert answer.headers["x-sluice-pool"] == "long"
    assert answer.headers["x-sluice-compressed"] == "none"


def test_a_client_may_opt_out(fleet: Fleet) -> None:
    answer = post(fleet, rag(), x_sluice_compress="off")
    assert answer.headers["x-sluice-pool"] == "long"
    record = fleet.decision(answer.headers["x-request-id"])
    assert record["compression"]["not_compressed"] == "refused_by_client"
    assert received(fleet, "long") == rag()


def test_a_stream_is_compressed_too(fleet: Fleet) -> None:
    answer = post(fleet, {**rag(9_700), "stream": True})
    assert answer.headers["x-sluice-pool"] == "short"
    assert answer.text.rstrip().endswith("data: [DONE]")
