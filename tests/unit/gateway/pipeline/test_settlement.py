"""Stage 10: the lease at once, the rest for all that end in one turn of the loop together."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gateway.metrics import Metrics
from gateway.pipeline.settlement import TOGETHER_S, Settling
from gateway.pipeline.walk import Walk
from gateway.policy.request.body import read_body
from gateway.records.attempt import Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.lease import Lease
from gateway.records.request import OPEN, Prompt
from tests.builders import chat_body, incoming, served_model
from tests.fakes import FakeClock, FakeStore, ListSink


class Broken(ListSink):
    """A sink that fails on one record."""

    def append(self, record: msgspec.Struct) -> None:
        if isinstance(record, DecisionRecord) and record.request_id == "bad":
            raise ValueError("cannot be kept")
        super().append(record)


def settling(
    clock: FakeClock, sink: ListSink, wall_clock: Callable[[], float] = lambda: 7.0
) -> Settling:
    return Settling(
        store=FakeStore(),
        metrics=Metrics(),
        records=sink,
        clock=clock,
        wall_clock=wall_clock,
        log_prompts=False,
    )


def ended(stage: Settling, request_id: str) -> Walk:
    walk = Walk()
    walk.outcome = Outcome(label="refused", status=401)
    stage.settle(incoming(request_id=request_id), walk)
    return walk


def ids(sink: ListSink) -> list[str]:
    return [record.request_id for record in sink.records]


async def test_who_ends_alone_is_recorded_at_once() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    for name in "abc":
        ended(stage, name)
        clock.now_s += 2 * TOGETHER_S
    assert ids(sink) == ["a", "b", "c"]


async def test_those_that_end_together_are_recorded_in_order_once_all_have_ended() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    for name in "abcd":
        ended(stage, name)
        # The last one ends later, while the others still wait: it does not overtake them.
        clock.now_s += 5 * TOGETHER_S if name == "c" else TOGETHER_S / 4
    assert ids(sink) == ["a"]
    await asyncio.sleep(0)
    assert ids(sink) == ["a", "b", "c", "d"]
    clock.now_s += 1.0
    ended(stage, "e")
    assert ids(sink)[-1] == "e"


async def test_times_are_those_of_the_end_not_of_the_record() -> None:
    clock, sink = FakeClock(), ListSink()
    wall_s = [1_000.0]
    stage = settling(clock, sink, lambda: wall_s[0])
    ended(stage, "a")
    walk = ended(stage, "b")
    assert walk.ended_unix_s == 1_000.0
    wall_s[0], clock.now_s = 2_000.0, clock.now_s + 50.0
    await asyncio.sleep(0)
    first, second = sink.records
    assert (first.timing.duration_s, first.admission.settled_unix_s) == (
        second.timing.duration_s,
        second.admission.settled_unix_s,
    )


async def test_a_record_that_fails_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    clock, sink = FakeClock(), Broken()
    stage = settling(clock, sink)
    for name in ("a", "bad", "c"):
        ended(stage, name)
    await asyncio.sleep(0)
    assert ids(sink) == ["a", "c"]
    assert "request bad was settled, not recorded" in caplog.text


async def test_of_one_kind_that_end_together_one_teaches() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    served = served_model()
    tenants = ("a", "a", "a", "b", "a")  # the first ends alone
    lease = Lease(
        id="l", model="m", entitlement="e", pool=0, spilled=False, cost_tokens=9, sequences=1
    )

    def answered(tenant: str) -> None:
        walk = Walk()
        walk.principal = msgspec.structs.replace(OPEN, tenant=tenant)
        walk.facts = read_body(CHAT, chat_body("a word " * 100))
        walk.served, walk.prompt = served, Prompt(body=b"{}")
        walk.estimate = served.estimator.estimate(CHAT, walk.facts, tenant)
        walk.lease = lease
        usage = Usage(prompt_tokens=200, completion_tokens=9, source="engine")
        walk.outcome = Outcome(label="ok", status=200, usage=usage, completed=True)
        stage.settle(incoming(), walk)

    for tenant in tenants:
        answered(tenant)
    assert served.estimator.observations == 1
    await asyncio.sleep(0)
    assert served.estimator.observations == 3
    assert len(sink.records) == len(tenants)
    clock.now_s += 1.0
    answered("a")
    assert served.estimator.observations == 4


async def test_a_walk_holds_nothing_that_holds_it_once_it_is_recorded() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    walk = Walk()
    walk.task = asyncio.current_task()
    stage.settle(incoming(), walk)
    assert walk.task is None
    assert walk.refusal is None
