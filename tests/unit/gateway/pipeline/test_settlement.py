"""Stage 10: the lease at once; what is learned, counted and recorded for all that end together."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.errors import Unavailable
from gateway.fleet.model_runtime import ModelCompression, ModelRuntime, Prefix
from gateway.metrics import Metrics
from gateway.payload.body import read_body
from gateway.pipeline.forward import Relay
from gateway.pipeline.request_progress import RequestLease, RequestProgress
from gateway.pipeline.settlement import TOGETHER_S, Settler, record_of
from gateway.ports import UpstreamCall
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import (
    AdmissionSection,
    CompressionSection,
    DecisionRecord,
    TimingSection,
)
from gateway.records.estimate import Plan
from gateway.records.lease import Lease, Limits
from gateway.records.limit import Limit
from gateway.records.request import OPEN, Prompt
from gateway.records.usage import token_price
from gateway.routing.routing import CompressionRules
from gateway.scheduling.scheduler import Job
from tests.builders import ask, attempts_of, changed, chat_body, incoming, served_model
from tests.fakes import FakeClock, FakeReply, FakeStore, ListSink

LIMITS = Limits(
    sequences=4,
    sequences_free=3,
    sequences_reset_s=0.0,
    tokens=0,
    tokens_free=0,
    tokens_reset_s=0.0,
)
PLAN = Plan(pool=0, alternates=(1,), reason="fits")
USED = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=40)
MONEY = Limit(id="b", scope="tenant", name="t", unit="money", amount=10**9, window="month")
TOKENS = msgspec.structs.replace(MONEY, unit="tokens")


def settling(
    clock: FakeClock,
    sink: ListSink,
    wall_clock: Callable[[], float] = lambda: 7.0,
    store: FakeStore | None = None,
) -> Settler:
    return Settler(
        store=store or FakeStore(),
        metrics=Metrics(),
        records=sink.append,
        clock=clock,
        wall_clock=wall_clock,
        log_prompts=False,
    )


def lease(**more: Any) -> Lease:
    known = {"cost_tokens": 300, "sequences": 1, "spilled": False, **more}
    return Lease(id="l", model="m", entitlement="e", pool=0, **known)


def admitted(
    served: ModelRuntime | None = None,
    held: Lease | None = None,
    *,
    prompt: Prompt | None = None,
    body: bytes = b"",
    tenant: str = "open",
) -> RequestProgress:
    """A request that holds a lease, is bound, and was answered."""
    served = served or served_model()
    asked = incoming(body or chat_body())
    principal = msgspec.structs.replace(OPEN, tenant=tenant)
    attempts = attempts_of(
        served, asked, plan=PLAN, lease=held or lease(), prompt=prompt, principal=principal
    )
    progress = RequestProgress(asked)
    progress.principal, progress.facts, progress.served = principal, attempts.facts, served
    progress.estimate, progress.planned, progress.plan = attempts.whole, PLAN, PLAN
    progress.attempts = attempts
    attempts.binding = Binding(pool=0, worker=0, score=0.5, candidates=(("w", 0.5),))
    attempts.sent_s = asked.received_s + 0.75
    progress.outcome = Outcome(
        label="ok", status=200, usage=USED, completed=True, finish_reason="stop", ttft_s=0.25
    )
    return progress


def refused(stage: Settler, request_id: str) -> None:
    progress = RequestProgress(incoming(request_id=request_id))
    progress.outcome = Outcome(label="refused", status=401)
    stage.settle(progress)


def ids(sink: ListSink) -> list[str]:
    return [record.request_id for record in sink.records]


# -- when


async def test_who_ends_alone_is_recorded_at_once() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    for name in "abc":
        refused(stage, name)
        clock.now_s += 2 * TOGETHER_S
    assert ids(sink) == ["a", "b", "c"]


async def test_those_that_end_together_are_recorded_in_order_once_all_have_ended() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    for name in "abcd":
        refused(stage, name)
        # The last one ends later, while the others still wait: it does not overtake them.
        clock.now_s += 5 * TOGETHER_S if name == "c" else TOGETHER_S / 4
    assert ids(sink) == ["a"]
    await asyncio.sleep(0)
    assert ids(sink) == ["a", "b", "c", "d"]
    clock.now_s += 1.0
    refused(stage, "e")
    assert ids(sink)[-1] == "e"


async def test_times_are_those_of_the_end_not_of_the_record() -> None:
    clock, sink = FakeClock(), ListSink()
    wall_s = [1_000.0]
    stage = settling(clock, sink, lambda: wall_s[0])
    for _ in range(2):
        stage.settle(admitted(held=lease(limits=LIMITS)))
    wall_s[0], clock.now_s = 2_000.0, clock.now_s + 50.0
    await asyncio.sleep(0)
    first, second = sink.records
    assert first.timing.duration_s == second.timing.duration_s
    assert first.admission.settled_unix_s == second.admission.settled_unix_s == 1_000.0


async def test_a_record_that_fails_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ListSink):
        def append(self, record: msgspec.Struct) -> None:
            if isinstance(record, DecisionRecord) and record.request_id == "bad":
                raise ValueError("cannot be kept")
            super().append(record)

    sink = Broken()
    stage = settling(FakeClock(), sink)
    for name in ("a", "bad", "c"):
        refused(stage, name)
    await asyncio.sleep(0)
    assert ids(sink) == ["a", "c"]
    assert "request bad was settled, not recorded" in caplog.text


async def test_of_one_kind_that_end_together_one_teaches() -> None:
    clock, sink = FakeClock(), ListSink()
    stage = settling(clock, sink)
    served = served_model()
    body = chat_body("a word " * 100)
    for tenant in ("a", "a", "a", "b", "a"):  # the first ends alone
        stage.settle(admitted(served, body=body, tenant=tenant))
    assert served.estimator.observations == 1
    await asyncio.sleep(0)
    assert served.estimator.observations == 3
    assert len(sink.records) == 5
    clock.now_s += 1.0
    stage.settle(admitted(served, body=body, tenant="a"))
    assert served.estimator.observations == 4


# -- the lease


@pytest.mark.parametrize(
    ("served", "cost_nano"),
    [
        (changed(served_model(), price=token_price(0.60, 1.80, None)), 100 * 600 + 20 * 1800),
        (changed(served_model(), by_hour=True), 77_000),
        (served_model(), None),
    ],
)
@pytest.mark.parametrize("limit", [MONEY, TOKENS, None])
def test_a_budget_in_money_counts_the_cost_that_the_record_has(
    served: ModelRuntime, cost_nano: int | None, limit: Limit | None
) -> None:
    store, sink = FakeStore(), ListSink()
    held = lease(asked=() if limit is None else (limit,))
    store.leases["l"] = held
    progress = admitted(served, held)
    assert progress.attempts is not None
    progress.attempts.slot_nano = 77_000.4
    progress.attempts.relay = sent_relay()
    settling(FakeClock(), sink, store=store).settle(progress)
    ((_, settlement),) = store.settlements
    assert settlement.usage == USED
    assert settlement.money == (cost_nano or 0 if limit is MONEY else 0)
    assert sink.records[0].usage.cost_nano == cost_nano


def sent_relay(first_s: float | None = None) -> Relay:
    """An attempt that reached its engine."""
    asked = incoming(chat_body())
    relay = Relay(
        asked,
        read_body(asked.endpoint, asked.body),
        FakeReply(),
        lambda: 0.0,
        UpstreamCall(method="POST", path="/", lines=b"", body=b""),
        b"",
        strip_usage=False,
        strip_running=False,
        bytes_per_token=4.0,
        window_tokens=8192,
    )
    relay.sent, relay.first_s = True, first_s
    return relay


async def test_a_lease_notes_what_the_store_was_asked_for() -> None:
    store = FakeStore()
    taken = await store.admit(ask("l", cost_tokens=100))
    held = RequestLease(store, lambda: 7.0, PLAN, taken)
    await held.transfer(1)
    held.resize(40, 9)
    held.extend(356, 3)
    assert (held.current.pool, held.current.cost_tokens, held.current.kv_bytes) == (1, 40, 9)
    assert (held.taken, held.reserved_tokens) == (taken, 356)
    assert store.sizes == [("l", 40, 9), ("l", 356, 3)]
    assert held.changes == [(7.0, "transfer", 1), (7.0, "resize", 40), (7.0, "resize", 356)]


async def test_a_transfer_that_is_refused_leaves_it_where_it_was() -> None:
    class Full(FakeStore):
        async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
            raise Unavailable("full", reason="full", code="full")

    first = await Full().admit(ask("l"))
    held = RequestLease(Full(), lambda: 7.0, PLAN, first)
    with pytest.raises(Unavailable):
        await held.transfer(1, force=False)
    assert (held.current, held.changes) == (first, [])


# -- the record


def test_the_body_is_recorded_only_where_it_shall_be() -> None:
    progress = admitted(body=chat_body("hello", stream=True))
    found = record_of(progress, prompts=False)
    assert (found.request.body_bytes, found.prompt) == (len(progress.incoming.body), None)
    assert record_of(progress, prompts=True).prompt == progress.incoming.body.decode()


def test_a_prompt_s_digests_are_recorded_under_a_key_unless_it_was_cut() -> None:
    def digests(prompt: Prompt | None, key: bytes) -> int:
        progress = admitted(prompt=prompt)
        assert progress.attempts is not None
        sending = progress.attempts.sending
        progress.attempts.prepare(sending._replace(prefix=Prefix(((500, 1), (900, 2)))))
        record = record_of(progress, prompts=False, digest_key=key)
        return len(record.request.prompt_digests)

    assert (digests(None, b"key"), digests(None, b"")) == (2, 0)
    assert digests(Prompt(body=b"{}", only_pool=0, kept_share=0.5), b"key") == 0


def test_a_retry_has_the_fingerprint_of_its_first_attempt_and_another_body_has_not() -> None:
    def digest(text: str) -> int | None:
        progress = RequestProgress(incoming(chat_body(text)))
        return record_of(progress, prompts=False).request.body_digest

    assert digest("hello") == digest("hello") != digest("jello")
    # Turns of a long conversation begin alike and have different ends.
    assert digest("x" * 200_000 + "a") != digest("x" * 200_000 + "b")


def test_sections_that_a_request_did_not_reach_are_left_out_of_its_line() -> None:
    progress = RequestProgress(incoming())
    progress.outcome = Outcome(label="refused", status=401)
    progress.ended_s = progress.incoming.received_s + 0.5
    line = msgspec.json.decode(msgspec.json.encode(record_of(progress, prompts=False)))
    assert {name for name, value in line.items() if isinstance(value, dict)} == {
        *("request", "admission", "timing"),
    }
    assert line["admission"] == {"lease_id": progress.incoming.lease_id}
    assert line["timing"] == {"queue_ms": 0.0, "duration_s": 0.5}


@pytest.mark.parametrize(
    ("observe", "plan", "reason", "would_route"),
    [
        (False, PLAN, "fits", None),
        (False, Plan(pool=0, alternates=(), reason="within_gamma", compress=True),
         "within_gamma", None),
        (True, Plan(pool=1, alternates=(), reason="observed"), "fits", "short"),
        (True, Plan(pool=0, alternates=(), reason="observed"), "fits", None),
    ],
)  # fmt: skip
def test_a_plan_is_the_boundary_s_and_observe_mode_says_where_it_would_have_gone(
    observe: bool, plan: Plan, reason: str, would_route: str | None
) -> None:
    served = served_model()
    progress = admitted(replace(served, routing=replace(served.routing, observe=observe)))
    assert progress.attempts is not None
    progress.attempts.sending = progress.attempts.sending._replace(plan=plan)
    found = record_of(progress, prompts=False).plan
    assert (found.pool, found.reason, found.would_route) == ("short", reason, would_route)


def test_a_managed_lease_is_told_from_its_admission_to_its_end() -> None:
    progress = admitted(held=lease(limits=LIMITS, kv_bytes=7, issued_unix_s=4.0))
    assert progress.attempts is not None
    held = progress.attempts.lease
    held.current = msgspec.structs.replace(held.current, cost_tokens=120, spilled=True, weight=2.0)
    held.changes.append((5.0, "transfer", 1))
    progress.settled_unix_s, progress.charged = 9.0, USED
    found = record_of(progress, prompts=False).admission
    assert (found.asked_pool, found.alternates) == ("short", ("long",))
    assert (found.reserved_tokens, found.reserved_kv_bytes) == (300, 7), "as it was taken"
    assert (found.admitted_unix_s, found.settled_unix_s) == (4.0, 9.0)
    assert (found.service_class, found.priority, found.spilled) == ("elastic", 2.0, True)
    assert found.lease_changes == ((5.0, "transfer", 1),)
    assert found.charge_tokens is not None


def test_a_lease_without_limits_has_no_figures_of_a_pool() -> None:
    progress = admitted(held=lease(would_deny="rate", contended=True))
    assert record_of(progress, prompts=False).admission == AdmissionSection(
        lease_id=progress.incoming.lease_id, would_deny="rate", contended=True
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(body=b""), CompressionSection()),
        (
            Prompt(body=b"", not_compressed="tools"),
            CompressionSection(not_compressed="tools", when="any"),
        ),
        (
            Prompt(body=b"", compressed="9->4", only_pool=0, kept_share=0.5),
            CompressionSection(compressed="9->4", kept_share=0.5, when="any"),
        ),
    ],
)
def test_compression_is_told_where_it_was_asked_for(
    prompt: Prompt, expected: CompressionSection
) -> None:
    compression = ModelCompression(rules=CompressionRules(when="any"))
    progress = admitted(replace(served_model(), compression=compression), prompt=prompt)
    assert record_of(progress, prompts=False).compression == expected


@pytest.mark.parametrize(("stream", "prefill_s"), [(True, 1.5), (False, None)])
def test_a_scheduler_s_predictions_stand_beside_what_came(
    stream: bool, prefill_s: float | None
) -> None:
    progress = admitted()
    attempts = progress.attempts
    assert attempts is not None
    found = record_of(progress, prompts=False).scheduling
    assert (found.score, found.candidates, found.expected_hit_tokens) == (0.5, (("w", 0.5),), None)
    attempts.job = job = Job(None, 100, 10, 0.0, stream=stream)
    job.sent_s, job.hit_tokens, job.backlog_tokens = 2.0, 30, 8
    job.active, job.mean_s, job.quantile_s = 3, 0.4, 0.0
    attempts.relay = sent_relay(first_s=3.5)
    found = record_of(progress, prompts=False).scheduling
    assert (found.expected_hit_tokens, found.backlog_tokens, found.worker_active) == (30, 8, 3)
    assert (found.predicted_prefill_s, found.predicted_prefill_q_s) == (0.4, None)
    assert (found.prefill_s, found.would_bind, found.would_prefill_s) == (prefill_s, None, None)
    job.expected_s, job.quantile_s, job.would_bind, job.would_s = 0.5, 0.9, 0, 0.2
    found = record_of(progress, prompts=False).scheduling
    assert (found.would_bind, found.would_prefill_s) == ("short-0", 0.2)
    assert (found.predicted_prefill_s, found.predicted_prefill_q_s) == (0.5, 0.9)


def test_time_in_the_queue_is_not_the_gateway_s_own() -> None:
    progress = admitted()
    assert progress.attempts is not None
    progress.attempts.queue_s = progress.attempts.waited_s = 0.5
    progress.attempts.compress_s = 0.125
    progress.ended_s = progress.incoming.received_s + 2.0
    assert record_of(progress, prompts=False).timing == TimingSection(
        queue_ms=500.0, overhead_ms=250.0, compress_ms=125.0, ttft_s=0.25, duration_s=2.0
    )


def test_what_was_not_admitted_counts_its_own_estimate() -> None:
    progress = admitted()
    progress.attempts = None
    found = record_of(progress, prompts=False)
    assert progress.estimate is not None
    assert found.estimate.input_tokens == progress.estimate.input_tokens_total
    assert (found.pool, found.attempts, found.rescued) == (None, (), False)
