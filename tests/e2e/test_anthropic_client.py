"""The official anthropic client through /v1/messages."""

from collections.abc import Iterator

import anthropic
import httpx
import pytest

from bench.common.fleet import MODEL, Fleet
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
    assert record["usage"]["completion_tokens"] == 8
    assert record["endpoint"] == "messages"


def test_a_streamed_message_is_metered(client: anthropic.Anthropic, fleet: Fleet) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        text = "".join(stream.text_stream)
        request_id = stream.response.headers["x-request-id"]
    assert text
    record = fleet.decision(request_id)
    assert record["usage"]["source"] == "engine"
    assert record["usage"]["completion_tokens"] == 8
    assert record["usage"]["prompt_tokens"] > 0


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello there"}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    message = client.messages.create(
        model=MODEL, max_tokens=1, messages=messages, system="Be brief."
    )
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/nothing"])
def test_what_there_is_not_is_told_in_anthropics_shape(fleet: Fleet, path: str) -> None:
    answer = httpx.post(fleet.url + path, json={}, headers={"x-api-key": KEY})
    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"


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
