from collections import Counter
from typing import Any

import pytest

from gateway.fleet import fleet
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT, QuartzProfile
from gateway.scheduling.scheduler import Job
from tests.unit.gateway.scheduling.scheduled import (
    RATE,
    Proportional,
    job_of,
    pool_of,
    quartz_of,
    submit_all,
    wait_s,
)


def drained(scheduler: Any, sent: list[Job], now_s: float = 100.0) -> list[Job]:
    """The order in which all jobs are sent when each is answered in turn."""
    order = list(sent)
    for job in order:
        order += scheduler.first_token(job, now_s)
    return order


def test_the_score_is_backlog_quantile_and_price_of_uncached_tokens() -> None:
    scheduler = quartz_of(pool_of(1))
    scheduler.submit(job_of(3000), 10.0)
    job = job_of(2000, 10.0, match=((500, 1),))
    scheduler.submit(job, 10.1)
    # W-hat .3 s less the .1 s gone by; twice the mean of 1,500 tokens; eight times that mean.
    assert job.score == pytest.approx(0.2 + 2 * 0.15 + 8 * 0.15)
    assert job.candidates == [(0, job.score)]
    assert job.hit_tokens == 500
    assert job.mean_s == pytest.approx(0.15)


def test_w_hat_falls_with_first_tokens_and_by_the_clock_only_for_the_prefill_in_progress() -> None:
    scheduler = quartz_of(pool_of(1))
    jobs = [job_of(4000) for _ in range(3)]
    submit_all(scheduler, jobs)
    assert wait_s(scheduler, 0, 0.1) == pytest.approx(1.1)
    assert wait_s(scheduler, 0, 50.0) == pytest.approx(0.8)
    scheduler.first_token(jobs[0], 50.0)
    assert wait_s(scheduler, 0, 50.1) == pytest.approx(0.7)
    scheduler.finished(jobs[1], 50.1)  # without a first token
    scheduler.cancel(jobs[2], 50.1)
    scheduler.finished(jobs[2], 50.1)
    assert wait_s(scheduler, 0, 50.1) == 0.0


def test_a_long_prefix_beats_an_idle_worker_and_a_short_one_does_not() -> None:
    for hit, chosen in ((3600, 0), (300, 1)):
        scheduler = quartz_of(pool_of(2))
        scheduler.submit(job_of(4000, preferred=0), 0.0)
        job = job_of(4000, match=((hit, 1),))
        scheduler.submit(job, 0.0)
        assert job.worker == chosen, hit


def test_new_prompts_go_where_less_was_written_lately() -> None:
    scheduler = quartz_of(pool_of(2))
    full = job_of(20_000, preferred=0)
    scheduler.submit(full, 0.0)
    scheduler.first_token(full, 2.0)
    other = job_of(100, 3.0, preferred=1)
    scheduler.submit(other, 3.0)
    scheduler.first_token(other, 3.1)
    new = job_of(3000, 4.0)
    scheduler.submit(new, 4.0)  # both are idle, the first one for longer
    assert new.worker == 1


def test_among_many_workers_only_the_least_loaded_and_the_best_prefix_are_predicted() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(100), predictor)
    job = job_of(4000, match=((3900, 1 << 42), (1000, (1 << 100) - 1)))
    scheduler.submit(job, 0.0)
    assert job.worker == 42
    assert predictor.predicted <= 2


def test_among_many_workers_load_is_spread() -> None:
    scheduler = quartz_of(pool_of(100))
    jobs = [job_of(4000) for _ in range(100)]
    submit_all(scheduler, jobs)
    counts = Counter(job.worker for job in jobs)
    assert len(counts) >= 90
    assert max(counts.values()) == 2


def test_telemetry_is_a_feature_of_predictions_until_it_is_stale() -> None:
    usage: dict[int, float | None] = {0: 0.75}
    scheduler = Quartz(pool_of(1), Proportional(), DEFAULT, kv_usage=lambda w, now_s: usage[w])
    job = job_of(1000)
    scheduler.tick(0.0)
    scheduler.submit(job, 0.0)
    assert job.kv_usage == 0.75
    usage[0] = None
    scheduler.tick(1.0)
    job = job_of(1000)
    scheduler.submit(job, 1.0)
    assert job.kv_usage == 0.0


@pytest.mark.parametrize(("gate_s", "sent"), [(0.0, 2), (0.17, 2), (0.19, 3), (1.0, 5)])
def test_the_gate_sends_one_behind_the_prefill_in_progress_or_what_takes_so_long(
    gate_s: float, sent: int
) -> None:
    scheduler = quartz_of(pool_of(1), gate_s=gate_s)
    jobs = [job_of(900) for _ in range(5)]
    assert len(submit_all(scheduler, jobs)) == sent
    assert scheduler._workers[0].sent_tokens == 900 * sent
    assert list(scheduler.first_token(jobs[0], 1.0)) == jobs[sent : sent + 1]


def test_the_prefill_in_progress_does_not_count_however_long_it_is() -> None:
    scheduler = quartz_of(pool_of(1), gate_s=0.2)
    jobs = [job_of(90_000), job_of(900), job_of(900), job_of(900)]
    assert len(submit_all(scheduler, jobs)) == 3


def test_gateways_that_share_workers_share_the_gate_but_each_sends_one_behind() -> None:
    scheduler = quartz_of(pool_of(1), gate_s=0.2)
    scheduler.replicas = 4
    assert len(submit_all(scheduler, [job_of(300) for _ in range(5)])) == 2


def test_a_worker_whose_first_tokens_nobody_saw_is_sent_all() -> None:
    scheduler = Quartz(pool_of(1), Proportional(), DEFAULT)
    jobs = [job_of(9000, stream=False) for _ in range(5)]
    assert submit_all(scheduler, jobs) == jobs
    scheduler.first_token(jobs[0], 1.0, assumed=True)
    assert len(submit_all(scheduler, [job_of(9000)], 1.0)) == 1
    scheduler.first_token(jobs[1], 2.0)
    assert not submit_all(scheduler, [job_of(9000)], 2.0)


def test_the_smaller_job_goes_first() -> None:
    scheduler = quartz_of(pool_of(1))
    jobs = [job_of(tokens) for tokens in (8000, 7000, 6000, 500, 3000)]
    sent = drained(scheduler, submit_all(scheduler, jobs))
    assert [job.prompt_tokens for job in sent] == [8000, 7000, 500, 3000, 6000]


def test_who_was_served_much_waits_behind_who_was_not() -> None:
    scheduler = quartz_of(pool_of(1))
    first = job_of(30_000, client="heavy")
    scheduler.submit(first, 0.0)
    scheduler.first_token(first, 1.0)
    block = [job_of(5000, 1.0, client="other") for _ in range(2)]
    heavy = job_of(1000, 1.0, client="heavy")
    light = job_of(2000, 1.0, client="light")
    sent = drained(scheduler, submit_all(scheduler, [*block, heavy, light], 1.0))
    assert sent == [*block, light, heavy]


def test_a_larger_share_is_owed_more() -> None:
    scheduler = quartz_of(pool_of(1))
    for client in ("large", "small"):
        job = job_of(20_000, client=client)
        scheduler.submit(job, 0.0)
        scheduler.first_token(job, 0.0)
    block = [job_of(5000, client="other") for _ in range(2)]
    small = job_of(1000, client="small", share=0.5)
    large = job_of(1000, client="large", share=2.0)
    sent = drained(scheduler, submit_all(scheduler, [*block, small, large], 0.0))
    assert sent == [*block, large, small]


def test_what_waits_counts_against_a_client_that_has_more_than_others() -> None:
    scheduler = quartz_of(pool_of(1))
    for client in ("flood", "light"):
        scheduler.shares.served(client, 1000, 0.0)
    jobs = [job_of(5000, client="flood") for _ in range(6)]
    submit_all(scheduler, jobs)
    light = job_of(6000, client="light")
    scheduler.submit(light, 0.0)
    assert drained(scheduler, jobs[:2])[3] is light


def test_a_home_is_kept_and_left_when_it_is_away() -> None:
    pool = pool_of(3)
    scheduler = quartz_of(pool)
    job = job_of(1000, preferred=2, match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert job.worker == 2
    fleet.unreachable(pool, 2)
    job = job_of(1000, preferred=2, match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert job.worker == 0


def test_excluded_workers_are_taken_when_no_other_is_left() -> None:
    pool = pool_of(2)
    scheduler = quartz_of(pool)
    job = job_of(1000, excluded=[0], match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert job.worker == 1
    job = job_of(1000, excluded=[0, 1], match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert job.worker == 0


def test_a_dead_workers_queue_goes_to_another() -> None:
    pool = pool_of(2)
    scheduler = quartz_of(pool)
    jobs = [job_of(5000, preferred=0) for _ in range(5)]
    submit_all(scheduler, jobs)
    assert [job.state for job in jobs] == ["sent", "sent", "waiting", "waiting", "waiting"]
    fleet.unreachable(pool, 0)
    assert list(scheduler.tick(1.0)) == jobs[2:4]
    assert [job.worker for job in jobs] == [0, 0, 1, 1, 1]
    assert wait_s(scheduler, 0, 1.0) == pytest.approx(0.5)


def test_when_no_worker_is_left_who_waits_is_nowhere() -> None:
    pool = pool_of(1)
    scheduler = quartz_of(pool)
    jobs = [job_of(5000), job_of(5000), job_of(5000)]
    submit_all(scheduler, jobs)
    fleet.unreachable(pool, 0)
    assert list(scheduler.tick(1.0)) == [jobs[2]]
    assert jobs[2].state == "nowhere"
    assert sum(scheduler.waiting) == 0
    late = job_of(1000)
    assert not scheduler.submit(late, 1.0)
    assert late.state == "nowhere"


def test_a_worker_that_stalls_keeps_its_backlog_and_is_chosen_no_more() -> None:
    scheduler = quartz_of(pool_of(2))
    stuck = [job_of(5000, preferred=0), job_of(5000, preferred=0)]
    submit_all(scheduler, stuck)
    jobs = [job_of(1000, 60.0 + i) for i in range(20)]
    for job in jobs:
        scheduler.submit(job, job.arrived_s)
        if job.worker == 1:
            scheduler.first_token(job, job.arrived_s + 0.1)
    bound = sum(job.worker == 0 for job in jobs)
    assert bound <= 4
    for job in stuck:
        scheduler.first_token(job, 80.0)
    assert wait_s(scheduler, 0, 90.0) < 0.1 * bound


def test_an_assumed_first_token_opens_the_gate_and_teaches_nothing() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(1), predictor)
    jobs = [job_of(5000, stream=False), job_of(5000), job_of(5000)]
    submit_all(scheduler, jobs)
    assert scheduler.first_token(jobs[0], 1.0, assumed=True) == [jobs[2]]
    assert not predictor.lessons


def test_the_prediction_that_is_observed_is_the_one_at_dispatch() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(1), predictor)
    jobs = [job_of(1000), job_of(2000, 0.0)]
    submit_all(scheduler, jobs)
    assert jobs[1].backlog_tokens == 1000
    assert jobs[1].quantile_s == pytest.approx(2 * 3000 / RATE)
    assert jobs[1].mean_s == pytest.approx(2000 / RATE)
    scheduler.first_token(jobs[1], 0.4)
    assert predictor.lessons[0] == pytest.approx((0, 0.6, 0.4))


def test_malformed_states_are_ignored() -> None:
    scheduler = quartz_of(pool_of(2))
    for served in (3, {"a": "b"}, {"a": 1.0}, {"a": "b"}, {"a": 2.0}):
        states: dict[str, Any] = {"a": {"pending_s": [float("nan"), "x"], "served": served}}
        scheduler.merge({**states, "b": {"pending_s": [1.0]}, "c": {}}, 0.0)
    assert wait_s(scheduler, 0, 0.0) == wait_s(scheduler, 1, 0.0) == 0.0
    assert scheduler.shares.kilotokens("a", 0.0) == pytest.approx(3.0)


def test_without_quantiles_it_goes_by_the_mean() -> None:
    scheduler = quartz_of(pool_of(1), quantile=False)
    job = job_of(1000)
    scheduler.submit(job, 0.0)
    assert job.score == pytest.approx(0.1 + 8 * 0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gate_s": -0.1},
        {"aging": -0.1},
        {"patience_s": -0.1},
        {"writes_tau_s": 0.0},
        {"fairness_tau_s": 0.0},
    ],
)
def test_a_profile_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        QuartzProfile(**wrong)  # type: ignore[arg-type]
