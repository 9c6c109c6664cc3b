"""The pipeline over a managed model: limits, evictions, extensions, the engines' priority."""

import asyncio
import hashlib
from typing import Any

import msgspec
import orjson
import pytest

from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.errors import RateLimited
from gateway.payload.sse import DONE
from gateway.records.endpoint import COMPLETIONS, COUNT_TOKENS
from gateway.records.entitlement import Entitlement
from gateway.records.request import Incoming, Principal
from gateway.store.memory_leases import MemoryLeases
from tests.builders import (
    answer_body,
    changed,
    chat_body,
    chunk,
    error_answer,
    incoming,
    keyring_of,
    served_model,
    usage_chunk,
)
from tests.fakes import (
    HANG,
    FakeClock,
    FakeReply,
    Script,
    stream,
    whole,
)
from tests.pipeline_bench import PipelineBench

OK = whole(200, answer_body())
STREAM = stream(chunk("a"), chunk("b"), chunk(finish="stop"), usage_chunk(10, 3), DONE)
SLOW = stream(chunk("a"), HANG)
BROKEN = stream(chunk("a"))
NOW_UNIX_S = 1_700_000_000.0


class Bench(PipelineBench):
    """A pipeline over the embedded store, one key an entitlement (`key-NAME`)."""

    def __init__(
        self, *entitlements: Entitlement, script: tuple[Script, ...] = (OK,), **served: Any
    ) -> None:
        model = changed(served_model(), kv_bytes_per_token=1, reclaim_s=0.01, **served)
        self.book = TokenPool(Terms(slots=(2, 2), largest_tokens=65_536))
        for terms in entitlements:
            self.book.define(terms)
        clock = FakeClock(NOW_UNIX_S)
        keyring = keyring_of(
            {
                hashlib.sha256(f"key-{e.name}".encode()).digest(): Principal(
                    entitlement=e.name,
                    tenant="t",
                    service_class=e.service_class,
                    model="m",
                    slo_ms=e.slo_ms,
                )
                for e in entitlements
            }
        )
        store = MemoryLeases(
            {"m": model}, clock, {"m": self.book}, wall_clock=clock, jitter=lambda: 0.0
        )
        super().__init__(
            *script, served=model, store=store, clock=clock, wall_clock=clock, keyring=keyring
        )

    async def ask(self, name: str, lease: str = "", **body: Any) -> FakeReply:
        reply = FakeReply()
        await self.serve(request(name, lease, **body), reply)
        return reply

    async def hanging(self, name: str, lease: str = "", **body: Any) -> asyncio.Task[FakeReply]:
        """One that waits for its engine."""
        task = asyncio.create_task(self.ask(name, lease, **body))
        await self.upstream.hanging.wait()
        return task


def request(name: str, lease: str = "", **body: Any) -> Incoming:
    lease = lease or f"lease-{name}"
    return incoming(
        chat_body(max_tokens=64, **body),
        request_id=lease,
        lease_id=lease,
        headers=[(b"authorization", f"Bearer key-{name}".encode())],
    )


def entitled(name: str, service_class: Any = "elastic", **more: Any) -> Entitlement:
    return Entitlement(name=name, model="m", service_class=service_class, **more)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_long_prompt_that_may_fit_is_not_refused_for_ever_by_its_careful_estimate() -> None:
    # 250,000 bytes are 69,445 tokens by the careful ratio, 31,250 at least; the bucket holds the
    # largest window, 65,536.
    bench = Bench(entitled("e", tokens_per_s=100, tokens_per_s_limit=100))
    reply = await bench.ask("e", text="word " * 50_000)
    assert reply.status == 200
    record = bench.record_of("lease-e")
    assert record.admission.reserved_tokens == 65_536
    assert (record.estimate.input_tokens or 0) > 65_536


async def test_too_long_for_everybody_is_told_as_clients_know_it() -> None:
    bench = Bench(entitled("e", tokens_per_s=100, tokens_per_s_limit=100))
    reply = await bench.ask("e", text="word " * 120_000)
    assert reply.refusal is not None
    assert (reply.refusal.status, reply.refusal.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("size", "status"), [(150_000, 200), (300_000, 400)])
async def test_a_batch_is_refused_for_ever_only_by_its_lowest_plausible_count(
    size: int, status: int
) -> None:
    # Two prompts of 150,000 bytes are 83,334 tokens by the careful ratio, 37,500 at least.
    bench = Bench(entitled("e", "guaranteed", baseline=(2, 2), tokens_per_s=100))
    reply = FakeReply()
    body = {"model": "m", "prompt": ["word " * (size // 5)] * 2, "max_tokens": 8}
    key = [(b"authorization", b"Bearer key-e")]
    batch = incoming(orjson.dumps(body), endpoint=COMPLETIONS, headers=key)
    await bench.pipeline.serve(batch, reply)
    refused = reply.refusal.reason if reply.refusal else None
    found = reply.refusal.status if reply.refusal else reply.status
    assert (found, refused) == (status, None if status == 200 else "exceeds_entitlement")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_tells_the_limits_in_force(streamed: bool) -> None:
    terms = entitled("e", limit=5, tokens_per_s=100.0, tokens_per_s_limit=100.0)
    bench = Bench(terms, script=(STREAM if streamed else OK,))
    reply = await bench.ask("e", stream=streamed)
    assert reply.headers[b"x-ratelimit-limit-requests"] == b"5"
    assert reply.headers[b"x-ratelimit-remaining-requests"] == b"4"
    assert reply.headers[b"x-ratelimit-limit-tokens"] == b"65536"
    assert int(reply.headers[b"x-ratelimit-remaining-tokens"]) < 65_536


async def asked(bench: Bench, lease: str, *, ago_s: float, **body: Any) -> None:
    """A request of `e` that was received so long ago."""
    received_s = bench.clock.now_s - ago_s
    late = msgspec.structs.replace(request("e", lease, **body), received_s=received_s)
    await bench.pipeline.serve(late, FakeReply())
    await asyncio.sleep(0)


async def test_streams_are_counted_by_whether_they_kept_the_target() -> None:
    bench = Bench(entitled("e", slo_ms=500), script=(STREAM, STREAM, OK, BROKEN))
    await asked(bench, "soon", ago_s=0.4, stream=True)
    assert bench.metrics.slo_requests.values == {("e", "true"): 1}
    await asked(bench, "late", ago_s=0.6, stream=True)
    assert bench.metrics.slo_requests.values == {("e", "true"): 1, ("e", "false"): 1}
    await asked(bench, "whole", ago_s=0.6)
    assert bench.metrics.slo_requests.values == {("e", "true"): 1, ("e", "false"): 1}
    await asked(bench, "broken", ago_s=0.1, stream=True)
    assert bench.metrics.slo_requests.values == {("e", "true"): 1, ("e", "false"): 2}


async def test_a_refusal_by_admission_is_no_broken_target() -> None:
    bench = Bench(entitled("e", limit=1, slo_ms=500), script=(HANG,))
    first = await bench.hanging("e", "one", stream=True)
    await asked(bench, "two", ago_s=0.1, stream=True)
    assert bench.metrics.slo_requests.values == {("e", "refused"): 1}
    bench.pipeline.evict("one")
    await first
    assert bench.metrics.slo_requests.values == {("e", "refused"): 1, ("e", "false"): 1}


async def test_what_was_used_is_charged_and_recorded() -> None:
    bench = Bench(entitled("e", tokens_per_s=100.0, tokens_per_s_limit=100.0))
    await bench.ask("e")
    account, record = bench.book.accounts["e"], bench.record_of("lease-e")
    assert (account.used, account.debited - account.refunded) == (13, 13)
    assert (record.admission.charge_tokens, record.admission.service_class) == (13, "elastic")
    assert record.admission.reserved_tokens is not None
    assert record.admission.reserved_tokens > 64


async def test_an_evicted_stream_ends_with_an_error_event_and_stops_at_the_engine() -> None:
    bench = Bench(entitled("p", "preemptible"), script=(SLOW,))
    task = await bench.hanging("p", stream=True)
    bench.pipeline.evict("lease-p")
    reply = await task
    assert reply.broken_off is not None
    assert reply.broken_off.reason == "evicted"
    assert bench.upstream.responses[0].aborted
    assert (bench.store.active, bench.book.pools[0].inflight) == (0, 0)
    record = bench.record_of("lease-p")
    assert (record.outcome, record.admission.evicted) == ("evicted", True)
    assert record.admission.charge_tokens is not None, "the prompt and what was emitted are charged"


async def test_an_evicted_request_without_a_byte_is_a_429_and_costs_nothing() -> None:
    bench = Bench(entitled("p", "preemptible"), script=(HANG,))
    task = await bench.hanging("p")
    bench.pipeline.evict("lease-p")
    reply = await task
    assert isinstance(reply.refusal, RateLimited)
    assert reply.refusal.should_retry
    assert bench.book.accounts["p"].used == 0
    assert bench.store.active == 0


async def test_a_client_that_leaves_while_it_is_evicted_is_still_settled_once() -> None:
    bench = Bench(entitled("p", "preemptible"), script=(HANG,))
    task = await bench.hanging("p")
    bench.pipeline.evict("lease-p")
    await bench.leave(task)
    assert bench.store.active == 0
    assert len(bench.sink.records) == 1


async def test_evicting_what_has_ended_does_nothing() -> None:
    bench = Bench(entitled("p", "preemptible"))
    await bench.ask("p")
    bench.pipeline.evict("lease-p")
    assert len(bench.sink.records) == 1


async def test_a_protected_request_that_waits_has_backfill_give_way() -> None:
    bench = Bench(
        entitled("g", "guaranteed", baseline=(2, 0)),
        entitled("p", "preemptible"),
        script=(HANG,),
    )
    bench.book.change(msgspec.structs.replace(bench.book.terms, headroom=0))
    low = []
    for n in range(2):
        low.append(asyncio.create_task(bench.ask("p", f"p{n}")))
        await turns()
        bench.clock.advance(1.0)
    high = asyncio.create_task(bench.ask("g"))
    async with asyncio.timeout(5.0):
        await asyncio.wait(low, return_when=asyncio.FIRST_COMPLETED)
    assert bench.record_of("p1").outcome == "evicted", "the youngest of equals"
    assert not high.done()
    for task in (low[0], high):
        task.cancel()
    await asyncio.gather(*low, high, return_exceptions=True)
    assert bench.store.active == 0


async def test_a_protected_request_that_is_served_in_time_displaces_nobody() -> None:
    bench = Bench(
        entitled("g", "guaranteed", baseline=(2, 0)),
        entitled("p", "preemptible"),
        script=(HANG, SLOW),
    )
    bench.book.change(msgspec.structs.replace(bench.book.terms, slots=(1, 2), headroom=0))
    low = asyncio.create_task(bench.ask("p"))
    await turns()
    high = asyncio.create_task(bench.ask("g", stream=True))
    await asyncio.sleep(0.05)
    assert not low.done()
    for task in (low, high):
        task.cancel()
    await asyncio.gather(low, high, return_exceptions=True)


async def test_a_stream_past_its_reserve_reserves_more_and_is_not_cut() -> None:
    many = [chunk("word") for _ in range(400)]
    bench = Bench(
        entitled("e", tokens_per_s=100.0, tokens_per_s_limit=100.0), script=(stream(*many, HANG),)
    )
    task = await bench.hanging("e", stream=True)
    before = bench.book.leases["lease-e"].estimate_tokens
    bench.pipeline.extend()
    after = bench.book.leases["lease-e"]
    assert after.estimate_tokens >= 400 > before
    assert after.kv_bytes == after.estimate_tokens == bench.book.pools[0].kv_bytes
    bench.pipeline.extend()
    assert bench.book.leases["lease-e"].estimate_tokens == after.estimate_tokens
    await bench.leave(task)
    account = bench.book.accounts["e"]
    assert account.debited - account.refunded == account.used
    assert bench.book.pools[0].kv_bytes == 0


@pytest.mark.parametrize(
    ("engines", "service_class", "priority"),
    [
        ("vllm", "guaranteed", 0),
        ("vllm", "elastic", 1),
        ("vllm", "preemptible", 3),
        ("sglang", "guaranteed", 3),
        ("sglang", "spot", 1),
        ("none", "elastic", None),
    ],
)
async def test_the_engine_is_told_the_priority_of_the_class_and_never_the_clients(
    engines: str, service_class: str, priority: int | None
) -> None:
    bench = Bench(entitled("e", service_class, baseline=(1, 1)), engine_priority=engines)
    await bench.ask("e", priority=-5)
    assert bench.sent.get("priority") == priority


async def test_requests_that_only_count_tokens_carry_no_priority() -> None:
    bench = Bench(entitled("e"), engine_priority="vllm")
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    key = [(b"authorization", b"Bearer key-e")]
    asked = incoming(orjson.dumps(body), endpoint=COUNT_TOKENS, headers=key)
    await bench.pipeline.serve(asked, FakeReply())
    assert "priority" not in bench.sent


async def test_engines_that_refuse_priorities_are_told_of_once_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = error_answer("Got priority 1 but Priority scheduling is not enabled.")
    bench = Bench(entitled("e"), script=(whole(400, refusal),) * 2, engine_priority="vllm")
    with caplog.at_level("WARNING", "sluice.settling"):
        for lease in ("one", "two"):
            reply = await bench.ask("e", lease)
            assert reply.status == 400
    assert caplog.text.count("--scheduling-policy priority") == 1


async def test_an_observed_entitlement_is_served_and_the_refusal_is_counted() -> None:
    bench = Bench(entitled("e", limit=1, observe=True), script=(HANG, OK))
    first = await bench.hanging("e", "one")
    reply = await bench.ask("e", "two")
    assert reply.status == 200
    assert b"x-ratelimit-limit-requests" not in reply.headers
    assert bench.record_of("two").admission.would_deny == "concurrency"
    assert bench.metrics.admission.values[("e", "would_deny", "concurrency")] == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert bench.store.active == 0
