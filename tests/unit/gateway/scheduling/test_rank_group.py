"""BF-IO: late binding, bands, fairness, the age guard, dead engines; a rank's load, the choice."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling import rank_solver as solver
from gateway.scheduling.quartz_score import DEFAULT
from gateway.scheduling.rank_group import (
    FIRST_STEP_S,
    RankGroup,
    RankLoad,
    RankRules,
    StepClock,
    choose,
    streamed,
)
from gateway.scheduling.scheduler import Job


def pool(ranks: int = 2, slots: int = 2, engines: int = 1) -> PoolState:
    names = tuple(f"e{e}#{r}" for e in range(engines) for r in range(ranks))
    return PoolState("p", names, slots, [range(e * ranks, (e + 1) * ranks) for e in range(engines)])


def group(state: PoolState, **rules: float) -> RankGroup:
    return RankGroup(state, solver.assign, rules=RankRules(**{"depth": 0, **rules}))  # type: ignore[arg-type]


def job(prompt: int = 100, at_s: float = 0.0, **fields: object) -> Job:
    return Job(owner=None, prompt_tokens=prompt, output_tokens=9, arrived_s=at_s, **fields)  # type: ignore[arg-type]


def test_jobs_wait_in_no_ranks_queue_until_a_slot_is_free() -> None:
    scheduler = group(pool())
    sent = [job(10 * n) for n in range(1, 5)]
    for one in sent:
        assert scheduler.submit(one, 0.0) == [one]
    late = job()
    assert not scheduler.submit(late, 0.0)
    assert (late.state, late.worker, list(scheduler.waiting)) == ("waiting", -1, [0, 1, 0])
    assert scheduler.finished(sent[2], 1.0) == [late]
    assert late.worker == sent[2].worker
    assert late.state == "sent"


def test_a_processes_share_of_the_slots_is_never_below_one() -> None:
    scheduler = group(pool(ranks=1, slots=8))
    scheduler.replicas = 4
    assert scheduler.limit == 2
    scheduler.replicas = 100
    assert scheduler.limit == 1


def test_the_slot_goes_to_the_request_that_fits_the_gap() -> None:
    scheduler = group(pool(ranks=2, slots=1))
    long, short = job(1000), job(100)
    scheduler.submit(long, 0.0)
    scheduler.submit(short, 0.0)
    small, fitting, huge = job(50, 0.1), job(900, 0.2), job(5000, 0.3)
    for one in (small, fitting, huge):
        scheduler.submit(one, 0.3)
    assert scheduler.finished(short, 1.0) == [fitting]


def test_a_lower_band_always_goes_first() -> None:
    scheduler = group(pool(ranks=1, slots=1))
    first = job()
    scheduler.submit(first, 0.0)
    spot, protected = job(100, 0.1, priority_class=2), job(4000, 0.2, priority_class=0)
    scheduler.submit(spot, 0.1)
    scheduler.submit(protected, 0.2)
    assert scheduler.finished(first, 1.0) == [protected]
    assert scheduler.finished(protected, 2.0) == [spot]


def test_a_client_that_had_more_than_its_part_is_put_back() -> None:
    scheduler = group(pool(ranks=1, slots=1), per_slot=0, spare=1)
    running = job(3000, client="heavy")
    scheduler.submit(running, 0.0)
    mine = [job(3000, 0.1 * n, client="heavy") for n in range(1, 4)]
    for one in mine:
        scheduler.submit(one, one.arrived_s)
    light = job(3000, 0.5, client="light")
    scheduler.submit(light, 0.5)
    (second,) = scheduler.finished(running, 1.0)
    # Known from its first request on: what it had is compared with an even part.
    assert second is mine[0]
    later = job(3000, 1.1, client="heavy")
    scheduler.submit(later, 1.1)
    (third,) = scheduler.finished(second, 1.2)
    (fourth,) = scheduler.finished(third, 1.3)
    (fifth,) = scheduler.finished(fourth, 1.4)
    assert light in (third, fourth, fifth)
    assert later.state == "waiting"


def test_a_lone_client_is_served_in_order_of_arrival() -> None:
    scheduler = group(pool(ranks=1, slots=1), per_slot=0, spare=1)
    jobs = [job(100 + 37 * n % 900, n / 100, client="only") for n in range(40)]
    order: list[Job] = []
    for one in jobs:
        order += scheduler.submit(one, one.arrived_s)
    now_s = 1.0
    while len(order) < len(jobs):
        now_s += 0.5
        order += scheduler.finished(order[-1], now_s)
    assert order == jobs


def test_a_request_is_passed_over_for_maxage_steps_and_no_longer() -> None:
    scheduler = group(pool(ranks=2, slots=1), maxage_steps=100)
    step_s = scheduler.steps.step_s
    full, running = job(1000), job(500)
    scheduler.submit(full, 0.0)
    scheduler.submit(running, 0.0)
    misfit = job(5000)
    scheduler.submit(misfit, 0.0)
    now_s = 0.0
    while misfit.state == "waiting":
        now_s += 10 * step_s
        scheduler.submit(job(500, now_s), now_s)
        (running,) = scheduler.finished(running, now_s)
        # It was first to choose from after ten steps, and a slot came free every ten.
        assert now_s < 121 * step_s
    assert now_s >= 100 * step_s


def test_a_request_whose_target_nears_goes_before_a_better_fit() -> None:
    scheduler = group(pool(ranks=2, slots=1))
    full, running = job(1000), job(500)
    for one in (full, running):
        scheduler.submit(one, 0.0)
    fitting = [job(900, 0.0), job(900, 0.0)]
    hurried, late = job(5000, 0.1, slo_s=2.0), job(5000, 0.0, slo_s=0.4)
    for one in (hurried, late, *fitting):
        scheduler.submit(one, 0.1)
    assert scheduler.finished(running, 0.5) == [fitting[0]], "there is time, or none is left"
    assert scheduler.finished(fitting[0], 1.2) == [hurried]
    assert scheduler.finished(hurried, 1.3) == [fitting[1]]
    assert late.state == "waiting"


def test_only_arrivals_of_the_next_seconds_overtake_by_their_targets() -> None:
    scheduler = group(pool(ranks=1, slots=1))
    running, plain, now_s, latest_s = job(500), job(5000), 0.0, 0.0
    scheduler.submit(running, 0.0)
    scheduler.submit(plain, 0.0)
    while plain.state == "waiting":
        now_s += 0.1
        for _ in range(2):  # twice as many as can be served
            scheduler.submit(job(500, now_s, slo_s=0.5), now_s)
        latest_s = max(latest_s, running.arrived_s)
        (running,) = scheduler.finished(running, now_s)
    ahead_s = DEFAULT.patience_s - 0.5
    # Beyond that only others of the few candidates, as without targets.
    assert ahead_s - 1.0 < latest_s < ahead_s + 1.0


def test_time_at_the_barrier_is_counted_by_engine_and_by_what_the_engine_says() -> None:
    said: dict[int, float] = {}
    scheduler = RankGroup(pool(engines=2), solver.assign, observed=lambda rank, _: said.get(rank))
    scheduler.tick(0.0)
    said |= {0: 1000.0, 1: 600.0, 2: 800.0, 3: 0.0}
    scheduler.tick(1.0)
    first, second = scheduler.barriers["e0"], scheduler.barriers["e1"]
    assert (first.busy_s, first.imbalance_tokens) == (1.0, 400)
    assert first.idle_s == pytest.approx(0.2)
    assert (second.busy_s, second.idle_s, second.imbalance_tokens) == (1.0, 0.5, 800)
    said |= dict.fromkeys(range(4), 0.0)
    scheduler.tick(2.0)
    assert (second.busy_s, second.idle_s) == (1.0, 0.5), "an idle engine waits for nobody"
    own = group(pool())
    own.submit(job(300), 0.0)
    own.tick(0.0)
    own.tick(1.0)
    assert own.barriers["e0"].idle_s == 0.5, "its own figures, where none are said"


def test_a_stored_response_waits_for_its_rank_and_holds_nobody_up() -> None:
    scheduler = group(pool(ranks=2, slots=1))
    left, right = job(10), job(10)
    scheduler.submit(left, 0.0)
    scheduler.submit(right, 0.0)
    preferring, other = job(10, preferred=right.worker), job(10)
    scheduler.submit(preferring, 0.1)
    scheduler.submit(other, 0.2)
    assert scheduler.finished(left, 1.0) == [other]
    assert scheduler.finished(right, 1.0) == [preferring]
    assert preferring.worker == right.worker


def test_a_homed_job_goes_anywhere_when_its_rank_is_away() -> None:
    state = pool(ranks=1, slots=1, engines=2)
    scheduler = group(state)
    running = [job(), job()]
    for one in running:
        scheduler.submit(one, 0.0)
    preferring = job(preferred=1)
    scheduler.submit(preferring, 0.1)
    fleet.unreachable(state, 1)
    at_0 = next(one for one in running if one.worker == 0)
    assert scheduler.finished(at_0, 1.0) == [preferring]
    assert preferring.worker == 0


def test_a_failed_request_goes_elsewhere_while_there_is_elsewhere() -> None:
    scheduler = group(pool(ranks=2, slots=1))
    busy = job(10)
    scheduler.submit(busy, 0.0)
    free = 1 - busy.worker
    again = job(10, excluded=(free,))
    assert scheduler.submit(again, 0.1) == []
    assert scheduler.finished(busy, 0.2) == [again]
    assert again.worker != free
    nowhere_else = job(10, excluded=(0, 1))
    assert scheduler.submit(nowhere_else, 0.3) == [nowhere_else]


def test_a_dead_engines_ranks_leave_together_and_the_waiting_go_to_the_other() -> None:
    state = pool(ranks=2, slots=1, engines=2)
    scheduler = group(state)
    running = [job() for _ in range(4)]
    for one in running:
        scheduler.submit(one, 0.0)
    waits = job()
    scheduler.submit(waits, 0.1)
    fleet.unreachable(state, 0)
    dead = [one for one in running if one.worker < 2]
    assert [scheduler.finished(one, 0.2) for one in dead] == [[], []]
    alive = next(one for one in running if one.worker >= 2)
    assert scheduler.finished(alive, 0.3) == [waits]


def test_without_a_rank_the_waiting_go_nowhere_and_newcomers_are_not_taken() -> None:
    state = pool(ranks=2, slots=1)
    scheduler = group(state)
    for _ in range(2):
        scheduler.submit(job(), 0.0)
    waits = [job(), job(preferred=1)]
    for one in waits:
        scheduler.submit(one, 0.1)
    fleet.unreachable(state, 1)
    assert set(scheduler.tick(0.2)) == set(waits)
    assert [one.state for one in waits] == ["nowhere", "nowhere"]
    assert list(scheduler.waiting) == [0, 0, 0]
    late = job()
    assert not scheduler.submit(late, 0.3)
    assert late.state == "nowhere"
    assert not scheduler.cancel(late, 0.4)


def test_a_full_line_takes_no_more() -> None:
    scheduler = group(pool(ranks=1, slots=1), most_waiting=2)
    for _ in range(3):
        scheduler.submit(job(), 0.0)
    late = job()
    scheduler.submit(late, 0.0)
    assert late.state == "nowhere"
    assert scheduler.waiting[1] == 2


def test_a_request_of_many_sequences_goes_where_one_slot_is_free() -> None:
    scheduler = group(pool(ranks=2, slots=2))
    wide = job(10, sequences=8)
    scheduler.submit(wide, 0.0)
    more = [job(10) for _ in range(3)]
    for one in more:
        scheduler.submit(one, 0.0)
    assert [one.state for one in more] == ["sent", "sent", "waiting"]
    assert all(one.worker != wide.worker for one in more[:2])


def test_load_follows_streams_and_telemetry() -> None:
    observed = {0: 700.0, 1: None}
    state = pool(ranks=2, slots=4)
    scheduler = RankGroup(state, solver.assign, observed=lambda rank, now_s: observed[rank])
    first = job(500)
    scheduler.submit(first, 0.0)
    assert first.worker == 0
    first.emitted = lambda: 100
    for _ in range(200):
        scheduler.tick(1.0)
    assert scheduler.ranks[0].tokens(1.0) == pytest.approx(700, abs=1)
    next_one = job(10, 1.0)
    scheduler.submit(next_one, 1.0)
    assert next_one.worker == 1
    scheduler.finished(first, 2.0)
    assert not scheduler.ranks[0].jobs
    assert scheduler.steps.step_s == pytest.approx(2.0 / 100)


# -- a rank's load, from the answers' streams


def streaming(prompt: int, *, emitted: int = 0, sequences: int = 1) -> Job:
    made = job(prompt, sequences=sequences)
    made.emitted = lambda: emitted
    return made


def test_between_counts_every_sequence_grows_by_a_token_a_step() -> None:
    rank = RankLoad(StepClock())
    rank.tokens(1.0)  # counted
    rank.add(streaming(100), 1.0)
    rank.add(streaming(50, sequences=3), 1.0)
    assert rank.tokens(1.0 + 2 * FIRST_STEP_S) == pytest.approx(150 + 2 * 4)


def test_who_leaves_takes_prompt_and_answer_along() -> None:
    rank = RankLoad(StepClock())
    first, second = streaming(100, emitted=40), streaming(10, emitted=5)
    rank.add(first, 1.0)
    rank.add(second, 1.0)
    assert rank.tokens(2.0) == 155
    rank.remove(first, 2.0)
    assert rank.tokens(2.0) == 15
    rank.remove(second, 2.0)
    assert (rank.tokens(2.0), rank.sequences, len(rank.jobs)) == (0, 0, 0)


def test_telemetry_adds_what_others_sent_and_takes_nothing_away() -> None:
    rank = RankLoad(StepClock())
    rank.add(streaming(100), 1.0)
    for _ in range(200):
        rank.observe(1100.0, 1.0)
    assert rank.tokens(1.0) == pytest.approx(1100, abs=1)
    for _ in range(200):
        rank.observe(50.0, 1.0)  # shared prefixes are counted once there
    assert rank.tokens(1.0) == 100


def test_the_step_is_learned_from_answers_and_not_from_short_ones() -> None:
    clock = StepClock()
    clock.ended(2, 100.0)
    assert clock.step_s == FIRST_STEP_S
    clock.ended(100, 1.0)
    assert clock.step_s == pytest.approx(0.01)
    clock.ended(100, 3.0)
    assert 0.01 < clock.step_s < 0.03


def test_an_answer_that_is_not_streamed_grows_with_time_up_to_what_is_expected() -> None:
    silent = job(10)
    silent.sent_s = 5.0
    assert streamed(silent, 5.0 + 5 * 0.01, 0.01) == pytest.approx(5, abs=1)
    assert streamed(silent, 100.0, 0.01) == silent.output_tokens


# -- the short ways of the choice, held against the objective and the solver


def pick(
    loads: Sequence[float],
    caps: Sequence[int],
    jobs: Sequence[Job],
    waits: Sequence[float] | None = None,
    maxage: float = inf,
) -> list[tuple[int, int]]:
    ranks = range(len(loads))
    return choose(solver.assign, ranks, loads, caps, jobs, waits or [0.0] * len(jobs), maxage)


def imbalance(loads: Sequence[float], pairs: list[tuple[int, int]], jobs: Sequence[Job]) -> float:
    after = list(loads)
    for item, index in pairs:
        after[index] += jobs[item].prompt_tokens
    return len(after) * max(after) - sum(after)


def test_a_tie_goes_to_the_rank_that_holds_more_of_the_prompt() -> None:
    assert pick([0, 0, 0], [1, 1, 1], [job(64, match=((48, 0b100), (16, 0b110)))]) == [(0, 2)]


def test_who_was_passed_over_for_too_long_goes_first() -> None:
    jobs = [job(10), job(99), job(20)]
    assert pick([900, 1000], [1, 0], jobs, [0.0, 1.0, 5.0], maxage=4.0) == [(2, 0)]


loads = st.lists(st.integers(0, 5000), min_size=2, max_size=6)


@given(loads=loads, size=st.integers(1, 3000), data=st.data())
@settings(max_examples=100, deadline=None)
def test_one_request_is_placed_as_the_solver_places_it(
    loads: list[int], size: int, data: st.DataObject
) -> None:
    caps = data.draw(st.lists(st.integers(0, 2), min_size=len(loads), max_size=len(loads)))
    jobs = [job(size)]
    mine = pick(loads, caps, jobs)
    theirs = solver.assign(loads, caps, [size], [0.0], maxage=None)
    assert imbalance(loads, mine, jobs) == imbalance(loads, theirs, jobs)
    assert len(mine) == len(theirs)


@given(loads=loads, sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_one_slot_is_filled_as_well_as_it_can_be(loads: list[int], sizes: list[int]) -> None:
    jobs = [job(size) for size in sizes]
    caps = [1] + [0] * (len(loads) - 1)
    mine = imbalance(loads, pick(loads, caps, jobs), jobs)
    assert mine == min(imbalance(loads, [(i, 0)], jobs) for i in range(len(jobs)))


@given(loads=loads, sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_free_slot_is_filled_once(
    loads: list[int], sizes: list[int], data: st.DataObject
) -> None:
    caps = data.draw(st.lists(st.integers(0, 3), min_size=len(loads), max_size=len(loads)))
    pairs = pick(loads, caps, [job(size) for size in sizes])
    assert len(pairs) == min(len(sizes), sum(caps))
    assert len({item for item, _ in pairs}) == len(pairs)
    for index, cap in enumerate(caps):
        assert sum(at == index for _, at in pairs) <= cap
