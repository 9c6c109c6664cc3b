"""The pipeline's stages 5 and 6: what is compressed, for whom, and what follows when it fails."""

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
import orjson
import pytest

from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.errors import RateLimited
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelCompression
from gateway.ports import CompressResult
from gateway.records.decision import DecisionRecord
from gateway.records.entitlement import Entitlement
from gateway.records.request import Incoming, Principal
from gateway.routing.routing import CompressionRules
from gateway.store.memory_leases import MemoryLeases
from tests.builders import (
    SHORT,
    answer_body,
    changed,
    chat_body,
    error_answer,
    incoming,
    keyring_of,
)
from tests.builders import served_model as model
from tests.fakes import (
    FakeClock,
    FakeCompressor,
    FakeReply,
    Script,
    whole,
)
from tests.pipeline_bench import PipelineBench

OK = whole(200, answer_body())
OVERFLOW = whole(
    400,
    error_answer(
        "The decoder prompt (length 4100) is longer than the maximum model length of 4096"
    ),
)
"""As a short request can be answered: the compressed ones here are."""
TEXT = "The river rose in the night and by morning the road was gone. " * 650
CODE = "def f(x):\n    return [y for y in x if y]  # {}\n" * 700
SHORTER = chat_body(TEXT[: len(TEXT) * 3 // 5], max_tokens=100)
DONE = CompressResult(body=SHORTER, text_bytes_before=len(TEXT), text_bytes_after=24_000)
FAILED = CompressResult(reason="protected_too_large")


class Bench(PipelineBench):
    """A pipeline over the embedded store, token pools managed, with a scripted compressor."""

    def __init__(
        self,
        result: CompressResult = DONE,
        *script: Script,
        observe: bool = False,
        compress: bool = True,
        long_slots: int = 8,
        rules: CompressionRules | None = None,
    ) -> None:
        served = model(slots=8)
        routing = replace(served.routing, observe=observe)
        served = changed(
            served,
            routing=routing,
            compression=ModelCompression(rules=rules or CompressionRules(gamma=1.5)),
            kv_bytes_per_token=2,
        )
        self.book = TokenPool(Terms(slots=(8, long_slots), largest_tokens=65_536, headroom=0))
        self.book.define(Entitlement(name="e", model="m", tokens_per_s=1e5))
        clock = FakeClock(1_700_000_000.0)
        self.runner = FakeCompressor(result)
        who = Principal(entitlement="e", tenant="t", model="m", compress=compress)
        super().__init__(
            *(script or (OK,)),
            served=served,
            store=MemoryLeases({"m": served}, clock, {"m": self.book}, wall_clock=clock),
            clock=clock,
            wall_clock=clock,
            keyring=keyring_of({hashlib.sha256(b"k").digest(): who}),
            compressor=self.runner,
        )

    async def run(self, request: Incoming | None = None) -> DecisionRecord:
        self.reply = FakeReply()
        await self.serve(request or asked(), self.reply)
        return self.sink.records[-1]

    @property
    def pool(self) -> str:
        return self.upstream.called[-1].split("-", maxsplit=1)[0]


def asked(text: str = TEXT, *headers: tuple[bytes, bytes], **more: Any) -> Incoming:
    return incoming(
        chat_body(text, max_tokens=100, **more),
        headers=[(b"authorization", b"Bearer k"), *headers],
    )


async def test_a_prompt_in_the_band_is_served_short_and_its_lease_is_lowered() -> None:
    bench = Bench()
    record = await bench.run()
    assert (bench.pool, bench.upstream.calls[-1][1].body) == ("short", SHORTER)
    before, after = bench.reply.headers[b"x-sluice-compressed"].split(b"->")
    assert int(before) > 8192 - 100 >= int(after)
    assert record.compression.compressed == f"{before.decode()}->{after.decode()}"
    assert (record.plan.reason, record.pool) == ("within_gamma", "short")
    assert record.compression.kept_share == pytest.approx(24_000 / len(TEXT))
    (change,) = record.admission.lease_changes
    assert record.admission.reserved_tokens is not None
    assert change[1] == "resize"
    assert change[2] == record.estimate.total_tokens
    assert change[2] <= 8192 < record.admission.reserved_tokens, "taken at first, then lowered"
    assert bench.metrics.compressions.values[("m", "compressed")] == 1
    account = bench.book.accounts["e"]
    assert account.debited - account.refunded == account.used
    assert bench.book.pools[SHORT].kv_bytes == 0


async def test_compressing_and_lowering_the_lease_are_stages_that_are_measured() -> None:
    bench = Bench()
    await bench.run()
    stages = {labels[0] for labels in bench.metrics.overhead.series}
    assert {"compress", "adjust", "bind"} <= stages


async def test_the_budget_leaves_room_for_the_output_and_the_clients_own_limit() -> None:
    bench = Bench()
    await bench.run()
    (task,) = bench.runner.tasks
    assert task.budget_tokens == 8192 - 100
    assert task.fixed_tokens > 0
    assert (task.endpoint, task.category) == ("chat", "prose")


async def test_text_that_the_compressor_does_not_know_stays_in_the_lease() -> None:
    bench = Bench()
    body = asked().body
    hidden = body[:-1] + b',"documents":["' + b"some words " * 300 + b'"]}'
    await bench.run(msgspec.structs.replace(asked(), body=hidden))
    (task,) = bench.runner.tasks
    assert task.fixed_tokens > 3300 / 5


async def test_what_cannot_be_compressed_goes_long_as_it_came_and_says_why() -> None:
    bench = Bench(FAILED)
    record = await bench.run()
    assert bench.pool == "long"
    assert bench.upstream.calls[-1][1].body == asked().body
    assert bench.reply.headers[b"x-sluice-compressed"] == b"none"
    assert record.compression.not_compressed == "protected_too_large"
    assert [pool.inflight for pool in bench.book.pools] == [0, 0]


async def test_what_finds_no_room_in_the_long_pool_either_is_refused_and_refunded() -> None:
    bench = Bench(FAILED, long_slots=1)
    filler = Entitlement(name="x", model="m", service_class="guaranteed", baseline=(0, 1))
    bench.book.define(filler)
    await bench.run(asked("short", request=1))
    bench.book.pools[1].inflight += 2  # others', past the overshoot
    await bench.run()
    assert isinstance(bench.reply.refusal, RateLimited)
    account = bench.book.accounts["e"]
    assert account.debited - account.refunded == account.used == 13


HEADER = CompressionRules(when="header", mark=False)


@pytest.mark.parametrize(
    ("why", "request_", "more"),
    [
        ("refused_by_client", asked(TEXT, (b"x-sluice-compress", b"off")), {}),
        ("refused_by_client", asked(TEXT, (b"x-sluice-compress", b"off")), {"rules": HEADER}),
        ("not_requested", asked(), {"rules": HEADER}),
        ("not_requested", asked(TEXT, (b"x-sluice-compress", b"perhaps")), {"rules": HEADER}),
        ("refused_by_entitlement", asked(), {"compress": False}),
        ("category", asked(CODE), {}),
        ("no_budget", asked(TEXT, max_completion_tokens=8_190), {}),
        # What the API promises.
        ("echo", asked(TEXT, echo=True), {}),
        ("suffix", asked(TEXT, suffix="the end"), {}),
        ("prompt_logprobs", asked(TEXT, prompt_logprobs=0), {}),
        ("prefill", asked(TEXT, continue_final_message=True), {}),
        ("cache_control", asked(TEXT, cache_control={"type": "ephemeral"}), {}),
    ],
)
async def test_who_or_what_may_not_be_compressed_goes_long_as_it_came(
    why: str, request_: Incoming, more: dict[str, Any]
) -> None:
    bench = Bench(**more)
    record = await bench.run(request_)
    assert bench.runner.tasks == []
    assert (bench.pool, record.compression.not_compressed) == ("long", why)
    assert bench.upstream.calls[-1][1].body == request_.body


async def test_short_and_very_long_prompts_are_none_of_the_compressors_business() -> None:
    bench = Bench()
    for text in ("hello", TEXT * 3):
        record = await bench.run(asked(text))
        assert record.compression.not_compressed is None
    assert bench.runner.tasks == []


async def test_a_conversation_that_was_served_whole_is_not_compressed_later() -> None:
    bench = Bench()
    turns = [{"role": "user", "content": TEXT[:1_000]}]

    def turn() -> Incoming:
        body = {"model": "m", "messages": turns, "max_tokens": 100}
        return incoming(orjson.dumps(body), headers=[(b"authorization", b"Bearer k")])

    await bench.run(turn())
    turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": TEXT[:36_000]}]
    record = await bench.run(turn())
    assert (bench.pool, record.compression.not_compressed) == ("long", "cached_conversation")


async def test_an_overflow_all_the_same_sends_the_original_long() -> None:
    bench = Bench(DONE, OVERFLOW, OK)
    record = await bench.run()
    assert [call[1].body for call in bench.upstream.calls] == [SHORTER, asked().body]
    assert (record.rescued, record.pool, record.compression.compressed) == (True, "long", "none")
    assert bench.reply.status == 200
    _, transferred, resized = record.admission.lease_changes
    assert transferred[1:] == ("transfer", 1)
    assert resized[1:] == ("resize", record.estimate.total_tokens), "the original's whole cost"
    assert record.admission.reserved_tokens == record.estimate.total_tokens
    assert (record.admission.reserved_tokens or 0) > 8192
    assert (record.admission.asked_pool, record.admission.alternates) == ("short", ("long",))


async def test_when_all_short_workers_are_gone_the_original_goes_long() -> None:
    bench = Bench()
    for worker in range(2):
        fleet.unreachable(bench.served.fleet.pools[SHORT], worker)
    record = await bench.run()
    assert (bench.pool, bench.upstream.calls[-1][1].body) == ("long", asked().body)
    assert record.compression.not_compressed == "other_pool"


@pytest.mark.parametrize(
    ("result", "why", "would"),
    [(DONE, "observed", 1), (CompressResult(reason="not_retrieval"), "not_retrieval", None)],
)
async def test_observe_mode_compresses_nothing_and_counts_what_it_would(
    result: CompressResult, why: str, would: int | None
) -> None:
    bench = Bench(result, observe=True)
    record = await bench.run()
    assert len(bench.runner.tasks) == 1
    assert bench.upstream.calls[-1][1].body == asked().body
    assert (record.compression.compressed, record.compression.not_compressed) == ("none", why)
    assert bench.metrics.would.values.get(("compress",)) == would
    assert bench.metrics.compressions.values[("m", why)] == 1


@pytest.mark.parametrize(
    ("request_", "rules", "told"),
    [
        (asked(TEXT, (b"x-sluice-compress", b"On")), HEADER, ("any", False)),
        (asked(TEXT, echo=False, suffix=None, continue_final_message=False), None, ("asked", True)),
        (asked(), CompressionRules(when="asked"), ("asked", True)),
        (asked(), CompressionRules(when="any"), ("any", True)),
    ],
)
async def test_the_model_s_choice_of_tasks_reaches_the_compressor(
    request_: Incoming, rules: CompressionRules | None, told: tuple[str, bool]
) -> None:
    bench = Bench(rules=rules)
    record = await bench.run(request_)
    assert record.compression.not_compressed is None
    assert [(task.when, task.mark) for task in bench.runner.tasks] == [told]


async def test_nothing_is_compressed_while_the_larger_pool_has_room() -> None:
    bench = Bench(rules=CompressionRules(only_when_busy=True))
    long = bench.served.fleet.pools[1]
    record = await bench.run()
    assert (bench.pool, record.compression.not_compressed) == ("long", "not_busy")
    long.inflight += len(long.workers) * long.slots_per_worker
    record = await bench.run(asked("Snow fell. " + TEXT))
    assert (bench.pool, record.compression.not_compressed) == ("short", None)
