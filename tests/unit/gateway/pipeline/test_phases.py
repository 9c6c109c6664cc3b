"""Pools in phases, over scripted engines: whatever happens, nothing is left behind.

Each history is one request: what its engines do, call by call, and when its client leaves. The
engines hold KV cache as vLLM's do, or meet in rooms as SGLang's do.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import FailureKind
from gateway.fleet import fleet
from gateway.fleet.fleet import SlotClock
from gateway.fleet.model_runtime import ModelRuntime, Phases, Pool, TransferTime
from gateway.payload.head import pairs_of
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from gateway.records.endpoint import EMBEDDINGS
from tests.builders import (
    address,
    answer_body,
    changed,
    chat_body,
    chunk,
    error_answer,
    incoming,
    routing,
    served_model,
    usage_chunk,
    usage_object,
)
from tests.fakes import Answer, FakeResponse, FakeUpstream, failure, stream, whole
from tests.pipeline_bench import PipelineBench

Kind = Literal["vllm", "sglang"]
DOES = ("ok", "connect", "reset", "timeout", "500", "busy", "400", "hang")
PROMPT = 40
OVERFLOW = (
    "This model's maximum context length is 512 tokens. However, you requested 600 output tokens "
    "and your prompt contains 5 input tokens, for a total of 605 tokens."
)


def in_phases(kind: Kind, *, prefill: int = 2, decode: int = 2, **more: Any) -> ModelRuntime:
    """A model of one pool in phases."""
    served = served_model(table=routing(("only", 8192, None)), workers=(decode,), eject_after=100)
    first = Pool("only/prefill", [address(f"p{n}", host=f"p{n}") for n in range(prefill)], 4)
    port = 8998 if kind == "sglang" else 0
    known = {"skip_below_tokens": 0, "bytes_per_second": 0.0, "bootstrap_port": port, **more}
    phases = Phases(prefill=1, kind=kind, **known)
    return changed(served, pools=(*served.fleet.pools, first), phases={0: phases})


class Engines(FakeUpstream):
    """Prefill engines (p0, p1) and decode engines; each call does what its turn says."""

    def __init__(self, does: Sequence[str]) -> None:
        super().__init__([])
        self.does = list(does)
        self.held: set[int] = set()
        """KV caches that nobody fetched."""
        self.twice = 0
        """Places that two decode requests had."""
        self.rooms: dict[int, asyncio.Event] = {}
        self.open_calls = 0
        self.cached = (0, 0)
        """Prompt tokens that prefill and decode engines report as cached."""
        self.on_prefill: Callable[[], object] = lambda: None
        self._made = 0

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        body = orjson.loads(call.body)
        release = body.get("prompt") == "a"
        does = "ok" if release or not self.does else self.does.pop(0)
        self.calls.append((worker, call))
        if does == "connect":
            raise failure("connect")
        self.open_calls += 1
        try:
            answer = await self._answer(worker, body, does)
        finally:
            self.open_calls -= 1
        response = FakeResponse(answer, self)
        self.responses.append(response)
        return response

    async def _answer(self, worker: WorkerAddress, body: dict[str, Any], does: str) -> Answer:
        params, room = body.get("kv_transfer_params") or {}, body.get("bootstrap_room")
        prefills = worker.id.startswith("p")
        if "place" in params and does in ("ok", "400", "overflow"):
            # Read, or told to be freed: engines do that also where they refuse a request.
            self.twice += body.get("prompt") != "a" and params["place"] not in self.held
            self.held.discard(params["place"])
        kinds: dict[str, FailureKind] = {"reset": "reset", "timeout": "timeout"}
        if does in kinds:
            raise failure(kinds[does])
        if does == "hang":
            await self.hang()  # if its client leaves, it may not have read the place
        if does == "500":
            return whole(500, error_answer("Internal server error", code=500))
        if does == "busy":
            return whole(503, error_answer("The engine is busy", code=503))
        if does == "400":
            return whole(400, error_answer("temperature must be positive"))
        if does == "overflow":
            return whole(400, error_answer(OVERFLOW))
        if room is not None:
            met = self.rooms.setdefault(room, asyncio.Event())
            if prefills:
                met.set()
            else:
                await met.wait()
        if prefills and room is None:
            assert body.get("max_completion_tokens", body.get("max_tokens")) == 1
            assert not body["stream"]
            self._made += 1
            self.held.add(self._made)
            self.on_prefill()
            more: dict[str, Any] = {
                "usage": usage_object(PROMPT, 1, self.cached[0]),
                "kv_transfer_params": {"place": self._made, "do_remote_prefill": True},
            }
            return whole(200, answer_body("h", **more))
        if body.get("stream"):
            ends = (chunk(finish="stop"), usage_chunk(PROMPT, 3), b"data: [DONE]\n\n")
            return stream(chunk("hi"), *ends)
        return whole(200, answer_body("hi", usage=usage_object(PROMPT, 3, self.cached[1])))


def nothing_is_left(bench: PipelineBench, engines: Engines) -> None:
    """Of a request that has ended."""
    assert bench.store.active == 0
    assert len(bench.store.settlements) == 1, "settled exactly once"
    for pool in bench.served.fleet.pools:
        assert (pool.total_active, pool.total_tokens) == (0, 0), pool.name
        assert not pool.queued
        assert sum(pool.scheduler.waiting) == 0
        assert not any(engine.progress.pending for engine in pool.engines)
    assert engines.open_calls == 0
    assert all(answer.ended or answer.aborted for answer in engines.responses)
    if bench.served.fleet.pools[0].alive:  # else nobody can be asked to free it
        assert not engines.held, "KV cache that nobody will fetch is given back"
    assert engines.twice == 0, "a place is for one engine"


async def history(kind: Kind, does: Sequence[str], *, streams: bool, leaves_after: int) -> None:
    engines = Engines(does)
    bench = PipelineBench(served=in_phases(kind), upstream=engines)
    request = bench.begin(incoming(chat_body(stream=streams)))
    for turn in range(10_000):
        if request.done():
            break
        if turn == leaves_after or engines.hanging.is_set():
            request.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await request
    for _ in range(20):  # what is given back is done beside it
        await asyncio.sleep(0)
    if bench.store.settlements or not request.cancelled():  # it was admitted
        nothing_is_left(bench, engines)
    if not request.cancelled():
        assert bench.reply.finished, "the client was told once how it ended"


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(("vllm", "sglang")),
    does=st.lists(st.sampled_from(DOES), max_size=7),
    streams=st.booleans(),
    leaves_after=st.integers(-1, 40),
)
@example(kind="vllm", does=["ok", "connect", "connect"], streams=True, leaves_after=-1)
@example(kind="vllm", does=["ok", "reset", "ok", "ok"], streams=True, leaves_after=-1)
@example(kind="sglang", does=["400", "ok"], streams=False, leaves_after=-1)
def test_whatever_happens_nothing_is_left(
    kind: Kind, does: list[str], streams: bool, leaves_after: int
) -> None:
    asyncio.run(history(kind, does, streams=streams, leaves_after=leaves_after))


# -- what engines are sent, and what is noted


async def served_by(
    engines: Engines, model: ModelRuntime, body: bytes | None = None, **more: Any
) -> PipelineBench:
    bench = PipelineBench(served=model, upstream=engines)
    await bench.serve(incoming(body, **more))
    await asyncio.sleep(0)
    return bench


def bodies(engines: Engines) -> list[Any]:
    return [orjson.loads(call.body) for _, call in engines.calls]


async def test_vllm_gets_the_prompt_alone_then_the_clients_request_with_its_place() -> None:
    engines = Engines([])
    body = chat_body(
        max_completion_tokens=7,
        min_tokens=2,
        stream=True,
        stream_options={"include_usage": False},
        kv_transfer_params={"remote_host": "evil"},
    )
    bench = await served_by(engines, in_phases("vllm"), body)
    first, second = bodies(engines)
    assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
    assert first["stream"] is False
    assert first.keys().isdisjoint({"min_tokens", "stream_options"})
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_completion_tokens"], second["min_tokens"]) == (7, 2)
    assert second["kv_transfer_params"]["place"] == 1
    assert "evil" not in str((first, second))
    ids = {dict(pairs_of(call.lines))[b"x-request-id"] for _, call in engines.calls}
    assert len(ids) == 1
    assert bench.reply.headers[b"x-sluice-prefill-worker"] == b"p0"
    record = bench.record
    assert (record.pool, record.prefill.pool, record.prefill.worker) == (
        "only",
        "only/prefill",
        "p0",
    )
    assert [attempt.pool for attempt in record.attempts] == ["only/prefill", "only"]
    assert bench.metrics.prefills.values == {("only/prefill", "ok"): 1}


async def test_a_pair_of_sglang_gets_one_body_and_a_room() -> None:
    engines = Engines([])
    body = chat_body(max_tokens=7, stream=True, bootstrap_room=5)
    await served_by(engines, in_phases("sglang"), body)
    first, second = bodies(engines)
    assert first == second
    assert (first["bootstrap_host"], first["bootstrap_port"]) == ("p0", 8998)
    assert 0 <= first["bootstrap_room"] < 1 << 63
    assert first["bootstrap_room"] != 5


@pytest.mark.parametrize(
    ("why", "body", "more"),
    [
        ("short", None, {"skip_below_tokens": 100_000}),
        ("sequences", chat_body(n=2), {}),
        ("no_prefill_worker", None, {"prefill": 0}),
    ],
)
async def test_decode_computes_what_need_not_or_cannot_be_handed_over(
    why: str, body: bytes | None, more: dict[str, Any]
) -> None:
    engines = Engines([])
    bench = await served_by(engines, in_phases("vllm", **more), body)
    assert bench.record.outcome == "ok"
    assert bench.record.prefill.skipped == why
    assert [worker.id for worker, _ in engines.calls] == ["only-0"]
    assert bench.metrics.prefills.values == {("only/prefill", why): 1}


async def test_other_endpoints_go_to_decode() -> None:
    engines = Engines([])
    body = orjson.dumps({"model": "m", "input": "hi"})
    bench = await served_by(engines, in_phases("vllm"), body, endpoint=EMBEDDINGS)
    assert bench.record.prefill.skipped == "endpoint"
    assert [worker.id for worker, _ in engines.calls] == ["only-0"]


async def test_a_client_pays_for_what_the_prefill_engine_had_not_cached() -> None:
    engines = Engines([])
    engines.cached = (24, 40)
    bench = await served_by(engines, in_phases("vllm"))
    assert bench.record.usage.prompt_tokens == PROMPT
    assert bench.record.usage.cached_tokens == 24, "not 40, which decode fetched"


async def test_a_place_that_may_be_free_by_now_is_not_used() -> None:
    model = in_phases("vllm", decode=1)
    decode, engines = model.fleet.pools[0], Engines([])
    decode.may_be_empty = True
    bench = PipelineBench(served=model, upstream=engines)
    engines.on_prefill = lambda: fleet.drain(decode, 0, on=True)
    request = bench.begin()
    while not model.scheduling.waiting_for_workers:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    bench.clock.advance(26.0)
    fleet.drain(decode, 0, on=False)
    bench.pipeline.tick()
    await request
    assert bench.record.prefill.skipped == "failed"
    assert "kv_transfer_params" not in bench.sent


async def test_a_place_that_decode_gave_back_as_it_refused_is_not_read_again() -> None:
    """A read of it would be counted as one after its end, which is an alert."""
    engines = Engines(["ok", "overflow"])
    bench = PipelineBench(served=in_phases("vllm"), upstream=engines)
    await bench.serve(incoming(chat_body(max_tokens=600)))
    await asyncio.sleep(0)
    assert bench.record.status == 400
    assert len(engines.calls) == 2
    assert not engines.held
    nothing_is_left(bench, engines)


async def test_a_frozen_prefill_engine_leaves_the_prompt_to_decode() -> None:
    engines = Engines(["hang"])
    model = in_phases("vllm", prefill=1)
    bench = PipelineBench(served=model, upstream=engines)
    request = bench.begin()
    await engines.hanging.wait()
    bench.pipeline.frozen(model, model.fleet.pools[1], 0)
    await request
    assert [attempt.result for attempt in bench.record.attempts] == ["frozen", "ok"]
    assert bench.record.prefill.skipped == "failed"
    nothing_is_left(bench, engines)


async def test_the_time_of_both_phases_has_its_price() -> None:
    model = in_phases("vllm")
    for pool in model.fleet.pools:
        pool.slot_clock = SlotClock(3600.0)
    engines = Engines([])
    bench = PipelineBench(served=changed(model, by_hour=True), upstream=engines)
    engines.on_prefill = lambda: bench.clock.advance(4.0)
    await bench.serve()
    # Of 4 slots each: 4 s of a worker of prefill, none of decode.
    assert bench.record.usage.cost_nano == pytest.approx(4.0 * 1e9 / 4)


def test_a_transfer_is_predicted_from_those_before() -> None:
    transfer = TransferTime()
    assert transfer.predict(1000, 1e-4) == pytest.approx(0.1)
    for _ in range(200):
        transfer.learn(0.05, 0.2, 1000)
        transfer.learn(0.05, 0.002, 10)
    assert transfer.predict(2000, 1e-4) == pytest.approx(0.05 + 0.4, rel=0.02)
