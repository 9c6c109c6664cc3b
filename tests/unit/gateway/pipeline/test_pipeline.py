"""The ten stages over fakes: one lease settled once, retries before the first byte, rescue."""

import asyncio
import gc
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import orjson
import pytest

from gateway.admission.terms import AdmissionRequest
from gateway.errors import EngineRefusal, RateLimited
from gateway.fleet import fleet
from gateway.fleet.fleet import Pending
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.head import child_id, pairs_of, read_head
from gateway.payload.sse import DONE
from gateway.pipeline.forward import HELD_BYTES
from gateway.pipeline.request_progress import Attempts, RequestProgress
from gateway.records.attempt import Usage
from gateway.records.endpoint import (
    CHAT,
    COUNT_TOKENS,
    RESPONSES,
    SPEECH,
    TOKENIZE,
    TRANSCRIPTIONS,
    Endpoint,
)
from gateway.records.lease import Lease
from gateway.records.record import Trace
from gateway.records.request import OPEN, Incoming, Principal
from gateway.routing.retry import MEMORY_S, MOST_BODIES, Suspects
from gateway.routing.routing import ResponseLocation
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy.keyring import Keyring
from tests.builders import (
    LONG,
    OVERFLOWS,
    SHORT,
    answer_body,
    chat_body,
    chunk,
    error_answer,
    event,
    incoming,
    keyring_of,
    routing,
    served_model,
    short_and_long,
    usage_chunk,
)
from tests.fakes import (
    HANG,
    Answer,
    FakeClock,
    FakeReply,
    FakeStore,
    Script,
    Step,
    broken,
    failure,
    stream,
    whole,
)
from tests.pipeline_bench import PipelineBench

OK = whole(200, answer_body())
STREAM = stream(chunk("a"), chunk("b"), chunk(finish="stop"), usage_chunk(10, 3), DONE)
E500 = whole(500, error_answer("CUDA error", code=500))
MANY = (4, 4)
"""Workers of the pools."""
RESET = failure("reset")
BUSY = whole(503, error_answer("The server is busy, try again later", code=503))
OVERFLOW = whole(400, error_answer(OVERFLOWS[0]))
FITS_SHORT = "many words in a row " * 1200
"""24,000 bytes: planned for the short pool, and may yet be more than 8,192 tokens."""
LONG_TEXT = "many words in a row " * 5000  # 100,000 bytes: about 25,000 tokens


class Bench(PipelineBench):
    """With an alias of the model, over a fake store unless a test has another."""

    def __init__(self, *script: Script, served: ModelRuntime | None = None, **more: Any) -> None:
        served = served or served_model()
        super().__init__(*script, served=served, models={"m": served, "alias": served}, **more)

    async def cancel_when_hanging(self, request: Incoming | None = None) -> None:
        """Serve until an engine says nothing, then leave as a client does."""
        task = self.begin(request)
        await self.upstream.hanging.wait()
        await self.leave(task)

    def assert_nothing_leaks(self, requests: int = 1) -> None:
        assert self.store.active == 0
        assert len(self.store.settlements) == requests
        for pool in self.served.fleet.pools:
            assert set(pool.active) == {0}
            assert set(pool.tokens) == {0}


def streaming(text: str = "hello", **more: Any) -> Incoming:
    return incoming(chat_body(text, stream=True, **more))


# -- success


async def test_no_client_can_choose_or_predict_its_id_at_an_engine() -> None:
    """Else it could occupy an id before another tenant's request comes with that."""
    bench = Bench(E500, OK)
    asked = incoming(
        chat_body(request_id="mine", rid="mine"),
        request_id="mine",
        lease_id="req-1",
        headers=[(b"x-request-id", b"mine")],
    )
    await bench.serve(asked)
    assert bench.reply.headers[b"x-request-id"] == b"mine"
    assert bench.record.request_id == "mine"
    assert set(bench.sent) == {"model", "messages"}
    ids = [dict(pairs_of(call.lines))[b"x-request-id"] for _, call in bench.upstream.calls]
    assert len(set(ids)) == 2, "each attempt has its own"
    assert all(re.fullmatch(rb"req-1-[0-9a-f]{16}", given) for given in ids)


async def test_response_headers_say_where_it_went() -> None:
    headers = (await Bench.answered(OK)).reply.headers
    assert int(headers[b"x-sluice-estimated-tokens"]) > 0
    assert (
        headers.items()
        >= {
            b"x-request-id": b"r1",
            b"x-sluice-pool": b"short",
            b"x-sluice-worker": b"short-0",
            b"x-sluice-spilled": b"false",
            b"x-sluice-compressed": b"none",
            b"x-sluice-queue-ms": b"0",
        }.items()
    )


async def test_the_decision_record_explains_the_request() -> None:
    bench = await Bench.answered(STREAM, asked=streaming(max_tokens=50))
    r = bench.record
    assert (r.request_id, r.endpoint, r.outcome, r.status) == ("r1", "chat", "ok", 200)
    assert (r.model, r.asked_model, r.tenant, r.stream) == ("m", "m", "open", True)
    assert (r.plan.pool, r.plan.reason, r.pool) == ("short", "within_boundary", "short")
    assert (r.worker, r.admission.spilled, r.rescued, r.mode) == (
        "short-0",
        False,
        False,
        "enforce",
    )
    assert (r.estimate.cap_tokens, r.estimate.output_tokens, r.request.messages) == (50, 50, 1)
    assert (r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.source) == (10, 3, "engine")
    assert (r.finish_reason, r.request.text_bytes, r.reason) == ("stop", len("hello"), None)
    assert [(a.pool, a.worker, a.result) for a in r.attempts] == [("short", "short-0", "ok")]
    assert dict(r.scheduling.candidates) == {"short-0": 0.0, "short-1": 0.0}
    assert r.prompt is None


async def test_times_come_from_the_clock() -> None:
    bench = Bench(STREAM)
    bench.clock.advance(0.25)

    async def tick() -> None:
        bench.clock.advance(1.0)

    await bench.serve(streaming(), FakeReply(on_write=tick))
    assert bench.record.timing.overhead_ms == pytest.approx(250)
    assert bench.record.timing.ttft_s == pytest.approx(0.25)
    # Four pieces were written (a, b, finish, [DONE]), all after the first token: 3 tokens.
    assert bench.record.timing.tpot_s == pytest.approx(4.0 / 2)


async def test_tokens_are_metered_once_by_model_and_entitlement() -> None:
    bench = await Bench.answered(OK)
    assert bench.metrics.tokens.values == {
        ("m", "open", "input"): 10,
        ("m", "open", "output"): 3,
        ("m", "open", "cached_input"): 0,
    }
    assert bench.metrics.requests.values == {("m", "short", "ok"): 1}


async def test_a_default_limit_is_estimated_as_it_is_sent() -> None:
    bench = Bench(OK, served=served_model(table=short_and_long(default_max_tokens=50)))
    await bench.serve(incoming(chat_body("word " * 100)))
    record = bench.record
    assert json.loads(bench.upstream.calls[0][1].body)["max_tokens"] == 50
    assert record.estimate.output_tokens == 50
    assert record.estimate.total_tokens == (record.estimate.input_tokens or 0) + 50


async def test_a_category_named_by_a_header_is_estimated_by_and_not_taught() -> None:
    bench = Bench(whole(200, answer_body(prompt=300, completion=7)))
    named = [(b"x-sluice-category", b"cjk")]
    await bench.serve(incoming(chat_body("word " * 250), headers=named))
    assert bench.record.estimate.category == "cjk"
    taught = bench.served.estimator.snapshot()["categories"]
    assert {name: taught[name]["n"] for name in ("prose", "cjk")} == {"prose": 1, "cjk": 0}


# -- usage on streams


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b'":', b'"\t:\r\n '),
        (b"e", b"\\u0065"),
        (b"}]", b'}\n, {"role": "user", "content": "\\/ \\ud83c\\udf0a \xe2\x80\xa8"} ]'),
        (b"{", b' {"x": [1E2, -0, 0.10, 1e-7, 12345678901234567890123, {"k ": null}] ,'),
    ],
    ids=["plain", "spaces", "escapes", "letters", "unknown fields"],
)
async def test_in_observe_mode_the_engine_receives_what_a_bare_relay_would_send(
    before: bytes, after: bytes
) -> None:
    bench = Bench(STREAM, served=served_model(table=short_and_long(observe=True)))
    body = chat_body(stream=True)
    body = body.replace(before, after, 1) if before else body
    await bench.serve(incoming(body))
    assert bench.upstream.calls[0][1].body == body
    assert usage_chunk(10, 3) in bench.reply.body, "nothing was injected: nothing is stripped"


async def test_an_engine_that_sends_no_usage_is_metered_by_estimate_and_text() -> None:
    bench = Bench(stream(chunk("a"), chunk("b"), chunk(finish="stop"), DONE))
    await bench.serve(streaming())
    assert bench.record.usage.source == "counted"
    assert bench.record.usage.prompt_tokens == bench.record.estimate.input_tokens
    assert bench.record.usage.completion_tokens == 2


# -- who may ask


def keys(**principal: Any) -> Keyring:
    digest = hashlib.sha256(b"sk-1").digest()
    return keyring_of({digest: Principal(entitlement="gold", tenant="t", **principal)})


KEY = [(b"authorization", b"Bearer sk-1")]


@pytest.mark.parametrize(
    ("headers", "principal", "status", "reason"),
    [
        ([], {}, 401, "missing_api_key"),
        ([(b"authorization", b"Bearer ")], {}, 401, "missing_api_key"),
        ([(b"authorization", b"Bearer sk-2")], {}, 401, "invalid_api_key"),
        ([(b"x-api-key", b"sk-2")], {}, 401, "invalid_api_key"),
        (KEY, {"expires_unix_s": 1000.0}, 403, "entitlement_expired"),
        (KEY, {"model": "o"}, 403, "model_not_entitled"),
    ],
)
async def test_a_key_that_does_not_open_the_model_reaches_nothing(
    headers: Any, principal: dict[str, Any], status: int, reason: str
) -> None:
    bench = await Bench.answered(OK, keyring=keys(**principal), asked=incoming(headers=headers))
    assert (bench.reply.status, bench.record.reason) == (status, reason)
    assert bench.upstream.calls == []
    assert bench.store.settlements == []


@pytest.mark.parametrize("name", [b"x-api-key", b"api-key"])
async def test_a_key_may_come_in_other_headers(name: bytes) -> None:
    bench = await Bench.answered(OK, keyring=keys(), asked=incoming(headers=[(name, b"sk-1")]))
    assert (bench.reply.status, bench.record.entitlement) == (200, "gold")


async def test_what_admission_refuses_reaches_no_engine_and_settles_nothing() -> None:
    bench = Bench(OK)
    bench.store.refuse_with = RateLimited("full", reason="concurrency")
    await bench.serve()
    assert (bench.reply.status, bench.record.reason) == (429, "concurrency")
    assert bench.store.settlements == []
    assert bench.metrics.requests.values == {("m", "", "refused"): 1}


# -- one lease, settled once


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([OK], 200),
        ([STREAM], 200),
        ([whole(400, error_answer("bad temperature"))], 400),
        ([whole(404, error_answer("no such adapter", code=404))], 404),
        ([E500, OK], 200),
        ([E500, E500, E500], 502),
        ([BUSY, BUSY, BUSY], 503),
        ([failure("timeout")], 504),
        ([failure("reset")], 502),
        ([failure("protocol")], 502),
        ([failure("connect")], 503),
        ([whole(200, b"{", broken())], 502),
        ([OVERFLOW, OK], 200),
        ([OVERFLOW, OVERFLOW], 400),
        ([stream(chunk("a"), broken())], 200),
        ([stream(chunk("a"))], 200),
        ([stream()], 502),
    ],
)
async def test_however_it_ends_the_lease_is_settled_once_and_no_load_stays(
    script: list[Script], status: int
) -> None:
    bench = await Bench.answered(*script, asked=streaming(FITS_SHORT))
    assert bench.reply.status == status
    assert bench.reply.finished
    bench.assert_nothing_leaks()
    assert bench.record.status in (status, 502)
    assert all(response.aborted for response in bench.upstream.responses)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([HANG], id="during open"),
        pytest.param([stream(HANG)], id="before the first byte"),
        pytest.param([stream(chunk("a"), chunk("b"), HANG)], id="during the stream"),
        pytest.param([whole(200, b'{"id":', HANG)], id="during the whole read"),
        pytest.param([E500, HANG], id="during a second attempt"),
        pytest.param([OVERFLOW, HANG], id="during a rescue"),
    ],
)
async def test_a_client_that_leaves_cancels_the_engine_and_settles_the_lease_once(
    script: list[Script],
) -> None:
    bench = Bench(*script)
    await bench.cancel_when_hanging(streaming(FITS_SHORT))
    bench.assert_nothing_leaks()
    assert bench.upstream.cancelled == 1
    assert all(response.aborted for response in bench.upstream.responses)
    assert (bench.record.outcome, bench.record.status) == ("disconnected", 499)
    assert bench.record.attempts[-1].result == "cancelled"


def at(received_s: float, request_id: str) -> Incoming:
    return msgspec.structs.replace(incoming(request_id=request_id), received_s=received_s)


async def test_requests_that_come_together_are_admitted_one_after_the_other_then_sent() -> None:
    bench = Bench(HANG)
    times_s = (100.0, 100.0002, 100.0004, 100.01)
    tasks = [
        asyncio.create_task(bench.serve(at(time_s, f"r{n}"), FakeReply()))
        for n, time_s in enumerate(times_s)
    ]
    await asyncio.sleep(0)
    assert bench.store.active == 4
    # The first of them did not know of the others, the last came later.
    assert len(bench.upstream.calls) == 2
    await asyncio.sleep(0)
    assert len(bench.upstream.calls) == 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    bench.assert_nothing_leaks(requests=4)


async def test_a_client_that_leaves_between_admission_and_dispatch_is_not_charged() -> None:
    bench = Bench(HANG)
    first, second = (
        asyncio.create_task(bench.serve(at(100.0, name), FakeReply())) for name in ("r1", "r2")
    )
    await asyncio.sleep(0)
    assert (bench.store.active, len(bench.upstream.calls)) == (2, 1)
    await bench.leave(second)
    assert (bench.store.active, len(bench.upstream.calls)) == (1, 1)
    assert bench.store.settlements[0][1].usage is None
    assert bench.record.outcome == "disconnected"
    await bench.leave(first)
    bench.assert_nothing_leaks(requests=2)


async def test_a_client_that_leaves_a_stream_is_charged_what_was_emitted() -> None:
    bench = Bench(stream(chunk("a"), chunk("b"), HANG))
    await bench.cancel_when_hanging(streaming())
    _, settlement = bench.store.settlements[0]
    assert settlement.usage == Usage(
        prompt_tokens=bench.record.estimate.input_tokens or 0,
        completion_tokens=2,
        source="counted",
    )


async def test_a_bug_is_settled_and_logged_as_an_internal_error() -> None:
    bench = Bench(OK)

    async def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await bench.serve(reply=FakeReply(on_write=bug))
    bench.assert_nothing_leaks()
    assert (bench.record.outcome, bench.record.status) == ("internal_error", 500)


@pytest.mark.parametrize(
    ("prompt", "completion", "charged"),
    [
        pytest.param(10**9, 3, 3, id="beyond the window"),
        pytest.param(2**70, 3, 3, id="beyond all numbers"),
        pytest.param(10, 700, 5, id="beyond the client's limit"),
    ],
)
async def test_usage_that_no_engine_could_report_is_not_charged(
    prompt: int, completion: int, charged: int
) -> None:
    said = answer_body(prompt=prompt, completion=completion)
    bench = await Bench.answered(whole(200, said), asked=incoming(chat_body(max_tokens=5)))
    assert bench.reply.body == said, "the client gets what the engine said"
    used = bench.record.usage
    assert (used.source, used.completion_tokens) == ("counted", charged)
    assert used.prompt_tokens == bench.record.estimate.input_tokens


@pytest.mark.parametrize(("script", "dispatched"), [(E500, True), (failure("connect"), False)])
async def test_what_no_engine_served_is_not_charged(script: Script, dispatched: bool) -> None:
    bench = await Bench.answered(script)
    ((_, settlement),) = bench.store.settlements
    assert (settlement.usage, settlement.dispatched) == (None, dispatched)


async def test_an_engines_own_400_is_relayed_and_not_charged() -> None:
    said = error_answer("temperature must be non-negative, got -1.0.")
    bench = await Bench.answered(whole(400, said))
    assert (bench.reply.status, bench.reply.body) == (400, said)
    assert bench.record.outcome == "error"
    assert bench.store.settlements[0][1].usage is None
    assert len(bench.upstream.calls) == 1


# -- answers that are too large to hold

PADDING = b'"logprobs":[' + b"-1.5," * (HELD_BYTES // 4) + b"0]"
USED = b'"usage":{"prompt_tokens":11,"completion_tokens":7}'
STOPPED = b'"choices":[{"finish_reason":"stop"}]'


@pytest.mark.parametrize(
    "body",
    [
        b"{%b,%b,%b}" % (STOPPED, USED, PADDING),
        b"{%b,%b,%b}" % (PADDING, STOPPED, USED),
        b"{%b,%b,%b,%b}" % (PADDING, STOPPED, USED, PADDING),
    ],
    ids=["usage first", "usage last", "usage between"],
)
@pytest.mark.parametrize("size", [60_000, HELD_BYTES + 37])
async def test_a_large_answer_passes_as_it_comes_and_is_charged_what_it_says(
    body: bytes, size: int
) -> None:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    bench = Bench(whole(200, *pieces))
    seen: list[int] = []
    bench.upstream.on_read = lambda: seen.append(len(bench.reply.body))
    await bench.serve()
    assert (bench.reply.body, bench.reply.finished) == (body, True)
    assert seen[-1] >= len(body) - 2 * size, "nothing waits for the end"
    assert (bench.record.outcome, bench.record.finish_reason) == ("ok", "stop")
    assert bench.store.settlements[0][1].usage == Usage(prompt_tokens=11, completion_tokens=7)


async def test_a_large_answer_breaks_off_where_its_engine_does() -> None:
    bench = await Bench.answered(whole(200, b"{" + PADDING, PADDING, broken()), OK)
    assert len(bench.upstream.calls) == 1
    assert bench.reply.broken_off is not None
    assert (bench.record.outcome, bench.record.status) == ("upstream_error", 502)


async def test_who_leaves_before_the_end_of_a_large_answer_is_charged_what_came() -> None:
    bench = Bench(whole(200, b"{" + PADDING, PADDING, HANG))
    await bench.cancel_when_hanging()
    used = bench.store.settlements[0][1].usage
    assert used is not None
    assert used.completion_tokens > HELD_BYTES // 4


async def test_who_leaves_while_a_whole_answer_is_sent_is_charged_for_it() -> None:
    async def leaves() -> None:
        raise asyncio.CancelledError

    bench = Bench(OK)
    with pytest.raises(asyncio.CancelledError):
        await bench.serve(None, FakeReply(leaves))
    await asyncio.sleep(0)
    assert bench.record.outcome == "disconnected"
    assert bench.store.settlements[0][1].usage == Usage(
        prompt_tokens=10, completion_tokens=3, cached_reported=True
    )


async def test_no_more_is_read_of_a_large_error_than_is_held() -> None:
    bench = await Bench.answered(whole(400, *[b"x" * HELD_BYTES] * 4))
    assert (bench.reply.status, len(bench.reply.body)) == (400, 0)
    assert bench.upstream.responses[0].aborted


# -- retries


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(failure("connect"), id="connect"),
        pytest.param(failure("reset"), id="reset"),
        pytest.param(failure("timeout"), id="timeout"),
        pytest.param(failure("protocol"), id="protocol"),
        pytest.param(E500, id="500"),
        pytest.param(BUSY, id="busy"),
        pytest.param(whole(401, error_answer("bad worker key")), id="worker key refused"),
        pytest.param(stream(broken()), id="stream reset before its first byte"),
        pytest.param(stream(b"data: {", broken()), id="stream reset within its first event"),
        pytest.param(stream(event({"error": {"message": "OOM"}})), id="stream begins with error"),
        pytest.param(whole(200, b'{"id":', broken()), id="whole answer reset"),
    ],
)
async def test_what_fails_before_the_first_byte_is_served_by_another_worker(first: Script) -> None:
    bench = await Bench.answered(first, STREAM, asked=streaming())
    assert bench.upstream.called == ["short-0", "short-1"]
    assert (bench.reply.status, bench.record.outcome) == (200, "ok")
    assert bench.reply.headers[b"x-sluice-worker"] == b"short-1"
    assert sum(bench.metrics.retries.values.values()) == 1
    bench.assert_nothing_leaks()


PING = b": ping\n\n"


@pytest.mark.parametrize(
    "then",
    [(broken(),), (), (event({"error": {"message": "OOM"}}),)],
    ids=["reset", "end", "error"],
)
async def test_an_engine_that_sent_only_comments_may_be_replaced(then: tuple[Step, ...]) -> None:
    bench = await Bench.answered(stream(PING, PING, *then), STREAM, asked=streaming())
    assert len(bench.upstream.calls) == 2
    assert (bench.reply.status, bench.record.outcome) == (200, "ok")
    assert bench.reply.body.startswith(PING + PING), "a client counts the time without a byte"


@pytest.mark.parametrize(
    "comments",
    [
        pytest.param((b": prefill 2048/9000\n\n", b": prefill 4096/9000\n\n"), id="each piece"),
        pytest.param((b":\n\n", b":\r\n\r\n"), id="bare"),
        pytest.param((b": OPENROUTER PRO", b"CESSING\n\n"), id="named"),
    ],
)
async def test_an_engines_comments_pass_before_the_first_event(comments: tuple[bytes, ...]) -> None:
    bench = Bench(stream(*comments, HANG))
    await bench.cancel_when_hanging(streaming())
    assert bench.reply.headers[b"content-type"].startswith(b"text/event-stream")
    assert bench.reply.body == b"".join(comments)


async def test_a_comment_is_not_the_first_token() -> None:
    bench = Bench(stream(PING, chunk("a"), chunk(finish="stop"), DONE))
    bench.upstream.on_read = lambda: bench.clock.advance(1.0)
    await bench.serve(streaming())
    assert bench.record.timing.ttft_s == 2.0


async def test_an_engine_that_sends_comments_for_ever_is_given_up() -> None:
    bench = Bench(stream(*[PING] * 10_000), STREAM)
    bench.upstream.on_read = lambda: bench.clock.advance(1.0)
    await bench.serve(streaming())
    assert [attempt.result for attempt in bench.record.attempts] == ["timeout", "ok"]


@pytest.mark.parametrize("then", [whole(400, error_answer("bad")), E500, OK, RESET])
async def test_what_fails_after_an_engines_comments_is_told_in_the_stream(then: Script) -> None:
    bench = Bench(stream(PING, broken()), then, served=served_model(workers=MANY))
    await bench.serve(streaming())
    assert len(bench.upstream.calls) == 2
    assert bench.reply.body == PING
    assert bench.reply.broken_off is not None
    assert bench.record.outcome in ("error", "upstream_error")


async def test_a_role_alone_is_no_token_and_yet_part_of_the_answer() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    bench = Bench(stream(role, chunk("a"), chunk(finish="stop"), DONE), STREAM)
    bench.upstream.on_read = lambda: bench.clock.advance(1.0)
    await bench.serve(streaming())
    assert bench.reply.body.startswith(role)
    assert bench.record.timing.ttft_s == 2.0
    silent = Bench(stream(role, HANG), STREAM)
    task = asyncio.create_task(silent.serve(streaming()))
    await silent.upstream.hanging.wait()
    silent.pipeline.frozen(silent.served, silent.served.fleet.pools[SHORT], 0)
    await asyncio.sleep(0)
    assert len(silent.upstream.calls) == 1, "no other engine can go on"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_stream_of_two_choices_that_ends_after_the_first_broke_off() -> None:
    bench = await Bench.answered(stream(chunk("a"), chunk(finish="stop")), asked=streaming(n=2))
    assert bench.reply.broken_off is not None
    assert bench.record.outcome == "upstream_error"


async def test_the_larger_pool_serves_when_the_smaller_ones_workers_all_failed() -> None:
    bench = await Bench.answered(E500, BUSY, OK)
    assert [w.split("-")[0] for w in bench.upstream.called] == ["short", "short", "long"]
    assert bench.store.transfers == [(SHORT, LONG)]
    assert bench.record.pool == "long"
    assert not bench.record.admission.spilled, "spilled is what admission did"


async def test_attempts_end_at_the_configured_number_with_the_engines_words() -> None:
    bench = await Bench.answered(E500, served=served_model(workers=(5, 5), max_attempts=2))
    assert len(bench.upstream.calls) == 2
    assert (bench.reply.status, bench.record.reason) == (502, "engine_error")
    assert bench.reply.refusal is not None
    assert "CUDA error" in bench.reply.refusal.message


# -- requests on which engines fail


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(RESET, "engine_connection_broken", id="engine gone"),
        pytest.param(stream(chunk("a"), broken()), None, id="engine gone within the stream"),
        pytest.param(E500, "engine_error", id="500"),
        pytest.param(failure("timeout"), "engine_timeout", id="no answer"),
        pytest.param(stream(event({"error": {"message": "OOM"}})), "engine_error", id="in band"),
    ],
)
async def test_a_body_on_which_two_engines_failed_reaches_no_third(
    fault: Script, reason: str | None
) -> None:
    bench = Bench(fault, fault, OK, served=served_model(workers=MANY))
    replies = []
    for _ in range(5):  # the client's own retries: each is a new request with the same body
        replies.append(FakeReply())
        await bench.serve(streaming(), replies[-1])
    assert len(set(bench.upstream.called)) == len(bench.upstream.calls) == 2
    refused = [reply.refusal for reply in replies if reply.refusal is not None]
    assert all(refusal.should_retry is False for refusal in refused)
    assert len(refused) == (5 if reason else 3), "a stream breaks off once for each engine"
    if reason:
        assert refused[0].reason == reason
    assert max(e.failures for e in bench.served.fleet.pools[SHORT].engine_of) <= 1.0
    # Others are served, and so is the body after a while.
    for other in (streaming("another"), streaming()):
        bench.reply = FakeReply()
        await bench.serve(other)
        assert bench.reply.status == 200
        bench.clock.advance(MEMORY_S + 1)


async def test_what_any_engine_serves_is_not_suspect() -> None:
    """A monitor's body meets every engine that dies."""
    bench = Bench(RESET, OK, RESET, OK, RESET, OK, served=served_model(workers=MANY))
    for text in ("ping", "ping", "ping", "another"):
        bench.reply = FakeReply()
        await bench.serve(incoming(chat_body(text)))
        assert bench.reply.status == 200


async def test_one_tenants_bodies_are_not_anothers() -> None:
    known = Suspects()
    known.note("a", b"x", "one", "ended", 0.0)
    assert not known.note("b", b"x", "two", "ended", 0.0)
    assert known.note("a", b"x", "two", "failed", 0.0) == "ended"
    assert (known.verdict("a", b"x", 0.0), known.verdict("b", b"x", 0.0)) == ("ended", "")
    assert not known.verdict("a", b"y", 0.0)
    for number in range(MOST_BODIES):
        known.note("c", b"%d" % number, "one", "ended", 0.0)
    assert not known.verdict("a", b"x", 0.0), "the oldest are forgotten"


async def test_healthy_engines_stay_whatever_one_client_sends() -> None:
    bench = Bench(E500, served=served_model(workers=(2, 1)))
    for number in range(5):
        await bench.serve(incoming(chat_body(f"defect {number}")), FakeReply())
    assert bench.metrics.ejections.values == {}


async def test_engines_that_answer_nothing_but_errors_leave_all_the_same() -> None:
    bench = Bench(E500, served=served_model(workers=(2, 1)))
    for number in range(12):
        await bench.serve(incoming(chat_body(f"any {number}")), FakeReply())
    assert sum(bench.metrics.ejections.values.values()) == 2


async def test_the_only_worker_is_tried_again() -> None:
    bench = Bench(E500, OK, served=served_model(table=routing(("all", 8192, None)), workers=(1,)))
    await bench.serve()
    assert bench.upstream.called == ["all-0", "all-0"]
    assert bench.reply.status == 200


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        *((E500, 502), (RESET, 502), (failure("protocol"), 502), (failure("timeout"), 504)),
        *((BUSY, 200), (failure("connect"), 200)),
    ],
)
async def test_what_continues_a_stored_response_is_sent_twice_only_if_it_did_not_run(
    fault: Script, status: int
) -> None:
    body = orjson.dumps({"model": "m", "input": "x", "previous_response_id": "resp_1"})
    bench = await Bench.answered(fault, OK, asked=incoming(body, endpoint=RESPONSES))
    assert (len(bench.upstream.calls), bench.reply.status) == (1 + (status == 200), status)


async def test_a_streamed_response_is_remembered_too() -> None:
    created = event({"type": "response.created", "response": {"id": "resp_7"}})
    done = event({"type": "response.completed", "response": {"id": "resp_7"}})
    bench = Bench(stream(created, done))
    await bench.serve(incoming(b'{"model":"m","input":"x","stream":true}', endpoint=RESPONSES))
    assert bench.served.fleet.stored_at("resp_7") == (SHORT, 0)


STORED = whole(
    200,
    b'{"id":"resp_1","status":"completed","output":[],'
    b'"usage":{"input_tokens":18000,"output_tokens":500}}',
)


async def test_a_response_counts_what_it_continues() -> None:
    bench = Bench(STORED, served=served_model(table=routing(("all", 65536, None)), workers=(1,)))
    await bench.serve(incoming(b'{"model":"m","input":"x"}', endpoint=RESPONSES))
    then = incoming(CONTINUED, endpoint=RESPONSES, request_id="r2")
    await bench.serve(then, FakeReply())
    assert (bench.sink.records[-1].estimate.input_tokens or 0) >= 18_500


CONTINUED = orjson.dumps({"model": "m", "input": "x", "previous_response_id": "resp_1"})


def with_key(body: bytes) -> Incoming:
    return incoming(body, endpoint=RESPONSES, headers=KEY)


@pytest.mark.parametrize("tenant", ["somebody else", None])
async def test_a_response_that_is_not_the_tenant_s_is_not_found(tenant: str | None) -> None:
    bench = Bench(STORED, keyring=keys())
    affinity = bench.served.fleet.response_affinity
    if tenant is not None:
        affinity.remember("resp_1", ResponseLocation("short", 0, tenant, 18_500))
    await bench.serve(with_key(CONTINUED))
    refusal = bench.reply.refusal
    assert refusal is not None
    assert (refusal.status, refusal.reason, refusal.type, refusal.param) == (
        *(404, "response_not_found"),
        *("invalid_request_error", "response_id"),
    )
    assert refusal.message == "Response with id 'resp_1' not found."
    assert not bench.upstream.calls
    if tenant is None:
        affinity.remember("resp_1", ResponseLocation("short", 0, "t", 5))
        await bench.serve(with_key(CONTINUED), FakeReply())
        assert len(bench.upstream.calls) == 1


async def test_an_open_gateway_relays_ids_that_it_does_not_know() -> None:
    bench = await Bench.answered(STORED, asked=incoming(CONTINUED, endpoint=RESPONSES))
    assert len(bench.upstream.calls) == 1


async def test_another_replica_s_fresh_response_is_waited_for() -> None:
    bench = Bench(STORED, keyring=keys())
    bench.served.fleet.response_affinity.on_remember = lambda response_id, home: None
    task = asyncio.create_task(bench.serve(with_key(CONTINUED)))
    await asyncio.sleep(0.02)
    assert bench.reply.refusal is None
    bench.served.fleet.response_affinity.learn("resp_1", ResponseLocation("short", 0, "t", 5))
    await task
    assert bench.reply.status == 200


# -- health


async def test_a_refused_connection_takes_the_worker_out_of_the_rotation() -> None:
    bench = await Bench.answered(failure("connect"), OK)
    assert [e.up for e in bench.served.fleet.pools[SHORT].engine_of] == [False, True]
    await bench.serve(incoming(request_id="r2"), FakeReply())
    assert bench.upstream.called == ["short-0", "short-1", "short-1"]


async def test_when_nobody_accepts_connections_it_is_503_after_each_was_asked_once() -> None:
    bench = await Bench.answered(failure("connect"))
    assert sorted(bench.upstream.called) == ["long-0", "long-1", "short-0", "short-1"]
    assert (bench.reply.status, bench.record.reason) == (503, "no_worker_ready")


async def test_when_the_gateway_has_no_open_file_left_no_worker_is_to_blame() -> None:
    bench = await Bench.answered(failure("local"), OK, served=served_model(eject_after=1))
    assert (bench.reply.status, bench.record.reason) == (503, "gateway_exhausted")
    assert len(bench.upstream.calls) == 1
    assert [e.up for e in bench.served.fleet.pools[SHORT].engine_of] == [True, True]
    assert bench.metrics.ejections.values == {}
    assert bench.store.settlements[0][1].usage is None


@pytest.mark.parametrize("refused", [False, True])
async def test_the_only_workers_are_tried_however_they_left_the_rotation(refused: bool) -> None:
    bench = Bench(OK)
    for state in bench.served.fleet.pools:
        for worker in range(2):
            fleet.missed(state, worker, "no answer", answers=False)
            if refused:
                fleet.unreachable(state, worker)
    await bench.serve()
    assert (bench.reply.status, bench.record.worker) == (200, "short-0")


async def test_a_pool_in_the_rotation_goes_before_a_last_resort() -> None:
    bench = Bench(OK)
    for worker in range(2):
        fleet.missed(bench.served.fleet.pools[SHORT], worker, "no answer", answers=False)
    await bench.serve()
    assert (bench.reply.status, bench.record.pool) == (200, "long")


async def test_a_dead_fleet_costs_a_request_one_connection() -> None:
    bench = Bench(failure("connect"))
    for state in bench.served.fleet.pools:
        for worker in range(2):
            fleet.unreachable(state, worker)
    await bench.serve()
    assert bench.upstream.called == ["short-0"]
    assert (bench.reply.status, bench.record.reason) == (503, "no_worker_ready")


@pytest.mark.parametrize("fault", [E500, RESET, failure("timeout"), failure("protocol")])
async def test_failures_in_a_row_eject_a_worker(fault: Script) -> None:
    bench = await Bench.answered(fault, OK, served=served_model(workers=(1, 1), eject_after=1))
    assert fleet.available(bench.served.fleet.pools[LONG], bench.clock()) == [0]
    assert bench.served.fleet.pools[SHORT].engine_of[0].ejected_until_s > bench.clock()
    assert bench.metrics.ejections.values == {("short", "short-0"): 1}


@pytest.mark.parametrize(
    "answer", [BUSY, OVERFLOW, stream(), failure("connect"), whole(400, error_answer("bad"))]
)
async def test_an_engine_that_ran_nothing_is_not_ejected(answer: Script) -> None:
    asked = incoming(chat_body(FITS_SHORT))
    bench = await Bench.answered(*[answer] * 4, served=served_model(eject_after=1), asked=asked)
    assert bench.metrics.ejections.values == {}


async def test_a_stream_that_breaks_counts_against_its_worker() -> None:
    bench = Bench(stream(chunk("a"), broken()), served=served_model(eject_after=1))
    await bench.serve(streaming())
    assert bench.metrics.ejections.values == {("short", "short-0"): 1}


async def test_a_client_that_leaves_does_not_count_against_the_worker() -> None:
    bench = Bench(HANG, served=served_model(eject_after=1))
    await bench.cancel_when_hanging()
    assert [e.failures for e in bench.served.fleet.pools[SHORT].engine_of] == [0, 0]
    assert bench.metrics.ejections.values == {}


# -- adapters


async def test_an_alias_that_is_an_adapter_is_sent_as_it_is() -> None:
    bench = Bench(OK)
    body = chat_body(model="alias")
    await bench.serve(incoming(body))
    assert json.loads(bench.upstream.calls[0][1].body)["model"] == "m"
    for pool in bench.served.fleet.pools:
        bench.served.adapters.listed(pool, 0, ["alias"])
    await bench.serve(incoming(body, request_id="r2"), FakeReply())
    sent = json.loads(bench.upstream.calls[1][1].body)
    assert sent == {**json.loads(body), "lora_path": "alias"}, "SGLang's own name of an adapter"


async def test_an_adapter_that_disappears_while_it_is_asked_for_is_not_the_base_s() -> None:
    gone = whole(404, b'{"error": {"message": "The model `sql` does not exist."}}')
    bench = Bench(gone, gone, OK)
    for pool in bench.served.fleet.pools:
        for worker in range(len(pool.workers)):
            bench.served.adapters.listed(pool, worker, ["alias"] if worker == 0 else [])
    await bench.serve(incoming(chat_body(model="alias")))
    assert bench.reply.reason == "no_worker_ready"
    assert {json.loads(call.body)["model"] for _, call in bench.upstream.calls} == {"alias"}
    assert all(e.up for pool in bench.served.fleet.pools for e in pool.engines)


async def test_a_busy_engine_s_retry_after_reaches_the_client_and_ejects_nobody() -> None:
    busy = whole(503, b'{"error": {"message": "The engine is currently busy."}}')
    busy = replace(busy, headers=(*busy.headers, (b"retry-after", b"7")))
    bench = await Bench.answered(*[busy] * 10, served=served_model(eject_after=1), asked=incoming())
    assert bench.reply.refusal is not None
    assert (bench.reply.refusal.reason, bench.reply.refusal.retry_after_s) == ("engine_busy", 7.0)
    assert bench.metrics.ejections.values == {}


# -- what is only counted


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [(COUNT_TOKENS, b'{"input_tokens":7}'), (TOKENIZE, b'{"count":7,"tokens":[]}')],
)
async def test_counting_tokens_is_relayed_and_charged_none(
    endpoint: Endpoint, answer: bytes
) -> None:
    bench = Bench(whole(200, answer))
    await bench.serve(incoming(chat_body("x " * 200_000), endpoint=endpoint))
    assert (bench.reply.status, bench.reply.body) == (200, answer)
    assert bench.upstream.calls[0][1].path == endpoint.path
    ((lease, settlement),) = bench.store.settlements
    assert (lease.cost_tokens, settlement.usage, settlement.dispatched) == (0, None, True)
    assert bench.record.usage.prompt_tokens is None


async def test_an_engine_that_cannot_count_is_told_in_anthropic_s_shape() -> None:
    bench = Bench(whole(404, b'{"detail":"Not Found"}'))
    await bench.serve(incoming(endpoint=COUNT_TOKENS))
    assert bench.reply.status == 404
    assert isinstance(bench.reply.refusal, EngineRefusal)


# -- frozen engines


async def hangs_at(bench: Bench, request: Incoming | None = None) -> tuple[asyncio.Task[None], int]:
    """A request that waits for its first byte, and the short pool's worker that has it."""
    task = asyncio.create_task(bench.serve(request))
    await bench.upstream.hanging.wait()
    return task, int(bench.upstream.called[-1][-1])


async def test_a_frozen_engine_s_requests_are_moved_before_the_first_byte() -> None:
    bench = Bench(HANG, STREAM)
    task, worker = await hangs_at(bench, streaming())
    bench.pipeline.frozen(bench.served, bench.served.fleet.pools[SHORT], worker)
    await task
    assert bench.upstream.called == [f"short-{worker}", f"short-{1 - worker}"]
    assert bench.reply.status == 200
    assert [a.result for a in bench.record.attempts] == ["frozen", "ok"]
    assert fleet.available(bench.served.fleet.pools[SHORT], bench.clock()) == [1 - worker]
    assert bench.metrics.ejections.values == {("short", f"short-{worker}"): 1}
    assert bench.metrics.retries.values == {("frozen",): 1}
    assert not any(e.progress.pending for e in bench.served.fleet.pools[SHORT].engines)


async def test_a_request_is_moved_once() -> None:
    bench = Bench(HANG)
    task, worker = await hangs_at(bench)
    bench.pipeline.frozen(bench.served, bench.served.fleet.pools[SHORT], worker)
    while len(bench.upstream.called) < 2:  # noqa: ASYNC110 - it does nothing else
        await asyncio.sleep(0)
    bench.pipeline.frozen(bench.served, bench.served.fleet.pools[SHORT], 1 - worker)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(bench.upstream.called) == 2
    await bench.leave(task)


@pytest.mark.parametrize("why", ["no other worker", "stored response"])
async def test_a_request_stays_where_moving_does_not_help_or_is_not_safe(why: str) -> None:
    alone = why == "no other worker"
    served = served_model(table=routing(("short", 8192, None)), workers=(1 if alone else 2,))
    bench = Bench(HANG, served=served)
    more = {} if alone else {"previous_response_id": "resp_1"}
    task, worker = await hangs_at(bench, incoming(chat_body(**more)))
    for _ in range(2):
        bench.pipeline.frozen(bench.served, bench.served.fleet.pools[0], worker)
        await asyncio.sleep(0)
    assert len(bench.upstream.called) == 1
    assert not task.done()
    await bench.leave(task)


async def test_a_stream_that_has_begun_is_never_moved() -> None:
    bench = Bench(stream(chunk("a"), HANG))
    task, worker = await hangs_at(bench, streaming())
    bench.pipeline.frozen(bench.served, bench.served.fleet.pools[SHORT], worker)
    await asyncio.sleep(0)
    assert not task.done()
    assert len(bench.upstream.called) == 1
    await bench.leave(task)


async def test_a_client_that_leaves_while_it_is_moved_has_left() -> None:
    bench = Bench(HANG, STREAM)
    task, worker = await hangs_at(bench, streaming())
    bench.pipeline.frozen(bench.served, bench.served.fleet.pools[SHORT], worker)
    await bench.leave(task)
    assert len(bench.upstream.called) == 1
    assert bench.record.outcome == "disconnected"
    assert bench.store.active == 0


async def test_refusals_of_a_frozen_engine_do_not_bring_it_back() -> None:
    bench = Bench(whole(400, error_answer("bad")))
    state = bench.served.fleet.pools[SHORT]
    fleet.drain(state, 1, on=True)
    waiting = Pending(None, 0.0, 1.0, lambda: 0)
    state.engine_of[0].progress.begin(waiting)
    state.engine_of[0].progress.look(50.0)
    fleet.eject(state, 0, bench.served.fleet.health, bench.clock())
    await bench.serve()
    assert state.engine_of[0].ejected_until_s > bench.clock()
    bench.upstream.script[:] = [OK]
    await bench.serve(incoming(request_id="r2"), FakeReply())
    assert state.engine_of[0].ejected_until_s == 0.0


# -- rescue


def first_event(wording: str) -> Script:
    error = {"error": {"message": wording, "type": "BadRequestError", "code": 400}}
    return stream(event(error), DONE)


@pytest.mark.parametrize(
    ("overflow", "streams"),
    [
        *[(whole(400, error_answer(wording)), False) for wording in OVERFLOWS],
        *[(first_event(wording), True) for wording in OVERFLOWS],
        (stream(), True),
    ],
)
async def test_each_wording_of_an_overflow_is_rescued_by_the_larger_pool(
    overflow: Script, streams: bool
) -> None:
    asked = incoming(chat_body(FITS_SHORT, **({"stream": True} if streams else {})))
    bench = await Bench.answered(overflow, STREAM if streams else OK, asked=asked)
    assert [w.split("-")[0] for w in bench.upstream.called] == ["short", "long"]
    assert (bench.reply.status, bench.record.rescued, bench.record.pool) == (200, True, "long")
    assert (bench.record.outcome, b"error" in bench.reply.body) == ("ok", False)
    first, second = bench.upstream.calls
    assert first[1].body == second[1].body
    assert bench.store.transfers == [(SHORT, LONG)]
    assert not bench.record.admission.spilled
    assert bench.metrics.misroutes.values[("overflow",)] == 1
    bench.assert_nothing_leaks()


ECHOES = (
    "[{'type': 'int_parsing', 'loc': ('body', 'top_k'), 'input': \"%s\"}]",
    "The model `%s` does not exist.",
    "Unknown role: %s",
)


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("wording", OVERFLOWS)
async def test_what_an_engine_echoes_of_a_client_is_no_overflow(wording: str, echo: str) -> None:
    bench = Bench(whole(400, error_answer(echo % wording)), OK)
    await bench.serve(incoming(chat_body(FITS_SHORT, top_k=wording)))
    assert (bench.reply.status, len(bench.upstream.calls)) == (400, 1)
    assert not bench.record.rescued


@pytest.mark.parametrize("wording", OVERFLOWS)
async def test_a_request_that_cannot_be_as_long_as_an_engine_says_is_not_rescued(
    wording: str,
) -> None:
    """A chat template of the client's own may raise whatever it likes."""
    bench = Bench(whole(400, error_answer(wording.replace("8192", "7000"))), OK)
    await bench.serve(incoming(chat_body("hi", max_tokens=20)))
    expected = 2048 in map(int, re.findall(r"[0-9]+", wording))  # so much may be the template's
    assert bench.record.rescued == expected


RESPONSE = {"id": "resp_1", "error": None, "instructions": OVERFLOWS[0]}
"""A response.created event has an error member (null) and repeats the instructions."""


@pytest.mark.parametrize(
    ("said", "end", "endpoint"),
    [
        pytest.param(chunk("error") + chunk(OVERFLOWS[0]), DONE, CHAT, id="an overflow"),
        pytest.param(chunk("event: error\n"), DONE, CHAT, id="an error event"),
        pytest.param(
            event({"type": "response.created", "response": RESPONSE}),
            event({"type": "response.completed", "response": {"id": "resp_1"}}),
            RESPONSES,
            id="its instructions",
        ),
    ],
)
async def test_an_answer_that_quotes_an_error_passes(
    said: bytes, end: bytes, endpoint: Endpoint
) -> None:
    said += chunk(finish="stop") if endpoint is CHAT else b""
    body = chat_body(FITS_SHORT, stream=True)
    if endpoint is RESPONSES:
        body = orjson.dumps({"model": "m", "input": "x", "stream": True})
    bench = await Bench.answered(stream(said, end), asked=incoming(body, endpoint=endpoint))
    assert (bench.reply.body, len(bench.upstream.calls)) == (said + end, 1)


async def test_a_rescue_passes_through_each_larger_window() -> None:
    table = routing(("s", 4096, 4096), ("m", 8192, 8192), ("l", 65536, None))
    bench = Bench(
        OVERFLOW, OVERFLOW, OK, served=served_model(table=table, workers=(1, 1, 1), max_attempts=1)
    )
    await bench.serve(incoming(chat_body("many words in a row " * 400)))
    assert bench.upstream.called == ["s-0", "m-0", "l-0"]


async def test_a_rescued_request_never_falls_back_to_a_smaller_window() -> None:
    bench = Bench(OVERFLOW, E500, BUSY, OK, served=served_model(max_attempts=4))
    await bench.serve(incoming(chat_body(FITS_SHORT)))
    assert [w.split("-")[0] for w in bench.upstream.called] == ["short", "long", "long", "long"]


async def test_an_overflow_of_the_largest_window_is_the_clients_400() -> None:
    bench = await Bench.answered(OVERFLOW, asked=incoming(chat_body(LONG_TEXT)))
    refusal = bench.reply.refusal
    assert refusal is not None
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")
    assert refusal.message == OVERFLOWS[0]


@pytest.mark.parametrize("breaks", [broken("reset"), broken("timeout"), chunk("late")])
async def test_after_its_end_nothing_makes_a_stream_broken(breaks: Any) -> None:
    bench = await Bench.answered(stream(chunk("a"), DONE, breaks), asked=streaming())
    assert (bench.reply.body, bench.reply.finished) == (chunk("a") + DONE, True)
    assert (bench.record.outcome, bench.served.fleet.pools[SHORT].engine_of[0].failures) == (
        "ok",
        0,
    )


@pytest.mark.parametrize("code", [502, "internal"])
async def test_an_error_with_status_200_is_tried_elsewhere(code: object) -> None:
    said = orjson.dumps({"error": {"message": "ResourceExhausted", "code": code}})
    bench = await Bench.answered(whole(200, said), OK, asked=incoming(chat_body()))
    assert bench.upstream.called == ["short-0", "short-1"]
    assert bench.reply.status == 200


async def test_a_clients_error_with_status_200_gets_its_own_status() -> None:
    bench = Bench(whole(200, error_answer("no such tool", code=422)))
    await bench.serve(incoming(chat_body()))
    assert (bench.reply.status, bench.record.outcome) == (422, "error")


async def test_a_whole_answer_without_usage_is_charged_by_its_bytes() -> None:
    choice = {"message": {"content": "x" * 400}, "finish_reason": "stop"}
    bench = Bench(whole(200, orjson.dumps({"id": "c", "choices": [choice]})))
    await bench.serve(incoming(chat_body()))
    assert bench.record.usage.source == "counted"
    assert 100 <= (bench.record.usage.completion_tokens or 0) <= 110


# -- broken streams


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([stream(chunk("a"), broken("reset"))], "engine_stream_broken"),
        ([stream(chunk("a"), broken("timeout"))], "engine_silent"),
        ([stream(chunk("a"))], "engine_stream_broken"),
        ([stream(chunk("a"), b"data: {")], "engine_stream_broken"),
    ],
)
async def test_a_stream_that_breaks_gets_an_error_event_and_no_faked_stop(
    script: list[Script], code: str
) -> None:
    bench = await Bench.answered(*script, asked=streaming())
    assert bench.reply.broken_off is not None
    assert (bench.reply.broken_off.code, bench.record.reason) == (code, code)
    assert b'"stop"' not in bench.reply.body
    assert DONE not in bench.reply.body
    assert len(bench.upstream.calls) == 1, "nothing is retried after the first byte"
    assert bench.reply.body.startswith(chunk("a"))
    assert bench.record.outcome == "upstream_error"
    bench.assert_nothing_leaks()


@pytest.mark.parametrize("cut", [False, True])
async def test_an_engines_own_error_event_is_relayed_once_and_is_an_error(cut: bool) -> None:
    error = event({"error": {"message": "EngineDeadError", "code": 500}})
    pieces = [error, DONE] if cut else [error + DONE]
    bench = await Bench.answered(stream(chunk("a"), *pieces), asked=streaming())
    assert bench.reply.body == chunk("a") + error + DONE
    assert bench.reply.broken_off is None
    assert bench.record.outcome == "upstream_error"


# -- spill


async def test_two_running_requests_with_the_same_id_do_not_share_a_lease() -> None:
    """A client chooses x-request-id; one that repeats it must get no other request's pool."""
    served = served_model()
    store = MemoryLeases({"m": served}, FakeClock())
    bench = Bench(HANG, OK, served=served, store=store)
    first = asyncio.create_task(bench.serve(incoming(request_id="same", lease_id="1")))
    await bench.upstream.hanging.wait()
    try:
        again = incoming(chat_body(LONG_TEXT), request_id="same", lease_id="2")
        await bench.serve(again, FakeReply())
        assert [w.split("-")[0] for w in bench.upstream.called] == ["short", "long"]
        assert store.active == 1
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_n_sequences_weigh_n_while_they_run() -> None:
    bench = Bench(HANG)
    task = asyncio.create_task(bench.serve(incoming(chat_body(n=3))))
    await bench.upstream.hanging.wait()
    assert bench.store.inflight(SHORT) == 3
    assert bench.served.fleet.pools[SHORT].active == [3, 0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bench.assert_nothing_leaks()


@pytest.mark.parametrize(
    ("script", "long_inflight", "words", "expected"),
    [
        pytest.param([OK], 99, 1_400, None, id="spilled to a smaller window"),
        pytest.param([OVERFLOW, OK], 0, 1_600, 4096, id="rescued by a larger window"),
    ],
)
async def test_a_defaulted_limit_fits_the_pool_that_serves(
    script: list[Script], long_inflight: int, words: int, expected: int | None
) -> None:
    boundary = 2048 if expected is None else 8192
    table = routing(("short", 8192, boundary), ("long", 65536, None), default_max_tokens=4096)
    served = served_model(table=table)
    served.fleet.pools[LONG].inflight = long_inflight
    store = MemoryLeases({"m": served}, FakeClock())
    bench = Bench(*script, served=served, store=store)
    await bench.serve(incoming(chat_body("some words " * words)))
    prompt = bench.record.estimate.input_tokens or 0
    served_window = 8192 if bench.record.pool == "short" else 65536
    assert prompt + bench.sent["max_tokens"] <= served_window
    assert expected in (None, bench.sent["max_tokens"])


@pytest.mark.parametrize(
    ("endpoint", "limits", "sent"),
    [
        (CHAT, b'"max_tokens":null', {"max_tokens": 50}),
        (CHAT, b'"max_t\\u006fkens": null', {"max_tokens": 50}),
        (CHAT, b'"max_completion_tokens":null', {"max_completion_tokens": None, "max_tokens": 50}),
        (RESPONSES, b'"max_output_tokens":null', {"max_output_tokens": 50}),
    ],
)
async def test_a_null_limit_is_replaced_by_the_default(
    endpoint: Endpoint, limits: bytes, sent: dict[str, int | None]
) -> None:
    bench = Bench(OK, served=served_model(table=short_and_long(default_max_tokens=50)))
    text = b'{"model":"m","messages":[{"role":"user","content":"x"}],"input":"x",'
    await bench.serve(incoming(text + limits + b"}", endpoint=endpoint))
    received = json.loads(bench.upstream.calls[0][1].body, object_pairs_hook=list)
    assert sorted(pair for pair in received if pair[0].startswith("max_")) == sorted(sent.items())


async def test_an_audio_form_is_sent_anew_with_its_model_renamed() -> None:
    form = (
        b'--%b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--%b\r\n'
        b'content-disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\x00\r\n--%b--\r\n'
    )
    bench = Bench(whole(200, b'{"text":"hello"}'))
    asked = incoming(form % (b"b", b"alias", b"b", b"b"), endpoint=TRANSCRIPTIONS)
    head = read_head([(b"content-type", b"multipart/form-data; boundary=b"), (b"accept", b"*/*")])
    await bench.serve(msgspec.structs.replace(asked, head=head))
    assert (bench.reply.status, bench.reply.body) == (200, b'{"text":"hello"}')
    call = bench.upstream.calls[0][1]
    sent = dict(pairs_of(call.lines))
    kind, _, boundary = sent[b"content-type"].partition(b"; boundary=")
    assert (kind, sent[b"accept"]) == (b"multipart/form-data", b"*/*")
    assert len([name for name, _ in pairs_of(call.lines) if name == b"content-type"]) == 1
    assert len(boundary) == 32
    assert call.path == "/v1/audio/transcriptions"
    assert call.body == form % (boundary, b"m", boundary, boundary)
    bench.assert_nothing_leaks()


async def test_speech_is_relayed_as_the_bytes_it_is() -> None:
    bench = Bench(Answer(200, ((b"content-type", b"audio/mpeg"),), (b"\xff\xfb\x90",)))
    body = b'{"model":"m","input":"Say this.","voice":"alloy"}'
    await bench.serve(incoming(body, endpoint=SPEECH))
    assert bench.reply.body == b"\xff\xfb\x90"
    assert bench.reply.headers[b"content-type"] == b"audio/mpeg"


@pytest.mark.parametrize(
    "said", [b'{"detail":"Not Found"}', b'{"object":"error","message":"Not Found"}', b"Not Found"]
)
async def test_an_engines_refusal_of_another_shape_is_told_in_openais(said: bytes) -> None:
    bench = await Bench.answered(whole(404, said))
    assert bench.reply.refusal is not None
    assert (bench.reply.refusal.status, bench.reply.refusal.message) == (404, "Not Found")
    assert bench.record.outcome == "error"


# -- usage, and answers that no engine should give


async def test_a_window_that_an_engine_exceeds_is_charged_told_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(whole(200, answer_body(prompt=9_000, completion=3)))
    with caplog.at_level("WARNING", "sluice.settling"):
        await bench.serve(incoming(chat_body(FITS_SHORT, max_tokens=100)))
    assert [pool.beyond_window_tokens for pool in bench.served.fleet.pools] == [9_003, 0]
    assert "set max_model_len to the engine's own" in caplog.text
    assert (bench.record.pool, bench.record.usage.source) == ("short", "engine")
    assert bench.record.usage.prompt_tokens == 9_000


PACKED = whole(200, b"\x1f\x8b\x08")
PACKED.headers = (*PACKED.headers, (b"content-encoding", b"gzip"))


@pytest.mark.parametrize("answer", [*[whole(status, b"") for status in (204, 301, 304)], PACKED])
async def test_an_answer_that_no_engine_should_give_is_its_fault(answer: Answer) -> None:
    bench = await Bench.answered(answer, OK)
    assert (bench.reply.status, len(bench.upstream.called)) == (200, 2)


@pytest.mark.parametrize(
    ("script", "keyring"),
    [
        ([OK], None),
        ([STREAM], None),
        ([BUSY] * 9, None),
        ([failure("connect")] * 9, None),
        ([], keyring_of({b"k": OPEN})),
    ],
    ids=["answered", "streamed", "busy", "unreachable", "unknown key"],
)
async def test_a_request_that_ended_is_freed_at_once(
    script: list[Script], keyring: Keyring | None
) -> None:
    bench = Bench(*script, keyring=keyring)
    before = states_alive()
    gc.disable()
    try:
        await bench.serve(incoming(chat_body(stream=script == [STREAM])))
        bench.reply.refusal = None
        assert states_alive() == before
    finally:
        gc.enable()


def states_alive() -> int:
    return sum(isinstance(found, RequestProgress | Attempts) for found in gc.get_objects())


# -- traces


async def test_engines_get_a_trace_that_names_the_attempt() -> None:
    trace = Trace(trace_id="a" * 32, span_id="4" + "0" * 15, sampled=True)
    bench = await Bench.answered(E500, OK, asked=msgspec.structs.replace(incoming(), trace=trace))
    sent = [dict(pairs_of(call.lines))[b"traceparent"] for _, call in bench.upstream.calls]
    assert sent == [f"00-{'a' * 32}-{child_id(trace, n)}-01".encode() for n in (1, 2)]
    assert bench.record.trace == trace


async def test_without_telemetry_the_clients_own_trace_reaches_the_engine() -> None:
    bench = Bench(OK)
    own = (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")
    await bench.serve(incoming(headers=[own]))
    assert own in pairs_of(bench.upstream.calls[0][1].lines)


async def test_an_attempt_s_begin_and_length_are_recorded() -> None:
    bench = Bench(failure("connect"), STREAM)
    bench.upstream.on_read = lambda: bench.clock.advance(0.25)
    await bench.serve(msgspec.structs.replace(streaming(), received_s=99.0))
    first, second = bench.record.attempts
    assert (first.start_ms, first.duration_ms) == (1000, 0)
    assert (second.start_ms, second.duration_ms) == (1000, 5 * 250)


# -- time by stage


async def test_one_request_in_sixteen_is_measured_stage_by_stage() -> None:
    bench = Bench(*[STREAM] * 33)
    for _ in range(33):
        await bench.serve(streaming(), FakeReply())
    counts = {labels[0]: sum(row[:-1]) for labels, row in bench.metrics.overhead.series.items()}
    measured = ("authenticate", "estimate", "plan", "admit", "bind", "dispatch", "forward")
    assert counts == {"to_dispatch": 33} | dict.fromkeys((*measured, "settle", "record"), 3)


class _SlowStore(FakeStore):
    """Takes half a second to admit."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    async def admit(self, ask: AdmissionRequest) -> Lease:
        self._clock.advance(0.5)
        return await super().admit(ask)


async def test_the_time_of_a_stage_counts_for_no_other_stage() -> None:
    bench = Bench(STREAM)
    bench.pipeline._store = _SlowStore(bench.clock)
    await bench.serve(streaming())
    times = {labels[0]: row[-1] for labels, row in bench.metrics.overhead.series.items()}
    assert times.pop("to_dispatch") == times.pop("admit") == 0.5
    assert set(times.values()) == {0.0}


async def test_first_tokens_of_streams_are_counted_by_tenant() -> None:
    bench = Bench(STREAM, OK)
    bench.upstream.on_read = lambda: bench.clock.advance(0.25)
    await bench.serve(streaming(), FakeReply())
    await bench.serve(incoming(), FakeReply())
    ((labels, row),) = bench.metrics.tenant_ttft.series.items()
    assert labels == ("m", "open")
    assert (sum(row[:-1]), row[-1]) == (1, 0.25)
