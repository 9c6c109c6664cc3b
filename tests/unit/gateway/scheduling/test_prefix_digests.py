"""Digests of a prompt's beginning: what two prompts share is found, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.payload.members import by_name
from gateway.scheduling import prefix_index as digests
from gateway.scheduling.prefix_index import (
    MAX_BYTES,
    MAX_LOGGED,
    MAX_POINTS,
    POSITIONS,
    keyed_digests,
    points_of,
)
from gateway.scheduling.scheduler import Points

WORDS = "It was the policy of the gateway to remember how every conversation began. "


def chat(*messages: str, compact: bool = False, **fields: Any) -> bytes:
    roles = ("system", "user", "assistant")
    listed = [
        {"role": roles[0 if not i else 1 + (i + 1) % 2], "content": text}
        for i, text in enumerate(messages)
    ]
    separators = (",", ":") if compact else None
    return json.dumps({"model": "m", "messages": listed, **fields}, separators=separators).encode()


def points(body: bytes, endpoint: str = "chat", tenant: str = "", adapter: str = "") -> Points:
    return points_of(endpoint, by_name(body), len(body), tenant, adapter)


def shared(first: Points, second: Points) -> int:
    """Longest common length, in bytes."""
    return max((length for length, _ in set(first) & set(second)), default=0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("then", [["An answer.", "And now?"], ["Calls four tools.", *[WORDS] * 4]])
def test_the_next_turn_finds_the_end_of_the_last_one(then: list[str], compact: bool) -> None:
    turn = [WORDS * 20, WORDS * 3]
    before = points(chat(*turn, compact=compact))
    after = points(chat(*turn, *then, compact=compact))
    assert shared(before, after) == before[-1][0]


def test_what_follows_the_messages_does_not_matter() -> None:
    turn = (WORDS * 20, "Go on.")
    plain = points(chat(*turn))
    assert points(chat(*turn, max_tokens=7, stream=True, stop=["}"])) == plain


def test_prompts_with_one_system_prompt_share_exactly_that() -> None:
    system = WORDS * 40
    first, second = points(chat(system, "What is it?")), points(chat(system, "Who is it?"))
    message = len(json.dumps({"role": "system", "content": system}))
    assert shared(first, second) == message + 1  # the list's bracket


def test_tools_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": WORDS * 10}}]
    first, second = points(chat("a" * 900, tools=tools)), points(chat("b" * 900, tools=tools))
    assert shared(first, second) == len(json.dumps(tools))
    assert not set(first) & set(points(chat("a" * 900)))


def test_a_difference_inside_ends_what_is_shared() -> None:
    text = WORDS * 400
    other = text[:15_000] + "!" + text[15_001:]
    found = shared(points(chat(text)), points(chat(other)))
    assert 15_000 / 1.15 < found <= 15_100


def test_tenants_adapters_templates_and_endpoints_are_apart() -> None:
    body = chat(WORDS * 30)
    sets = [
        points(body),
        points(body, tenant="tenant-a"),
        points(body, tenant="tenant-b"),
        points(body, adapter="adapter-a"),
        points(body, tenant="tenant-a", adapter="adapter-a"),
        points(body, endpoint="messages"),
        points(chat(WORDS * 30, chat_template_kwargs={"thinking": True})),
    ]
    assert len({digest for each in sets for _, digest in each}) == sum(map(len, sets))


def test_tenants_share_points_where_engines_share_their_caches() -> None:
    body = chat(WORDS * 30)
    members, size = by_name(body), len(body)
    assert points_of("chat", members, size, "tenant-a", salted=False) == points(body)
    found = points_of("chat", members, size, "tenant-a", "adapter-a", salted=False)
    assert found == points(body, adapter="adapter-a")


def test_responses_items_without_roles_are_messages_too() -> None:
    items: list[Any] = [{"type": "message", "role": "user", "content": WORDS * 20}]
    before = points(json.dumps({"model": "m", "input": items}).encode(), "responses")
    items += [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": WORDS},
    ]
    after = points(json.dumps({"model": "m", "input": items}).encode(), "responses")
    assert shared(before, after) == before[-1][0]


def test_an_input_text_of_responses_and_a_system_prompt_of_messages_count() -> None:
    body = json.dumps({"model": "m", "instructions": WORDS * 10, "input": WORDS}).encode()
    assert points(body, "responses")[-1][0] == len(json.dumps(WORDS * 10) + json.dumps(WORDS))
    first = json.dumps({"model": "m", "system": WORDS * 10, "messages": [{"role": "user"}]})
    assert points(first.encode(), "messages")[0][0] == 512


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank", "score", "tokenize", "speech"])
def test_other_endpoints_have_none(endpoint: str) -> None:
    assert points(chat(WORDS * 30), endpoint) == ()


def test_a_very_long_prompt_has_few_points() -> None:
    found = points(chat(WORDS * 80_000, *("x" * 300 for _ in range(20))))
    assert len(POSITIONS) < len(found) <= MAX_POINTS


@given(
    st.lists(st.text(max_size=2000), min_size=1, max_size=12),
    st.lists(st.text(max_size=2000), min_size=1, max_size=12),
    st.booleans(),
)
def test_points_ascend_and_equal_digests_mean_equal_bytes(
    first: list[str], second: list[str], compact: bool
) -> None:
    bodies = [chat(*texts, compact=compact) for texts in (first, second)]
    lists = [body[body.index(b"[") :] for body in bodies]
    found = [points(body) for body in bodies]
    for each in found:
        lengths = [length for length, _ in each]
        assert lengths == sorted(set(lengths))
        assert len(each) <= MAX_POINTS
    for length, _ in set(found[0]) & set(found[1]):
        assert lists[0][:length] == lists[1][:length]


@pytest.mark.parametrize("endpoint", ["chat", "completions", "messages"])
def test_of_a_very_long_prompt_only_the_beginning_and_the_end_are_looked_at(endpoint: str) -> None:
    """An image of 12 MB in a conversation took 50 ms to digest."""
    image = "A" * (3 * MAX_BYTES)

    def of(*texts: str) -> Points:
        if endpoint == "completions":
            return points(json.dumps({"prompt": "".join(texts)}).encode(), endpoint)
        return points(chat(*texts, system="Be brief."), endpoint)

    one, same, longer = of(WORDS, image), of(WORDS, image), of(WORDS, image, "And now?")
    assert one == same
    assert len(one) <= MAX_POINTS
    assert one[-1][0] > 3 * MAX_BYTES
    assert shared(one, longer) == MAX_BYTES
    short = of(WORDS, image[:20_000])
    assert shared(one, short) > 15_000
    assert shared(one, of("other" + WORDS, image)) == 0


def test_the_end_of_a_very_long_prompt_tells_it_from_others() -> None:
    image = "A" * (3 * MAX_BYTES)
    assert points(chat(WORDS, image))[-1] != points(chat(WORDS, image[:-1] + "B"))[-1]


def test_digests_compare_under_one_seed_only() -> None:
    before, data = digests.seed(), b"x" * 2000
    members = {"messages": Raw(b'[{"role":"user","content":"%b"}]' % data)}
    try:
        digests.use_seed(1)
        one = digests.points_of("chat", members, 2000)
        digests.use_seed(2)
        two = digests.points_of("chat", members, 2000)
        digests.use_seed(1)
        assert digests.points_of("chat", members, 2000) == one
    finally:
        digests.use_seed(before)
    assert [at for at, _ in one] == [at for at, _ in two]
    assert not {digest for _, digest in one} & {digest for _, digest in two}
    assert all(0 <= digest < 2**63 for _, digest in one)


def test_salt_and_template_settings_do_not_run_into_one_another() -> None:
    def first(salt: str, kwargs: bytes) -> int:
        members = {
            "messages": Raw(b'[{"role":"user","content":"%b"}]' % (b"x" * 2000)),
            "chat_template_kwargs": Raw(kwargs),
        }
        return digests.points_of("chat", members, 2000, salt)[0][1]

    assert len({first("a", b"bc"), first("ab", b"c"), first("", b"abc")}) == 3


def test_the_log_gets_the_edges_and_the_octaves_of_a_long_prompt_under_its_key() -> None:
    first = points(chat(WORDS * 300, WORDS * 20, "An answer.", *[WORDS] * 6))
    assert len(first) > MAX_LOGGED
    logged = keyed_digests(first, b"one key")
    lengths = [length for length, _ in logged]
    assert len(logged) <= MAX_LOGGED
    assert lengths == sorted(lengths)
    assert lengths[-1] == first[-1][0]
    edges = {length for length, _ in first} - set(POSITIONS)
    assert edges <= set(lengths)
    assert {2048, 4096, 8192, 16384} <= set(lengths)
    # Only who has the key can tell which prompt it was.
    assert logged == keyed_digests(first, b"one key")
    others = {digest for _, digest in keyed_digests(first, b"another key")}
    assert not {digest for _, digest in logged} & others
    assert max(others) < 2**40
