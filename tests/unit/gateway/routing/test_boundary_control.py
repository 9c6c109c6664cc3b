"""Boundaries that move by what goes wrong: steps, evidence, limits, memory."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.boundary_control import (
    SAMPLE_S,
    BoundaryBounds,
    BoundaryControl,
    Move,
    PoolSample,
)

SHORT = BoundaryBounds(pool="short", start=8192, least=2048, most=16_384)


def sample(
    share: float = 0.0, *, requests: int = 1000, load: float = 0.3, waiting: float = 0.0
) -> PoolSample:
    """A minute in which so many of the requests were preempted."""
    return PoolSample(
        requests=requests,
        finished=float(requests),
        preemptions=share * requests,
        load=load,
        waiting=waiting,
    )


HALF_FULL = PoolSample(load=0.6)


def drive(
    control: BoundaryControl,
    minutes: int,
    happens: Callable[[int], PoolSample],
    start: int = 0,
    larger: PoolSample = HALF_FULL,
) -> list[tuple[int, Move]]:
    """(minute, move) of a one-boundary control; `happens` by boundary, `larger` above it."""
    return [
        (minute, move)
        for minute in range(start + 1, start + minutes + 1)
        for move in control.step(SAMPLE_S * minute, [happens(control.boundaries[0]), larger])
    ]


def test_five_minutes_above_one_percent_lower_it_by_a_tenth() -> None:
    control = BoundaryControl([SHORT])
    moves = drive(control, 5, lambda _: sample(0.011))
    assert [(minute, m.before, m.after) for minute, m in moves] == [(5, 8192, 7372)]
    assert moves[0][1].reason == ("1.1 % preempted, 0 % rescued, 0 % overrun in 5 min, above 1 %")
    assert control.boundaries == (7372,)


def test_further_steps_come_every_other_minute_until_it_is_better() -> None:
    control = BoundaryControl([SHORT])
    moves = drive(control, 30, lambda b: sample(0.5 if b > 5500 else 0.005))
    assert [minute for minute, _ in moves] == [5, 7, 9, 11]
    assert control.boundaries[0] == 5373


def test_a_backlog_that_falls_is_given_time() -> None:
    control = BoundaryControl([SHORT])
    drive(control, 5, lambda _: sample(0.5, load=4.0))
    loads = iter([4.0, 3.0, 2.0, 1.0, 1.0])
    moves = drive(control, 5, lambda _: sample(0.5, load=next(loads)), start=5)
    assert [minute for minute, _ in moves] == [10]


def test_under_two_permille_it_rises_by_two_percent_every_five_minutes() -> None:
    control = BoundaryControl([SHORT])
    moves = drive(control, 10, lambda _: sample(0.001))
    assert [(minute, m.after) for minute, m in moves] == [(5, 8356), (10, 8524)]


@pytest.mark.parametrize(
    "what",
    [
        sample(0.005),
        sample(0.0, requests=0),
        sample(0.0, load=0.8),
        PoolSample(requests=50, finished=50, preemptions=0.4),
    ],
    ids=["between", "none", "full", "too few errors"],
)
def test_nothing_moves_between_the_thresholds_or_without_evidence(what: PoolSample) -> None:
    assert drive(BoundaryControl([SHORT]), 60, lambda _: what) == []


@pytest.mark.parametrize(("requests", "minutes"), [(100, 5), (50, 10), (20, 25), (1, 60)])
def test_a_pool_with_few_requests_relaxes_after_longer(requests: int, minutes: int) -> None:
    control = BoundaryControl([SHORT])
    drive(control, 5, lambda _: PoolSample(requests=requests, rescues=requests))
    moves = drive(control, 1 + 2 * minutes, lambda _: sample(requests=requests), start=5 + 24 * 60)
    low = moves[0][1].before
    assert low == 7372
    first = 6 + 24 * 60
    assert [(minute - first, m.after) for minute, m in moves] == [
        (minutes, 7520),
        (2 * minutes, 7671),
    ]


def test_one_tenant_cannot_lower_a_boundary_that_others_use() -> None:
    control = BoundaryControl([SHORT])
    forged = PoolSample(requests=60, rescues=20, wrong={"evil": 20})
    assert drive(control, 24 * 60, lambda _: forged) == []
    joined = PoolSample(requests=60, rescues=1, overruns=1, wrong={"a": 1, "b": 1})
    assert drive(control, 5, lambda _: joined, start=24 * 60)


@given(st.lists(st.integers(0, 50), min_size=5, max_size=60), st.integers(0, 3))
def test_one_tenant_at_most_doubles_what_the_others_say(forged: list[int], honest: int) -> None:
    control = BoundaryControl([SHORT], observe=True)
    for minute, count in enumerate(forged, 1):
        wrong = {"a": honest, "evil": count}
        below = PoolSample(requests=100, rescues=honest + count, wrong=wrong)
        control.step(60.0 * minute, [below, PoolSample()])
        # In each window: the others' once more, or two in all, if it is but a minute long.
        assert control.shares[0] <= (honest + max(honest, 2)) / 100 + 1e-9


def test_engines_that_preempt_and_finish_nothing_count_as_wrong() -> None:
    stuck = PoolSample(requests=10, preemptions=30.0)
    assert drive(BoundaryControl([SHORT]), 5, lambda _: stuck)


def test_it_does_not_oscillate_around_a_cliff() -> None:
    """Above 7,000 tokens everything fails, below nothing does."""
    control = BoundaryControl([SHORT])
    moves = drive(control, 24 * 60, lambda b: sample(0.3 if b > 7000 else 0.0))
    downs = [minute for minute, m in moves if m.after < m.before]
    # The first two find the cliff; the others are retries, each after twice the pause.
    pauses = [b - a for a, b in pairwise(downs[1:])]
    assert downs[:2] == [5, 7]
    assert all(later > 1.8 * first for first, later in pairwise(pauses))
    assert len(downs) <= 6
    assert 6300 <= control.boundaries[0] <= 7000


QUEUES, IDLES = sample(load=1.2, waiting=0.2), sample(load=0.2)


def test_a_boundary_moves_towards_the_pool_that_idles_while_the_other_queues() -> None:
    control = BoundaryControl([SHORT])
    up = drive(control, 10, lambda _: IDLES, larger=QUEUES)
    assert [(minute, m.after) for minute, m in up] == [(5, 9012), (10, 9914)]
    assert up[0][1].reason == (
        "the larger pool queues for 5 min (at least 20 % of its slots wait, "
        "0 requests found no place), the other idles (at most 20 % in use)"
    )
    down = drive(control, 10, lambda _: QUEUES, start=10, larger=IDLES)
    assert [(minute, m.after) for minute, m in down] == [(15, 8922), (20, 8029)]
    assert down[0][1].reason.startswith("the smaller pool queues")


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (sample(load=0.55), QUEUES),
        (QUEUES, sample(load=0.55)),
        (QUEUES, QUEUES),
        (sample(0.005), QUEUES),
        (sample(load=0.2, waiting=0.2), QUEUES),
    ],
    ids=["half full", "half full above", "both queue", "errors below", "waits for KV"],
)
def test_equal_pressure_moves_nothing_up_or_down(smaller: PoolSample, larger: PoolSample) -> None:
    moves = drive(BoundaryControl([SHORT]), 60, lambda _: smaller, larger=larger)
    assert not [move for _, move in moves if "queues" in move.reason]


def test_requests_that_find_no_place_are_pressure_too() -> None:
    full = PoolSample(requests=800, load=1.0, turned_away=200)
    assert drive(BoundaryControl([SHORT]), 5, lambda _: IDLES, larger=full)
    nearly = PoolSample(requests=950, load=1.0, turned_away=50)
    moves = drive(BoundaryControl([SHORT]), 5, lambda _: IDLES, larger=nearly)
    assert [m.after for _, m in moves] == [8356]  # errors alone relax it


def test_pressure_respects_what_was_too_high_before() -> None:
    control = BoundaryControl([SHORT])
    moves = drive(control, 50, lambda b: sample(0.02) if b > 8000 else IDLES, larger=QUEUES)
    assert [m.after for _, m in moves] == [7372, 7782]  # .95 of 8,192


def test_errors_raise_it_only_while_the_larger_pool_is_the_busier_one() -> None:
    control, calm = BoundaryControl([SHORT]), sample(0.001, load=0.6)
    assert not drive(control, 60, lambda _: calm)
    moves = drive(control, 5, lambda _: calm, start=60, larger=sample(load=0.7))
    assert [m.after for _, m in moves] == [8356]


def test_what_pressure_lowered_was_too_high() -> None:
    control = BoundaryControl([SHORT])
    drive(control, 5, lambda _: QUEUES, larger=IDLES)
    moves = drive(control, 70, lambda _: IDLES, start=5, larger=QUEUES)
    assert [(minute, m.after) for minute, m in moves][:2] == [(10, 7782), (65, 8561)]


def test_with_all_requests_at_the_boundary_it_turns_ever_more_rarely() -> None:
    """Below 7,000 all go to the larger pool, above it all to the smaller one."""
    control = BoundaryControl([SHORT])
    few = sample(load=0.2, requests=1)  # too few for errors to relax it
    ups = []
    for minute in range(1, 48 * 60):
        pools = [QUEUES, few] if control.boundaries[0] > 7000 else [few, QUEUES]
        moves = control.step(60.0 * minute, pools)
        ups += [minute for move in moves if move.after > 7000]
    pauses = [later - first for first, later in pairwise(ups) if later - first > 15]
    assert len(ups) <= 12
    assert all(later > 1.4 * first for first, later in pairwise(pauses))


def test_boundaries_of_three_pools_move_apart_and_never_meet() -> None:
    control = BoundaryControl(
        [
            BoundaryBounds(pool="s", start=1000, least=100, most=4000),
            BoundaryBounds(pool="m", start=1100, least=100, most=16_000),
        ]
    )
    for minute in range(1, 200):
        control.step(60.0 * minute, [sample(0.0), sample(0.5), sample(load=0.6)])
        low, high = control.boundaries
        assert low < high
    assert control.boundaries[1] - control.boundaries[0] == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            PoolSample,
            requests=st.integers(0, 2000),
            rescues=st.integers(0, 50),
            overruns=st.integers(0, 50),
            preemptions=st.floats(0, 500),
            finished=st.floats(0, 2000),
            load=st.floats(0, 3),
            waiting=st.floats(0, 3),
        ),
        max_size=80,
    ),
    st.sampled_from([PoolSample(), sample(load=1.5, waiting=0.5)]),
)
def test_it_stays_in_bounds_by_steps_of_the_stated_size(
    samples: list[PoolSample], larger: PoolSample
) -> None:
    control = BoundaryControl([SHORT])
    for minute, one in enumerate(samples):
        for move in control.step(60.0 * minute, [one, larger]):
            most = 1.10 if "queues" in move.reason else 1.02
            assert 0.899 * move.before <= move.after <= most * move.before + 1
        assert SHORT.least <= control.boundaries[0] <= SHORT.most
