"""Stage 10: the lease at once, the rest for all that end in one turn of the loop together."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gateway.metrics import Metrics
from gateway.payload.body import read_body
from gateway.pipeline.request_progress import RequestEnding, RequestLease, RequestProgress, Sending
from gateway.pipeline.settlement import TOGETHER_S, Settler
from gateway.records.attempt import Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.estimate import Plan
from gateway.records.lease import Lease, Limits
from gateway.records.request import OPEN, Prompt
from gateway.scheduling.scheduler import NO_PREFIX
from tests.builders import chat_body, incoming, served_model
from tests.fakes import FakeClock, FakeStore, ListSink

LEASE = Lease(id="l", model="m", entitlement="e", pool=0, spilled=False, cost_tokens=9, sequences=1)
PLAN = Plan(pool=0, alternates=(), reason="fits")


class Broken(ListSink):
    """A sink that fails on one record."""

    def append(self, record: msgspec.Struct) -> None:
        if isinstance(record, DecisionRecord) and record.request_id == "bad":
            raise ValueError("cannot be kept")
        super().append(record)


def settling(
    clock: FakeClock, sink: ListSink, wall_clock: Callable[[], float] = lambda: 7.0
) -> Settler:
    return Settler(
        store=FakeStore(),
        metrics=Metrics(),
        records=sink,
        clock=clock,
        wall_clock=wall_clock,
        log_prompts=False,
    )


def held() -> RequestProgress:
    """A request with a managed lease."""
    progress = RequestProgress()
    progress.served = served = served_model()
    progress.facts = facts = read_body(CHAT, chat_body())
    progress.estimate = served.estimator.estimate(CHAT, facts, "t")
    limits = Limits(
        sequences=1,
        sequences_free=0,
        sequences_reset_s=0.0,
        tokens=0,
        tokens_free=0,
        tokens_reset_s=0.0,
    )
    lease = msgspec.structs.replace(LEASE, limits=limits)
    progress.lease = RequestLease(FakeStore(), lambda: 7.0, PLAN, lease)
    return progress


def ended(stage: Settler, request_id: str, progress: RequestProgress | None = None) -> None:
    refused = RequestEnding(Outcome(label="refused", status=401))
    stage.settle(incoming(request_id=request_id), progress or RequestProgress(), refused)


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
    ended(stage, "a", held())
    ended(stage, "b", held())
    wall_s[0], clock.now_s = 2_000.0, clock.now_s + 50.0
    await asyncio.sleep(0)
    first, second = sink.records
    assert first.timing.duration_s == second.timing.duration_s
    assert first.admission.settled_unix_s == second.admission.settled_unix_s == 1_000.0


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

    def answered(tenant: str) -> None:
        progress = RequestProgress()
        progress.principal = msgspec.structs.replace(OPEN, tenant=tenant)
        progress.facts = facts = read_body(CHAT, chat_body("a word " * 100))
        progress.served = served
        estimate = served.estimator.estimate(CHAT, facts, tenant)
        progress.lease = RequestLease(FakeStore(), lambda: 7.0, PLAN, LEASE)
        progress.sending = Sending(Prompt(body=b"{}"), estimate, PLAN, NO_PREFIX)
        usage = Usage(prompt_tokens=200, completion_tokens=9, source="engine")
        outcome = Outcome(label="ok", status=200, usage=usage, completed=True)
        stage.settle(incoming(), progress, RequestEnding(outcome))

    for tenant in tenants:
        answered(tenant)
    assert served.estimator.observations == 1
    await asyncio.sleep(0)
    assert served.estimator.observations == 3
    assert len(sink.records) == len(tenants)
    clock.now_s += 1.0
    answered("a")
    assert served.estimator.observations == 4
