"""Worker load and health: overload, ejection, doubling, and probes that never touch load."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState, SlotClock
from gateway.records.attempt import HealthRules
from gateway.usage.report import FleetBill
from sluice.build import compiled

RULES = HealthRules(eject_after=3, eject_s=5.0, max_eject_s=60.0)


def pool(workers: int = 2, slots: int = 4) -> PoolState:
    return PoolState("p", tuple(f"w{i}" for i in range(workers)), slots)


def eject(state: PoolState, worker: int, now_s: float) -> bool:
    return [fleet.failed(state, worker, RULES, now_s) for _ in range(RULES.eject_after)][-1]


def test_overloaded_exactly_from_ready_slots_plus_spill_queue() -> None:
    state = pool(workers=2, slots=4)
    state.inflight = 10
    assert not fleet.overloaded(state, spill_queue=3, now_s=0.0)
    assert fleet.overloaded(state, spill_queue=2, now_s=0.0)


def test_gateways_that_share_engines_spill_once_their_slots_are_taken_together() -> None:
    """Four gateways get eight requests in turn between two readings of the engines."""
    gateways = [pool(workers=2, slots=16) for _ in range(4)]
    sent = 0
    while not fleet.overloaded(gateways[sent % 4], spill_queue=0, now_s=0.0):
        state, worker = gateways[sent % 4], sent // 4 % 2
        fleet.start(state, worker, 1, 10)
        state.inflight += 1
        sent += 1
        if sent % 8 == 0:
            for each in gateways:
                for engine in range(2):
                    fleet.heard(each, engine, sum(other.active[engine] for other in gateways))
    assert sent == 32
    fleet.heard(gateways[0], 0, 0)
    assert not fleet.overloaded(gateways[0], spill_queue=0, now_s=0.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    state = pool()
    for _ in range(4):
        fleet.failed(state, 0, RULES, 0.0)
        fleet.failed(state, 0, RULES, 0.0)
        fleet.succeeded(state, 0)
    assert fleet.available(state, 0.0) == [0, 1]


def test_each_further_ejection_doubles_up_to_the_longest() -> None:
    state = pool()
    waits = []
    for _ in range(5000):  # so many that the wait would overflow
        eject(state, 0, 100.0)
        waits.append(state.engine_of[0].ejected_until_s - 100.0)
    assert waits == [5.0, 10.0, 20.0, 40.0, *[60.0] * 4996]


def test_a_success_clears_the_ejection_history() -> None:
    state = pool()
    eject(state, 0, 0.0)
    eject(state, 0, 20.0)
    fleet.succeeded(state, 0)
    assert fleet.available(state, 20.0) == [0, 1]
    eject(state, 0, 100.0)
    assert state.engine_of[0].ejected_until_s == 105.0


def test_an_ejected_worker_that_is_not_draining_beats_a_draining_one() -> None:
    state = pool()
    eject(state, 0, 0.0)
    fleet.drain(state, 1, on=True)
    assert fleet.available(state, 0.0) == [0]


def test_a_successful_probe_returns_a_refusing_worker_and_ends_its_ejection() -> None:
    state = pool()
    eject(state, 0, 0.0)
    fleet.unreachable(state, 0)
    assert fleet.probed(state, 0, ok=True)
    assert fleet.available(state, 0.0) == [0, 1]


def test_a_good_probe_of_a_worker_that_is_up_does_not_end_its_ejection() -> None:
    """/health may answer while generation fails."""
    state = pool()
    eject(state, 0, 0.0)
    assert not fleet.probed(state, 0, ok=True)
    assert fleet.available(state, 1.0) == [1]


def test_the_third_missed_probe_in_a_row_takes_a_worker_out() -> None:
    state = pool()
    fleet.probed(state, 0, ok=True)
    for _ in range(3):
        assert not fleet.missed(state, 0, "why", answers=False)
        assert not fleet.missed(state, 0, "why", answers=False)
        assert fleet.available(state, 0.0) == [0, 1]
        fleet.probed(state, 0, ok=True)
    assert [fleet.missed(state, 0, "why", answers=False) for _ in range(4)] == [
        False, False, True, False,
    ]  # fmt: skip
    assert fleet.available(state, 0.0) == [1]
    assert [e.why_down for e in state.engine_of] == ["why", ""]
    assert fleet.probed(state, 0, ok=True)
    assert (fleet.available(state, 0.0), state.engine_of[0].why_down) == ([0, 1], "")


@given(st.lists(st.booleans()))
def test_probes_alone_never_take_out_a_worker_that_answers(answers: list[bool]) -> None:
    state = pool()
    fleet.probed(state, 0, ok=True)
    in_a_row = 0
    for answered in answers:
        in_a_row = 0 if answered else in_a_row + 1
        fleet.missed(state, 0, "why", answers=answered)
        if in_a_row >= 3:
            return
        assert fleet.available(state, 0.0) == [0, 1]


def test_the_last_resort_is_who_missed_probes_then_who_refused() -> None:
    state = pool(workers=3)
    for worker in range(3):
        fleet.missed(state, worker, "why", answers=False)
    fleet.unreachable(state, 0)
    fleet.drain(state, 1, on=True)
    assert fleet.available(state, 0.0) == []
    assert fleet.last_resort(state, refused=False) == [2]
    fleet.unreachable(state, 2)
    assert fleet.last_resort(state, refused=False) == []
    assert fleet.last_resort(state, refused=True) == [0, 2]


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans())), st.integers(0, 9), st.integers(0, 99))
def test_probes_never_touch_load(verdicts: list[tuple[int, bool]], active: int, kv: int) -> None:
    state = pool()
    fleet.start(state, 0, active, kv)
    state.inflight = active
    for worker, ok in verdicts:
        fleet.probed(state, worker, ok=ok)
    assert (state.active, state.tokens, state.inflight) == ([active, 0], [kv, 0], active)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(0, 10_000))))
def test_finish_takes_away_exactly_what_start_added(work: list[tuple[int, int, int]]) -> None:
    state = pool(workers=3)
    for one in work:
        fleet.start(state, *one)
    assert sum(state.active) == sum(s for _, s, _ in work)
    for one in reversed(work):
        fleet.finish(state, *one)
        assert min(state.active) >= 0
        assert min(state.tokens) >= 0
    assert (state.active, state.tokens) == ([0, 0, 0], [0, 0, 0])


class Looked(list[fleet.EngineState]):
    """Counts how often it is asked for a worker's value; what is compiled does not ask it."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)


def test_an_ejected_worker_is_looked_for_once_not_for_every_request() -> None:
    state = fleet.PoolState("p", tuple(map(str, range(100))), 4)
    rules = HealthRules(eject_after=1, eject_s=5.0)
    assert fleet.failed(state, 7, rules, 10.0)
    looked = state.engine_of = Looked(state.engine_of)
    found = [fleet.available(state, 10.0 + number / 100) for number in range(400)]
    assert found[0] == [i for i in range(100) if i != 7]
    assert all(each is found[0] for each in found), "looked for anew"
    assert compiled() or looked.times == 100
    assert fleet.available(state, 15.0) == list(range(100))
    assert fleet.available(state, 14.0) == found[0], "whatever order is asked in"


def test_each_end_of_an_ejection_and_each_change_of_health_is_seen() -> None:
    state = fleet.PoolState("p", ("a", "b", "c", "d"), 4)
    fleet.failed(state, 0, HealthRules(eject_after=1, eject_s=5.0), 10.0)
    fleet.failed(state, 1, HealthRules(eject_after=1, eject_s=9.0), 10.0)
    assert [fleet.available(state, now_s) for now_s in (10.0, 15.0, 19.0)] == [
        [2, 3], [0, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip
    assert fleet.available(state, 11.0) == [2, 3]
    fleet.unreachable(state, 3)
    assert fleet.available(state, 11.0) == [2]
    fleet.unreachable(state, 2)
    assert fleet.available(state, 11.0) == [0, 1], "doubtful ones rather than none"
    fleet.succeeded(state, 1)
    assert fleet.available(state, 11.0) == [1]


def test_a_failure_that_ejects_nobody_changes_no_list() -> None:
    state = fleet.PoolState("p", ("a", "b"), 4)
    alive = state.alive
    rules = HealthRules(eject_after=3)
    for _ in range(5):
        assert not fleet.failed(state, 0, rules, 1.0)
        fleet.succeeded(state, 0)
    assert state.alive is alive


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


def priced(worker_hour: float | None, workers: int) -> PoolState:
    made = PoolState("p", [f"w{i}:1" for i in range(workers)], SLOTS)
    made.slot_clock = None if worker_hour is None else SlotClock(worker_hour)
    return made


def test_the_bill_counts_every_worker_that_is_there_busy_or_not() -> None:
    paid, free = priced(3.6, 3), priced(None, 5)
    fleet.unreachable(paid, 0)
    paid.present[2] = False
    bill = FleetBill([("m", paid), ("n", free)])
    assert bill.due(100.0, 1) == []
    (due,) = bill.due(110.0, 1)
    assert (due.model, due.pool, due.worker_s) == ("m", "p", 20.0)
    assert due.cost_nano == pytest.approx(20_000_000, abs=1)


def test_parts_of_a_nano_unit_are_not_lost() -> None:
    bill = FleetBill([("m", priced(0.000001, 1))])
    bills = [sum(due.cost_nano for due in bill.due(at / 4, 1)) for at in range(4 * 3600 + 1)]
    assert sum(bills) == pytest.approx(1000, abs=1)
    assert 0 in bills


def test_replicas_bill_a_part_each() -> None:
    bill = FleetBill([("m", priced(3.6, 2))])
    bill.due(0.0, 2)
    (due,) = bill.due(10.0, 2)
    assert due.worker_s == 10.0
