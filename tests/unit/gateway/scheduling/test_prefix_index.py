"""Who holds how much of a prompt: bounded, learned, and never claimed of the wrong worker."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduling.prefix_index import MIN_ENTRIES, ExpectedHit, PrefixIndex
from sluice.build import compiled

Points = tuple[tuple[int, int], ...]


def prompt(name: int, tokens: int, *, step: int = 100, shared: int = 0) -> Points:
    """Points every `step` tokens; those up to `shared` are any prompt's."""
    return tuple(
        (length, hash((0 if length <= shared else name, length)))
        for length in range(step, tokens + 1, step)
    )


def test_the_longest_match_comes_first_and_masks_grow() -> None:
    index = PrefixIndex(3)
    index.insert(prompt(1, 1000, shared=300), 0)
    index.insert(prompt(1, 500, shared=300), 1)
    index.insert(prompt(2, 800, shared=300), 2)
    assert index.match(prompt(1, 2000, shared=300)) == [(1000, 0b001), (500, 0b011), (300, 0b111)]


def test_a_forgotten_worker_holds_nothing_until_it_is_sent_something() -> None:
    index = PrefixIndex(2)
    for worker in (0, 1):
        index.insert(prompt(1, 1000), worker)
    index.forget(0)
    assert index.match(prompt(1, 1000)) == [(1000, 0b10)]
    index.insert(prompt(1, 1200), 1)  # touching what it once had does not bring it back
    assert index.match(prompt(1, 1200)) == [(1200, 0b10)]
    assert index.insert(prompt(1, 500), 0).known_tokens == 0
    assert index.match(prompt(1, 1200)) == [(1200, 0b10), (500, 0b11)]


def test_what_a_full_cache_lets_go_is_not_expected() -> None:
    index = PrefixIndex(1, capacity_tokens=10_000)
    index.insert(prompt(1, 2000), 0)
    for name in range(2, 5):
        index.insert(prompt(name, 2000), 0)
    assert index.match(prompt(1, 2000)) == [(2000, 1)]
    for name in range(5, 8):
        index.insert(prompt(name, 2000), 0)
    assert index.match(prompt(1, 2000)) == []
    expected = index.insert(prompt(1, 2000), 0)
    assert expected == ExpectedHit(0, 2000, 14_000)


def test_hits_do_not_fill_a_cache() -> None:
    index = PrefixIndex(1, capacity_tokens=10_000)
    index.insert(prompt(1, 2000), 0)
    for _ in range(50):
        index.insert(prompt(2, 2000), 0)
    assert index.match(prompt(1, 2000)) == [(2000, 1)]


def test_a_failed_prompt_is_taken_back_and_what_was_there_stays() -> None:
    index = PrefixIndex(2)
    index.insert(prompt(1, 500), 0)
    longer = prompt(1, 1000)
    expected = index.insert(longer, 0)
    index.withdraw(longer, 0, expected)
    assert index.match(longer) == [(500, 0b01)]


def serve(index: PrefixIndex, points: Points, *, cache: list[int], capacity: int) -> None:
    """An engine with an LRU cache of whole prompts, of this one's length."""
    name = points[-1][1]
    cached = points[-1][0] if name in cache[-capacity // points[-1][0] :] else 0
    if name in cache:
        cache.remove(name)
    cache.append(name)
    index.correct(0, index.insert(points, 0), cached)


@pytest.mark.parametrize("start", [10_000, 2_000_000])
def test_a_capacity_is_learned_from_what_engines_report(start: int) -> None:
    rng = random.Random(5)
    index = PrefixIndex(1, capacity_tokens=start)
    cache: list[int] = []
    for _ in range(3000):
        name = min(int(rng.expovariate(1 / 60)), 400)
        serve(index, prompt(name, 1000), cache=cache, capacity=60_000)
    assert 30_000 < index.capacity_tokens[0] < 90_000


def test_a_worker_whose_cache_is_off_is_not_expected_to_hit() -> None:
    index = PrefixIndex(2)
    points = prompt(1, 1000)
    for _ in range(60):
        for worker in (0, 1):
            expected = index.insert(points, worker)
            index.correct(worker, expected, expected.known_tokens if worker else 0)
    assert index.match(points) == [(1000, 0b10)]
    for _ in range(20):
        index.correct(0, index.insert(points, 0), 1000)
    assert index.match(points) == [(1000, 0b11)]


def test_two_alike_side_by_side_do_not_teach_a_small_cache() -> None:
    index = PrefixIndex(1, capacity_tokens=100_000)
    points = prompt(1, 2000)
    index.insert(points, 0)
    for _ in range(20):
        index.correct(0, index.insert(points, 0), 0)
    assert index.capacity_tokens == [100_000]


def test_reports_beyond_what_was_expected_break_nothing() -> None:
    index = PrefixIndex(1, capacity_tokens=50_000)
    for cached in (10**9, -5, 0):
        index.correct(0, index.insert(prompt(1, 1000), 0), cached)
    assert index.match(prompt(1, 1000)) == [(1000, 1)]
    assert index.capacity_tokens == [50_000]


@pytest.mark.parametrize("entries", [MIN_ENTRIES, 20_000])
def test_entries_never_pass_their_limit_and_the_latest_stay(entries: int) -> None:
    rng = random.Random(3)
    index = PrefixIndex(4, max_entries=entries, capacity_tokens=10**12)
    for name in range(2000):
        points = prompt(name, 100 * rng.randint(1, 62), shared=500)
        worker = name % 4
        index.insert(points, worker)
        assert len(index) <= entries
        assert index.match(points)[0] == (points[-1][0], 1 << worker) or points[-1][0] <= 500
    assert len(index) > entries // 2
    assert index.match(prompt(10**9, 500, shared=500)) == [(500, 0b1111)]


def test_memory_of_an_index_that_is_hammered_stays_bounded() -> None:
    index = PrefixIndex(2, max_entries=MIN_ENTRIES)
    for turn in range(3000):  # touched over and over: never evicted, never kept twice
        index.insert(prompt(turn % 5, 6200), turn % 2)
    kept = sum(len(chunk) for _, chunk in index._chunks) + len(index._chunk)
    assert len(index) == 5 * 62
    assert kept <= MIN_ENTRIES


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "forget", "correct"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    max_size=80,
)


@settings(max_examples=150)
@given(STEPS, st.sampled_from([2_000, 20_000, 10**9]))
def test_a_match_is_ordered_and_names_only_who_was_sent_so_much(
    steps: list[tuple[str, int, int, int]], capacity: int
) -> None:
    index = PrefixIndex(3, max_entries=MIN_ENTRIES, capacity_tokens=capacity)
    sent: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for kind, worker, name, length in steps:
        points = prompt(name, length * 100, shared=700)
        if kind == "forget":
            index.forget(worker)
            sent[worker].clear()
        else:
            expected = index.insert(points, worker)
            assert 0 <= expected.hit_tokens <= expected.known_tokens <= points[-1][0]
            if kind == "correct":
                index.correct(worker, expected, length)
            sent[worker].update(digest for _, digest in points)
        found = index.match(points)
        tokens = [match[0] for match in found]
        assert tokens == sorted(set(tokens), reverse=True)
        at = dict(points)
        before = 0
        for length_tokens, mask in found:
            assert mask & before == before
            assert mask != before
            before = mask
            for other in range(3):
                assert not mask >> other & 1 or at[length_tokens] in sent[other]


def test_a_prompt_of_gossip_may_come_when_all_workers_are_gone() -> None:
    index = PrefixIndex(1)
    index.left(0)
    index.insert(prompt(1, 1000), 0)
    assert index.match(prompt(1, 1000)) == []


@pytest.mark.skipif(compiled(), reason="calls of compiled code cannot be counted")
def test_workers_that_come_together_cost_one_rebuild_of_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = PrefixIndex(50)
    for worker in range(50):
        index.insert(prompt(1, 1000), worker)
    rebuilds: list[float] = []
    rebuild = index._rebuild

    def counted(clock: float) -> None:
        rebuilds.append(clock)
        rebuild(clock)

    monkeypatch.setattr(index, "_rebuild", counted)
    for worker in range(1, 50):
        index.left(worker)
        index.joined(worker)
    assert index.match(prompt(1, 1000)) == [(1000, 1)]
    assert len(rebuilds) == 1
