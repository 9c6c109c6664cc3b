"""The minutely look at the boundaries, and what it reads of settled requests and engines."""

import logging
from typing import Any

import pytest

from gateway.control.admin import describe_fleet
from gateway.fleet.engine_metrics import EngineSample, record
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.records.attempt import Attempt
from gateway.records.decision import DecisionRecord
from gateway.routing.boundary_control import BoundaryBounds, BoundaryControl
from gateway.routing.boundary_controller import BoundaryController
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.retry import Fault
from tests.builders import ITEM, changed, decision, served_model, short_and_long


class World:
    """A model, its engines' counters, and the chore that watches both."""

    def __init__(self, *, observe: bool = False, planned: Any = ()) -> None:
        self.metrics = Metrics()
        bounds = BoundaryBounds(pool="short", start=8192, least=4096, most=8192)
        control = BoundaryControl([bounds], observe=observe)
        self.served = changed(
            served_model(),
            watch=BoundaryWatch(2, planned, control),
            reads_metrics=True,
        )
        self.preempted = self.finished = 0.0
        self.now_s = 0.0
        self.chore = BoundaryController([self.served], self.metrics, clock=lambda: self.now_s)
        self.report()

    def report(self) -> None:
        told = EngineSample(preemptions_total=self.preempted, finished_total=self.finished)
        record(self.served.fleet.pools[0].view, 1, told, self.now_s)

    def minutes(self, count: int, *, preempted: float) -> None:
        for _ in range(count):
            self.now_s += 60.0
            self.preempted += preempted
            self.finished += 1000.0
            self.report()
            self.chore.look()


def boundary(served: ModelRuntime) -> int | None:
    return served.routing.pools[0].boundary_tokens


def test_preemptions_of_the_engines_lower_the_boundary(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    table = world.served.routing
    with caplog.at_level(logging.WARNING, "sluice.boundary"):
        world.minutes(5, preempted=20.0)
    assert boundary(world.served) == 7372
    assert table.pools[0].boundary_tokens == 8192  # what requests in flight hold
    assert world.served.routing.pools[1] == table.pools[1]
    assert "boundary of m/short: 8192 -> 7372 tokens (2 % preempted" in caplog.text
    assert world.served.watch is not None
    assert world.metrics.would.values == {}


def test_observed_moves_are_counted_and_not_made(caplog: pytest.LogCaptureFixture) -> None:
    world = World(observe=True)
    with caplog.at_level(logging.WARNING, "sluice.boundary"):
        world.minutes(10, preempted=20.0)
    assert boundary(world.served) == 8192
    assert world.metrics.would.values == {("boundary",): 2}
    assert "would move 8192 -> 7372" in caplog.text


@pytest.mark.parametrize(("others", "lowered"), [("evil", True), ("a", False)])
def test_overflows_of_one_tenant_move_the_boundary_only_where_it_is_alone(
    others: str, lowered: bool
) -> None:
    world = World()
    watch = world.served.watch
    assert watch is not None
    for _ in range(30):
        for tenant, results in (("evil", ("overflow", "ok")), (others, ("ok",))):
            attempts = tuple(
                Attempt(pool=pool, worker="w", result=result)
                for pool, result in zip(("short", "long"), results, strict=False)
            )
            record = decision(
                attempts=attempts,
                pool=attempts[-1].pool,
                tenant=tenant,
                prompt_tokens=8192,
                source="engine",
            )
            for _ in range(5):
                watch.settled(record, world.served.routing)
        world.minutes(1, preempted=0.0)
    assert (boundary(world.served) or 0) < 8192 if lowered else boundary(world.served) == 8192


def test_lengths_that_drift_are_logged_once_each_way(caplog: pytest.LogCaptureFixture) -> None:
    world = World(planned=((1000, 0.5), (8000, 1.0)))
    watch = world.served.watch
    assert watch is not None
    assert watch.drift is not None
    with caplog.at_level(logging.WARNING, "sluice.boundary"):
        for tokens, count in ((500, 1000), (5000, 1000), (500, 100)):
            for _ in range(count):
                watch.drift.add(tokens)
            world.minutes(2, preempted=0.0)
    said = [r.getMessage() for r in caplog.records if "lengths" in r.getMessage()]
    assert said == [
        "lengths of m are not those that were planned for: distance 0.50; plan again",
        "lengths of m are as planned again",
    ]


def test_it_looks_once_a_minute() -> None:
    world = World()
    for second in range(601):
        world.now_s = float(second)
        if second % 60 == 0:
            world.preempted += 20.0
            world.finished += 1000.0
            world.report()
        world.chore.tick()
    assert (boundary(world.served) or 0) < 8192


def settled(*results: tuple[str, str], **fields: Any) -> DecisionRecord:
    """A request whose attempts were in these pools with these results."""
    attempts = tuple(Attempt(pool=pool, worker="w", result=result) for pool, result in results)
    given = {"pool": results[-1][0], "source": "engine", "sequences": 1, **fields}
    return decision(attempts=attempts, **given)


def told(*records: DecisionRecord, **routing: Any) -> BoundaryWatch:
    watch = BoundaryWatch(2, ((1000, 0.5), (8000, 1.0)))
    for each in records:
        watch.settled(each, short_and_long(**routing))
    return watch


RESCUED = (("short", "overflow"), ("long", "ok"))
SERVED = (("short", "ok"),)
AT_WINDOW = {"prompt_tokens": 5000, "completion_tokens": 3192}
SAID = b'{"message": "CUDA out of memory. Tried to allocate 2.00 GiB"}'


def failed(body: bytes) -> str:
    return Fault(kind="server_error", message="status 500", status=500, body=body).result


@pytest.mark.parametrize(
    ("record", "routing", "rescues", "overruns"),
    [
        pytest.param(settled(*RESCUED, prompt_tokens=8192), {}, 1, 0, id="rescued"),
        pytest.param(settled(*RESCUED, prompt_tokens=8191), {}, 0, 0, id="would have fitted"),
        pytest.param(settled(*RESCUED, prompt_tokens=8000, cap_tokens=193), {}, 1, 0, id="the cap"),
        pytest.param(
            settled(*RESCUED, prompt_tokens=9000, source="counted"), {}, 0, 0, id="nobody knows"
        ),
        pytest.param(settled(*SERVED, **AT_WINDOW), {}, 0, 1, id="ended at its window"),
        pytest.param(
            settled(*SERVED, **{**AT_WINDOW, "completion_tokens": 3191}), {}, 0, 0, id="within it"
        ),
        pytest.param(settled(*SERVED, cap_tokens=3192, **AT_WINDOW), {}, 0, 0, id="limited"),
        pytest.param(
            settled(*SERVED, **AT_WINDOW), {"default_max_tokens": 4000}, 0, 0, id="by default"
        ),
        pytest.param(settled(("short", failed(SAID)), ("long", "ok")), {}, 0, 1, id="no memory"),
        pytest.param(settled(("short", failed(b"oops"))), {}, 0, 0, id="another failure"),
    ],
)
def test_what_went_wrong_counts_once_where_it_did(
    record: DecisionRecord, routing: dict[str, Any], rescues: int, overruns: int
) -> None:
    short, long = told(record, **routing).pools
    assert (short.requests, short.rescues, short.overruns) == (1, rescues, overruns)
    assert (long.requests, long.rescues, long.overruns) == (len(record.attempts) - 1, 0, 0)


def test_what_goes_wrong_is_told_by_tenant_once() -> None:
    watch = told(settled(*RESCUED, tenant="a", prompt_tokens=8192))
    assert not watch.several[0]
    watch.settled(settled(("short", "ok"), tenant="b", **AT_WINDOW), short_and_long())
    assert watch.several == [True, False]
    pool = PoolState("short", ["w"], 8)
    assert watch.sample(0, pool).wrong == {"a": 1, "b": 1}
    assert watch.sample(0, pool).wrong == {}


def test_lengths_are_those_of_whole_answers_as_they_came() -> None:
    ok = {"prompt_tokens": 400, "completion_tokens": 100}
    watch = told(
        settled(("short", "ok"), **ok),
        settled(("short", "ok"), kept_share=0.5, **ok),
        settled(("short", "disconnected"), outcome="disconnected", **ok),
        settled(("short", "ok"), **{**ok, "source": "counted"}),
        settled(("short", "ok"), **{**ok, "sequences": 4}),
        decision(outcome="refused"),
    )
    assert watch.drift is not None
    assert watch.drift.observations == 2
    assert [pool.requests for pool in watch.pools] == [5, 0]


def test_what_engines_count_between_two_samples_is_summed_over_restarts() -> None:
    watch, pool = BoundaryWatch(2), PoolState("short", ["a", "b"], 8)

    def told(worker: int, preempted: float, finished: float) -> None:
        sample = EngineSample(
            preemptions_total=preempted, finished_total=finished, running=4.0, kv_usage=0.5
        )
        record(pool.view, worker, sample, 0.0)

    told(0, 100.0, 900.0)
    told(1, 5.0, 50.0)
    first = watch.sample(0, pool)
    assert (first.preemptions, first.finished, first.load) == (0.0, 0.0, 0.5)
    told(0, 110.0, 950.0)
    told(0, 3.0, 20.0)
    told(1, 7.0, 60.0)
    second = watch.sample(0, pool)
    assert (second.preemptions, second.finished) == (15.0, 80.0)


def test_while_no_engine_tells_its_counters_nothing_falls_or_rises() -> None:
    state, watch = PoolState("short", ["w"], 8), BoundaryWatch(2)
    told = EngineSample(preemptions_total=0.0, finished_total=0.0)
    record(state.view, 0, told, 0.0)
    watch.sample(0, state)
    record(state.view, 0, EngineSample(preemptions_total=50.0, finished_total=1000.0), 60.0)
    assert watch.sample(0, state).finished == 1000.0
    state.view.forget(0)  # the pool is empty for a while
    assert (watch.sample(0, state).finished, state.view.finished) == (0.0, 1000.0)
    record(state.view, 0, told, 180.0)
    again = watch.sample(0, state)
    assert (again.preemptions, again.finished) == (0.0, 0.0)


def test_a_pool_that_idles_gets_the_requests_of_one_that_queues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(observe=True)
    short, long = world.served.fleet.pools
    for pool, waiting in ((short, 0.0), (long, 20.0)):
        told = EngineSample(preemptions_total=0.0, finished_total=0.0, running=1.0, waiting=waiting)
        record(pool.view, 0, told, 0.0)
    with caplog.at_level(logging.WARNING, "sluice.boundary"):
        for _ in range(5):
            world.now_s += 60.0
            world.chore.look()
    assert boundary(world.served) == 8192  # its window is the most that it may be
    assert world.served.watch is not None
    assert world.served.watch.moves == {}
    told = EngineSample(preemptions_total=0.0, finished_total=0.0, running=1.0, waiting=0.0)
    record(long.view, 0, told, 0.0)
    short.inflight += 10  # queued in the gateway, at no worker yet
    for _ in range(5):
        world.now_s += 60.0
        world.chore.look()
    _, move = world.served.watch.moves["short"]
    assert (move.before, move.after) == (8192, 7372)
    assert move.reason.startswith("the smaller pool queues")
    shown = [
        pool["boundary_move"] for pool in describe_fleet(world.served, (), world.now_s)["pools"]
    ]
    proposed = {"pool": "short", "before": 8192, "after": 7372, "reason": move.reason}
    assert shown == [{**proposed, "made": False, "ago_s": 0}, None]


@pytest.mark.parametrize(
    ("record", "away"),
    [
        (decision(outcome="refused", reason="priority", plan={"pool": "long"}), (0, 1)),
        (decision(outcome="refused", reason="tokens", plan={"pool": "long"}), (0, 0)),
        (decision(asked_pool="short", spilled=True, plan={"pool": "long"}), (1, 0)),
        (decision(outcome="refused", reason="priority", plan={"pool": "long"}, batch=ITEM), (0, 0)),
    ],
    ids=["no slot", "its own limit", "spilled", "nothing left over"],
)
def test_who_finds_no_place_counts_where_it_belongs(
    record: DecisionRecord, away: tuple[int, int]
) -> None:
    assert tuple(pool.turned_away for pool in told(record).pools) == away


def test_who_is_prefilled_elsewhere_does_not_wait() -> None:
    pool, prefill = PoolState("short", ["w"], 10), PoolState("short/prefill", ["p"], 10)
    pool.inflight, pool.total_active = 8, 3
    watch = BoundaryWatch(2)
    assert watch.sample(0, pool).waiting == 0.5
    pool.prefill, prefill.total_active = prefill, 4
    assert watch.sample(0, pool).waiting == 0.1
