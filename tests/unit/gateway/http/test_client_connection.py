"""Who gives way (whoever holds most, oldest first), and how often warnings of clients are told."""

import logging

import pytest

from gateway.http.client_connection import EVERY_S, RareLog, giving_way
from tests.fakes import FakeClock


def test_the_oldest_of_whoever_holds_most_give_way_until_others_hold_as_much() -> None:
    greedy = [("greedy", float(n), f"g{n}") for n in range(6)]
    others = [("a", -2.0, "a0"), ("b", -1.0, "b0"), ("a", 9.0, "a1")]
    assert giving_way([*others, *reversed(greedy)], 4) == ["g0", "g1", "g2", "g3"]
    found = giving_way([*others, *greedy], 7)
    assert set(found[:6]) == {"g0", "g1", "g2", "g3", "g4", "a0"}
    assert len(giving_way([*others, *greedy], 100)) == 9
    assert giving_way([], 3) == []


def test_one_line_in_a_while_says_how_many_it_stands_for(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = RareLog(logging.getLogger("sluice.test"), "rain", clock)
    for n in range(1000):
        log.note(f"10.0.0.{n % 9}")
    assert [r.getMessage() for r in caplog.records] == [
        "rain from 10.0.0.0 (0 more since the last line)"
    ]
    clock.advance(EVERY_S)
    log.note("10.0.0.1")
    log.note("10.0.0.2")
    assert [r.getMessage() for r in caplog.records[1:]] == [
        "rain from 10.0.0.1 (999 more since the last line)"
    ]
