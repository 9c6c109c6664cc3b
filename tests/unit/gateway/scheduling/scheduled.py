"""Jobs, pools and a predictor of known figures, for tests of schedulers."""

from collections.abc import Sequence
from typing import Any

from gateway.fleet.fleet import PoolState
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import QuartzProfile
from gateway.scheduling.scheduler import Job
from predictor.features import features
from predictor.online import PrefillPredictor

RATE = 10_000.0
"""Tokens per second of every worker."""


class Proportional(PrefillPredictor):
    """Predicts uncached tokens over RATE as mean, twice that as quantile; records what it sees."""

    def __init__(self) -> None:
        super().__init__(workers=0)
        self.share: float | None = None
        self.rates: dict[int, float] = {}
        self.lessons: list[tuple[int, float, float]] = []
        self.predicted = 0

    @property
    def coverage(self) -> float | None:
        return self.share

    def predict_request(
        self, worker: int, *asked: Any
    ) -> tuple[tuple[float, ...], float, float, int]:
        self.predicted += 1
        x = features(*asked)
        mean_s = (x[1] + x[2]) / self.rates.get(worker, RATE)
        return x, mean_s, 2 * mean_s, 0

    def observe(
        self,
        worker: int,
        x: tuple[float, ...],
        mean_s: float,
        quantile_s: float,
        bucket: int,
        actual_s: float,
        client: str = "",
    ) -> None:
        self.lessons.append((worker, quantile_s, actual_s))

    def prefill_tokens_per_s(self, worker: int) -> float:
        return self.rates.get(worker, RATE)


def pool_of(workers: int) -> PoolState:
    return PoolState("pool", tuple(f"w{i}" for i in range(workers)), 64)


def job_of(prompt_tokens: int = 1000, arrived_s: float = 0.0, **more: Any) -> Job:
    more.setdefault("owner", None)
    more.setdefault("output_tokens", 100)
    return Job(prompt_tokens=prompt_tokens, arrived_s=arrived_s, **more)


def quartz_of(pool: PoolState, predictor: Proportional | None = None, **profile: Any) -> Quartz:
    """Of workers whose first tokens were seen; each is sent one request behind another."""
    predictor = predictor or Proportional()
    scheduler = Quartz(pool, predictor, QuartzProfile(**{"gate_s": 0.0, **profile}))
    for worker in range(len(pool.workers)):
        job = job_of(1, preferred=worker)
        scheduler.submit(job, 0.0)
        scheduler.first_token(job, 0.0, cached_tokens=1)
    predictor.lessons.clear()
    predictor.predicted = 0
    return scheduler


def submit_all(scheduler: Any, jobs: Sequence[Job], now_s: float = 0.0) -> list[Job]:
    """All jobs that were sent, in order."""
    return [sent for job in jobs for sent in scheduler.submit(job, now_s)]


def wait_s(scheduler: Quartz, worker: int, now_s: float) -> float:
    """W-hat of a worker."""
    return scheduler._workers[worker].wait_s(now_s, scheduler._share())
