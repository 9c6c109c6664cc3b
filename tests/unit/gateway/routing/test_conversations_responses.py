"""Stored responses go back to the worker that has them, are their tenant's, and are bounded."""

import pytest

from gateway.routing import conversations
from gateway.routing.conversations import ResponseAffinity, ResponseLocation


def known(*owned: tuple[str, str]) -> ResponseAffinity:
    """Responses remembered in order, each (id, tenant)."""
    found = ResponseAffinity()
    for response_id, tenant in owned:
        found.remember(response_id, ResponseLocation("p", 0, tenant, 1))
    return found


def test_a_remembered_response_is_found() -> None:
    found = ResponseAffinity()
    found.remember("resp_1", ResponseLocation("p", 2, "t", 3))
    assert found.find("resp_1") == ("p", 2, "t", 3)


def test_an_unknown_response_and_no_response_have_no_home() -> None:
    assert known().find("resp_1") is None
    assert known().find(None) is None


def test_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_RESPONSES", 2)
    found = known(("a", "t"), ("b", "t"), ("c", "t"))
    assert [bool(found.find(name)) for name in "abc"] == [False, True, True]
    assert len(found) == 2


def test_remembering_again_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_RESPONSES", 2)
    assert known(("a", "t"), ("b", "t"), ("b", "t")).find("a")


def test_no_tenant_makes_another_s_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_RESPONSES", 10)
    found = known(("mine", "quiet"), *[(f"r{n}", "busy") for n in range(100)])
    assert found.find("mine")
    assert len(found) == 10


def test_an_id_stays_whose_it_was() -> None:
    found = known(("a", "first"), ("a", "second"))
    location = found.find("a")
    assert location is not None
    assert location.tenant == "first"


def test_what_the_workers_of_one_pool_stored_is_forgotten_when_they_are_gone() -> None:
    found = ResponseAffinity()
    for pool in "01":
        for worker in range(3):
            location = ResponseLocation(pool, worker, f"t{worker}")
            found.remember(f"{pool}.{worker}", location)
    found.left("0", {0, 2})
    assert [name for name in ("0.0", "0.1", "0.2", "1.0", "1.2") if found.find(name)] == [
        "0.1",
        "1.0",
        "1.2",
    ]
