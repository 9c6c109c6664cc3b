"""Workers that join and leave: places stay true, new ones start slowly, nothing leaks."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fleet import fleet, members
from gateway.fleet.fleet import Pending, PoolState
from gateway.fleet.members import REUSE_AFTER_S, WARM_UP_S
from gateway.records.attempt import HealthRules
from gateway.scheduling.baselines import LeastLoaded
from gateway.scheduling.scheduler import Job


def bound(pool: PoolState, now_s: float) -> int:
    """The worker that a request is bound to; -1 for none."""
    job = Job(None, 10, 10, now_s)
    LeastLoaded(pool).submit(job, now_s)
    return job.worker


def pool_of(*workers: str) -> PoolState:
    """A pool whose workers are up."""
    return PoolState("p", workers, 4)


def test_a_leaving_worker_gets_nothing_new_and_is_no_last_resort() -> None:
    pool = pool_of("a", "b")
    members.leave(pool, 1)
    assert fleet.available(pool, 0.0) == [0]
    fleet.unreachable(pool, 0)
    assert fleet.last_resort(pool, refused=True) == [0]


def test_a_worker_is_finished_only_without_sequences_and_attempts() -> None:
    pool = pool_of("a", "b")
    pending = Pending(None, 0.0, 1.0, lambda: 0)
    fleet.start(pool, 1, 1, 10)
    pool.engine_of[1].progress.begin(pending)
    members.leave(pool, 1)
    assert not members.finished(pool, 1)
    fleet.finish(pool, 1, 1, 10)
    assert not members.finished(pool, 1)
    pool.engine_of[1].progress.end(pending, answered=True)
    assert members.finished(pool, 1)


def test_a_vacant_place_keeps_its_name_until_it_is_used_again() -> None:
    pool = pool_of("a", "b")
    members.leave(pool, 1)
    members.vacate(pool, 1, 100.0)
    assert members.join(pool, ["c"], 100.0 + REUSE_AFTER_S - 1) == (2,)
    assert pool.workers == ["a", "b", "c"]
    assert members.join(pool, ["d"], 100.0 + REUSE_AFTER_S) == (1,)
    assert pool.workers == ["a", "d", "c"]
    assert [name for _, name in members.present(pool)] == ["a", "d", "c"]


def test_a_place_used_again_remembers_nothing_of_its_former_worker() -> None:
    pool = pool_of("a", "b")
    for _ in range(3):
        fleet.failed(pool, 1, RULES, 0.0)
    fleet.unreachable(pool, 1)
    fleet.drain(pool, 1, on=True)
    members.leave(pool, 1)
    members.vacate(pool, 1, 0.0)
    (place,) = members.join(pool, ["c"], REUSE_AFTER_S, up=True)
    assert place == 1
    assert fleet.available(pool, REUSE_AFTER_S) == [0, 1]
    engine = pool.engine_of[1]
    assert (engine.failures, engine.ejections, engine.refused) == (0, 0, False)


RULES = HealthRules(eject_after=3, eject_s=5.0, max_eject_s=60.0)


def test_the_share_of_a_new_worker_rises_to_an_even_share() -> None:
    pool = pool_of("a", "b", "c", "d")
    (new,) = members.join(pool, ["new"], 0.0, up=True)
    shares = []
    running: list[int] = []
    per_s = 400
    for second in range(int(WARM_UP_S) + 10):
        chosen: Counter[int] = Counter()
        for n in range(per_s):
            worker = bound(pool, second + n / per_s)
            chosen[worker] += 1
            fleet.start(pool, worker, 1, 100)
            running.append(worker)
            if len(running) > 40:
                fleet.finish(pool, running.pop(0), 1, 100)
        shares.append(chosen[new] / per_s)
    assert shares[0] < 0.02
    assert sum(shares[10:20]) / 10 == pytest.approx(0.5 / 5, abs=0.02)
    assert sum(shares[25:30]) / 5 == pytest.approx(0.9 / 5, abs=0.03)
    assert sum(shares[31:]) / len(shares[31:]) == pytest.approx(1 / 5, abs=0.03)
    assert not pool.warming


def test_new_workers_share_at_once_where_no_other_serves() -> None:
    pool = PoolState("p", (), 4, may_be_empty=True)
    for name in ("a", "b"):
        members.join(pool, [name], 0.0)
    for place in range(2):
        fleet.probed(pool, place, ok=True)
    assert not pool.warming
    assert {bound(pool, 0.0) for _ in range(4)} == {0, 1}


def test_a_request_goes_to_new_workers_when_only_they_are_left() -> None:
    pool = pool_of("a")
    members.join(pool, ["b"], 0.0, up=True)
    fleet.unreachable(pool, 0)
    assert bound(pool, 1.0) == 1


class Membership(RuleBasedStateMachine):
    """Engines come and go under load; a model of names checks what the arrays say."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolState("p", (), 4, may_be_empty=True)
        self.now_s = 0.0
        self.names = 0
        self.engines: dict[tuple[int, ...], list[str]] = {}
        self.leaving: set[tuple[int, ...]] = set()
        self.running: list[tuple[int, str, Pending]] = []

    @rule(ranks=st.integers(1, 3), up=st.booleans())
    def join(self, ranks: int, up: bool) -> None:
        ids = [f"w{self.names}#{rank}" for rank in range(ranks)]
        self.names += 1
        places = members.join(self.pool, ids, self.now_s, up=up)
        assert len(set(places)) == ranks
        assert not any(places_ for places_ in self.engines if set(places_) & set(places))
        self.engines[places] = ids

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        places = data.draw(st.sampled_from(sorted(self.engines)))
        members.leave(self.pool, data.draw(st.sampled_from(places)))
        self.leaving.add(places)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def stay(self, data: st.DataObject) -> None:
        places = data.draw(st.sampled_from(sorted(self.leaving)))
        members.stay(self.pool, places[0])
        self.leaving.discard(places)

    @rule()
    def sweep(self) -> None:
        for places in sorted(self.leaving):
            busy = any(worker in places for worker, _, _ in self.running)
            assert members.finished(self.pool, places[0]) == (not busy)
            if not busy:
                members.vacate(self.pool, places[0], self.now_s)
                del self.engines[places]
                self.leaving.discard(places)

    @rule(seconds=st.floats(0.0, 2 * REUSE_AFTER_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(ok=st.booleans(), data=st.data())
    def probe(self, ok: bool, data: st.DataObject) -> None:
        if self.engines:
            fleet.probed(self.pool, data.draw(st.sampled_from(sorted(self.engines)))[0], ok=ok)

    @rule()
    def start(self) -> None:
        worker = bound(self.pool, self.now_s)
        if worker < 0:
            return
        pending = Pending(None, self.now_s, 1.0, lambda: 0)
        fleet.start(self.pool, worker, 1, 7)
        self.pool.engine_of[worker].progress.begin(pending)
        assert not self.pool.engine_of[worker].leaving
        self.running.append((worker, self.pool.workers[worker], pending))

    @precondition(lambda self: self.running)
    @rule()
    def end(self) -> None:
        worker, name, pending = self.running.pop(0)
        assert self.pool.workers[worker] == name
        fleet.finish(self.pool, worker, 1, 7)
        self.pool.engine_of[worker].progress.end(pending, answered=True)

    @invariant()
    def places_are_true(self) -> None:
        pool = self.pool
        expected = {
            place: name
            for places, ids in self.engines.items()
            for place, name in zip(places, ids, strict=True)
        }
        assert dict(members.present(pool)) == expected
        assert sorted(e.ranks for e in pool.engines) == sorted(self.engines)
        assert sum(pool.active) == pool.total_active == len(self.running)
        assert sum(pool.tokens) == pool.total_tokens == 7 * len(self.running)
        out = {place for places in self.leaving for place in places}
        assert pool.alive == [w for w in sorted(expected) if pool.engine_of[w].up and w not in out]
        assert set(pool.warming) == set(pool.warm_credit) <= set(expected) - out

    @invariant()
    def a_running_request_still_names_its_worker(self) -> None:
        for worker, name, _ in self.running:
            assert self.pool.workers[worker] == name


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
