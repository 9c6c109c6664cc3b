"""Stored responses go back to the worker that has them; the table is bounded."""

import pytest

from gateway.policy import homes
from gateway.policy.homes import ResponseHomes


def test_a_remembered_response_is_found() -> None:
    known = ResponseHomes()
    known.remember("resp_1", 1, 2)
    assert known.find("resp_1") == (1, 2)


def test_an_unknown_response_and_no_response_have_no_home() -> None:
    known = ResponseHomes()
    assert known.find("resp_1") is None
    assert known.find(None) is None


def test_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MAX_HOMES", 2)
    known = ResponseHomes()
    for name in ("a", "b", "c"):
        known.remember(name, 0, 0)
    assert (known.find("a"), known.find("b"), known.find("c")) == (None, (0, 0), (0, 0))
    assert len(known) == 2


def test_remembering_again_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MAX_HOMES", 2)
    known = ResponseHomes()
    for name in ("a", "b", "b"):
        known.remember(name, 0, 0)
    assert known.find("a") == (0, 0)
