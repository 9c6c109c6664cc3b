"""The minutely look at the boundaries."""

import logging
from typing import Any

import pytest

from gateway.fleet.engine_telemetry import EngineSample, TelemetryView, record
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.records.attempt import Attempt
from gateway.routing.boundary_control import BoundaryBounds, BoundaryControl
from gateway.routing.boundary_controller import BoundaryController
from gateway.routing.boundary_watch import BoundaryWatch
from tests.builders import changed, decision, served_model


class World:
    """A model, its engines' counters, and the chore that watches both."""

    def __init__(self, *, observe: bool = False, planned: Any = ()) -> None:
        self.metrics = Metrics()
        bounds = BoundaryBounds(pool="short", start=8192, least=4096, most=8192)
        control = BoundaryControl([bounds], observe=observe)
        self.served = changed(
            served_model(),
            watch=BoundaryWatch(2, planned, control),
            telemetry=(TelemetryView(2), TelemetryView(2)),
        )
        self.preempted = self.finished = 0.0
        self.now_s = 0.0
        self.chore = BoundaryController([self.served], self.metrics, clock=lambda: self.now_s)
        self.report()

    def report(self) -> None:
        told = EngineSample(preemptions_total=self.preempted, finished_total=self.finished)
        record(self.served.fleet.telemetry[0], 1, told, self.now_s)

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


def test_rescues_of_this_gateway_count_too() -> None:
    world = World()
    watch = world.served.watch
    assert watch is not None
    for _ in range(5):
        watch.requests[0] += 100
        watch.rescues[0] += 5
        world.minutes(1, preempted=0.0)
    assert boundary(world.served) == 7372


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


def test_a_model_without_a_watch_is_left_alone() -> None:
    plain = served_model()
    chore = BoundaryController([plain], Metrics(), clock=lambda: 0.0)
    assert chore.look() == []


async def test_it_starts_and_ends() -> None:
    world = World()
    await world.chore.start()
    await world.chore.close()
    assert boundary(world.served) == 8192
