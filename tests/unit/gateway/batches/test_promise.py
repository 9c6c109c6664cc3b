"""Promises: what no draw of live demand may contradict, and what the profile teaches."""

from math import inf
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.batches.promise import (
    HOUR_S,
    WEEK,
    Decision,
    Demand,
    FreeSlots,
    Profile,
    Work,
    with_hour,
    work,
)
from gateway.records.batch import Batch, Part, Promise

HOUR = 40 * WEEK
NOW = HOUR * HOUR_S + 1234.0
WINDOW_S = 6 * 3600.0
NO_LEFTOVERS = Profile(first_hour=HOUR - 2 * WEEK, hours=(30.0,) * 2 * WEEK)


def week(weeks: int, spread: float = 0.05, seed: int = 0) -> tuple[float, ...]:
    """Busy by day and calm by night."""
    hours = np.arange(weeks * WEEK)
    noise = np.exp(spread * np.random.default_rng(seed).standard_normal(len(hours)))
    return tuple(((6 - 4 * np.cos(2 * np.pi * hours / 24)) * noise).tolist())


KNOWN = Profile(first_hour=HOUR - 4 * WEEK, hours=week(4))
DEMANDS = [Demand(p, HOUR) for p in (KNOWN, Profile(), NO_LEFTOVERS)]


def decided(demand: Demand, slots: float, batch: Work, others: list[Work]) -> Decision:
    return FreeSlots(demand, slots, 5.0, NOW).decide(batch, others)


def works(least: float = 0.0) -> st.SearchStrategy[Work]:
    due = st.one_of(st.none(), st.floats(60, 72 * 3600).map(lambda s: NOW + s))
    return st.builds(Work, slot_s=st.floats(least, 1e6), doubt=st.floats(0.03, 0.5), by_unix_s=due)


@settings(max_examples=60)
@given(
    demand=st.sampled_from(DEMANDS),
    slots=st.floats(0, 40),
    fewer=st.floats(0, 40),
    batch=works(),
    more=st.floats(1, 3),
    window_s=st.floats(60, 72 * 3600),
    others=st.lists(works(), max_size=4),
)
def test_more_work_or_less_capacity_is_never_promised_earlier(
    demand: Demand,
    slots: float,
    fewer: float,
    batch: Work,
    more: float,
    window_s: float,
    others: list[Work],
) -> None:
    batch = replace(batch, by_unix_s=NOW + window_s)
    whole = decided(demand, slots, batch, others)
    for harder in (
        decided(demand, slots, replace(batch, slot_s=batch.slot_s * more), others),
        decided(demand, max(0.0, slots - fewer), batch, others),
        decided(demand, slots, batch, [*others, Work(slot_s=1e5, doubt=0.1, by_unix_s=NOW)]),
    ):
        assert harder.p50_s >= whole.p50_s - 1e-6
        assert harder.p95_s >= whole.p95_s - 1e-6
        assert harder.earliest_s >= whole.earliest_s
        assert whole.promised or not harder.promised


@settings(max_examples=60)
@given(
    demand=st.sampled_from(DEMANDS),
    slots=st.floats(0, 40),
    batch=works(1.0),
    others=st.lists(works(), max_size=6),
)
def test_the_earliest_window_that_is_named_is_promised(
    demand: Demand, slots: float, batch: Work, others: list[Work]
) -> None:
    first = decided(demand, slots, replace(batch, by_unix_s=NOW + 60), others)
    if first.earliest_s < inf:
        again = replace(batch, by_unix_s=NOW + first.earliest_s)
        found = decided(demand, slots, again, others)
        assert found.promised
        assert found.p95_s <= first.earliest_s
        assert found.earliest_s == first.earliest_s


def test_no_batch_is_promised_before_one_whose_promise_would_break() -> None:
    demand = DEMANDS[0]
    large = Work(slot_s=150_000, doubt=0.05, by_unix_s=NOW + 1)
    end_s = decided(demand, 12, large, []).earliest_s
    promised = replace(large, by_unix_s=NOW + end_s)
    small = Work(slot_s=20_000, doubt=0.05, by_unix_s=NOW + end_s / 2)
    assert decided(demand, 12, small, []).promised
    assert not decided(demand, 12, small, [promised]).promised
    roomy = replace(large, by_unix_s=NOW + 3 * end_s)
    assert decided(demand, 12, small, [roomy]).promised


def test_leftovers_of_the_night_are_foreseen_in_the_day() -> None:
    noon = Demand(KNOWN, HOUR - 12)  # the profile's history began at midnight
    left = FreeSlots(noon, 10.0, 10.0, NOW - 12 * HOUR_S)
    early, late = (
        left.decide(Work(slot_s=slot_s, doubt=0.03, by_unix_s=NOW), []).p50_s
        for slot_s in (10_000.0, 100_000.0)
    )
    assert early > 1.5 * HOUR_S  # by day nearly nothing is left
    assert late < 6 * early  # by night most is


def test_little_history_makes_wide_promises_and_much_of_it_narrow_ones() -> None:
    batch = Work(slot_s=100_000, doubt=0.03, by_unix_s=NOW)
    spreads = []
    for hours in (0, 24, 72, 4 * WEEK):
        profile = Profile(first_hour=HOUR - hours, hours=week(4)[4 * WEEK - hours :])
        found = decided(Demand(profile, HOUR), 14, batch, [])
        spreads.append(found.p95_s / found.p50_s)
    assert min(spreads[:2]) > 1.5 > spreads[2] > 1.2 > spreads[3]


def test_promises_of_a_profile_come_true_as_often_as_they_say() -> None:
    """Weeks that differ by days as the profile's own did."""
    random = np.random.default_rng(5)
    kept, runs = 0, 60
    for seed in range(runs):
        days = np.exp(0.15 * random.standard_normal(35)).repeat(24)
        live = np.array(week(5, seed=seed)) * days
        start = int(random.integers(4 * WEEK, 4 * WEEK + 72))
        profile = Profile(first_hour=HOUR - start, hours=tuple(live[:start].tolist()))
        left = FreeSlots(Demand(profile, HOUR), 12, 0.0, float(HOUR * HOUR_S))
        batch = Work(slot_s=120_000, doubt=0.03, by_unix_s=NOW)
        p95_s = left.decide(batch, []).p95_s
        done = np.cumsum(np.maximum(0, 12 - live[start:])) * HOUR_S * profile.used_share
        kept += bool(np.interp(p95_s / HOUR_S, np.arange(1, len(done) + 1), done) >= 120_000)
    assert 0.85 * runs <= kept


def test_measured_items_replace_what_was_planned() -> None:
    planned = work(Profile(), 1000.0, items=100)
    twice = work(Profile(), 1000.0, items=1000, done=500, used_slot_s=1000.0)
    assert planned.slot_s == 1000
    assert twice.slot_s > 0.9 * 1000
    assert twice.doubt < planned.doubt / 4
    longer = Profile(ratios=(0.69,) * 40)
    assert 1.9 < work(longer, 1000.0, items=100).slot_s / 1000 < 2.0
    assert work(longer, 1000.0, items=100).doubt < planned.doubt / 2


def test_a_batch_is_urgent_when_its_forecast_passes_its_promise() -> None:
    def batch(**more: Any) -> Batch:
        return Batch(
            id="batch_1",
            tenant="t",
            entitlement="e",
            endpoint="/v1/chat/completions",
            model="m",
            input_file="file-1",
            completion_window="1h",
            created_unix_s=0,
            expires_unix_s=3600,
            total=100,
            parts=(Part(epoch=1, number=0, lines=50),),
            **more,
        )

    promise = Promise(finish_p50_unix_s=100, finish_p95_unix_s=900, promised_by_unix_s=1000)
    late = Promise(finish_p50_unix_s=900, finish_p95_unix_s=1200, promised_by_unix_s=1000)
    assert not batch().is_urgent
    assert not batch(promise=promise, forecast=promise).is_urgent
    assert batch(promise=promise, forecast=late).is_urgent
    assert batch(promise=promise).is_urgent  # no end of it is foreseen


def test_replicas_add_their_parts_of_an_hour_and_gaps_stay_unknown() -> None:
    profile = Profile()
    for hour, live in ((HOUR, 2.0), (HOUR, 3.0), (HOUR + 2, 1.0)):
        profile = with_hour(profile, hour, live)
    assert (profile.first_hour, profile.hours) == (HOUR, (5.0, -1.0, 1.0))
    full = with_hour(profile, HOUR + 10 * WEEK, 4.0)
    assert full.hours[-1] == 4.0
    assert full.first_hour + len(full.hours) == HOUR + 10 * WEEK + 1
