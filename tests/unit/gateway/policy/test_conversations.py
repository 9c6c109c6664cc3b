"""A conversation that was served as it came is known again by its next turn, and bounded."""

import json

from gateway.policy.conversations import PER_START, Conversations
from gateway.policy.members import Members, by_name

BEGIN = "The first turn is longer than what beginnings are told apart by. " * 8


def body(*texts: str, name: str = "messages") -> Members:
    turns = [{"role": "user", "content": text} for text in texts]
    return by_name(json.dumps({"model": "m", name: turns}).encode())


def test_the_next_turn_continues_what_was_served() -> None:
    known = Conversations()
    known.remember("t", body(BEGIN, "one"))
    assert known.continues("t", body(BEGIN, "one"))
    assert known.continues("t", body(BEGIN, "one", "two"))
    assert not known.continues("t", body(BEGIN, "other", "two"))
    assert not known.continues("t", body(BEGIN)), "an earlier turn is another list"
    assert not known.continues("other tenant", body(BEGIN, "one", "two"))


def test_lists_that_begin_alike_are_told_apart_by_all_of_them() -> None:
    known = Conversations()
    for number in range(PER_START + 1):
        known.remember("t", body(BEGIN, f"turn {number}"))
    known.remember("t", body(BEGIN, f"turn {PER_START}"))
    found = [known.continues("t", body(BEGIN, f"turn {n}", "next")) for n in range(PER_START + 1)]
    assert found == [False] + [True] * PER_START
    assert len(known) == 1


def test_the_longest_unused_is_forgotten_first() -> None:
    known = Conversations(kept=2)
    for name in ("a", "b", "a", "c"):
        known.remember("t", body(name + BEGIN, name="input"))
    assert len(known) == 2
    assert [known.continues("t", body(n + BEGIN, "next", name="input")) for n in "abc"] == [
        True,
        False,
        True,
    ]


def test_a_body_without_a_list_is_no_conversation() -> None:
    known = Conversations()
    members = by_name(b'{"model": "m", "input": "text"}')
    known.remember("t", members)
    assert len(known) == 0
    assert not known.continues("t", members)
