"""Pools in phases over real sockets: the official client, mock engines of both kinds, one gateway.

Whatever an engine does at whatever step, and whenever a client leaves: answers are those of one
engine, each request is settled once, and neither side holds a slot or KV cache for nobody.
"""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from bench.common.fleet import Fleet
from sluice.children import free_ports
from tests.asking import until
from tests.running import MOCK_MODEL, mock_engine

KINDS = ("vllm", "sglang")
LEASE_S = 2000 * 60.0
"""Model seconds of a lease: nothing that is left behind expires during a test."""
WORDS = "What is it that the people of this country think of? "


class Phased:
    """Two prefill and two decode engines of each kind, one that does both, and a gateway.

    Of the further kinds there is one each, as of vLLM: of `ranked` decode has two ranks of one
    slot; of `slow` prefill takes seconds; of `patient` and `hurried` prefills wait in the gateway.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        (port,) = free_ports(1)
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._made: dict[str, dict[str, Any]] = {}
        self._outer = stack
        self.http = stack.enter_context(httpx.Client(timeout=20, trust_env=False))
        self.alone = self.start()
        self.engines = {
            ("vllm", "p"): [self.start(kv_transfer="vllm") for _ in range(2)],
            ("vllm", "d"): [self.start(kv_transfer="vllm") for _ in range(2)],
            # Prefill engines of SGLang have one bootstrap port: here, each on an address.
            ("sglang", "p"): [
                self.start(kv_transfer="sglang-prefill", host=f"127.0.0.{n}", port=port)
                for n in (1, 2)
            ],
            ("sglang", "d"): [self.start(kv_transfer="sglang-decode") for _ in range(2)],
            ("ranked", "p"): [self.start(kv_transfer="vllm")],
            ("ranked", "d"): [self.start(kv_transfer="vllm", dp_ranks=2, speed=2)],
            ("slow", "p"): [self.start(kv_transfer="vllm", speed=0.003)],
            ("slow", "d"): [self.start(kv_transfer="vllm")],
            ("patient", "p"): [self.start(kv_transfer="vllm", speed=0.02)],
            ("patient", "d"): [self.start(kv_transfer="vllm")],
            ("hurried", "p"): [self.start(kv_transfer="vllm", speed=0.03)],
            ("hurried", "d"): [self.start(kv_transfer="vllm")],
        }
        vllm: dict[str, Any] = {"kind": "vllm"}
        models = [
            self._model("vllm", vllm),
            self._model("sglang", {"kind": "sglang", "bootstrap_port": port}),
            self._model("ranked", vllm, max_num_seqs=1, ranks=2),
            self._model("slow", vllm),
            self._queueing("patient"),
            self._queueing("hurried", scheduling={"queue_timeout_s": 1.0, "queue_limit": 4}),
        ]
        health = {"interval_s": 1.0, "timeout_s": 2.0, "eject_after": 1000}
        config = {"models": models, "health": health}
        self.fleet = stack.enter_context(Fleet(short=0, long=0, config=config))
        self.url = self.fleet.url

    def start(self, **fields: Any) -> str:
        """A new engine."""
        stack = contextlib.ExitStack()
        more = {"kv_hold_s": LEASE_S, "max_model_len": 4096, **fields}
        url = stack.enter_context(mock_engine(**more))
        self._outer.callback(stack.close)
        self._stacks[url], self._made[url] = stack, {**fields, "port": urlsplit(url).port}
        return url

    def stop(self, url: str) -> None:
        """End an engine: connections to it are refused."""
        self._stacks[url].close()

    def restart(self, url: str) -> None:
        """Have it serve again, and wait until the gateway knows."""
        self._stacks[url].enter_context(
            mock_engine(kv_hold_s=LEASE_S, max_model_len=4096, **self._made[url])
        )
        until(lambda: self.metric("sluice_worker_up", urlsplit(url).netloc) == 1)

    def _model(
        self,
        kind: str,
        transfer: dict[str, Any],
        max_num_seqs: int = 32,
        policy: str = "round-robin",
        **decode: Any,
    ) -> dict[str, Any]:
        def engines(side: str, slots: int, policy: str | None, **more: Any) -> dict[str, Any]:
            workers = [{"url": u, "model": MOCK_MODEL, **more} for u in self.engines[kind, side]]
            scheduling = {"scheduling": {"policy": policy}} if policy else {}
            return {"max_num_seqs": slots, "workers": workers, **scheduling}

        # In turn, so that of two requests one meets the first engine; ranks have their own policy.
        of_decode = None if decode else "round-robin"
        pool = {
            "max_model_len": 8192,
            "prefill": engines("p", 32, policy),
            "decode": engines("d", max_num_seqs, of_decode, **decode),
            "transfer": transfer,
        }
        limits = {"first_byte_s": 2.0, "idle_s": 2.0}
        return {"name": kind, "timeouts": limits, "pools": {"all": pool}}

    def _queueing(self, kind: str, **more: Any) -> dict[str, Any]:
        """A model whose prefills wait in the gateway."""
        model = self._model(kind, {"kind": "vllm"}, policy="quartz")
        return {**model, "timeouts": {}, **more}

    def fail(self, kind: str, side: str, spec: str, *, both: bool = False) -> str:
        """Break the first engine of a side, or both; "" mends. Its id."""
        for url in self.engines[kind, side][: 2 if both else 1]:
            self.http.post(url + "/mock/fail", json={"spec": spec}).raise_for_status()
        return urlsplit(self.engines[kind, side][0]).netloc

    def held(self) -> list[dict[str, float]]:
        """What each engine holds, where that is anything."""
        urls = [url for urls in self.engines.values() for url in urls]
        found = [self.http.get(url + "/mock/kv").json() for url in urls]
        return [state for state in found if any(state.values())]

    def metric(self, *parts: str) -> float:
        """The sum of the gateway's series with all of these in their names."""
        return self.sums(parts)[0]

    def sums(self, *wanted: Sequence[str]) -> list[float]:
        page = self.http.get(self.url + "/metrics").text
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        return [
            sum(float(line.split()[-1]) for line in lines if all(part in line for part in parts))
            for parts in wanted
        ]

    def idle(self) -> bool:
        """Whether neither an engine nor the gateway holds anything."""
        kept = ("sluice_worker_inflight{",), ("sluice_queue_depth{",), ('leases{state="active"}',)
        return not any(self.sums(*kept)) and not self.held()


class Ended(NamedTuple):
    """How a request ended for its client."""

    text: str
    usage: tuple[int, int]
    """Prompt and completion tokens."""
    record: str
    """Its request's id."""


NUMBERS = itertools.count()
"""One for each request to the gateway."""


def asked(kind: str, tokens: int, *, words: int = 12, **more: Any) -> dict[str, Any]:
    text = f"{next(NUMBERS)}: {WORDS * words}"
    return {
        "model": kind,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        **more,
    }


def said(client: openai.OpenAI, body: dict[str, Any]) -> Ended:
    """What the official client makes of an answer."""
    if not body.get("stream"):
        raw = client.chat.completions.with_raw_response.create(**body)
        whole = raw.parse()
        text, usage = whole.choices[0].message.content, whole.usage
    else:
        raw = client.chat.completions.with_raw_response.create(
            **body, stream_options={"include_usage": True}
        )
        text = ""
        for chunk in raw.parse():
            usage = chunk.usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    tokens = usage.prompt_tokens, usage.completion_tokens
    return Ended(text, tokens, raw.headers.get("x-request-id", ""))


def official(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=60)


def as_alone(
    phased: Phased, client: openai.OpenAI, kind: str, count: int = 4, *, streams: bool = True
) -> list[Ended]:
    """Ask so often, of four times twice for a stream; each answer is that of one engine."""
    ended = []
    with official(phased.alone) as alone:
        for number in range(count):
            body = asked(kind, 12, stream=streams and number % 4 > 1)
            answer = said(client, body)
            expected = said(alone, {**body, "model": MOCK_MODEL})
            assert answer[:2] == expected[:2]
            ended.append(answer)
    return ended


@pytest.fixture(scope="module")
def everything() -> Iterator[Phased]:
    with contextlib.ExitStack() as stack:
        yield Phased(stack)


@pytest.fixture
def phased(everything: Phased) -> Iterator[Phased]:
    """All in order, and left so: nothing is held for anybody, and each request was settled."""
    requests, number = everything.metric("sluice_requests_total"), next(NUMBERS)
    yield everything
    for kind, side in everything.engines:
        everything.fail(kind, side, "", both=True)
    try:
        until(everything.idle, 10.0)
    except AssertionError:
        inflight = {k: v for k, v in everything.fleet.metrics().items() if v and "inflight" in k}
        pytest.fail(f"held: {everything.held()} {inflight}")
    asked_for = next(NUMBERS) - number - 1
    assert everything.metric("sluice_requests_total") == requests + asked_for, "each settled once"
    assert not any(
        "vllm:nixl_num_kv_expired_reqs_total" in line and not line.endswith(" 0")
        for url in everything.engines["vllm", "p"]
        for line in everything.http.get(url + "/metrics").text.splitlines()
        if not line.startswith("#")
    )


@pytest.fixture
def client(phased: Phased) -> Iterator[openai.OpenAI]:
    with official(phased.url) as made:
        yield made


@pytest.mark.parametrize("kind", [*KINDS, "ranked"])
def test_answers_are_those_of_one_engine(phased: Phased, client: openai.OpenAI, kind: str) -> None:
    tokens = [phased.metric("sluice_tokens_total", kind, what) for what in ("input", "output")]
    ended = as_alone(phased, client, kind, 6)
    until(phased.idle)
    for place, what in enumerate(('"input"', '"output"')):
        counted = phased.metric("sluice_tokens_total", f'"{kind}"', what) - tokens[place]
        assert counted == sum(answer.usage[place] for answer in ended), "charged once"
    pool = {"pool": "all/prefill"}
    for answer in ended:
        record = phased.fleet.decision(answer.record)
        assert [attempt["result"] for attempt in record["attempts"]] == ["ok", "ok"]
        assert {attempt["pool"] for attempt in record["attempts"]} == {"all", "all/prefill"}
        assert record["prefill"].items() >= pool.items()
        assert "skipped" not in record["prefill"]
        if kind == "vllm":  # a pair of SGLang may end together
            assert ("transfer_s" in record["prefill"]) == record.get("stream", False)
    raw = client.chat.completions.with_raw_response.create(**asked(kind, 4))
    assert raw.headers["x-sluice-prefill-worker"] in {
        urlsplit(url).netloc for url in phased.engines[kind, "p"]
    }


FAULTS = ("refuse", "reset-before", "500", "busy", "reset-mid", "stall:0")
FAILURES = [
    (kind, side, fault)
    for kind, side, fault in itertools.product(KINDS, ("p", "d"), FAULTS)
    # Where vLLM computed a prompt and the answer is lost, nobody knows the place of what it holds:
    # until its lease ends. Of SGLang nobody needs that answer.
    if side == "d" or fault not in ("reset-mid", "stall:0")
]


@pytest.mark.parametrize("fault", ["reset-mid", "stall:0"])
def test_nobody_waits_for_the_answer_of_a_prefill_in_a_pair(
    phased: Phased, client: openai.OpenAI, fault: str
) -> None:
    phased.fail("sglang", "p", fault, both=True)
    as_alone(phased, client, "sglang")


@pytest.mark.parametrize(("kind", "side", "fault"), FAILURES)
def test_an_engine_that_fails_is_replaced(
    phased: Phased, client: openai.OpenAI, kind: str, side: str, fault: str
) -> None:
    broken = phased.fail(kind, side, fault)
    # Of a stream something may have been seen.
    count, streams = 2 if fault == "stall:0" else 4, fault != "reset-mid"
    ended = as_alone(phased, client, kind, count, streams=streams)
    attempts = [
        attempt["result"]
        for answer in ended
        for attempt in phased.fleet.decision(answer.record)["attempts"]
        if attempt["worker"] == broken and attempt["result"] != "ok"
    ]
    expected = {"500": {"server_error"}, "busy": {"busy"}}
    if side == "d":  # perhaps for what it should have fetched
        expected["500"] = {"handover", "server_error"}
    assert attempts, "it was asked"
    assert set(attempts) <= expected.get(fault, {"reset", "timeout", "protocol"})


def test_decode_computes_the_prompt_where_the_first_phase_or_the_hand_over_fails(
    phased: Phased, client: openai.OpenAI
) -> None:
    phased.fail("vllm", "p", "busy", both=True)
    failed = as_alone(phased, client, "vllm", 2)
    phased.fail("vllm", "p", "", both=True)
    phased.fail("vllm", "d", "kv-fail")
    not_handed_over = as_alone(phased, client, "vllm", 4)
    whys = [phased.fleet.decision(answer.record)["prefill"].get("skipped") for answer in failed]
    assert whys == ["failed", "failed"]
    records = [phased.fleet.decision(answer.record) for answer in not_handed_over]
    results = [[attempt["result"] for attempt in record["attempts"]] for record in records]
    assert ["ok", "handover", "ok"] in results
    for record, result in zip(records, results, strict=True):
        assert record["prefill"].get("skipped") == ("failed" if "handover" in result else None)
    assert phased.metric("sluice_prefills_total", '"all/prefill"', '"failed"') >= 3


def test_a_pair_that_cannot_meet_is_a_refusal(phased: Phased, client: openai.OpenAI) -> None:
    phased.fail("sglang", "p", "500", both=True)
    with pytest.raises(openai.InternalServerError, match="engine failed"):
        said(client, asked("sglang", 4))
    phased.fail("sglang", "p", "", both=True)
    phased.fail("sglang", "d", "kv-fail", both=True)
    with pytest.raises(openai.InternalServerError, match="engine failed"):
        said(client, asked("sglang", 4, stream=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_says_so(phased: Phased, client: openai.OpenAI, kind: str) -> None:
    phased.fail(kind, "d", "reset-mid:4", both=True)
    with pytest.raises(openai.APIError, match="broke off"):
        said(client, asked(kind, 40, stream=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_client_hears_of_its_own_mistakes(
    phased: Phased, client: openai.OpenAI, kind: str
) -> None:
    errors = phased.metric("sluice_requests_total", f'"{kind}"', '"error"')
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        client.completions.create(model=kind, prompt=[next(NUMBERS), 1 << 32], max_tokens=4)
    long = asked(kind, 8)
    long["messages"][0]["content"] *= 35
    with pytest.raises(openai.BadRequestError, match="context length") as caught:
        client.chat.completions.create(**long)
    assert caught.value.code == "context_length_exceeded"
    assert phased.metric("sluice_requests_total", f'"{kind}"', '"error"') == errors + 2


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_gone_is_replaced(
    phased: Phased, client: openai.OpenAI, kind: str, side: str
) -> None:
    url = phased.engines[kind, side][0]
    phased.stop(url)
    try:
        ended = as_alone(phased, client, kind, 2)
    finally:
        phased.restart(url)
    results = [
        attempt["result"]
        for answer in ended
        for attempt in phased.fleet.decision(answer.record)["attempts"]
    ]
    # Unless a probe noticed it first. With SGLang, the other's attempt ends, too.
    assert set(results) <= {"ok", "connect", "handover", "cancelled"}
    assert kind == "sglang" or results.count("ok") == 4, "what was computed went to the other"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("slow", ""), ("vllm", "kv-stall"), ("vllm", "")),
        *(("sglang", "kv-stall"), ("sglang", "")),
    ],
    ids=["vllm-prefill", "vllm-transfer", "vllm-decode", "sglang-both", "sglang-decode"],
)
def test_a_client_that_leaves_leaves_nothing_behind(
    phased: Phased, kind: str, fault: str, stream: bool
) -> None:
    phased.fail(kind, "d", fault, both=True)
    body = asked(kind, 3500, stream=stream, mock_output_tokens=3500)
    ended = threading.Event()

    def leaves() -> None:
        until_s, path = time.monotonic() + 0.6, phased.url + "/v1/chat/completions"
        with (
            contextlib.suppress(httpx.TimeoutException),
            httpx.stream("POST", path, json=body, timeout=0.6) as answer,
        ):
            for _ in answer.iter_raw():
                if time.monotonic() > until_s:
                    break
        ended.set()

    gone = phased.metric("sluice_requests_total", '"disconnected"')
    threading.Thread(target=leaves).start()
    until(lambda: phased.metric("sluice_worker_inflight", f'"{kind}"') >= 1)
    assert ended.wait(30)
    until(phased.idle, 8.0)
    assert phased.metric("sluice_requests_total", '"disconnected"') == gone + 1


def test_a_client_that_leaves_between_the_phases_has_the_kv_freed(phased: Phased) -> None:
    (producer,) = phased.engines["ranked", "p"]
    stop = threading.Event()

    def streams(number: int) -> bool:
        """Whether an answer began before the client had enough of waiting."""
        body = asked("ranked", 3000 + number, stream=True, mock_output_tokens=3000)
        path = phased.url + "/v1/chat/completions"
        try:
            with httpx.stream("POST", path, json=body, timeout=2.5) as answer:
                for _ in answer.iter_raw():
                    if stop.is_set():
                        break
        except httpx.ReadTimeout:
            return False
        return True

    def held() -> float:
        return float(phased.http.get(producer + "/mock/kv").json()["held"])

    with ThreadPoolExecutor(10) as threads:
        began = threads.map(streams, range(10))
        try:
            until(lambda: phased.metric("sluice_queue_depth", '"ranked"', '"all"') and held())
            until(lambda: not held())
            assert phased.metric("sluice_worker_inflight", '"ranked"', '"all"'), "others go on"
        finally:
            stop.set()
        assert set(began) == {True, False}


def test_who_waits_in_vain_for_a_prefill_leaves_its_queue(
    phased: Phased, client: openai.OpenAI
) -> None:
    counts = ("sluice_prefill_seconds_count",), ("sluice_prefills_total", '"ok"')
    before = phased.sums(*counts)
    said(client, asked("hurried", 4))  # from now on the gate knows what it lets in

    def ends(number: int) -> str:
        body = asked("hurried", 4, words=300)
        limit_s = 0.7 if number % 3 == 2 else 60.0
        try:
            answer = httpx.post(phased.url + "/v1/chat/completions", json=body, timeout=limit_s)
        except httpx.TimeoutException:
            return "left"
        return str(answer.headers.get("x-sluice-reason", "ok"))

    with ThreadPoolExecutor(14) as threads:
        ended = list(threads.map(ends, range(14)))
    assert "ok" in ended
    assert len({"queue_timeout", "queue_full", "left"} & set(ended)) > 1
    until(phased.idle)
    said(client, asked("hurried", 4))
    ran, counted = (now - then for now, then in zip(phased.sums(*counts), before, strict=True))
    assert ended.count("ok") + 2 <= counted == ran, "of those that were refused no prompt was"


def test_a_stream_that_waits_for_a_prefill_worker_is_told_so(
    phased: Phased, client: openai.OpenAI
) -> None:
    said(client, asked("patient", 4))

    def comments(_: int) -> int:
        body, waits = asked("patient", 3, words=200, stream=True), {"x-sluice-queue-status": "on"}
        path = phased.url + "/v1/chat/completions"
        answer = httpx.post(path, json=body, headers=waits, timeout=60)
        assert answer.text.endswith("data: [DONE]\n\n")
        return answer.text.count(": sluice queued position=")

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(comments, range(4))) >= 1


def load(phased: Phased, requests: int, clients: int = 16) -> float:
    """Ask so often, in turn for each kind, and whole or as a stream; seconds that it took."""

    def ask(number: int) -> Ended:
        kind, stream = KINDS[number % 2], number % 4 > 1
        return said(pool[number % clients], asked(kind, 8, stream=stream))

    pool = [official(phased.url) for _ in range(clients)]
    begun_s = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        ended = list(threads.map(ask, range(requests)))
    took_s = time.monotonic() - begun_s
    for each in pool:
        each.close()
    assert all(0 < answer.usage[1] <= 8 for answer in ended)
    return took_s


def test_many_at_once(phased: Phased) -> None:
    ok = phased.metric("sluice_requests_total", '"ok"')
    load(phased, 200)
    until(phased.idle)
    assert phased.metric("sluice_requests_total", '"ok"') == ok + 200


if __name__ == "__main__":  # python -m tests.integration.test_phases 10000
    with contextlib.ExitStack() as outer:
        made = Phased(outer)
        count = int(sys.argv[1])
        seconds = load(made, count)
        until(made.idle)
        counts = {k: v for k, v in made.fleet.metrics().items() if "sluice_requests_total" in k}
        print(f"{count} requests in {seconds:.0f} s, nothing left: {counts}")
