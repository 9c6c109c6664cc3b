"""Batches as the official client sends them, and what must hold of their output."""

import json
from typing import Any, Final

import openai

from bench.common.fleet import MODEL
from tests.asking import get, until

USAGE: Final = "/v1/sluice/usage?by=tenant"
"""The sums that the ledger holds for a key's tenant."""


def client_of(url: str, key: str = "sk-batch", max_retries: int = 2) -> openai.OpenAI:
    """The official client of a gateway, which takes no answer of another shape."""
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=max_retries,
        _strict_response_validation=True,
    )


def item(number: int, tokens: int = 40, model: str = MODEL) -> bytes:
    """A line of an input file."""
    text = f"{'A shared system prompt. ' * 20}{number % 5}: tell me about {number}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }
    line = {
        "custom_id": f"item-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(line).encode() + b"\n"


def items(count: int, tokens: int = 40, model: str = MODEL) -> bytes:
    """An input file."""
    return b"".join(item(number, tokens, model) for number in range(count))


def upload(client: openai.OpenAI, data: bytes) -> openai.types.FileObject:
    """Upload an input file."""
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def create(client: openai.OpenAI, file: str, **more: Any) -> openai.types.Batch:
    """A batch of an uploaded file."""
    return client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", **more
    )


def done(client: openai.OpenAI, batch: str) -> int:
    """Items that have their answers in the output."""
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def output(client: openai.OpenAI, batch: str, count: int, limit_s: float = 60.0) -> str:
    """The output of a batch once it has completed, with all items answered."""
    until(lambda: client.batches.retrieve(batch).status == "completed", limit_s)
    ended = client.batches.retrieve(batch)
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (count, 0)
    assert ended.output_file_id is not None
    return client.files.content(ended.output_file_id).text


def assert_once(text: str, count: int) -> list[dict[str, int]]:
    """Each item has one line; the usage of all."""
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(f"item-{n}" for n in range(count))
    return [a["response"]["body"]["usage"] for a in answers]


def assert_posted(usage: list[dict[str, int]], url: str, key: str = "sk-batch") -> None:
    """The ledger has just this of the key's tenant."""
    total = get(url, key, USAGE).json()["total"]
    posted = [total[name] for name in ("requests", "input_tokens", "output_tokens")]
    names = ("prompt_tokens", "completion_tokens")
    assert posted == [len(usage), *(sum(each[name] for each in usage) for name in names)]
