"""What requests cost: by their tokens, or by the time that they held slots of a worker."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.fleet.fleet import SlotClock
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from gateway.records.decision import DecisionRecord
from gateway.records.usage import token_price
from tests.builders import answer_body, changed, chat_body, error_answer, incoming, served_model
from tests.fakes import HANG, FakeUpstream, Script, whole
from tests.pipeline_bench import PipelineBench

PRICED = changed(served_model(), price=token_price(0.60, 1.80, 0.15))
ANSWER = whole(200, answer_body(prompt=10, completion=3))
E500 = whole(500, error_answer("CUDA error", code=500))


class SlowUpstream(FakeUpstream):
    """Time passes before each answer."""

    answer_after: Callable[[], None] = staticmethod(lambda: None)

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        answer = await super().open(worker, call)
        self.answer_after()
        return answer


class Gateway(PipelineBench):
    def __init__(self, served: ModelRuntime, *script: Script) -> None:
        self.slow = SlowUpstream(list(script))
        super().__init__(served=served, upstream=self.slow)

    async def run(self) -> DecisionRecord:
        await self.serve()
        return self.record

    async def cancelled_after(self, seconds: float) -> DecisionRecord:
        """Serve a request whose client leaves after so long, without an answer."""
        task = self.begin(incoming(chat_body(stream=True)))
        await self.upstream.hanging.wait()
        self.clock.advance(seconds)
        await self.leave(task)
        await asyncio.sleep(0)
        return self.record


def hourly() -> ModelRuntime:
    served = changed(served_model(slots=8), by_hour=True)
    for pool in served.fleet.pools:
        pool.slot_clock = SlotClock(3.6)  # a thousandth a second
    return served


async def test_a_request_costs_its_tokens_at_the_models_price() -> None:
    gateway = Gateway(PRICED, ANSWER)
    record = await gateway.run()
    assert record.usage.cost_nano == 10 * 600 + 3 * 1800
    assert gateway.metrics.cost.values == {("m", record.tenant): 10 * 600 + 3 * 1800}


async def test_what_is_refunded_costs_nothing() -> None:
    gateway = Gateway(PRICED, E500, E500, E500)
    record = await gateway.run()
    assert record.usage.cost_nano is None
    assert not gateway.metrics.cost.values


async def test_a_request_costs_its_slots_share_of_its_worker() -> None:
    gateway = Gateway(hourly(), HANG)
    record = await gateway.cancelled_after(16.0)
    assert record.usage.cost_nano == pytest.approx(16 * 1_000_000 / 8)
    assert record.usage.prompt_tokens is not None


async def test_time_at_a_worker_that_failed_counts_as_well() -> None:
    gateway = Gateway(hourly(), E500, HANG)
    gateway.slow.answer_after = lambda: gateway.clock.advance(4.0)
    record = await gateway.cancelled_after(8.0)
    assert len(record.attempts) == 2
    assert record.usage.cost_nano == pytest.approx((4 + 8) * 1_000_000 / 8)
