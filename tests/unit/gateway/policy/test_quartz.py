from typing import Any

import msgspec
import pytest

from gateway.policy import fleet
from gateway.policy.quartz import Quartz
from gateway.policy.quartz_profile import PROFILES, QuartzProfile
from gateway.policy.schedulers import NAMES, make_scheduler
from gateway.policy.scheduling import Job
from tests.unit.gateway.policy.scheduled import (
    RATE,
    Proportional,
    job_of,
    pool_of,
    quartz_of,
    submit_all,
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
    # W-hat .3 s less the .1 s gone by; twice the mean of 1,500 tokens; four times that mean.
    assert job.score == pytest.approx(0.2 + 2 * 0.15 + 4 * 0.15)
    assert job.candidates == [(0, job.score)]
    assert job.hit_tokens == 500
    assert job.mean_s == pytest.approx(0.15)


def test_w_hat_drains_with_the_clock_and_takes_means() -> None:
    scheduler = quartz_of(pool_of(1))
    scheduler.submit(job_of(4000), 0.0)
    assert scheduler.wait_s(0, 0.1) == pytest.approx(0.3)
    assert scheduler.wait_s(0, 5.0) == 0.0


def test_a_long_prefix_beats_an_idle_worker_and_a_short_one_does_not() -> None:
    for hit, chosen in ((3000, 0), (300, 1)):
        scheduler = quartz_of(pool_of(2))
        scheduler.submit(job_of(4000, home=0), 0.0)
        job = job_of(4000, match=((hit, 1),))
        scheduler.submit(job, 0.0)
        assert job.worker == chosen, hit


def test_new_prompts_go_where_less_was_written_lately() -> None:
    scheduler = quartz_of(pool_of(2))
    full = job_of(20_000, home=0)
    scheduler.submit(full, 0.0)
    scheduler.first_token(full, 2.0)
    other = job_of(100, 3.0, home=1)
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
    assert sorted(job.worker for job in jobs) == list(range(100))


def test_a_nearly_full_worker_is_avoided_and_a_silent_one_is_not() -> None:
    usage: dict[int, float | None] = {0: 1.0, 1: None}
    scheduler = Quartz(
        pool_of(2), Proportional(), PROFILES["default"], kv_usage=lambda w, now_s: usage[w]
    )
    scheduler.tick(0.0)
    job = job_of(1000)
    scheduler.submit(job, 0.0)
    assert job.worker == 1


def test_telemetry_that_went_stale_is_not_counted_any_more() -> None:
    usage: dict[int, float | None] = {0: 1.0, 1: 0.9}
    scheduler = Quartz(
        pool_of(2), Proportional(), PROFILES["default"], kv_usage=lambda w, now_s: usage[w]
    )
    scheduler.tick(0.0)
    usage[0] = usage[1] = None
    scheduler.tick(1.0)
    job = job_of(1000)
    assert scheduler.submit(job, 1.0) == (job,)
    assert job.score == pytest.approx(0.2 + 0.4)


def test_the_gate_sends_two_steps_of_prefill_and_no_more() -> None:
    scheduler = quartz_of(pool_of(1), chunk_tokens=1000)
    jobs = [job_of(900) for _ in range(5)]
    assert len(submit_all(scheduler, jobs)) == 3
    assert scheduler.backlog_tokens == [2700]
    assert scheduler.first_token(jobs[0], 1.0) == [jobs[3]]


def test_gateways_that_share_workers_share_the_gate_but_each_sends_one() -> None:
    scheduler = quartz_of(pool_of(1), chunk_tokens=1000)
    scheduler.replicas = 4
    assert len(submit_all(scheduler, [job_of(300) for _ in range(5)])) == 2
    other = quartz_of(pool_of(1), chunk_tokens=1000)
    other.replicas = 1000
    assert len(submit_all(other, [job_of(5000) for _ in range(2)])) == 1


def test_the_smaller_job_goes_first() -> None:
    scheduler = quartz_of(pool_of(1))
    jobs = [job_of(tokens) for tokens in (8000, 6000, 500, 3000)]
    sent = drained(scheduler, submit_all(scheduler, jobs))
    assert [job.prompt_tokens for job in sent] == [8000, 500, 3000, 6000]


def test_a_lower_band_goes_first_whatever_the_size() -> None:
    scheduler = quartz_of(pool_of(1))
    jobs = [job_of(8000), job_of(100, band=2), job_of(500, band=1), job_of(9000, band=0)]
    sent = drained(scheduler, submit_all(scheduler, jobs))
    assert [job.band for job in sent] == [1, 0, 1, 2]


def test_who_was_served_much_waits_behind_who_was_not() -> None:
    scheduler = quartz_of(pool_of(1))
    first = job_of(30_000, client="heavy")
    scheduler.submit(first, 0.0)
    scheduler.first_token(first, 1.0)
    block = job_of(5000, 1.0, client="other")
    heavy = job_of(1000, 1.0, client="heavy")
    light = job_of(2000, 1.0, client="light")
    sent = drained(scheduler, submit_all(scheduler, [block, heavy, light], 1.0))
    assert sent == [block, light, heavy]


def test_a_larger_share_is_owed_more() -> None:
    scheduler = quartz_of(pool_of(1))
    for client in ("large", "small"):
        job = job_of(20_000, client=client)
        scheduler.submit(job, 0.0)
        scheduler.first_token(job, 0.0)
    block = job_of(5000, client="other")
    small = job_of(1000, client="small", share=0.5)
    large = job_of(1000, client="large", share=2.0)
    sent = drained(scheduler, submit_all(scheduler, [block, small, large], 0.0))
    assert sent == [block, large, small]


def test_what_waits_counts_against_a_client_that_has_more_than_others() -> None:
    scheduler = quartz_of(pool_of(1))
    for client in ("flood", "light"):
        scheduler.shares.served(client, 1000, 0.0)
    jobs = [job_of(5000, client="flood") for _ in range(6)]
    submit_all(scheduler, jobs)
    light = job_of(6000, client="light")
    scheduler.submit(light, 0.0)
    assert drained(scheduler, [jobs[0]])[2] is light


def test_a_home_is_kept_and_left_when_it_is_away() -> None:
    pool = pool_of(3)
    scheduler = quartz_of(pool)
    job = job_of(1000, home=2, match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert job.worker == 2
    fleet.unreachable(pool, 2)
    job = job_of(1000, home=2, match=((900, 1),))
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
    jobs = [job_of(5000, match=((4990, 1),)) for _ in range(4)]
    for job in jobs:
        job.hit_tokens = 0
    waiting = [job_of(5000, home=0) for _ in range(3)]
    submit_all(scheduler, waiting)
    assert [job.state for job in waiting] == ["sent", "waiting", "waiting"]
    fleet.unreachable(pool, 0)
    assert list(scheduler.tick(1.0)) == [waiting[1]]
    assert [job.worker for job in waiting] == [0, 1, 1]


def test_when_no_worker_is_left_who_waits_is_nowhere() -> None:
    pool = pool_of(1)
    scheduler = quartz_of(pool)
    jobs = [job_of(5000), job_of(5000)]
    submit_all(scheduler, jobs)
    fleet.unreachable(pool, 0)
    assert list(scheduler.tick(1.0)) == [jobs[1]]
    assert jobs[1].state == "nowhere"
    assert sum(scheduler.waiting) == 0
    late = job_of(1000)
    assert not scheduler.submit(late, 1.0)
    assert late.state == "nowhere"


def test_a_stalled_worker_loses_its_queue_and_comes_back_when_it_answers() -> None:
    scheduler = quartz_of(pool_of(2))
    stuck, behind = job_of(5000, home=0), job_of(5000, home=0)
    submit_all(scheduler, [stuck, behind])
    behind.home = -1
    assert not scheduler.tick(1.9)
    assert not scheduler.tick(7.9)  # 8 x the quantile of 1 s
    assert list(scheduler.tick(8.1)) == [behind]
    assert behind.worker == 1
    job = job_of(1000, 8.1)
    scheduler.submit(job, 8.1)
    assert job.worker == 1
    scheduler.first_token(stuck, 9.0)
    job = job_of(1000, 9.0)
    scheduler.submit(job, 9.0)
    assert job.worker == 0


def test_a_stall_does_not_teach_the_predictor_and_other_answers_do() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(2), predictor)
    stuck, well = job_of(5000, home=0), job_of(5000, home=1)
    submit_all(scheduler, [stuck, well])
    scheduler.first_token(well, 0.7)
    scheduler.tick(60.0)
    scheduler.first_token(stuck, 61.0)
    assert [worker for worker, _, _ in predictor.observed] == [1]
    assert predictor.observed[0][1:] == pytest.approx((1.0, 0.7))


def test_a_worker_that_never_answered_is_tried_with_one_request_at_a_time() -> None:
    scheduler = quartz_of(pool_of(1))
    stuck = job_of(100)
    scheduler.submit(stuck, 0.0)
    scheduler.tick(10.0)
    scheduler.finished(stuck, 11.0)
    scheduler.tick(11.1)
    trial = [job_of(100), job_of(100)]
    assert submit_all(scheduler, trial, 11.2) == trial[:1]
    assert scheduler.first_token(trial[0], 11.5) == [trial[1]]


def test_an_assumed_first_token_opens_the_gate_and_teaches_nothing() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(1), predictor)
    jobs = [job_of(5000, stream=False), job_of(5000)]
    submit_all(scheduler, jobs)
    assert scheduler.first_token(jobs[0], 1.0, assumed=True) == [jobs[1]]
    assert not predictor.observed


def test_the_prediction_that_is_observed_is_the_one_at_dispatch() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(1), predictor)
    jobs = [job_of(1000), job_of(2000, 0.0)]
    submit_all(scheduler, jobs)
    assert jobs[1].backlog_tokens == 1000
    assert jobs[1].quantile_s == pytest.approx(2 * 3000 / RATE)
    assert jobs[1].mean_s == pytest.approx(2000 / RATE)
    scheduler.first_token(jobs[1], 0.4)
    assert predictor.observed[0] == pytest.approx((0, 0.6, 0.4))


def test_the_fallback_is_first_come_first_served_and_goes_on_predicting() -> None:
    predictor = Proportional()
    scheduler = quartz_of(pool_of(1), predictor)
    trigger = job_of(100)
    scheduler.submit(trigger, 0.0)
    predictor.miss_rate = 0.2
    scheduler.first_token(trigger, 0.1)
    assert scheduler.fallback
    jobs = [job_of(tokens, 1.0 + i) for i, tokens in enumerate((8000, 6000, 500))]
    sent = submit_all(scheduler, jobs, 5.0)
    predictor.miss_rate = 0.09
    order = drained(scheduler, sent)
    assert order == jobs
    seen = [scheduler.fallback]
    assert all(job.quantile_s > 0 for job in jobs)
    predictor.miss_rate = 0.07
    last = job_of(10, 6.0)
    scheduler.submit(last, 6.0)
    scheduler.first_token(last, 6.1)
    seen.append(scheduler.fallback)
    assert seen == [True, False]
    assert scheduler.fallbacks_total == 1


def test_the_fallback_prefers_the_longest_prefix_until_that_worker_is_crowded() -> None:
    pool, predictor = pool_of(2), Proportional()
    scheduler = quartz_of(pool, predictor)
    trigger = job_of(100)
    scheduler.submit(trigger, 0.0)
    predictor.miss_rate = 0.5
    scheduler.first_token(trigger, 0.1)
    near = job_of(1000, match=((10, 2),))
    scheduler.submit(near, 1.0)
    assert near.worker == 1
    fleet.start(pool, 1, 60, 0)
    away = job_of(1000, match=((10, 2),))
    scheduler.submit(away, 1.0)
    assert away.worker == 0


def test_what_other_processes_assigned_and_served_is_taken_in() -> None:
    one, other = quartz_of(pool_of(2)), quartz_of(pool_of(2))
    one.merge({"other": other.state()}, 0.0)
    job = job_of(20_000, client="a", home=0)
    other.submit(job, 0.0)
    one.merge({"other": other.state()}, 0.0)
    assert one.wait_s(0, 0.0) == pytest.approx(2.0)
    other.first_token(job, 2.0)
    one.merge({"other": other.state()}, 2.0)
    assert one.wait_s(0, 2.0) == 0.0
    assert one.shares.kilotokens("a", 2.0) == pytest.approx(20.0)


def test_malformed_states_are_ignored() -> None:
    scheduler = quartz_of(pool_of(2))
    for served in (3, {"a": "b"}, {"a": 1.0}, {"a": "b"}, {"a": 2.0}):
        states: dict[str, Any] = {"a": {"pending_s": [float("nan"), "x"], "served": served}}
        scheduler.merge({**states, "b": {"pending_s": [1.0]}, "c": {}}, 0.0)
    assert scheduler.wait_s(0, 0.0) == scheduler.wait_s(1, 0.0) == 0.0
    assert scheduler.shares.kilotokens("a", 0.0) == pytest.approx(3.0)


def test_the_papers_profile_draws_two_candidates() -> None:
    scheduler = Quartz(pool_of(8), Proportional(), PROFILES["paper"], seed=1)
    job = job_of(1000, match=((900, 1),))
    scheduler.submit(job, 0.0)
    assert 1 <= len(job.candidates) <= 2
    assert PROFILES["paper"].aging == 0.02


def test_point_goes_by_the_mean() -> None:
    scheduler = make_scheduler("point", pool_of(1), predictor=Proportional())
    job = job_of(1000)
    scheduler.submit(job, 0.0)
    assert job.score == pytest.approx(0.1 + 4 * 0.1)


def test_every_name_makes_a_scheduler_and_no_other_does() -> None:
    for name in NAMES:
        scheduler = make_scheduler(name, pool_of(2), predictor=Proportional())
        assert len(scheduler.submit(job_of(), 0.0)) == 1, name
    with pytest.raises(ValueError, match="unknown scheduler"):
        make_scheduler("best", pool_of(1))
    with pytest.raises(ValueError, match="needs a predictor"):
        make_scheduler("quartz", pool_of(1))


@pytest.mark.parametrize(
    "wrong",
    [{"gate_steps": 0.0}, {"aging": -0.1}, {"fallback_leave": 0.5}, {"fairness_tau_s": 0.0}],
)
def test_a_profile_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        msgspec.structs.replace(QuartzProfile(), **wrong)
