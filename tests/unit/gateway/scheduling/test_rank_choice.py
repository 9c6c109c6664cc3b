"""The short ways of the rank group's choice, held against the objective and the solver."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduling import rank_solver as solver
from gateway.scheduling.rank_group import choose
from gateway.scheduling.scheduler import Job, Match

NEVER = float("inf")


def job(prompt: int, match: Match = ()) -> Job:
    return Job(owner=None, prompt_tokens=prompt, output_tokens=1, arrived_s=0.0, match=match)


def pick(
    loads: Sequence[float],
    caps: Sequence[int],
    jobs: Sequence[Job],
    waits: Sequence[float] | None = None,
    maxage: float = NEVER,
) -> list[tuple[int, int]]:
    ranks = range(len(loads))
    return choose(solver.assign, ranks, loads, caps, jobs, waits or [0.0] * len(jobs), maxage)


def imbalance(loads: Sequence[float], pairs: list[tuple[int, int]], jobs: Sequence[Job]) -> float:
    after = list(loads)
    for item, index in pairs:
        after[index] += jobs[item].prompt_tokens
    return len(after) * max(after) - sum(after)


def test_a_tie_goes_to_the_rank_that_holds_more_of_the_prompt() -> None:
    assert pick([0, 0, 0], [1, 1, 1], [job(64, match=((48, 0b100), (16, 0b110)))]) == [(0, 2)]


def test_who_was_passed_over_for_too_long_goes_first() -> None:
    jobs = [job(10), job(99), job(20)]
    assert pick([900, 1000], [1, 0], jobs, [0.0, 1.0, 5.0], maxage=4.0) == [(2, 0)]


loads = st.lists(st.integers(0, 5000), min_size=2, max_size=6)


@given(loads=loads, size=st.integers(1, 3000), data=st.data())
@settings(max_examples=100, deadline=None)
def test_one_request_is_placed_as_the_solver_places_it(
    loads: list[int], size: int, data: st.DataObject
) -> None:
    caps = data.draw(st.lists(st.integers(0, 2), min_size=len(loads), max_size=len(loads)))
    jobs = [job(size)]
    mine = pick(loads, caps, jobs)
    theirs = solver.assign(loads, caps, [size], [0.0], maxage=None)
    assert imbalance(loads, mine, jobs) == imbalance(loads, theirs, jobs)
    assert len(mine) == len(theirs)


@given(loads=loads, sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_one_slot_is_filled_as_well_as_it_can_be(loads: list[int], sizes: list[int]) -> None:
    jobs = [job(size) for size in sizes]
    caps = [1] + [0] * (len(loads) - 1)
    mine = imbalance(loads, pick(loads, caps, jobs), jobs)
    assert mine == min(imbalance(loads, [(i, 0)], jobs) for i in range(len(jobs)))


@given(loads=loads, sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_free_slot_is_filled_once(
    loads: list[int], sizes: list[int], data: st.DataObject
) -> None:
    caps = data.draw(st.lists(st.integers(0, 3), min_size=len(loads), max_size=len(loads)))
    pairs = pick(loads, caps, [job(size) for size in sizes])
    assert len(pairs) == min(len(sizes), sum(caps))
    assert len({item for item, _ in pairs}) == len(pairs)
    for index, cap in enumerate(caps):
        assert sum(at == index for _, at in pairs) <= cap
