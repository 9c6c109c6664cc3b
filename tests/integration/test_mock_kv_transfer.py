"""Mock engines that prefill and decode apart, over real sockets: what is fetched, held and lost."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.running import MOCK_MODEL, mock_engine

Start = Callable[..., str]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
IDLE = {"held": 0, "rooms": 0, "running": 0, "waiting": 0, "kv_usage": 0.0}
TEXT = "What is it that the people of this country think of? " * 20


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        yield lambda **fields: stack.enter_context(mock_engine(**fields))


def body(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MOCK_MODEL, "messages": messages, "max_tokens": 12, **fields}


def post(url: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", json=fields, timeout=20)


def prefill(url: str, text: str = TEXT) -> dict[str, Any]:
    answer = post(url, body(text, max_tokens=1, kv_transfer_params=PREFILL)).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def text_of(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def metric(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + "{")))


def settled(url: str, expected: dict[str, float] = IDLE) -> bool:
    """Whether the engine comes to hold just this."""
    for _ in range(200):
        if httpx.get(url + "/mock/kv").json() == expected:
            return True
        time.sleep(0.02)
    return False


def fail(url: str, spec: str) -> None:
    assert httpx.post(url + "/mock/fail", json={"spec": spec}).status_code == 200


# vLLM


@pytest.fixture
def pair(start: Start) -> tuple[str, str]:
    """A prefill and a decode engine."""
    made = [start(kv_transfer="vllm", max_model_len=4096) for _ in range(2)]
    return made[0], made[1]


def test_decode_starts_from_what_prefill_held(pair: tuple[str, str]) -> None:
    producer, consumer = pair
    alone = post(producer, body())
    assert alone.json()["kv_transfer_params"] is None
    params = prefill(producer)
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    assert httpx.get(producer + "/mock/kv").json()["held"] == 1
    assert metric(producer, "vllm:kv_cache_usage_perc") > 0

    answer = post(consumer, body(kv_transfer_params=params))

    assert text_of(answer) == text_of(alone)
    usage = answer.json()["usage"]
    # As vLLM: the producer's cached tokens, which had the prompt from the request before.
    assert usage["prompt_tokens_details"]["cached_tokens"] == params["remote_prefill_cached_tokens"]
    assert params["remote_prefill_cached_tokens"] > 0
    assert usage["prompt_tokens"] == params["remote_num_tokens"]
    hits = metric(consumer, "vllm:external_prefix_cache_hits_total")
    assert hits == usage["prompt_tokens"]
    assert settled(producer)
    assert settled(consumer)


def test_a_stream_of_the_official_client_starts_from_it_too(pair: tuple[str, str]) -> None:
    producer, consumer = pair
    alone = text_of(post(producer, body()))
    with openai.OpenAI(base_url=consumer + "/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            **body(), stream=True, extra_body={"kv_transfer_params": prefill(producer)}
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == alone
    assert settled(producer)


def test_a_dead_producer_is_an_error_and_no_answer(start: Start) -> None:
    consumer = start(kv_transfer="vllm")
    with mock_engine(kv_transfer="vllm") as producer:
        params = prefill(producer)

    answer = post(consumer, body(kv_transfer_params=params))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    streamed = post(consumer, body(kv_transfer_params=params, stream=True))
    first, end = [line[6:] for line in streamed.text.splitlines() if line]
    assert streamed.status_code == 200
    assert (json.loads(first)["error"]["code"], end) == (500, "[DONE]")
    assert metric(consumer, "vllm:nixl_num_failed_transfers_total") == 2
    assert post(consumer, body()).status_code == 200
    assert settled(consumer)


def test_what_nobody_fetches_expires_and_a_late_fetch_gets_a_wrong_answer(start: Start) -> None:
    producer = start(kv_transfer="vllm", kv_hold_s=2.0, speed=10)
    consumer = start(kv_transfer="vllm")
    params = prefill(producer)
    assert settled(producer)
    assert metric(producer, "vllm:nixl_num_kv_expired_reqs_total") == 1

    late = post(consumer, body(kv_transfer_params=params))

    assert late.status_code == 200
    assert text_of(late) != text_of(post(consumer, body()))
    assert metric(producer, "vllm:nixl_num_notifications_after_expiry_total") == 1


@pytest.mark.parametrize("wrong", [{"temperature": 0, "max_tokens": 100_000}, {"model": "none"}])
def test_a_rejected_decode_request_frees_what_is_held(
    pair: tuple[str, str], wrong: dict[str, Any]
) -> None:
    producer, consumer = pair
    params = prefill(producer)
    refused = post(consumer, {**body(kv_transfer_params=params), **wrong})
    assert 400 <= refused.status_code < 500
    assert settled(producer)
    assert metric(producer, "vllm:nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.parametrize("slow", ["prefill", "transfer", "decode"])
def test_a_client_that_leaves_leaves_nothing_behind(start: Start, slow: str) -> None:
    rate = 100.0 if slow == "transfer" else 1e6
    producer = start(kv_transfer="vllm", speed=1, kv_tokens_per_s=rate)
    consumer = start(kv_transfer="vllm", speed=1)
    if slow == "prefill":
        fail(producer, "slow:100")
        leave(producer, body(max_tokens=1, kv_transfer_params=PREFILL))
    else:
        params = prefill(producer)
        leave(consumer, body(kv_transfer_params=params, max_tokens=1500, ignore_eos=True))
    assert settled(producer)
    assert settled(consumer)


def leave(url: str, fields: dict[str, Any]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/chat/completions", json=fields, timeout=0.3)


def test_injected_faults_of_a_transfer(pair: tuple[str, str]) -> None:
    producer, consumer = pair
    fail(consumer, "kv-fail")
    params = prefill(producer)
    assert post(consumer, body(kv_transfer_params=params)).status_code == 500
    assert httpx.get(producer + "/mock/kv").json()["held"] == 1  # until its lease ends
    fail(consumer, "kv-stall")
    leave(consumer, body(kv_transfer_params=params))
    assert settled(consumer)
    assert settled(producer)  # it was told when the client left
    fail(consumer, "")
    fail(producer, "kv-lost")
    post(consumer, body(kv_transfer_params=prefill(producer)))
    assert metric(producer, "vllm:nixl_num_notifications_after_expiry_total") == 1
    assert settled(producer)


def test_held_blocks_keep_others_waiting(start: Start) -> None:
    # Room for one prompt of 259 tokens only.
    producer = start(kv_transfer="vllm", kv_blocks=20, max_model_len=320, prefix_cache_tokens=0)
    consumer = start(kv_transfer="vllm")
    params = prefill(producer)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(post, producer, body("Another. " + TEXT))
        assert settled_waiting(producer)
        assert not other.done()
        post(consumer, body(kv_transfer_params=params))
        assert other.result(10).status_code == 200
    assert settled(producer)


def settled_waiting(url: str) -> bool:
    for _ in range(200):
        if httpx.get(url + "/mock/kv").json()["waiting"] == 1:
            return True
        time.sleep(0.02)
    return False


# SGLang


@pytest.fixture
def sglang(start: Start) -> tuple[str, str]:
    speeds = {"speed": 20, "kv_hold_s": 20.0}
    return start(kv_transfer="sglang-prefill", **speeds), start(
        kv_transfer="sglang-decode", **speeds
    )


def room(prefill_url: str, number: int = (1 << 62) + 5) -> dict[str, Any]:
    port = int(prefill_url.rpartition(":")[2])
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": number}


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_pair_meets_whoever_comes_first(sglang: tuple[str, str], stream: bool) -> None:
    answers = []
    for number, order in enumerate((sglang, sglang[::-1])):
        fields = body(stream=stream, **room(sglang[0], number))
        with ThreadPoolExecutor() as pool:
            first = pool.submit(post, order[0], fields)
            time.sleep(0.1)
            assert not first.done()
            both = [post(order[1], fields), first.result(10)]
        answers += [a for a in both if a.url.port != int(sglang[0].rpartition(":")[2])]
        assert all(a.status_code == 200 for a in both)
    if not stream:
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {12}
    assert settled(sglang[0])
    assert settled(sglang[1])


def test_sglangs_engines_need_a_room(sglang: tuple[str, str]) -> None:
    for url in sglang:
        refused = post(url, body())
        assert refused.status_code == 400
        assert "without bootstrap room id" in refused.json()["message"]


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_without_partner_gives_up(sglang: tuple[str, str], side: int) -> None:
    answer = post(sglang[side], body(**room(sglang[0])))
    assert answer.status_code == 500
    assert answer.json()["object"] == "error"
    assert settled(sglang[0])
    assert settled(sglang[1])


@pytest.mark.parametrize("side", [0, 1])
def test_a_partner_that_leaves_fails_the_other_side(start: Start, side: int) -> None:
    kinds = ("sglang-prefill", "sglang-decode")
    # A prefill of 9 steps of 80 ms or more.
    urls = [start(kv_transfer=kind, speed=0.1, max_num_batched_tokens=32) for kind in kinds]
    fields = body(**room(urls[0]))
    with ThreadPoolExecutor() as pool:
        other = pool.submit(post, urls[1 - side], fields)
        leave(urls[side], fields)
        assert other.result(10).status_code == 500
    for url in urls:
        assert settled(url)


def test_ten_pairs_at_once_each_get_their_own(sglang: tuple[str, str]) -> None:
    def one(number: int) -> str:
        fields = body(f"{number}. {TEXT}", **room(sglang[0], number))
        thread = threading.Thread(target=post, args=(sglang[0], fields))
        thread.start()
        answer = text_of(post(sglang[1], fields))
        thread.join(10)
        return answer

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(one, range(10)))
    assert len(set(answers)) == 10
    assert settled(sglang[0])


def test_no_port_is_free_for_ever() -> None:
    """A decode engine that is given a port where nobody listens says so."""
    with socket.socket() as taken, mock_engine(kv_transfer="sglang-decode") as url:
        taken.bind(("127.0.0.1", 0))
        answer = post(url, body(**room(f"http://127.0.0.1:{taken.getsockname()[1]}")))
        assert answer.status_code == 500
