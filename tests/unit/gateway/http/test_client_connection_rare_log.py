"""Warnings that clients cause: one line now and then, however many there are."""

import logging

import pytest

from gateway.http.client_connection import EVERY_S, RareLog
from tests.fakes import FakeClock


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
