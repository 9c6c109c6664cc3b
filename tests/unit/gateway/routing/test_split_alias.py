"""Weights are kept over many conversations, and each conversation keeps its model."""

import json
from typing import Any

from msgspec import Raw

from gateway.routing.split_alias import SplitAlias, conversation_key

SPLIT = SplitAlias("gpt-4o", {"a": 90, "b": 10})


def key(**members: Any) -> bytes:
    return conversation_key({name: Raw(json.dumps(v).encode()) for name, v in members.items()})


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def test_conversations_are_split_by_weight() -> None:
    chosen = [SPLIT.choose(SPLIT.models, "t", f"user-{n}".encode()) for n in range(10_000)]
    assert 0.88 < chosen.count("a") / len(chosen) < 0.92


def test_a_conversations_turns_share_their_key() -> None:
    system, first = message("be brief", "system"), message("hello")
    one = key(messages=[system, first])
    assert key(messages=[system, first, message("hi", "assistant"), message("more")]) == one
    assert key(messages=[system, message("bye")]) != one


def test_a_name_of_the_conversation_counts_before_its_text() -> None:
    said = [message("hello")]
    assert key(messages=said, user="u1") != key(messages=said, user="u2")
    assert key(messages=said, user="u", prompt_cache_key="c") == key(prompt_cache_key="c")
    assert key(messages=said, user=None) == key(messages=said)


def test_other_bodies_go_by_their_beginning() -> None:
    assert key(input="a text") != key(input="another")
    assert key(input=["a text", "more"]) == key(input=["a text"])
    assert key(prompt="x" * 5000 + "y") == key(prompt="x" * 5000 + "z")
    assert key(model="m") == b""
    assert key(messages=[]) == b""
