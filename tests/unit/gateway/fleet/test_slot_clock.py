"""A worker's cost is shared among what runs on it: all of it when full, and never more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState, SlotClock
from gateway.usage.report import FleetBill

SLOTS = 4
A_SECOND = 1_000_000_000 / 3600
"""Of a worker at 1 an hour, in nano-units."""

Run = tuple[int, int, int]
"""Begin, duration, sequences; in tenths of a second."""
runs = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100), st.integers(1, 3)), max_size=30)


def shares(many: list[Run]) -> tuple[list[float], float]:
    """What each run owes, and what part of 60 s the slots were held, at one worker."""
    clock, active, began = SlotClock(1.0), 0, dict[int, float]()
    owed = [0.0] * len(many)
    events = [(begin, 1, i) for i, (begin, _, _) in enumerate(many)]
    events += [(begin + length, 2, i) for i, (begin, length, _) in enumerate(many)]
    held_s, last = 0.0, 0
    for at, kind, i in sorted(events):
        held_s += (at - last) / 10 * active / max(active, SLOTS)
        last = at
        total = clock.read(0, active, SLOTS, at / 10)
        if kind == 1:
            began[i] = total
            active += many[i][2]
        else:
            owed[i] = many[i][2] * (total - began[i])
            active -= many[i][2]
    return owed, held_s


def test_a_sequence_owes_the_slot_that_it_holds() -> None:
    owed, _ = shares([(0, 100, 1)])
    assert owed == [pytest.approx(10 * A_SECOND / SLOTS)]


def test_more_sequences_than_slots_share_the_worker() -> None:
    owed, _ = shares([(0, 100, 2)] * 4)
    assert sum(owed) == pytest.approx(10 * A_SECOND)
    assert owed[0] == pytest.approx(10 * A_SECOND / 4)


def test_what_a_request_owes_is_by_what_ran_beside_it() -> None:
    owed, _ = shares([(0, 100, 3), (50, 100, 3)])
    first = 3 * A_SECOND * (5 / SLOTS + 5 / 6)
    assert owed == [pytest.approx(first), pytest.approx(first)]


@given(runs)
def test_all_shares_together_are_what_the_held_slots_cost(many: list[Run]) -> None:
    owed, held_s = shares(many)
    assert sum(owed) == pytest.approx(held_s * A_SECOND)
    assert all(part >= 0 for part in owed)


def test_each_worker_has_a_total_of_its_own() -> None:
    clock = SlotClock(1.0)
    began = [clock.read(worker, 0, SLOTS, 100.0) for worker in (7, 3)]
    assert clock.read(7, 1, SLOTS, 101.0) - began[0] == pytest.approx(A_SECOND / SLOTS)
    assert clock.read(3, 8, SLOTS, 102.0) - began[1] == pytest.approx(2 * A_SECOND / 8)


def pool(worker_hour: float | None, workers: int) -> PoolState:
    made = PoolState("p", [f"w{i}:1" for i in range(workers)], SLOTS)
    made.slot_clock = None if worker_hour is None else SlotClock(worker_hour)
    return made


def test_the_bill_counts_every_worker_that_is_there_busy_or_not() -> None:
    priced, free = pool(3.6, 3), pool(None, 5)
    fleet.unreachable(priced, 0)
    priced.present[2] = False
    bill = FleetBill([("m", priced), ("n", free)])
    assert bill.due(100.0, 1) == []
    (due,) = bill.due(110.0, 1)
    assert (due.model, due.pool, due.worker_s) == ("m", "p", 20.0)
    assert due.cost_nano == pytest.approx(20_000_000, abs=1)


def test_parts_of_a_nano_unit_are_not_lost() -> None:
    bill = FleetBill([("m", pool(0.000001, 1))])
    bills = [sum(due.cost_nano for due in bill.due(at / 4, 1)) for at in range(4 * 3600 + 1)]
    assert sum(bills) == pytest.approx(1000, abs=1)
    assert 0 in bills


def test_replicas_bill_a_part_each() -> None:
    bill = FleetBill([("m", pool(3.6, 2))])
    bill.due(0.0, 2)
    (due,) = bill.due(10.0, 2)
    assert due.worker_s == 10.0


def test_a_clock_that_stands_still_bills_nothing() -> None:
    bill = FleetBill([("m", pool(3.6, 2))])
    bill.due(5.0, 1)
    assert bill.due(5.0, 1) == []
