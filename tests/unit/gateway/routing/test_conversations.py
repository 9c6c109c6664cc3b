"""Conversations: prompts served unchanged are known again; stored responses find their worker."""

import json

import pytest

from gateway.payload.members import by_name
from gateway.routing import routing
from gateway.routing.routing import Conversations, ResponseAffinity, ResponseLocation
from gateway.scheduling.prefix_index import points_of
from gateway.scheduling.scheduler import Points

BEGIN = "The first turn is longer than what beginnings are told apart by. " * 8


def prompt(*texts: str, endpoint: str = "chat", **more: object) -> Points:
    name = "input" if endpoint == "responses" else "messages"
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    turns = [{"role": roles[i], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": "m", name: turns, **more}).encode()
    return points_of(endpoint, by_name(body), len(body))


@pytest.mark.parametrize("endpoint", ["chat", "messages", "responses"])
def test_the_next_turn_continues_what_was_served(endpoint: str) -> None:
    known = Conversations()
    known.remember("t", prompt(BEGIN, "one", endpoint=endpoint))
    for texts in ((BEGIN, "one"), (BEGIN, "one", "said"), (BEGIN, "one", "said", "two")):
        assert known.continues("t", prompt(*texts, endpoint=endpoint))
    assert not known.continues("t", prompt(BEGIN, "other", "said", "two", endpoint=endpoint))
    assert not known.continues("t", prompt(BEGIN, endpoint=endpoint)), "an earlier turn is another"
    assert not known.continues("u", prompt(BEGIN, "one", "said", "two", endpoint=endpoint))


def test_many_with_one_system_prompt_are_all_known() -> None:
    """What an application begins all of its prompts with tells none of them apart."""
    known = Conversations()
    for number in range(300):
        known.remember("t", prompt(BEGIN, f"question {number}"))
    for number in range(300):
        assert known.continues("t", prompt(BEGIN, f"question {number}", "said", "next"))
    assert not known.continues("t", prompt(BEGIN, "question 300", "said", "next"))


def test_with_other_tools_it_is_another_prompt() -> None:
    known = Conversations()
    known.remember("t", prompt(BEGIN, "one", tools=[{"type": "function"}]))
    assert not known.continues("t", prompt(BEGIN, "one", "said", "two"))
    assert known.continues("t", prompt(BEGIN, "one", "said", tools=[{"type": "function"}]))


def test_the_longest_unused_are_forgotten_first() -> None:
    known = Conversations(capacity=4)
    for name in "abcad":
        known.remember("t", prompt(name + BEGIN))
        assert len(known) <= 4
    found = [known.continues("t", prompt(name + BEGIN, "said", "next")) for name in "abcd"]
    assert found == [True, False, True, True]


def known(*owned: tuple[str, str]) -> ResponseAffinity:
    """Responses remembered in order, each (id, tenant)."""
    found = ResponseAffinity()
    for response_id, tenant in owned:
        found.remember(response_id, ResponseLocation("p", 0, tenant, 1))
    return found


def test_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_RESPONSES", 2)
    found = known(("a", "t"), ("b", "t"), ("c", "t"))
    assert [bool(found.find(name)) for name in "abc"] == [False, True, True]
    assert len(found) == 2


def test_no_tenant_makes_another_s_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_RESPONSES", 10)
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
