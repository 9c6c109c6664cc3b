"""The official anthropic client through /v1/messages."""

from collections.abc import Iterator

import anthropic
import pytest

from bench.fleet import MODEL, Fleet
from tests.e2e.conftest import KEY


@pytest.fixture
def client(fleet: Fleet) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.url, api_key=KEY) as client:
        yield client


def test_a_message(client: anthropic.Anthropic, fleet: Fleet) -> None:
    answer = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
    )
    message = answer.parse()
    assert message.usage.output_tokens == 8
    assert message.stop_reason == "max_tokens"
    record = fleet.decision(answer.headers["x-request-id"])
    assert record["completion_tokens"] == 8
    assert record["endpoint"] == "messages"


def test_a_streamed_message_is_metered(client: anthropic.Anthropic, fleet: Fleet) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        text = "".join(stream.text_stream)
        request_id = stream.response.headers["x-request-id"]
    assert text
    record = fleet.decision(request_id)
    assert record["usage_source"] == "engine"
    assert record["completion_tokens"] == 8
    assert record["prompt_tokens"] > 0


def test_errors_have_anthropics_shape(fleet: Fleet) -> None:
    with (
        anthropic.Anthropic(base_url=fleet.url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
        )
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"
