"""A conversation that was served as it came is known again by its next turn, and bounded."""

import json

import pytest

from gateway.payload.members import by_name
from gateway.routing.conversations import Conversations
from gateway.scheduling.prefix_digests import points_of
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
    known = Conversations(kept=4)
    for name in "abcad":
        known.remember("t", prompt(name + BEGIN))
        assert len(known) <= 4
    found = [known.continues("t", prompt(name + BEGIN, "said", "next")) for name in "abcd"]
    assert found == [True, False, True, True]


def test_what_is_too_short_for_a_prefix_is_no_conversation() -> None:
    known = Conversations()
    known.remember("t", prompt("hi"))
    assert len(known) == 0
    assert not known.continues("t", prompt("hi"))
