"""QUARTZ in a pool that grows: new workers get their share, whatever their start was like."""

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest

from gateway.fleet import fleet
from gateway.fleet.members import WARM_UP_S
from gateway.fleet.model_runtime import ModelRuntime
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT
from gateway.scheduling.scheduler import Job, Points
from predictor.online import PrefillPredictor
from tests.builders import address, changed, routing, served_model
from tests.unit.gateway.scheduling.test_prefix_index import prompt

START, END = 4, 12
PER_S = 120.0
TOKENS, SHARED = 400, 100
ANSWER_S = 0.25
FIRST_S = 0.03
GROWS_S = 15.0


class Growing:
    """A pool in virtual time: Poisson arrivals of distinct prompts, 4 workers, later 12.

    The first requests of a new worker take longer, as if connections opened and kernels compiled.
    """

    def __init__(self, seed: int, slow_starts: int, slow_s: float) -> None:
        self._random = Random(seed)
        self._slow_starts = slow_starts
        self._slow_s = slow_s
        plain = served_model(table=routing(("only", 8192, None)), workers=(START,))
        predictor = PrefillPredictor(workers=START, slots=8)
        self._index = PrefixIndex(START)
        self._pool = plain.fleet.pools[0]
        self._quartz = Quartz(self._pool, predictor, DEFAULT)
        self._served: ModelRuntime = changed(
            plain,
            scheduler=(self._quartz,),
            predictor=(predictor,),
            prefixes=(self._index,),
        )
        self._events: list[tuple[float, int, str, Job | None]] = []
        self._events_made = 0
        self._prompts = 0
        self.sent: list[tuple[float, int]] = []
        """(time, worker) of each request."""
        self._total: Counter[int] = Counter()
        self.slowness = predictor.slowness

    def run(self, until_s: float) -> None:
        self._at(0.0, "arrive")
        self._at(0.25, "tick")
        self._at(GROWS_S, "grow")
        while self._events[0][0] < until_s:
            now_s, _, kind, job = heappop(self._events)
            if job is None:
                getattr(self, f"_{kind}")(now_s)
            elif kind == "first_token":
                self._sent(self._quartz.first_token(job, now_s), now_s)
                self._at(now_s + ANSWER_S, "finished", job)
            else:
                fleet.finish(self._pool, job.worker, 1, TOKENS)
                self._sent(self._quartz.finished(job, now_s, answered=True), now_s)

    def share_of_new(self, from_s: float, until_s: float) -> float:
        """Of the requests in this time after the growth, those that went to the new workers."""
        found = [worker for at_s, worker in self.sent if from_s <= at_s - GROWS_S < until_s]
        return sum(worker >= START for worker in found) / len(found)

    def least_of_new(self, from_s: float, until_s: float) -> float:
        """The same for the new worker that got least."""
        found = [worker for at_s, worker in self.sent if from_s <= at_s - GROWS_S < until_s]
        return min(found.count(worker) for worker in range(START, END)) / len(found)

    def _at(self, at_s: float, kind: str, job: Job | None = None) -> None:
        self._events_made += 1
        heappush(self._events, (at_s, self._events_made, kind, job))

    def _arrive(self, now_s: float) -> None:
        self._prompts += 1
        points: Points = prompt(self._prompts, TOKENS, shared=SHARED)
        match = self._index.match(points)
        job = Job(points, TOKENS, 10, now_s, match=match, stream=True)
        self._sent(self._quartz.submit(job, now_s), now_s)
        self._at(now_s + self._random.expovariate(PER_S), "arrive")

    def _tick(self, now_s: float) -> None:
        self._sent(self._quartz.tick(now_s), now_s)
        self._at(now_s + 0.25, "tick")

    def _grow(self, now_s: float) -> None:
        for number in range(START, END):
            self._served.fleet.pools[0].join((address(f"new{number}"),), now_s, up=True)

    def _sent(self, jobs: object, now_s: float) -> None:
        assert isinstance(jobs, tuple | list)
        for job in jobs:
            worker = job.worker
            fleet.start(self._pool, worker, 1, TOKENS)
            self._index.insert(job.owner, worker)
            self._total[worker] += 1
            self.sent.append((now_s, worker))
            starts = worker >= START and self._total[worker] <= self._slow_starts
            first_s = (self._slow_s if starts else FIRST_S) * self._random.uniform(0.7, 1.5)
            self._at(now_s + first_s, "first_token", job)


@pytest.mark.parametrize(("slow_starts", "slow_s"), [(0, FIRST_S), (20, 0.3), (40, 1.0)])
@pytest.mark.parametrize("seed", [1, 2])
def test_new_workers_get_their_share_whatever_their_first_requests_took(
    seed: int, slow_starts: int, slow_s: float
) -> None:
    pool = Growing(seed, slow_starts, slow_s)
    pool.run(GROWS_S + 75.0)
    even = (END - START) / END
    assert pool.share_of_new(60.0, 75.0) >= 0.9 * even
    assert pool.least_of_new(60.0, 75.0) >= 0.7 / END


def test_workers_that_join_together_share_the_slow_start_evenly() -> None:
    pool = Growing(1, 0, FIRST_S)
    pool.run(GROWS_S + WARM_UP_S)
    even = (END - START) / END
    assert pool.share_of_new(0.0, 3.0) < 0.1 * even
    assert pool.share_of_new(12.0, 18.0) == pytest.approx(0.5 * even, rel=0.2)
    assert pool.least_of_new(12.0, 18.0) == pytest.approx(0.5 / END, rel=0.3)


def test_a_new_worker_that_stays_slow_is_found_slow() -> None:
    pool = Growing(1, 1_000_000, 4 * FIRST_S)
    pool.run(GROWS_S + 120.0)
    assert all(
        pool.slowness(new) > 2 * pool.slowness(old)
        for new in range(START, END)
        for old in range(START)
    )
