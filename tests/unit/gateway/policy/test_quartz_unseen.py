"""Answers that are not streamed: what is learned of prefills that nobody sees."""

from heapq import heappop, heappush
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.quartz import Quartz
from gateway.policy.quartz_profile import QuartzProfile
from gateway.policy.quartz_unseen import UnseenPrefills
from gateway.policy.scheduling import Job
from predictor.online import PrefillPredictor
from tests.unit.gateway.policy.scheduled import Proportional, job_of, pool_of, quartz_of, submit_all

PROMPT = 500


def test_what_engines_took_stands_beside_what_was_predicted() -> None:
    unseen = UnseenPrefills(2)
    assert unseen.read(1, 100, 7.0, 1.0) is None  # what came before is nobody's
    unseen.add(1, 0.4)
    unseen.add(1, 0.6)
    assert unseen.read(1, 100, 7.0, 2.0) is None  # the same reading, or an idle engine's
    assert unseen.read(1, 110, 8.0, 3.0) == pytest.approx((0.5, 0.1, 0.0, 2))
    unseen.add(1, 0.5)
    # .4 s longer than 2 s ago.
    assert unseen.read(1, 112, 9.0, 5.0) == pytest.approx((0.5, 0.5, 0.2, 1))
    unseen.add(0, 9.0)
    assert unseen.read(1, 120, 9.0, 6.0) is None  # nothing was sent since


def test_streams_teach_by_themselves() -> None:
    unseen = UnseenPrefills(1)
    unseen.read(0, 0, 0.0, 1.0)
    unseen.add(0, 0.5)
    unseen.saw(0)
    assert unseen.read(0, 2, 1.0, 2.0) is None
    unseen.add(0, 0.5)
    assert unseen.read(0, 4, 2.0, 3.0) is not None


def test_an_engine_that_began_anew_says_nothing_at_first() -> None:
    unseen = UnseenPrefills(1)
    unseen.read(0, 1000, 50.0, 1.0)
    unseen.add(0, 0.5)
    assert unseen.read(0, 5, 0.5, 2.0) is None
    unseen.add(0, 0.5)
    assert unseen.read(0, 6, 0.75, 3.0) == (0.5, 0.25, 0.0, 1)


counters = st.floats(0, 1e12)


@given(
    st.lists(st.one_of(st.tuples(counters, counters, counters), st.floats(1e-4, 1e5), st.none()))
)
def test_what_is_told_is_never_nonsense(
    steps: list[tuple[float, float, float] | float | None],
) -> None:
    unseen = UnseenPrefills(1)
    for step in steps:
        if step is None:
            unseen.saw(0)
        elif isinstance(step, tuple):
            told = unseen.read(0, *step)
            assert told is None or (told.predicted_s > 0 <= told.actual_s and told.requests > 0)
            assert told is None or isfinite(told.growth)
        else:
            unseen.add(0, step)


Page = tuple[float, float, float] | None


def test_it_is_read_at_ticks_and_told_the_predictor() -> None:
    predictor = Proportional()
    page: list[Page] = [(10.0, 1.0, 0.0), None]
    scheduler = Quartz(
        pool_of(2), predictor, QuartzProfile(), first_tokens=lambda worker, _: page[worker]
    )
    for job in submit_all(scheduler, [job_of(1000, stream=False) for _ in range(2)]):
        scheduler.finished(job, 0.0, answered=True)
    scheduler.tick(0.0)  # from here on they are compared
    jobs = [job_of(1000, stream=False) for _ in range(3)]
    submit_all(scheduler, jobs)
    here = [job for job in jobs if job.worker == 0]
    scheduler.first_token(here[0], 0.2, assumed=True)
    for job in here[1:]:
        scheduler.finished(job, 0.3, answered=True)  # before it was due: a prefill all the same
    page[0] = (10.0 + len(here), 1.0 + 0.05 * len(here), 1.0)
    scheduler.tick(1.0)
    mean_s = sum(job.expected_s for job in here) / len(here)
    (heard,) = predictor.heard
    assert heard == pytest.approx((0, mean_s, 0.05, 0.0, len(here)))


def test_who_left_the_queue_or_failed_was_no_prefill() -> None:
    scheduler = quartz_of(pool_of(1))
    jobs = [job_of(5000, client="a", stream=False) for _ in range(3)]
    assert submit_all(scheduler, jobs) == jobs[:1]
    scheduler.cancel(jobs[1], 0.1)
    scheduler.finished(jobs[0], 0.2)
    assert not scheduler.unseen.workers
    assert scheduler.shares.kilotokens("a", 0.2) == 0.0


def test_an_answer_that_came_before_its_first_token_was_due_was_served() -> None:
    scheduler = quartz_of(pool_of(1))
    (job,) = submit_all(scheduler, [job_of(5000, client="a", stream=False)])
    scheduler.finished(job, 0.01, answered=True)
    scheduler.finished(job, 0.02, answered=True)  # again: nothing happens
    assert scheduler.unseen.workers == {0}
    assert scheduler.shares.kilotokens("a", 0.01) == pytest.approx(5.0)
    assert scheduler.wait_s(0, 0.01) == 0.0


def served(
    tokens_per_s: float,
    offered_tokens_per_s: float,
    *,
    tells: bool,
    seen: list[tuple[float, float, int]] | None = None,
) -> list[float]:
    """Waits in the gateway of prompts that come evenly for 30 s; no answer is streamed.

    One engine, which prefills in order and answers 5 s after the first token. It tells of its
    first tokens once a second, or not at all. `seen` gets, at each tick, the time, the seconds
    of prefill that lie at the engine, and how many requests wait in the gateway.
    """
    count, sum_s, free_s = 0, 0.0, 0.0
    page = (0.0, 0.0, 0.0)
    predictor = PrefillPredictor(workers=1)
    scheduler = Quartz(
        pool_of(1),
        predictor,
        QuartzProfile(locality=False),
        first_tokens=(lambda *_: page) if tells else None,
    )
    events: list[tuple[float, int, str, Job | None]] = []
    gap_s = PROMPT / offered_tokens_per_s
    for number in range(int(30 / gap_s)):
        heappush(events, (number * gap_s, len(events), "comes", None))
    for number in range(1, 130):
        heappush(events, (number / 4, len(events), "tick", None))
    number, waits = len(events), []
    while events:
        now_s, _, what, job = heappop(events)
        ready: list[Job] = []
        if what == "comes":
            ready += scheduler.submit(job_of(PROMPT, now_s, stream=False), now_s)
        elif what == "tick":
            if now_s % 1 == 0:
                page = (float(count), sum_s, now_s)
            ready += scheduler.tick(now_s)
            if seen is not None:
                seen.append((now_s, max(0.0, free_s - now_s), sum(scheduler.waiting)))
        elif what == "first":
            assert job is not None
            count, sum_s = count + 1, sum_s + now_s - job.sent_s
        elif what == "assumed":
            assert job is not None
            ready += scheduler.first_token(job, now_s, assumed=True)
        else:
            assert job is not None
            ready += scheduler.finished(job, now_s)
        for one in ready:
            waits.append(now_s - one.arrived_s)
            free_s = max(free_s, now_s) + PROMPT / tokens_per_s
            for at_s, told in (
                (free_s, "first"),
                (now_s + one.expected_s, "assumed"),
                (free_s + 5.0, "ends"),
            ):
                number += 1
                heappush(events, (at_s, number, told, one))
    return waits


def test_an_engine_faster_than_was_assumed_is_sent_what_it_can_do() -> None:
    held = served(50_000.0, 35_000.0, tells=False)
    assert held[-1] > 10.0  # else the next lines show nothing
    learned = served(50_000.0, 35_000.0, tells=True)
    assert max(learned[-1000:]) < 0.1


@pytest.mark.parametrize("tokens_per_s", [8_000.0, 20_000.0])
def test_a_saturated_engine_is_kept_busy_by_a_short_queue(tokens_per_s: float) -> None:
    """What it cannot do waits in the gateway, where it can be put in order."""
    offered = 1.5 * tokens_per_s
    seen: list[tuple[float, float, int]] = []
    served(tokens_per_s, offered, tells=True, seen=seen)
    gate_s = 4096 / tokens_per_s
    settled = [(backlog_s, waiting) for now_s, backlog_s, waiting in seen if 10 <= now_s <= 30]
    assert sum(backlog_s <= 0 for backlog_s, _ in settled) <= len(settled) * 0.05
    assert max(backlog_s for backlog_s, _ in settled) < 4 * gate_s
    least = 0.9 * 30 * (offered - tokens_per_s) / PROMPT
    assert least < settled[-1][1] < least * 1.25
