"""Schedulers under arbitrary sequences of calls: nothing is lost, doubled or negative."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fleet import fleet
from gateway.records.attempt import HealthRules
from gateway.scheduling.scheduler import Job
from gateway.scheduling.schedulers import NAMES, make_scheduler
from tests.unit.gateway.scheduling.scheduled import Proportional, job_of, pool_of, wait_s

WORKERS = 3
index = st.integers(0, 10_000)


class Calls(RuleBasedStateMachine):
    """The caller's side: it sends what it is given and tells what became of it."""

    policy = "quartz"

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pool = pool_of(WORKERS)
        self.predictor = Proportional()
        self.scheduler: Any = make_scheduler(self.policy, self.pool, predictor=self.predictor)
        self.jobs: list[Job] = []
        self.sent: list[Job] = []
        self.refused: list[Job] = []

    def take(self, ready: Any) -> None:
        for job in ready:
            if job.state == "nowhere":
                assert not fleet.available(self.pool, self.now_s)
                self.refused.append(job)
                continue
            assert job.state == "sent"
            assert job.worker in fleet.available(self.pool, self.now_s)
            assert job not in self.sent
            fleet.start(self.pool, job.worker, 1, job.kv_tokens)
            self.sent.append(job)

    def some(self, i: int, *states: str) -> Job | None:
        found = [job for job in self.jobs if job.state in states]
        return found[i % len(found)] if found else None

    @rule(
        tokens=st.integers(1, 20_000),
        priority_class=st.integers(0, 2),
        client=st.sampled_from("abc"),
        share=st.floats(0.1, 10),
        hit=st.integers(0, 20_000),
        mask=st.integers(1, 7),
        preferred=st.integers(-1, 2),
        excluded=st.lists(st.integers(0, 2), max_size=2),
    )
    def submit(self, tokens: int, hit: int, mask: int, **more: Any) -> None:
        job = job_of(tokens, self.now_s, match=((hit, mask),), **more)
        self.jobs.append(job)
        ready = self.scheduler.submit(job, self.now_s)
        if job.state == "nowhere":
            assert not ready
            assert not fleet.available(self.pool, self.now_s)
            return
        assert (job in ready) == (job.state == "sent")
        self.take(ready)

    @rule(i=index, cached=st.none() | st.integers(0, 30_000), assumed=st.booleans())
    def first_token(self, i: int, cached: int | None, assumed: bool) -> None:
        if job := self.some(i, "sent"):
            self.take(self.scheduler.first_token(job, self.now_s, cached, assumed=assumed))
            assert not self.scheduler.first_token(job, self.now_s)

    @rule(i=index)
    def finished(self, i: int) -> None:
        if job := self.some(i, "sent", "answering"):
            fleet.finish(self.pool, job.worker, 1, job.kv_tokens)
            self.take(self.scheduler.finished(job, self.now_s))
            assert job.state == "gone"
            assert not self.scheduler.finished(job, self.now_s)

    @rule(i=index)
    def cancel(self, i: int) -> None:
        if job := self.some(i, "waiting"):
            self.take(self.scheduler.cancel(job, self.now_s))
            assert job.state == "gone"
            assert not self.scheduler.cancel(job, self.now_s)

    @rule()
    def tick(self) -> None:
        self.take(self.scheduler.tick(self.now_s))

    @rule(s=st.floats(0.001, 30.0))
    def wait(self, s: float) -> None:
        self.now_s += s

    @rule(worker=st.integers(0, 2), ok=st.booleans())
    def probe(self, worker: int, ok: bool) -> None:
        fleet.probed(self.pool, worker, ok=ok)

    @rule(worker=st.integers(0, 2))
    def eject(self, worker: int) -> None:
        fleet.failed(self.pool, worker, HealthRules(eject_after=1), self.now_s)

    @precondition(lambda self: any(job.state == "waiting" for job in self.jobs))
    @rule()
    def workers_come_back_and_all_goes_through(self) -> None:
        for worker in range(WORKERS):
            fleet.probed(self.pool, worker, ok=True)
        for _ in range(10 * len(self.jobs) + 10):
            self.now_s += 100.0
            self.take(self.scheduler.tick(self.now_s))
            for job in [job for job in self.jobs if job.state == "sent"]:
                self.take(self.scheduler.first_token(job, self.now_s))
        assert not any(job.state in {"waiting", "sent"} for job in self.jobs)

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        waiting = [job for job in self.jobs if job.state == "waiting"]
        assert sum(self.scheduler.waiting) == len(waiting)
        assert list(self.scheduler.waiting) == [
            sum(job.priority_class == priority_class for job in waiting)
            for priority_class in range(3)
        ]
        assert not any(job in self.sent for job in waiting)

    @invariant()
    def no_count_is_negative(self) -> None:
        workers = getattr(self.scheduler, "_workers", None)
        backlog = [worker.sent_tokens for worker in workers] if workers else [0] * WORKERS
        for worker in range(WORKERS):
            owed = [j for j in self.sent if j.state == "sent" and j.worker == worker]
            assert backlog[worker] >= len(owed) if self.scheduler.gates else True
            if not owed:
                assert backlog[worker] == 0
            if self.policy == "quartz":
                assert wait_s(self.scheduler, worker, self.now_s) >= 0


def machine(name: str) -> type[Calls]:
    return type(f"Calls_{name}", (Calls,), {"policy": name})


for _name in NAMES:
    _case = machine(_name).TestCase
    _case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    globals()[f"Test_{_name.replace('-', '_')}"] = _case
del _case
