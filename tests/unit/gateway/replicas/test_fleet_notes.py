"""Replicas tell one another of drained and ejected engines, and where stored responses live."""

from collections import deque
from itertools import chain

import msgspec
import pytest

from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime, drain_worker
from gateway.replicas import notes as fleet_notes
from gateway.replicas.notes import LOCATIONS_SHARED_S, FleetNotes
from gateway.routing.routing import ResponseAffinity, ResponseLocation
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.unit.gateway.replicas.test_scheduler_notes import Boards

HOME = ResponseLocation(pool="short", worker=1, tenant="t", tokens=7)


class Replicas:
    """Some replicas of one model, on one board and one clock."""

    def __init__(self, count: int = 2) -> None:
        self.clock = FakeClock(100.0)
        self.boards = Boards()
        self.served: list[ModelRuntime] = []
        self.notes: list[FleetNotes] = []
        self.wall_clocks: list[FakeClock] = []
        for _ in range(count):
            self.join()

    def join(self, workers: tuple[int, int] = (2, 1)) -> ModelRuntime:
        served = served_model(workers=workers)
        name = f"replica {len(self.served)}"
        self.served.append(served)
        self.wall_clocks.append(FakeClock(1_700_000_000.0))
        view = self.boards.of(name)
        self.notes.append(
            FleetNotes([served], view.publish, view.peers, self.clock, self.wall_clocks[-1])
        )
        return served

    def exchange(self) -> None:
        for _ in range(2):
            for clock in (self.clock, *self.wall_clocks):
                clock.advance(1.0)
            for each in self.notes:
                deque(chain(each.send(), each.receive()), maxlen=0)

    def drain(self, replica: int, worker: str, *, on: bool) -> None:
        assert drain_worker([self.served[replica]], worker, on=on)
        self.notes[replica].drained(worker, on=on)

    def draining(self) -> list[list[bool]]:
        """By replica, whether each worker of the short pool is drained."""
        return [served.fleet.pools[0].draining for served in self.served]

    def eject(self, worker: int) -> None:
        """In the first replica."""
        served = self.served[0]
        fleet.eject(served.fleet.pools[0], worker, served.fleet.health, self.clock())


def test_an_engine_is_drained_in_all_replicas_and_the_newest_change_holds() -> None:
    replicas = Replicas(3)
    for replica, on in ((0, True), (2, False)):
        replicas.drain(replica, "short-1", on=on)
        replicas.exchange()
        assert replicas.draining() == [[False, on]] * 3


def test_an_undo_holds_also_where_the_clock_of_the_drain_was_ahead() -> None:
    replicas = Replicas(3)
    replicas.wall_clocks[0].advance(10.0)
    for on in (True, False, True):
        replicas.drain(0, "short-1", on=on)
        replicas.exchange()
        replicas.drain(1, "short-1", on=not on)
        replicas.exchange()
        assert replicas.draining() == [[False, not on]] * 3


def test_of_two_changes_at_the_same_time_one_holds_everywhere() -> None:
    replicas = Replicas(2)
    replicas.drain(0, "short-1", on=False)
    replicas.drain(1, "short-1", on=True)
    replicas.exchange()
    assert replicas.draining() == [[False, True]] * 2


def test_a_replica_that_starts_later_hears_of_drains_from_whoever_lives() -> None:
    replicas = Replicas(2)
    replicas.drain(0, "short-0", on=True)
    replicas.exchange()
    del replicas.boards.notes["replica 0"], replicas.notes[0]
    replicas.join()
    replicas.exchange()
    assert replicas.draining()[-1] == [True, False]


def test_one_failure_confirms_an_ejection_elsewhere() -> None:
    replicas = Replicas(2)
    two, rules = replicas.served[1].fleet.pools[0], replicas.served[1].fleet.health
    replicas.eject(1)
    replicas.exchange()
    assert fleet.available(two, replicas.clock()) == [0, 1], "not copied"
    assert fleet.failed(two, 1, rules, replicas.clock())
    assert fleet.available(two, replicas.clock()) == [0]
    assert not fleet.failed(two, 0, rules, replicas.clock()), "the other one has its chances"


def test_own_success_outweighs_what_others_say_and_a_doubt_ends_with_its_ejection() -> None:
    replicas = Replicas(2)
    one, two = (served.fleet.pools[0] for served in replicas.served)
    rules = replicas.served[1].fleet.health
    replicas.eject(1)
    replicas.exchange()
    fleet.succeeded(two, 1)
    assert not fleet.failed(two, 1, rules, replicas.clock())
    while one.engine_of[1].ejected_until_s > replicas.clock():
        replicas.exchange()
    for _ in range(2):
        replicas.exchange()
    assert two.engine_of[1].doubted_until_s < replicas.clock()


def test_stored_responses_are_found_by_all_and_told_for_a_while_only() -> None:
    replicas = Replicas(2)
    replicas.served[0].fleet.response_affinity.remember("resp-1", HOME)
    replicas.exchange()
    assert replicas.served[1].fleet.response_affinity.find("resp-1") == HOME
    replicas.clock.advance(LOCATIONS_SHARED_S)
    late = replicas.join()
    replicas.exchange()
    assert late.fleet.response_affinity.find("resp-1") is None


def test_a_stored_response_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(2)
    learned: list[str] = []
    learn = ResponseAffinity.learn

    def note(
        response_affinity: ResponseAffinity, response_id: str, location: ResponseLocation
    ) -> None:
        if response_affinity is replicas.served[1].fleet.response_affinity:
            learned.append(response_id)
        learn(response_affinity, response_id, location)

    monkeypatch.setattr(ResponseAffinity, "learn", note)
    for number in range(3):
        replicas.served[0].fleet.response_affinity.remember(f"r{number}", HOME)
        replicas.served[0].fleet.response_affinity.remember(f"s{number}", HOME)
        replicas.exchange()
    assert learned == ["r0", "s0", "r1", "s1", "r2", "s2"]


def test_replicas_that_list_workers_in_other_orders_mean_the_same_ones() -> None:
    replicas = Replicas(1)
    other = replicas.join(workers=(3, 1))
    other.fleet.pools[0].workers[:] = ["short-1", "new", "short-0"]
    replicas.eject(1)
    replicas.served[0].fleet.response_affinity.remember("resp-1", HOME)
    replicas.drain(0, "short-1", on=True)
    replicas.exchange()
    assert other.fleet.response_affinity.find("resp-1") == HOME._replace(worker=0)
    doubted = [engine.doubted_until_s > 0 for engine in other.fleet.pools[0].engine_of]
    assert doubted == [True, False, False]
    assert replicas.draining() == [[False, True], [True, False, False]]


@pytest.mark.parametrize("note", [b"", b"\xc1", msgspec.msgpack.encode({"workers": "x"})])
def test_what_is_malformed_is_ignored(note: bytes) -> None:
    replicas = Replicas(1)
    replicas.boards.of("liar").publish("fleet:m", note)
    replicas.exchange()


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_notes, "MAX_DRAINS", 3)
    replicas = Replicas(1)
    for number in range(10):
        replicas.notes[0].drained(f"w{number}", on=True)
    for number in range(2 * fleet_notes.MAX_LOCATIONS_SHARED):
        replicas.served[0].fleet.response_affinity.remember(f"r{number}", HOME)
    replicas.exchange()
    (reported,) = replicas.boards.notes["replica 0"].values()
    note = fleet_notes._decode_fleet(reported)
    assert list(note.drains) == ["w7", "w8", "w9"]
    assert len(note.locations) == fleet_notes.MAX_LOCATIONS_SHARED


def test_a_drain_ends_everywhere_when_a_new_engine_joins_at_the_address() -> None:
    replicas = Replicas()
    replicas.drain(0, "short-1", on=True)
    replicas.exchange()
    assert replicas.draining() == [[False, True]] * 2
    drain_worker([replicas.served[1]], "short-1", on=False)  # as a new engine begins
    replicas.notes[1].joined("short-1")
    replicas.exchange()
    assert replicas.draining() == [[False, False]] * 2


def test_a_drain_heard_of_reaches_models_that_a_reload_removed() -> None:
    replicas = Replicas()
    gone = served_model(workers=(2, 1))
    replicas.notes[1]._retiring = [gone]
    replicas.drain(0, "short-1", on=True)
    replicas.exchange()
    assert gone.fleet.pools[0].draining == [False, True]
