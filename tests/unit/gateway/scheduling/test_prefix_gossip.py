"""Prompts that one process sent are known to the others, once each."""

import struct
from typing import Any

import msgspec
import pytest

from gateway.scheduling.prefix_gossip import MAX_POINTS, MAX_RUNS, SLICE_POINTS, PrefixGossip, check
from gateway.scheduling.prefix_index import PrefixIndex

PROMPT = tuple((512 * n, 1000 + n) for n in range(1, 9))
RUN, POINT_BYTES = struct.Struct("<IId"), 16
POINT = struct.pack("<qq", 512, -1)


def other(number: int) -> tuple[tuple[int, int], ...]:
    """A prompt that shares nothing with those of other numbers."""
    return tuple((512 * n, 1000 * number + n) for n in range(1, 9))


def heard() -> PrefixGossip:
    """Of a process that others listen to."""
    gossip = PrefixGossip()
    gossip.listened(by_others=True)
    return gossip


def told(gossip: PrefixGossip) -> dict[str, Any]:
    """As it comes out at the other end of a wire."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(gossip.chapters()))
    return found


def runs(note: dict[str, Any]) -> list[tuple[int, int]]:
    """Worker and number of points of each run of the newest chapter."""
    chapter, at, found = note["chapters"][-1][1], 0, []
    while at < len(chapter):
        worker, count, _ = RUN.unpack_from(chapter, at)
        found.append((worker, count))
        at += RUN.size + POINT_BYTES * count
    return found


def test_what_one_process_sent_another_expects_at_that_worker() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    teller.sent(PROMPT, 1, 0.25)
    assert sum(hearer.receive({"a": told(teller)}, index)) == 1
    assert index.match(PROMPT, 0.25)[0] == (1024, 0b10)


def test_what_an_engine_evicted_is_expected_nowhere_until_it_is_sent_again() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    teller.sent(PROMPT, 1, 1.0)
    for _, digest in PROMPT[2:]:
        teller.evicted(digest, 1)
    sum(hearer.receive({"a": told(teller)}, index))
    assert index.match(PROMPT) == [(1024, 0b10)]
    teller.evicted(PROMPT[0][1], 1)
    teller.sent(PROMPT, 1, 1.0)
    teller.evicted(PROMPT[-1][1], 1)
    teller.sent(PROMPT, 1, 1.0)
    sum(hearer.receive({"a": told(teller)}, index))
    assert index.match(PROMPT)[0] == (4096, 0b10)


def test_a_prompt_is_told_twice_and_heard_once() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    teller.sent(PROMPT, 0, 0.25)
    assert [sum(hearer.receive({"a": told(teller)}, index)) for _ in range(3)] == [1, 0, 0]
    teller.sent(PROMPT, 1, 0.25)
    missed = told(teller)
    assert len(missed["chapters"]) == 1
    teller.sent(other(7), 1, 0.25)
    assert sum(hearer.receive({"a": told(teller)}, index)) == 2


def test_of_a_prompt_that_grows_only_what_is_new_is_told() -> None:
    teller, own = heard(), PrefixIndex(2)
    hearer, index = PrefixGossip(), PrefixIndex(2)
    found = []
    for turn in range(3, 9):
        points = PROMPT[:turn]
        teller.sent(points, 1, 0.25, own.insert(points, 1, 0.25).hit_tokens)
        note = told(teller)
        found += runs(note)
        assert sum(hearer.receive({"a": note}, index)) == 1
        assert index.match(points, 0.25) == own.match(points, 0.25)
    assert found == [(1, 3), *[(1, 2)] * 5]  # with the point where it goes on
    assert index._clock == own._clock  # as much was written, as far as the hearer knows


def test_where_prompts_part_what_they_share_stays_young() -> None:
    """Each new conversation behind a common beginning touches the end of that."""
    teller, own = heard(), PrefixIndex(2)
    hearer, index = PrefixGossip(), PrefixIndex(2, capacity_tokens=2_000)
    for number in range(40):
        points = (*PROMPT[:2], *((512 * n, 1000 * number + n) for n in range(3, 9)))
        teller.sent(points, 0, 0.25, own.insert(points, 0, 0.25).hit_tokens)
        sum(hearer.receive({"a": told(teller)}, index))
    assert index.match(PROMPT[:2], 0.25) == [(256, 0b1)]


def test_a_prompt_that_comes_again_keeps_its_end_young() -> None:
    teller, own = heard(), PrefixIndex(2)
    hearer, index = PrefixGossip(), PrefixIndex(2)
    for _ in range(3):
        for _ in range(2):
            teller.sent(PROMPT, 0, 0.25, own.insert(PROMPT, 0, 0.25).hit_tokens)
        note = told(teller)
        sum(hearer.receive({"a": note}, index))
    assert runs(note) == [(0, 1)]
    assert index.match(PROMPT, 0.25)[0] == (1024, 0b1)


def test_a_run_that_waits_to_be_told_is_told_once() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    for worker in (0, 1, 0, 1, 0):
        teller.sent(PROMPT, worker, 0.25)
    assert sum(hearer.receive({"a": told(teller)}, index)) == 2
    teller.sent(PROMPT, 0, 0.25)
    assert sum(hearer.receive({"a": told(teller)}, index)) == 1
    assert sum(hearer.receive({"a": told(teller)}, index)) == 0


def test_processes_with_another_key_do_not_understand_one_another() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    teller.sent(PROMPT, 1, 0.25)
    note = told(teller) | {"check": check() + 1}
    assert sum(hearer.receive({"a": note}, index)) == 0
    assert len(index) == 0


def test_what_is_told_at_a_time_is_bounded_and_the_newest() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    for number in range(1000):
        teller.sent(other(number), number % 2, 0.25)
    note = told(teller)
    points = sum(count for _, count in runs(note))
    assert MAX_POINTS - len(PROMPT) < points <= MAX_POINTS
    assert sum(hearer.receive({"a": note}, index)) == points // len(PROMPT)
    assert index.match(other(999))
    assert not index.match(other(0))


@pytest.mark.parametrize(
    "chapter",
    [
        None,
        [],
        [1, 2, 3],
        [1, "text"],
        ["1", RUN.pack(0, 1, 0.25) + POINT],
        [0, RUN.pack(0, 1, 0.25) + POINT],
        [1, RUN.pack(2, 1, 0.25) + POINT],
        [1, RUN.pack(0, 0, 0.25)],
        [1, RUN.pack(0, 2, 0.25) + POINT],
        [1, RUN.pack(0, 1 << 31, 0.25) + POINT],
        [1, RUN.pack(0, 1, 1e9) + POINT],
        [1, RUN.pack(0, 1, float("nan")) + POINT],
        [1, POINT[:8]],
        [1, b""],
    ],
)
def test_what_is_malformed_is_ignored(chapter: Any) -> None:
    hearer, index = PrefixGossip(), PrefixIndex(2)
    assert sum(hearer.receive({"a": {"check": check(), "chapters": [chapter]}}, index)) == 0
    assert sum(hearer.receive({"a": {"check": check(), "chapters": 3}, "b": {}}, index)) == 0
    assert len(index) == 0
    good = [2, RUN.pack(0, 1, 0.25) + POINT]
    assert sum(hearer.receive({"a": {"check": check(), "chapters": [chapter, good]}}, index)) == 1


def test_a_run_that_cannot_be_spares_those_behind_it() -> None:
    hearer, index = PrefixGossip(), PrefixIndex(2)
    chapter = RUN.pack(9, 1, 0.25) + POINT + RUN.pack(1, 1, 0.25) + POINT
    assert sum(hearer.receive({"a": {"check": check(), "chapters": [[1, chapter]]}}, index)) == 1


def test_what_is_heard_is_entered_in_slices() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    for number in range(400):
        teller.sent(other(number), 0, 0.25)
    slices = list(hearer.receive({"a": told(teller)}, index))
    most = -(-SLICE_POINTS // len(PROMPT))
    assert sum(slices) == 400
    assert slices[:-1] == [most] * (400 // most)
    assert list(hearer.receive({"a": told(teller)}, index)) == []


def test_where_nobody_listens_nothing_is_kept() -> None:
    alone = PrefixGossip()
    for number in range(100):
        alone.sent(other(number), 0, 0.25)
    assert len(alone) == 0
    teller = heard()
    teller.sent(PROMPT, 0, 0.25)
    teller.chapters()
    teller.sent(other(1), 0, 0.25)
    assert len(teller) == 1
    teller.listened(by_others=False)
    assert len(teller) == 0
    assert teller.chapters()["chapters"] == []


def test_what_waits_to_be_told_is_bounded_and_the_newest() -> None:
    teller, hearer, index = heard(), PrefixGossip(), PrefixIndex(2)
    for number in range(MAX_RUNS + 100):
        teller.sent(((512, number),), 0, 0.25)
    assert len(teller) == MAX_RUNS
    assert sum(hearer.receive({"a": told(teller)}, index)) == MAX_RUNS
    assert index.match(((512, MAX_RUNS + 99),))
    assert not index.match(((512, 99),))
