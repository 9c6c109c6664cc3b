"""Prompts that one process sent are known to the others, once each."""

from typing import Any

import msgspec

from gateway.policy.prefix_index import PrefixIndex
from gateway.policy.prefix_news import CHECK, MOST_POINTS, PrefixNews

PROMPT = tuple((512 * n, 1000 + n) for n in range(1, 9))
POINT = (512).to_bytes(8, "little") + (-1).to_bytes(8, "little", signed=True)


def heard() -> PrefixNews:
    """Of a process that others listen to."""
    news = PrefixNews()
    news.listened(by_others=True)
    return news


def told(news: PrefixNews) -> dict[str, Any]:
    """As it comes out at the other end of a wire."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(news.tell()))
    return found


def test_what_one_process_sent_another_expects_at_that_worker() -> None:
    teller, hearer, index = heard(), PrefixNews(), PrefixIndex(2)
    teller.sent(PROMPT, 1, 0.25)
    assert hearer.hear({"a": told(teller)}, index) == 1
    assert index.match(PROMPT, 0.25)[0] == (1024, 0b10)


def test_a_prompt_is_told_twice_and_heard_once() -> None:
    teller, hearer, index = heard(), PrefixNews(), PrefixIndex(2)
    teller.sent(PROMPT, 0, 0.25)
    assert [hearer.hear({"a": told(teller)}, index) for _ in range(3)] == [1, 0, 0]
    teller.sent(PROMPT, 1, 0.25)
    missed = told(teller)
    assert len(missed["prompts"]) == 1
    assert hearer.hear({"a": told(teller)}, index) == 1


def test_processes_with_another_key_do_not_understand_one_another() -> None:
    teller, hearer, index = heard(), PrefixNews(), PrefixIndex(2)
    teller.sent(PROMPT, 1, 0.25)
    note = told(teller) | {"check": CHECK + 1}
    assert hearer.hear({"a": note}, index) == 0
    assert len(index) == 0


def test_what_is_told_at_a_time_is_bounded_and_the_newest() -> None:
    teller = heard()
    for worker in range(1000):
        teller.sent(PROMPT, worker % 2, 0.25)
    note = told(teller)
    points = sum(len(prompt[3]) // 16 for prompt in note["prompts"])
    assert MOST_POINTS - len(PROMPT) < points <= MOST_POINTS
    assert note["prompts"][-1][0] == 1000


def test_what_is_malformed_is_ignored() -> None:
    hearer, index = PrefixNews(), PrefixIndex(2)
    bad: list[Any] = [
        None,
        [],
        [1, 0, 0.25],
        [1, 2, 0.25, POINT],
        [1, -1, 0.25, POINT],
        ["1", 0, 0.25, POINT],
        [1, 0, "x", POINT],
        [1, 0, 1e9, POINT],
        [0, 0, 0.25, POINT],
        [1, 0, 0.25, POINT[:8]],
        [1, 0, 0.25, [[1, 2]]],
        [1, 0, 0.25, 7],
        [1, 0, 0.25, b""],
    ]
    assert hearer.hear({"a": {"check": CHECK, "prompts": bad}}, index) == 0
    assert hearer.hear({"a": {"check": CHECK, "prompts": 3}, "b": {}}, index) == 0
    assert len(index) == 0
    good = [1, 0, 0.25, POINT]
    assert hearer.hear({"a": {"check": CHECK, "prompts": [*bad, good]}}, index) == 1


def test_where_nobody_listens_nothing_is_kept() -> None:
    alone = PrefixNews()
    for _ in range(100):
        alone.sent(PROMPT, 0, 0.25)
    assert len(alone) == 0
    teller = heard()
    teller.sent(PROMPT, 0, 0.25)
    assert len(teller) == 1
    teller.listened(by_others=False)
    assert len(teller) == 0


def test_what_was_told_often_enough_is_forgotten() -> None:
    teller = heard()
    for _ in range(50):
        teller.sent(PROMPT, 0, 0.25)
    kept = []
    for _ in range(3):
        teller.tell()
        kept.append(len(teller))
    assert kept == [50, 50, 0]
