"""Whatever happens: each job is sent once, cancelled or told that there is nowhere to go."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.records.attempt import HealthRules
from gateway.scheduling import rank_solver as solver
from gateway.scheduling.rank_group import RankGroup, RankRules
from gateway.scheduling.scheduler import Job
from tests.unit.gateway.scheduling.scheduled import job_of

SLOTS, DEPTH, RANKS, MAX_WAITING = 2, 1, 3, 12


class RankGroupMachine(RuleBasedStateMachine):
    """Two engines of three ranks, with clients that come and leave and engines that die."""

    def __init__(self) -> None:
        super().__init__()
        names = tuple(f"e{i // RANKS}#{i % RANKS}" for i in range(2 * RANKS))
        self.pool = PoolState("p", names, SLOTS, [range(RANKS), range(RANKS, 2 * RANKS)])
        rules = RankRules(depth=DEPTH, most_waiting=MAX_WAITING, maxage_steps=20, spare=2)
        self.group = RankGroup(self.pool, solver.assign, rules=rules)
        self.now_s = 0.0
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.sent: set[Job] = set()

    def told(self, jobs: Any) -> None:
        for job in jobs:
            if job.state == "nowhere":
                self.waiting.remove(job)
                continue
            assert job not in self.sent, "sent twice"
            assert job.state == "sent"
            assert job.worker in fleet.available(self.pool, self.now_s)
            self.sent.add(job)
            self.running.append(job)
            if job in self.waiting:
                self.waiting.remove(job)

    @rule(
        prompt=st.integers(1, 4000),
        client=st.sampled_from("abc"),
        priority_class=st.integers(0, 2),
        preferred=st.sampled_from([-1, -1, -1, 0, 5]),
        excluded=st.sampled_from([(), (), (0,), (0, 1, 2), tuple(range(6))]),
        share=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def submit(self, prompt: int, **more: Any) -> None:
        job = job_of(prompt, self.now_s, **more)
        ready = self.group.submit(job, self.now_s)
        if job.state == "waiting":
            self.waiting.append(job)
        elif job.state == "nowhere":
            assert job not in ready
            full = sum(self.group.waiting) >= MAX_WAITING
            assert full or not fleet.available(self.pool, self.now_s)
        self.told(ready)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), emitted=st.integers(0, 500))
    def finish(self, data: st.DataObject, emitted: int) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        job.emitted = lambda: emitted
        self.told(self.group.finished(job, self.now_s))
        assert self.group.finished(job, self.now_s) == ()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(job)
        self.told(self.group.cancel(job, self.now_s))
        assert job.state == "gone"

    @rule(passed_s=st.floats(0.001, 3.0))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.told(self.group.tick(self.now_s))

    @rule(worker=st.integers(0, 5), up=st.booleans())
    def probe(self, worker: int, up: bool) -> None:
        fleet.probed(self.pool, worker, ok=up)

    @rule(worker=st.integers(0, 5))
    def fail(self, worker: int) -> None:
        fleet.failed(self.pool, worker, HealthRules(), self.now_s)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert sum(self.group.waiting) == len(self.waiting) <= MAX_WAITING
        assert all(job.state == "waiting" for job in self.waiting)

    @invariant()
    def no_rank_holds_more_than_its_slots_and_the_depth(self) -> None:
        for index, rank in enumerate(self.group.ranks):
            mine = [job for job in self.running if job.worker == index]
            assert rank.sequences == len(mine) <= SLOTS + DEPTH
            assert rank.tokens(self.now_s) >= 0

    @invariant()
    def nobody_waits_beside_a_free_slot_after_a_tick(self) -> None:
        self.told(self.group.tick(self.now_s))
        known = fleet.available(self.pool, self.now_s)
        free = [w for w in known if self.group.ranks[w].sequences < SLOTS + DEPTH]
        for job in self.waiting:
            # But for those that must not, or must, go to one rank.
            assert not free or job.preferred >= 0 or job.excluded, "a slot stays empty"


RankGroupMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestRankGroup = RankGroupMachine.TestCase
