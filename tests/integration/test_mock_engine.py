"""The mock engine over real sockets: official clients, raw bytes, faults."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from simulator.mock_server import tokenizer
from simulator.mock_server.api.config import OverflowWording
from tests.running import MOCK_MODEL, mock_engine

CHAT = "/v1/chat/completions"
Start = Callable[..., str]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with mock_engine() as address:
        yield address


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        yield lambda **fields: stack.enter_context(mock_engine(**fields))


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat_body(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    return {"model": MOCK_MODEL, "messages": user(text), **fields}


def post(url: str, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=10, **options)


def metrics(url: str) -> dict[str, float]:
    """Samples by name and labels, as written."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def metric(url: str, name: str, engine: int = 0) -> float:
    found = metrics(url)
    return found.get(f'{name}{{engine="{engine}",model_name="{MOCK_MODEL}"}}', -1.0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


class Received:
    """What came of a request before its connection failed, if it did."""

    def __init__(self, url: str, body: dict[str, Any], timeout_s: float = 10) -> None:
        self.head: httpx.Response | None = None
        self.body = b""
        self.error: Exception | None = None
        self.on_part: Callable[[], None] = lambda: None
        self._url, self._request, self._timeout_s = url, body, timeout_s

    def run(self) -> "Received":
        try:
            with httpx.stream(
                "POST", self._url + CHAT, json=self._request, timeout=self._timeout_s
            ) as response:
                self.head = response
                for part in response.iter_raw():
                    self.body += part
                    self.on_part()
        except httpx.TransportError as error:
            self.error = error
        return self

    @property
    def chunks(self) -> int:
        return self.body.count(b"data: ")


def fail(url: str, spec: str) -> None:
    assert post(url, "/mock/fail", {"spec": spec}).status_code == 200


# Shapes, with the official clients


def test_chat_stream_is_shaped_as_vllms(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MOCK_MODEL,
        messages=user("Hi?"),
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-mock-output-tokens": "150"},
    )
    first, *content, usage = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert [c.choices[0].finish_reason for c in content] == [None] * (len(content) - 1) + ["stop"]
    assert content[-1].choices[0].delta.content
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 150
    assert 140 <= len(content) < 150  # a few tokens have no text


def test_continuous_usage_rides_on_every_chunk(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = post(url, CHAT, chat_body(max_tokens=3, stream=True, stream_options=options))
    assert [e["usage"]["completion_tokens"] for e in events(response)] == [0, 1, 2, 3, 3]


def test_responses_remember_earlier_turns(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MOCK_MODEL, input="Hi?", max_output_tokens=3)
    second = client.responses.create(
        model=MOCK_MODEL, input="And?", max_output_tokens=3, previous_response_id=first.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model=MOCK_MODEL, input="And?", previous_response_id="resp_none")


def test_tokenize_counts_what_usage_reports(url: str) -> None:
    body = chat_body("Count these words, please: один два три.", max_tokens=1)
    counted = post(url, "/tokenize", body).json()
    usage = post(url, CHAT, body).json()["usage"]
    assert counted["count"] == len(counted["tokens"]) == usage["prompt_tokens"]
    assert counted["max_model_len"] == 2048
    plain = post(url, "/tokenize", {"prompt": "a b", "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer.encode("a b")


# Lengths


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"mock_output_tokens": 5}, 5, "stop"),
        ({"mock_output_tokens": 5, "max_tokens": 5}, 5, "stop"),
        ({"mock_output_tokens": 6, "max_tokens": 5}, 5, "length"),
        ({"mock_output_tokens": 5, "min_tokens": 9}, 9, "stop"),
        ({"mock_output_tokens": 5, "ignore_eos": True, "max_tokens": 12}, 12, "length"),
        ({"mock_output_tokens": 5, "max_completion_tokens": 4, "max_tokens": 9}, 4, "length"),
    ],
)
def test_limits_cut_the_natural_length(
    url: str, fields: dict[str, Any], tokens: int, reason: str
) -> None:
    answer = post(url, CHAT, chat_body(**fields)).json()
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == reason


# Refusals


def prompt_of(tokens: int) -> list[int]:
    return [7] * tokens


IS_V1 = (
    "This model's maximum context length is 100 tokens. However, you requested 110 tokens "
    "(90 in the messages, 20 in the completion)."
)
IS_V2 = (
    "You passed 90 input tokens and requested 20 output tokens. However, the model's "
    "context length is only 100 tokens, resulting in a maximum input length of 80 tokens."
)
IS_V3 = (
    "This model's maximum context length is 100 tokens. However, you requested 20 output "
    "tokens and your prompt contains at least 81 input tokens, for a total of at least "
    "101 tokens. Please reduce the length of the input prompt or the number of requested "
    "output tokens."
)
IS_V4 = "max_tokens=200 cannot be greater than max_model_len=max_total_tokens=100."
IS_SGLANG = "The input (150 tokens) is longer than the model's context length (100 tokens)."
IS_SGLANG_TOTAL = "Requested token count exceeds the model's maximum context length of"


@pytest.mark.parametrize(
    ("wording", "prompt_tokens", "limit", "says"),
    [
        ("v1", 90, 20, IS_V1),
        ("v2", 90, 20, IS_V2),
        ("v3", 90, 20, IS_V3),
        ("v4", 90, 20, IS_V3),
        ("v4", 10, 200, IS_V4),
        ("sglang", 150, 20, IS_SGLANG),
        ("sglang", 90, 20, IS_SGLANG_TOTAL),
    ],
)
def test_overflow_wordings(
    start: Start, wording: OverflowWording, prompt_tokens: int, limit: int, says: str
) -> None:
    url = start(max_model_len=100, overflow_wording=wording)
    body = {"model": MOCK_MODEL, "prompt": prompt_of(prompt_tokens), "max_tokens": limit}
    answer = post(url, "/v1/completions", body)
    error = answer.json() if wording == "sglang" else answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert error["message"].startswith(says)
    assert error["type"] == "BadRequestError"
    streamed = post(url, "/v1/completions", {**body, "stream": True})
    assert (streamed.status_code, streamed.json()) == (400, answer.json())


def check(error: dict[str, Any], kind: str, code: int, says: str) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, code)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"model": "other"}, 404, "NotFoundError", "The model `other` does not exist."),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        ({"max_tokens": "9"}, 400, "Bad Request", "valid integer"),
        ({"priority": 3}, 400, "BadRequestError", "Priority scheduling is not enabled"),
        ({"messages": None}, 400, "Bad Request", "Field required"),
        ({"messages": "hi"}, 400, "Bad Request", "valid list"),
        ({"messages": [{"content": "hi"}]}, 400, "Bad Request", "Field required"),
        ({"n": 0}, 200, "", ""),
        ({"n": -1}, 400, "BadRequestError", "n must be in"),
    ],
)
def test_bad_bodies(url: str, fields: dict[str, Any], status: int, kind: str, says: str) -> None:
    answer = post(url, CHAT, chat_body(**{"max_tokens": 2, **fields}))
    assert answer.status_code == status
    if status != 200:
        check(answer.json()["error"], kind, status, says)


def test_bad_bytes(url: str) -> None:
    headers = {"content-type": "application/json"}
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (b"{", b"", b"[1]", b"\xff\xfe", deep):
        answer = httpx.post(url + CHAT, content=body, headers=headers)
        check(answer.json()["error"], "Bad Request", 400, "")
    answer = httpx.post(url + CHAT, content=b"{}", headers={"content-type": "text/plain"})
    check(answer.json()["error"], "Bad Request", 400, "Unsupported Media Type")


def test_a_key_is_asked_for_on_v1_only(start: Start) -> None:
    url = start(api_key="secret")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = post(url, CHAT, chat_body(max_tokens=1), headers=headers)
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    good = {"authorization": "Bearer secret"}
    assert post(url, CHAT, chat_body(max_tokens=1), headers=good).status_code == 200
    assert httpx.get(url + "/health").status_code == 200


async def gather(url: str, number: int, **fields: Any) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=10) as http:
        calls = [http.post(url + CHAT, json=chat_body(**fields)) for _ in range(number)]
        return await asyncio.gather(*calls)


async def test_a_full_queue_is_busy(start: Start) -> None:
    url = start(max_num_seqs=2, max_num_queued=3, speed=5)
    answers = await gather(url, 12, max_tokens=200, ignore_eos=True)
    statuses = [answer.status_code for answer in answers]
    assert 3 <= statuses.count(200) <= 6
    assert statuses.count(200) + statuses.count(503) == 12
    error = next(a for a in answers if a.status_code == 503).json()["error"]
    assert (error["code"], "try again later" in error["message"]) == (503, True)
    assert post(url, CHAT, chat_body(max_tokens=1)).status_code == 200


# The engine behind it


def test_a_second_prompt_finds_the_first_ones_prefix(url: str) -> None:
    text = "The prefix cache works on blocks of sixteen tokens. " * 10

    def cached(**fields: Any) -> int:
        usage = post(url, CHAT, chat_body(text, max_tokens=2, **fields)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    hits = metric(url, "vllm:prefix_cache_hits_total")
    assert cached() == 0
    found = cached()
    assert found > 100
    assert found % 16 == 0
    assert cached(cache_salt="tenant") == 0
    assert cached(cache_salt="tenant") == found
    assert metric(url, "vllm:prefix_cache_hits_total") == hits + 2 * found


@pytest.mark.alone
def test_tokens_come_at_the_models_pace(start: Start) -> None:
    url = start(speed=1, w_s=0.008, h_s=0.002)
    body = chat_body(max_tokens=40, ignore_eos=True, stream=True)
    with httpx.stream("POST", url + CHAT, json=body) as response:
        stamps = [time.monotonic() for _ in response.iter_raw()]
    took = stamps[-1] - stamps[0]
    # 40 tokens are 39 intervals of W + H; a late one does not delay the next.
    assert 0.95 * 39 * 0.010 < took < 39 * 0.010 + 0.15
    assert metrics(url)[f'mock_lag_p99_seconds{{model_name="{MOCK_MODEL}"}}'] < 0.1


async def cancel_midway(url: str, number: int, *, stream: bool) -> None:
    body = chat_body(max_tokens=1500, ignore_eos=True, stream=stream)
    async with httpx.AsyncClient(timeout=10) as http:

        async def one() -> None:
            async with http.stream("POST", url + CHAT, json=body) as response:
                async for _ in response.aiter_raw():
                    pass

        tasks = [asyncio.create_task(one()) for _ in range(number)]
        give_up = time.monotonic() + 5
        while (await http.get(url + "/load")).json()["server_load"] < number:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slots(start: Start, stream: bool) -> None:
    url = start(speed=1, max_num_seqs=24)  # some of 40 run, the others wait
    await cancel_midway(url, 40, stream=stream)
    left = time.monotonic()
    while metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting") > 0:
        assert time.monotonic() - left < 1
    assert metrics(url)[f'mock_aborted_total{{model_name="{MOCK_MODEL}"}}'] == 40
    assert metric(url, "vllm:kv_cache_usage_perc") == 0


async def test_data_parallel_ranks(start: Start) -> None:
    url = start(dp_ranks=2)
    for _ in range(3):
        headers = {"x-data-parallel-rank": "1"}
        assert post(url, CHAT, chat_body(max_tokens=2), headers=headers).status_code == 200
    assert metric(url, "vllm:generation_tokens_total", engine=0) == 0
    assert metric(url, "vllm:generation_tokens_total", engine=1) == 6
    for bad in ("2", "-1"):
        answer = post(url, CHAT, chat_body(), headers={"x-data-parallel-rank": bad})
        assert answer.status_code == 400
        assert "out of range [0, 2)" in answer.json()["error"]["message"]
    await gather(url, 8, max_tokens=40, ignore_eos=True)
    assert metric(url, "vllm:generation_tokens_total", engine=0) == 160  # spread evenly


def test_metrics_have_vllms_names(start: Start) -> None:
    url = start()
    post(url, CHAT, chat_body("What is it?", max_tokens=30, ignore_eos=True))
    post(url, CHAT, chat_body("What is it?", mock_output_tokens=3, max_tokens=30, stream=True))
    found = metrics(url)
    labels = f'engine="0",model_name="{MOCK_MODEL}"'
    for name, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 2 * (8 + tokenizer.count("What is it?")),
        "generation_tokens_total": 33,
        "time_to_first_token_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_prompt_tokens_count": 2,
        "request_generation_tokens_sum": 33,
        "request_params_max_tokens_sum": 60,
    }.items():
        assert found[f"vllm:{name}{{{labels}}}"] == value, name
    assert found[f'vllm:request_generation_tokens_bucket{{{labels},le="5.0"}}'] == 1
    assert found[f'vllm:request_generation_tokens_bucket{{{labels},le="+Inf"}}'] == 2
    assert found[f'vllm:request_success_total{{{labels},finished_reason="stop"}}'] == 1
    assert found[f'vllm:request_success_total{{{labels},finished_reason="length"}}'] == 1
    (info,) = [name for name in found if name.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in info
    assert 'num_gpu_blocks="65536"' in info
    assert f'mock_lag_seconds_count{{model_name="{MOCK_MODEL}"}}' in found


def test_what_was_received_is_remembered_byte_for_byte(url: str) -> None:
    body = b'{ "messages":[{"role":"user","content":"\\u4f60"}],\n"max_tokens":1, "max_tokens":1}'
    headers = {"content-type": "application/json", "X-Custom": "Kept"}
    httpx.post(url + CHAT, content=body, headers=headers)
    (last,) = httpx.get(url + "/mock/last").json()
    assert (last["path"], last["body"]) == (CHAT, body.decode())
    assert base64.b64decode(last["body_base64"]) == body
    assert last["headers"]["x-custom"] == "Kept"


# Faults


@pytest.fixture
def faulty(url: str) -> Iterator[Callable[[str], str]]:
    def set_faults(spec: str) -> str:
        fail(url, spec)
        return url

    yield set_faults
    fail(url, "")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("spec", "error"), [("refuse", httpx.RemoteProtocolError), ("reset-before", httpx.ReadError)]
)
def test_connections_that_end_before_an_answer(
    faulty: Callable[[str], str], spec: str, error: type[Exception], stream: bool
) -> None:
    url = faulty(spec)
    with pytest.raises(error):
        post(url, CHAT, chat_body(max_tokens=2, stream=stream))
    if spec == "refuse":
        with pytest.raises(error):
            httpx.get(url + "/health")
    else:
        assert httpx.get(url + "/health").status_code == 200


def test_a_reset_in_the_middle_of_a_stream(faulty: Callable[[str], str]) -> None:
    url = faulty("reset-mid:4")
    got = Received(url, chat_body(max_tokens=50, stream=True)).run()
    assert isinstance(got.error, httpx.ReadError)
    assert got.chunks == 5  # the role and four tokens
    assert metric(url, "vllm:num_requests_running") == 0


def test_a_reset_in_the_middle_of_a_body(faulty: Callable[[str], str]) -> None:
    got = Received(faulty("reset-mid"), chat_body(max_tokens=5)).run()
    assert isinstance(got.error, httpx.ReadError)
    assert got.head is not None
    assert len(got.body) == int(got.head.headers["content-length"]) // 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("spec", ["stall", "stall:2"])
def test_stalls_keep_the_connection_open(
    faulty: Callable[[str], str], spec: str, stream: bool
) -> None:
    url = faulty(spec)
    got = Received(url, chat_body(max_tokens=50, stream=stream), timeout_s=0.3).run()
    assert isinstance(got.error, httpx.ReadTimeout)
    if spec == "stall":
        assert got.head is None
    elif stream:
        assert got.chunks == 3
    else:
        assert got.head is not None
        assert 0 < len(got.body) < int(got.head.headers["content-length"])


@pytest.mark.parametrize(
    ("spec", "prompt_tokens"), [("usage-zero", 0), ("usage-huge", 10**9), ("usage-none", None)]
)
def test_wrong_usage(faulty: Callable[[str], str], spec: str, prompt_tokens: int | None) -> None:
    url = faulty(spec)
    whole = post(url, CHAT, chat_body(max_tokens=2)).json()
    body = chat_body(max_tokens=2, stream=True, stream_options={"include_usage": True})
    last = events(post(url, CHAT, body))[-1]
    for answer in (whole, last):
        assert answer.get("usage", {}).get("prompt_tokens") == prompt_tokens


def test_streams_that_end_badly(faulty: Callable[[str], str]) -> None:
    body = chat_body(max_tokens=3, stream=True)
    unfinished = post(faulty("no-done"), CHAT, body)
    assert "[DONE]" not in unfinished.text
    assert events(unfinished)[-1]["choices"][0]["finish_reason"] == "length"
    broken = post(faulty("no-finish"), CHAT, body)
    assert "[DONE]" not in broken.text
    assert [e["choices"][0]["finish_reason"] for e in events(broken)] == [None] * 4


def test_usage_on_the_last_content_chunk(faulty: Callable[[str], str]) -> None:
    body = chat_body(max_tokens=3, stream=True)
    *others, last = events(post(faulty("usage-every"), CHAT, body))
    assert last["usage"]["completion_tokens"] == 3
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in event for event in others)


def test_an_overflow_answered_200_and_empty(faulty: Callable[[str], str]) -> None:
    url = faulty("empty-200")
    body = {"model": MOCK_MODEL, "prompt": prompt_of(3000)}
    assert post(url, "/v1/completions", body).status_code == 400
    answer = post(url, "/v1/completions", {**body, "stream": True})
    assert (answer.status_code, answer.content) == (200, b"")


def test_broken_side_endpoints_and_names(faulty: Callable[[str], str]) -> None:
    url = faulty("models-500,no-metrics,model-name:llama-x")
    assert httpx.get(url + "/v1/models").status_code == 500
    assert httpx.get(url + "/metrics").status_code == 404
    assert post(url, CHAT, chat_body(max_tokens=2)).json()["model"] == "llama-x"
    streamed = events(post(url, CHAT, chat_body(max_tokens=2, stream=True)))
    assert {event["model"] for event in streamed} == {"llama-x"}


@pytest.mark.parametrize("spec", ["slow:8", "slow:8@0.999"])
@pytest.mark.parametrize("stream", [True, False])
def test_slow_engines_and_slow_requests(start: Start, spec: str, stream: bool) -> None:
    url = start(speed=10, h_s=0.0)
    body = chat_body(max_tokens=25, ignore_eos=True, stream=stream)
    post(url, CHAT, body)
    fail(url, spec)
    started = time.monotonic()
    post(url, CHAT, body)
    assert time.monotonic() - started > 0.95 * 25 * 0.008 * 8 / 10  # 20 ms unspoiled


def test_a_bad_spec_changes_nothing(url: str) -> None:
    answer = post(url, "/mock/fail", {"spec": "explode"})
    assert answer.status_code == 400
    assert "known faults" in answer.json()["error"]["message"]
    assert post(url, CHAT, chat_body(max_tokens=1)).status_code == 200


# The command


def command(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "sluice.mock", "--port", "0", "--model", MOCK_MODEL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )


def test_the_command_serves_and_ends_at_once() -> None:
    with command("--max-model-len", "512", "--profile", "demo") as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().split()
            assert ready[:2] == ["MOCK", "READY"]
            models = httpx.get(ready[2] + "/v1/models").json()
            assert models["data"][0]["max_model_len"] == 512
            body = chat_body(max_tokens=480, ignore_eos=True, stream=True)
            got = Received(ready[2], body)
            got.on_part = lambda: process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert isinstance(got.run().error, httpx.TransportError)
            process.wait(5)
            assert time.monotonic() - began < 1
            assert process.stdout.read() == ""
        finally:
            process.kill()
