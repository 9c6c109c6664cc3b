"""What engines, clients and bodies may do to requests in phases that no draw of faults says."""

import asyncio
from typing import Any

import orjson
import pytest

from gateway.fleet import fleet
from gateway.ports import Lines
from gateway.records.attempt import WorkerAddress
from gateway.records.endpoint import COMPLETIONS
from tests.builders import answer_body, chat_body, event, incoming
from tests.fakes import Answer, FakeReply, failure, stream, whole
from tests.pipeline_bench import PipelineBench
from tests.unit.gateway.pipeline.test_phases import PROMPT, Engines, in_phases, nothing_is_left


async def test_a_body_that_ends_two_decode_engines_is_sent_to_no_third() -> None:
    engines = Engines(["ok", "reset"] * 2)
    bench = PipelineBench(served=in_phases("vllm", decode=3), upstream=engines)
    await bench.serve()
    await asyncio.sleep(0)
    results = [attempt.result for attempt in bench.record.attempts]
    assert results == ["ok", "reset", "ok", "reset"]
    assert bench.record.outcome == "upstream_error"
    nothing_is_left(bench, engines)


async def test_what_a_prefill_refuses_in_a_stream_is_the_clients_answer() -> None:
    class TooLong(Engines):
        async def _answer(self, worker: WorkerAddress, body: dict[str, Any], does: str) -> Answer:
            if not worker.id.startswith("p"):
                return await super()._answer(worker, body, does)
            told = {"error": {"message": "too long for the KV pool", "code": 400}}
            return stream(event(told), b"data: [DONE]\n\n")

    engines = TooLong([])
    bench = PipelineBench(served=in_phases("sglang"), upstream=engines)
    await bench.serve(incoming(chat_body(stream=True)))
    assert bench.reply.status == 400
    assert str(bench.reply.refusal) == "too long for the KV pool"
    nothing_is_left(bench, engines)


async def test_an_answer_that_is_on_its_way_is_not_given_twice() -> None:
    class Slow(FakeReply):
        def __init__(self) -> None:
            super().__init__()
            self.sending, self.reads = asyncio.Event(), asyncio.Event()

        async def send(self, status: int, lines: Lines, body: bytes) -> None:
            self.sending.set()
            await self.reads.wait()
            await super().send(status, lines, body)

    class Late(Engines):
        async def _answer(self, worker: WorkerAddress, body: dict[str, Any], does: str) -> Answer:
            if worker.id.startswith("p"):
                await reply.sending.wait()
                raise failure("reset")
            return whole(200, answer_body("hi", prompt=PROMPT, completion=3))

    reply, engines = Slow(), Late([])
    bench = PipelineBench(served=in_phases("sglang"), upstream=engines)
    request = bench.begin(reply=reply)
    await reply.sending.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    reply.reads.set()
    await request
    assert len(engines.calls) == 2
    assert bench.record.outcome == "ok"
    nothing_is_left(bench, engines)


STEERED = (
    b'{"kv_transfer_p\\u0061rams":{"remote_host":"evil"},"model":"m","max_tokens":null,"stream":false,'
    b'"messages":[{"role":"user","content":"hello"}],"bootstr\\u0061p_host":"evil",'
    b'"stream_options":null,"max_completion_tokens":60,"min_tokens":3,"bootstrap_room":8}'
)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_neither_phase_gets_what_a_client_says_of_them(kind: Any) -> None:
    engines = Engines([])
    bench = PipelineBench(served=in_phases(kind), upstream=engines)
    await bench.serve(incoming(STEERED))
    assert bench.record.outcome == "ok"
    bodies = []
    for _, call in engines.calls:
        members = orjson.loads(call.body)
        assert call.body.count(b"evil") == 0
        for name in ("stream", "max_tokens", "bootstrap_room", "kv_transfer_params"):
            assert call.body.count(b'"%b":' % name.encode()) <= (name in members), "no second one"
        bodies.append(members)
    if kind == "vllm":
        first, second = bodies
        assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
        assert "min_tokens" not in first
        assert (second["max_completion_tokens"], second["min_tokens"]) == (60, 3)
    else:
        assert bodies[0] == bodies[1]
        assert bodies[0]["bootstrap_room"] > 8


async def test_a_limit_that_the_endpoint_does_not_know_limits_no_prefill() -> None:
    engines = Engines([])
    bench = PipelineBench(served=in_phases("vllm"), upstream=engines)
    body = b'{"model":"m","prompt":"hello","max_completion_tokens":60}'
    await bench.serve(incoming(body, endpoint=COMPLETIONS))
    assert orjson.loads(engines.calls[0][1].body)["max_tokens"] == 1


async def test_a_prompt_is_computed_for_nobody_where_no_decode_engine_is_ready() -> None:
    engines = Engines([])
    bench = PipelineBench(served=in_phases("vllm"), upstream=engines)
    for worker in range(2):
        fleet.unreachable(bench.served.fleet.pools[0], worker)
    await bench.serve()
    assert bench.record.outcome == "ok"
    assert bench.record.prefill.skipped == "no_decode_worker"
    assert bench.metrics.prefills.values == {("only/prefill", "no_decode_worker"): 1}


async def test_a_prefill_that_was_not_awaited_counts_as_none() -> None:
    engines = Engines(["hang"])
    bench = PipelineBench(served=in_phases("vllm"), upstream=engines)
    request = bench.begin()
    await engines.hanging.wait()
    await bench.leave(request)
    await asyncio.sleep(0)
    assert bench.record.outcome == "disconnected"
    assert not bench.metrics.prefills.values


async def test_a_decode_engine_that_fails_without_a_hand_over_too_is_to_blame() -> None:
    engines = Engines(["ok", "500", "500", "ok"])
    bench = PipelineBench(served=in_phases("vllm"), upstream=engines)
    await bench.serve()
    await asyncio.sleep(0)
    results = [attempt.result for attempt in bench.record.attempts]
    assert results == ["ok", "handover", "server_error", "ok"]
    _, first, again, other = [attempt.worker for attempt in bench.record.attempts]
    assert first == again != other
    (broken,) = [e for e in bench.served.fleet.pools[0].engines if e.failures]
    assert bench.served.fleet.pools[0].workers[broken.ranks[0]] == first
    nothing_is_left(bench, engines)
