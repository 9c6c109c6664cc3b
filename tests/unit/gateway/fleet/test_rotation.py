"""Engines that sources name and drop: which stay, which drain, and that nothing is left."""

import asyncio
import logging
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from gateway.fleet import fleet, members
from gateway.fleet.members import REUSE_AFTER_S
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.fleet.probes import Prober
from gateway.fleet.rotation import CONFIGURED, Engine, Rotation, RotationLog
from gateway.metrics import Metrics
from gateway.records.attempt import HealthRules, WorkerAddress
from tests.builders import address, changed, routing, served_model
from tests.fakes import FakeClock, FakeEngines
from tests.unit.gateway.fleet.test_probes import Polled

DNS = "dns://engines:8000"


class Bench:
    """A rotation over one pool, with engines that answer."""

    def __init__(self, *configured: str) -> None:
        plain = served_model(table=routing(("only", 8192, None)), workers=(0,))
        self.served: ModelRuntime = changed(
            plain,
            pools=(
                Pool(
                    "only",
                    [address(name, port=n + 1) for n, name in enumerate(configured)],
                    8,
                    may_be_empty=True,
                ),
            ),
        )
        self.clock = FakeClock(1000.0)
        self.engines = FakeEngines()
        self.engines.answer("/health")
        self.engines.answer("/v1/models", '{"data": []}')
        self.engines.answer("/metrics", "vllm:num_requests_running 1\n")
        self.prober = Prober(
            [self.served], interval_s=60.0, timeout_s=1.0, upstream=self.engines, clock=self.clock
        )
        self.metrics = Metrics()
        self.closed: list[WorkerAddress] = []
        self.joined: list[str] = []
        self.rotation = Rotation(
            [self.served],
            self.prober,
            self.metrics,
            self.clock,
            disconnect=self.closed.append,
            on_join=self.joined.append,
        )

    @property
    def pool(self) -> Pool:
        return self.served.fleet.pools[0]

    @property
    def names(self) -> list[str]:
        return [name for _, name in members.present(self.pool)]

    @property
    def available(self) -> set[str]:
        return {self.pool.workers[place] for place in fleet.available(self.pool, 0.0)}

    async def apply(self, *engines: Engine, source: str = DNS) -> None:
        await self.rotation.apply_to("m", "only", source, engines)

    async def until_up(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while self.available != set(names):  # noqa: ASYNC110 - probes set no event
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A rotation; a parameter names the configured engines."""
    made = Bench(*getattr(request, "param", ()))
    yield made
    await made.prober.close()


def configured(*names: str) -> pytest.MarkDecorator:
    """Have the configuration name these engines."""
    return pytest.mark.parametrize("bench", [names], indirect=True)


def engine(name: str, port: int = 50) -> Engine:
    return (address(name, port=port),)


async def test_a_found_engine_is_in_the_rotation_once_a_probe_succeeds(bench: Bench) -> None:
    bench.engines.answer("/health", status=503, port=50)
    await bench.apply(engine("a"), engine("b", port=51))
    assert bench.joined == ["a", "b"]
    await bench.until_up("b")
    bench.engines.answer("/health", port=50)
    assert await bench.prober.probe(bench.served.fleet.pools[0], 0)
    await bench.until_up("a", "b")


@configured("kept")
async def test_a_dropped_engine_serves_to_the_end_and_is_gone_then(bench: Bench) -> None:
    await bench.apply(engine("a"))
    await bench.until_up("kept", "a")
    place = bench.pool.workers.index("a")
    fleet.start(bench.pool, place, 1, 10)
    bench.metrics.ejections.add("only", "a")
    await bench.apply()
    bench.rotation.sweep()
    assert bench.names == ["kept", "a"]
    assert fleet.available(bench.pool, 0.0) == [0]
    fleet.finish(bench.pool, place, 1, 10)
    bench.rotation.sweep()
    assert bench.names == ["kept"]
    assert [gone.id for gone in bench.closed] == ["a"]
    assert bench.metrics.ejections.values == {}
    asked = bench.engines.asked("/health", 50)
    await asyncio.sleep(0.01)
    assert bench.engines.asked("/health", 50) == asked


async def test_an_engine_named_again_while_it_drains_stays_at_its_place(bench: Bench) -> None:
    await bench.apply(engine("a"))
    await bench.until_up("a")
    fleet.start(bench.pool, 0, 1, 10)
    await bench.apply()
    await bench.apply(engine("a"))
    bench.rotation.sweep()
    assert fleet.available(bench.pool, 0.0) == [0]
    assert bench.joined == ["a"]


@configured("a")
async def test_an_engine_leaves_only_when_the_last_source_drops_it(bench: Bench) -> None:
    await bench.apply((bench.served.fleet.pools[0].addresses[0],))
    bench.rotation.remove(bench.served, bench.pool, CONFIGURED, "a")
    assert bench.rotation.sources(bench.pool) == {"a": {DNS}}
    assert fleet.available(bench.pool, 0.0) == [0]
    await bench.apply(source=DNS)
    assert fleet.available(bench.pool, 0.0) == []


async def test_a_changed_engine_is_another_one_and_the_former_drains(bench: Bench) -> None:
    await bench.apply(engine("a", port=50))
    fleet.start(bench.pool, 0, 1, 10)
    await bench.apply(engine("a", port=51))
    await bench.until_up("a")
    assert bench.names == ["a", "a"]
    assert fleet.available(bench.pool, 0.0) == [1]
    assert bench.served.fleet.pools[0].addresses[1].port == 51
    fleet.finish(bench.pool, 0, 1, 10)
    bench.rotation.sweep()
    assert bench.names == ["a"]


@configured("a", "b", "c")
async def test_while_all_engines_are_replaced_requests_find_one(bench: Bench) -> None:
    replacing = asyncio.ensure_future(
        bench.apply(*(engine(name) for name in "xyz"), source=CONFIGURED)
    )
    turns = 0
    while not replacing.done():
        found = fleet.available(bench.pool, 0.0) or fleet.last_resort(bench.pool, refused=True)
        assert found, "a request in between is refused"
        turns += 1
        await asyncio.sleep(0)
    await replacing
    assert turns > 3


async def test_an_engine_of_several_ranks_comes_and_goes_as_one(bench: Bench) -> None:
    ranks = tuple(address(f"a#{rank}", port=50, rank=rank) for rank in range(2))
    await bench.apply(ranks)
    await bench.until_up("a#0", "a#1")
    assert bench.engines.asked("/health", 50) == 1
    await bench.apply()
    bench.rotation.sweep()
    assert bench.names == []
    assert bench.pool.engines == []


async def test_engines_that_come_and_go_all_day_leave_nothing_behind(bench: Bench) -> None:
    for number in range(200):
        await bench.apply(engine(f"w{number}"), engine(f"v{number}"))
        bench.clock.advance(REUSE_AFTER_S / 4)
        bench.rotation.sweep()
    assert len(bench.names) == 2
    assert len(bench.pool.workers) < 20
    assert len(bench.served.fleet.pools[0].addresses) == len(bench.pool.workers)
    assert len(bench.rotation.sources(bench.pool)) == 2
    assert len(bench.prober._background._tasks) == 2


def many(count: int) -> list[Engine]:
    return [engine(f"w{number}", port=number + 1) for number in range(count)]


async def test_engines_that_leave_at_once_let_requests_run_in_between(bench: Bench) -> None:
    await bench.apply(*many(50))
    left = []
    leaving = asyncio.create_task(bench.apply())
    while not leaving.done():
        left.append(sum(e.leaving for e in bench.pool.engine_of))
        await asyncio.sleep(0)
    assert left[-1] == 50
    assert max(after - before for before, after in pairwise(left)) == 1


async def test_a_turn_removes_a_few_engines(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.rotation.VACATE_BATCH", 20)
    await bench.apply(*many(50))
    await bench.apply()
    left: list[int] = []
    for _ in range(3):
        bench.rotation.sweep()
        left.append(len(bench.names))
    assert left == [30, 10, 0]


async def test_an_engine_that_an_admin_removes_while_others_leave_is_no_defect(
    bench: Bench,
) -> None:
    await bench.apply(*many(3), source=CONFIGURED)
    leaving = asyncio.create_task(bench.apply(source=CONFIGURED))
    await asyncio.sleep(0)
    bench.rotation.remove(bench.served, bench.pool, CONFIGURED, "w2")
    bench.rotation.sweep()
    await leaving
    bench.rotation.sweep()
    assert bench.names == []


def test_each_change_is_told_once_with_cause_and_undo(caplog: pytest.LogCaptureFixture) -> None:
    served, log = Polled(2).served, RotationLog()
    pool = served.fleet.pools[0]

    def told(now_s: float) -> list[str]:
        caplog.clear()
        for _ in range(3):
            log.look([served], now_s)
        return caplog.messages

    rules = HealthRules(eject_after=1, eject_s=5.0)
    with caplog.at_level(logging.INFO, "sluice.workers"):
        assert told(0.0) == []
        fleet.unreachable(pool, 0)  # as traffic notes it
        out = "is out of the rotation: "
        probed = "it returns when a probe succeeds"
        assert told(1.0) == [f"worker only-0 of m/only {out}it refuses connections; {probed}"]
        fleet.unreachable(pool, 0, "it refuses connections")  # as a probe does afterwards
        assert told(2.0) == []
        fleet.unfit(pool, 0, "/health answered 503")
        assert told(3.0)[0].endswith(f"/health answered 503; {probed}")
        fleet.probed(pool, 0, ok=True)
        assert told(4.0) == ["worker only-0 of m/only is back in the rotation"]
        fleet.failed(pool, 1, rules, 4.0, "it answered 500")
        tried = "ejected for 5 s; then it is tried again"
        assert told(4.0) == [f"worker only-1 of m/only {out}it answered 500; {tried}"]
        assert told(10.0) == ["worker only-1 of m/only is back in the rotation"]
        fleet.drain(pool, 1, on=True)  # the audit tells it
        assert told(11.0) == []
