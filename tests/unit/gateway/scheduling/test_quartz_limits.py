"""Workers whose slots or KV cache are full: no prefix is worth a wait while a slot is free."""

from collections import Counter
from typing import Any

import pytest

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import Sticky
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT
from tests.unit.gateway.scheduling.scheduled import Proportional, job_of, quartz_of

ALL = 0b1111


def pool_of_slots(slots: int, workers: int = 4) -> PoolState:
    return PoolState("pool", tuple(f"w{i}" for i in range(workers)), slots)


def placed(scheduler: Any, pool: PoolState, jobs: int, now_s: float, **more: Any) -> Counter[int]:
    """Workers of so many jobs, each counted as running from then on."""
    workers: Counter[int] = Counter()
    for _ in range(jobs):
        job = job_of(6000, now_s, stream=False, **more)
        for sent in scheduler.submit(job, now_s):
            fleet.start(pool, sent.worker, 1, sent.kv_tokens)
            scheduler.first_token(sent, now_s, assumed=True)
            workers[sent.worker] += 1
    return workers


@pytest.mark.parametrize("make", [Sticky, quartz_of])
def test_a_prompt_that_everybody_shares_spreads_once_its_holder_is_full(make: Any) -> None:
    pool = pool_of_slots(4)
    found = placed(make(pool), pool, 12, 1.0, match=((5900, 0b0001),))
    assert max(found.values()) <= 5
    assert len(found) == 4


def test_a_burst_of_which_all_workers_hold_the_prefix_is_spread_evenly() -> None:
    pool = pool_of_slots(4)
    found = placed(quartz_of(pool), pool, 32, 1.0, match=((5900, ALL),))
    assert set(found.values()) == {8}


def test_a_new_prompt_avoids_full_slots_although_little_was_written_there() -> None:
    pool = pool_of_slots(4, workers=2)
    scheduler = quartz_of(pool)
    other = job_of(50_000, preferred=1)  # a large cache, and idle
    scheduler.submit(other, 0.5)
    scheduler.first_token(other, 0.9)
    for _ in range(4):  # long answers to short prompts
        fleet.start(pool, 0, 1, 9000)
    assert placed(scheduler, pool, 1, 1.0) == {1: 1}


def test_a_worker_whose_kv_cache_is_nearly_full_gets_none_while_another_has_room() -> None:
    pool = pool_of_slots(64, workers=2)
    for worker in (0, 1):
        for _ in range(6):
            fleet.start(pool, worker, 1, 0)
    usage = [0.99, 0.05]
    scheduler = Quartz(pool, Proportional(), DEFAULT, kv_usage=lambda worker, _: usage[worker])
    scheduler.tick(0.0)
    assert placed(scheduler, pool, 20, 1.0, match=((5900, 0b01),)) == {1: 20}


def test_what_other_gateways_run_fills_slots_too() -> None:
    pool = pool_of_slots(4, workers=2)
    scheduler, peer = quartz_of(pool), quartz_of(other := pool_of_slots(4, workers=2))
    for _ in range(4):
        fleet.start(other, 0, 1, 0)
    scheduler.merge({"peer": peer.state()}, 1.0)
    assert placed(scheduler, pool, 1, 1.0, match=((5900, 0b01),)) == {1: 1}


def test_among_full_workers_the_longer_wait_counts_as_long_as_it_is() -> None:
    pool = pool_of_slots(2, workers=2)
    scheduler = quartz_of(pool)
    for worker in (0, 1):
        for _ in range(3):
            fleet.start(pool, worker, 1, 0)
    job = job_of(1000, 1.0, preferred=0)
    scheduler.submit(job, 1.0)
    scheduler.finished(job, 3.0, answered=True)  # 2 s, of which it ran for 1: three were there
    late = job_of(1000, 3.0, match=((1000, 0b11),))
    scheduler.submit(late, 3.0)
    # Two answers of 1 s on two slots, nothing uncached but the last token, three running.
    assert late.score == pytest.approx(1.0 + 0.0002 + 0.06)


def test_whole_answers_correct_a_prefill_that_was_taken_to_be_longer() -> None:
    pool = pool_of_slots(4, workers=1)
    predictor = Proportional()
    scheduler = Quartz(pool, predictor, DEFAULT)
    for took_s in (0.3, 2.0):
        job = job_of(6000, stream=False)  # predicted: .6 s
        scheduler.submit(job, 0.0)
        scheduler.finished(job, took_s, answered=True)
    assert [actual_s for _, _, actual_s in predictor.lessons] == [0.3]
