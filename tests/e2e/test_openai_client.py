"""The official openai client through the gateway: every endpoint, streaming and not."""

import json
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import MODEL, Fleet
from simulator.mock_server.tokenizer import count
from tests.e2e.conftest import KEY


def words(tokens: int) -> str:
    """English text of about `tokens` tokens by the mock's tokenizer, never fewer."""
    piece = "The quick brown fox jumps over the lazy dog while seven wise owls watch the river. "
    return piece * -(-tokens * 100 // count(piece * 100))


def user(text: str) -> Any:
    """One user message; Any, for the client's overloads are not what is tested."""
    return [{"role": "user", "content": text}]


def raw(client: openai.OpenAI) -> Any:
    """The chat call that keeps the response's headers."""
    return client.chat.completions.with_raw_response.create


def chat(client: openai.OpenAI) -> Any:
    """The plain chat call."""
    return client.chat.completions.create


def ask(client: openai.OpenAI, text: str, **more: object) -> tuple[httpx.Headers, Any]:
    answer = raw(client)(model=MODEL, messages=user(text), **more)
    return answer.headers, json.loads(answer.content)


def test_a_200_token_prompt_goes_to_the_short_pool(client: openai.OpenAI) -> None:
    headers, body = ask(client, words(200), max_tokens=16)
    assert headers["x-sluice-pool"] == "short"
    assert body["choices"][0]["message"]["content"]


def test_a_20000_token_prompt_goes_to_the_long_pool(client: openai.OpenAI) -> None:
    headers, body = ask(client, words(20_000), max_tokens=16)
    assert headers["x-sluice-pool"] == "long"
    assert body["usage"]["prompt_tokens"] >= 20_000


def test_7000_tokens_with_room_for_4000_go_to_the_long_pool(client: openai.OpenAI) -> None:
    headers, _ = ask(client, words(7000), max_tokens=4000, extra_body={"mock_output_tokens": 5})
    assert headers["x-sluice-pool"] == "long"


def test_a_stream_arrives_in_pieces_and_its_usage_is_metered_unasked(
    client: openai.OpenAI, fleet: Fleet
) -> None:
    response = raw(client)(
        model=MODEL,
        messages=user("Tell me a story."),
        max_tokens=24,
        stream=True,
        extra_body={"mock_output_tokens": 24},
    )
    chunks = list(response.parse())
    assert all(chunk.choices for chunk in chunks), "a usage chunk reached a client that asked none"
    assert all(chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text
    assert chunks[-1].choices[0].finish_reason == "stop"
    record = fleet.decision(response.headers["x-request-id"])
    assert record["usage"]["source"] == "engine"
    assert record["usage"]["completion_tokens"] == 24
    assert record["usage"]["prompt_tokens"] > 0


def test_a_client_that_asks_for_usage_on_a_stream_gets_it(client: openai.OpenAI) -> None:
    chunks = list(
        chat(client)(
            model=MODEL,
            messages=user("Count."),
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_completions_embeddings_responses_and_models(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=4)
    assert len(completion.choices) == 2
    embedding = client.embeddings.create(model=MODEL, input=["a text", "another"])
    assert len(embedding.data) == 2
    response = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=6)
    assert response.output_text
    assert {m.id for m in client.models.list()} == {MODEL, "gpt-4o-mini"}


def test_a_streamed_response_completes(client: openai.OpenAI, fleet: Fleet) -> None:
    stream = client.responses.with_raw_response.create(
        model=MODEL, input="Say something.", max_output_tokens=6, stream=True
    )
    events = list(stream.parse())
    assert events[-1].type in ("response.completed", "response.incomplete")
    record = fleet.decision(stream.headers["x-request-id"])
    assert record["usage"]["source"] == "engine"
    assert record["usage"]["completion_tokens"] == 6


def test_a_stored_response_returns_to_its_worker(client: openai.OpenAI) -> None:
    first = client.responses.with_raw_response.create(
        model=MODEL, input="Remember me.", max_output_tokens=4
    )
    worker = first.headers["x-sluice-worker"]
    for _ in range(4):
        again = client.responses.with_raw_response.create(
            model=MODEL,
            input="Who am I?",
            previous_response_id=first.parse().id,
            max_output_tokens=4,
        )
        assert again.headers["x-sluice-worker"] == worker


def test_an_alias_reaches_the_engine_under_its_own_name(
    client: openai.OpenAI, fleet: Fleet
) -> None:
    answer = raw(client)(
        model="gpt-4o-mini",
        messages=user("alias"),
        max_tokens=2,
    )
    engine = next(e for e in fleet.engines if e.id == answer.headers["x-sluice-worker"])
    assert json.loads(engine.last()[-1]["body"])["model"] == MODEL


def test_several_choices_are_counted_as_sequences(client: openai.OpenAI, fleet: Fleet) -> None:
    answer = raw(client)(
        model=MODEL,
        messages=user("three"),
        max_tokens=4,
        n=3,
    )
    assert len(answer.parse().choices) == 3
    assert fleet.decision(answer.headers["x-request-id"])["estimate"]["sequences"] == 3


def test_client_keys_and_steering_fields_never_reach_an_engine(
    client: openai.OpenAI, fleet: Fleet
) -> None:
    answer = raw(client)(
        model=MODEL,
        messages=user("steer"),
        max_tokens=2,
        extra_headers={"X-data-parallel-rank": "3", "x-gateway-destination": "me", "cookie": "a=b"},
        extra_body={"priority": -100, "cache_salt": "x", "kv_transfer_params": {"a": 1}},
    )
    engine = next(e for e in fleet.engines if e.id == answer.headers["x-sluice-worker"])
    got = engine.last()[-1]
    assert not {"authorization", "x-data-parallel-rank", "x-gateway-destination", "cookie"} & set(
        got["headers"]
    )
    assert set(json.loads(got["body"])) == {"model", "messages", "max_tokens"}


def test_an_unchanged_body_is_forwarded_byte_for_byte(fleet: Fleet) -> None:
    body = (
        b'{ "model" :"' + MODEL.encode() + b'",\n\t"messages":[{"role":"user",'
        b'"content":"\\u00e9t\\u00e9 \xc3\xa9"}] , "max_tokens": 2, "unknown": {"a":[1, 2.50]} }'
    )
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions",
        content=body,
        headers={"authorization": "Bearer sk-test-e2e", "content-type": "application/json"},
    )
    assert answer.status_code == 200
    engine = next(e for e in fleet.engines if e.id == answer.headers["x-sluice-worker"])
    assert engine.last()[-1]["body"].encode() == body


def test_a_wrong_key_is_refused_in_openai_shape(fleet: Fleet) -> None:
    with (
        openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="sk-wrong") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=user("no"))
    assert refused.value.code == "invalid_api_key"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-99", messages=user("no"))
    assert refused.value.code == "model_not_found"


def test_what_cannot_fit_any_window_is_refused_without_an_engine(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, words(200_000), max_tokens=16)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


def test_a_3_mb_inline_image_is_served(client: openai.OpenAI) -> None:
    content = [
        {"type": "text", "text": words(50)},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}},
    ]
    answer = raw(client)(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
    )
    assert answer.headers["x-sluice-pool"] == "short"


CHINESE = "人工智能正在改变我们的生活方式，也带来了新的挑战和机会。" * 60


def test_escaped_cjk_is_estimated_like_unescaped(fleet: Fleet) -> None:
    estimates = []
    for ascii_only in (True,) * 30 + (True, False):  # the first ones warm the ratio up
        body = json.dumps(
            {"model": MODEL, "messages": user(CHINESE), "max_tokens": 2}, ensure_ascii=ascii_only
        )
        answer = httpx.post(
            f"{fleet.url}/v1/chat/completions",
            content=body.encode(),
            headers={"authorization": "Bearer sk-test-e2e", "content-type": "application/json"},
        )
        estimates.append(int(answer.headers["x-sluice-estimated-tokens"]))
    assert abs(estimates[-2] / estimates[-1] - 1) <= 0.05


def test_a_base_url_without_v1_serves_as_well(fleet: Fleet) -> None:
    """Some clients append only `/chat/completions`."""
    with openai.OpenAI(base_url=fleet.url, api_key=KEY) as client:
        answer = client.chat.completions.create(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hello"}]
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert MODEL in {model.id for model in client.models.list()}
