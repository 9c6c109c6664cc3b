"""QUARTZ in another policy's shadow: it predicts and advises, and binds nothing."""

from random import Random
from typing import Any

import pytest

from gateway.fleet import fleet
from gateway.scheduling.scheduler import Job
from gateway.scheduling.schedulers import BURST_S, PER_S, SHADOWED, make_scheduler
from predictor.online import PrefillPredictor
from tests.unit.gateway.scheduling.scheduled import RATE, Proportional, job_of, pool_of


def shadowed(name: str, workers: int, predictor: Any = None) -> tuple[Any, Any]:
    pool = pool_of(workers)
    predictor = predictor or Proportional()
    return make_scheduler(name, pool, predictor=predictor, shadow=True), pool


def bound(name: str, *, shadow: bool) -> list[tuple[int, float, int]]:
    """Worker, score and expected hit of 300 jobs, a third of which has ended."""
    pool, random = pool_of(5), Random(3)
    predictor = PrefillPredictor(workers=5)
    scheduler = make_scheduler(name, pool, predictor=predictor, shadow=shadow)
    found, running = [], []
    for number in range(300):
        now_s = 0.01 * number
        match = ((random.randrange(900), 1 << random.randrange(5)),) if number % 2 else ()
        job = job_of(1000, now_s, match=match, kv_tokens=random.randrange(2000))
        assert scheduler.submit(job, now_s) == (job,)
        fleet.start(pool, job.worker, 1, job.kv_tokens)
        running.append(job)
        found.append((job.worker, job.score, job.hit_tokens))
        if number % 3 == 0:
            ended = running.pop(random.randrange(len(running)))
            scheduler.first_token(ended, now_s)
            scheduler.finished(ended, now_s)
            fleet.finish(pool, ended.worker, 1, ended.kv_tokens)
        scheduler.tick(now_s)
    return found


@pytest.mark.parametrize("name", sorted(SHADOWED))
def test_a_shadow_changes_no_binding(name: str) -> None:
    assert bound(name, shadow=True) == bound(name, shadow=False)


def test_it_says_where_quartz_would_bind_and_what_would_be_gained() -> None:
    scheduler, _ = shadowed("round-robin", 2)
    job = job_of(4000, match=((3000, 0b10),))
    scheduler.submit(job, 0.0)
    assert (job.worker, job.hit_tokens, job.would_bind) == (0, 0, 1)
    assert job.expected_s == pytest.approx(4000 / RATE)
    assert job.would_s == pytest.approx(1000 / RATE)


def test_it_learns_from_first_tokens_on_the_worker_that_was_chosen() -> None:
    predictor = Proportional()
    scheduler, _ = shadowed("round-robin", 2, predictor)
    jobs = [job_of(2000) for _ in range(3)]
    for job in jobs:
        scheduler.submit(job, 0.0)
    third = jobs[2]
    assert (third.worker, third.backlog_tokens) == (0, 2000)
    assert third.expected_s == pytest.approx(4000 / RATE)
    scheduler.first_token(third, 0.7)
    assert [(worker, actual_s) for worker, _, actual_s in predictor.lessons] == [(0, 0.7)]
    assert predictor.lessons[0][1] == pytest.approx(8000 / RATE)
    scheduler.first_token(jobs[0], 0.8, assumed=True)
    scheduler.finished(jobs[1], 0.9)
    assert len(predictor.lessons) == 1
    predictor.share = 0.5
    assert scheduler.coverage == 0.5


def test_no_backlog_remains_when_all_have_ended() -> None:
    scheduler, pool = shadowed("least-loaded", 3, PrefillPredictor(workers=3))
    random, running = Random(1), []
    for number in range(100):
        job = job_of(random.randrange(1, 4000), 0.1 * number)
        scheduler.submit(job, 0.1 * number)
        running.append(job)
    random.shuffle(running)
    for job in running:
        if random.random() < 0.6:
            scheduler.first_token(job, 20.0)
        scheduler.finished(job, 21.0)
        scheduler.cancel(job, 21.0)
    last: list[Job] = []
    for _ in range(3):
        last.append(job_of(100, 30.0))
        scheduler.submit(last[-1], 30.0)
        fleet.start(pool, last[-1].worker, 1, 100)
    assert [job.backlog_tokens for job in last] == [0, 0, 0]


def test_a_busy_pool_predicts_some_requests_and_counts_the_backlog_of_all() -> None:
    predictor = Proportional()
    scheduler, _ = shadowed("round-robin", 1, predictor)
    jobs = [job_of(1000, stream=True) for _ in range(3000)]
    for number, job in enumerate(jobs):
        scheduler.submit(job, number / 1000)  # 1,000 a second for 3 s
    advised = [job for job in jobs if job.would_bind >= 0]
    assert len(advised) == pytest.approx(3 * PER_S + BURST_S * PER_S, abs=2)
    assert [job.backlog_tokens for job in jobs] == [1000 * n for n in range(3000)]
    for job in jobs:
        assert job.expected_s > 0  # what an answer that is not streamed waits for
        scheduler.first_token(job, 4.0)
    assert len(predictor.lessons) == len(advised)
    scheduler.submit(last := job_of(1000), 5.0)
    assert last.backlog_tokens == 0
