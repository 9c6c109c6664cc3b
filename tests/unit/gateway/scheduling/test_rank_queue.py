"""The central pool's order."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.rank_load import RankLine
from gateway.scheduling.scheduler import Job


def job(order: int, key: float = 0.0, priority_class: int = 1, preferred: int = -1) -> Job:
    made = Job(
        owner=None,
        prompt_tokens=1,
        output_tokens=1,
        arrived_s=0.0,
        priority_class=priority_class,
        preferred=preferred,
    )
    made.key, made.order = key, order
    return made


def test_who_must_go_to_one_rank_stands_apart_until_that_rank_is_away() -> None:
    line = RankLine()
    preferring, free = job(0, preferred=3), job(1)
    line.put(preferring)
    line.put(free)
    assert line.first(1, 9) == [free]
    assert line.preferring(3, 1, 9) == [preferring]
    assert line.preferred_ranks == [3]
    line.release(3)
    assert line.first(1, 9) == [preferring, free]
    assert line.preferred_ranks == []
    line.take(preferring)
    assert set(line.all()) == {free}


@given(
    st.lists(
        st.tuples(
            st.floats(0, 9), st.integers(0, 2), st.sampled_from([-1, -1, 0, 1]), st.booleans()
        ),
        max_size=30,
    )
)
def test_what_is_put_and_not_taken_waits_in_order(
    given_jobs: list[tuple[float, int, int, bool]],
) -> None:
    line, kept = RankLine(), []
    for order, (key, priority_class, preferred, stays) in enumerate(given_jobs):
        one = job(order, key, priority_class, preferred)
        line.put(one)
        if stays:
            kept.append(one)
        else:
            line.take(one)
    assert set(line.all()) == set(kept)
    assert line.total == len(kept) == sum(line.waiting)
    for priority_class in range(3):
        found = line.first(priority_class, 99)
        free = [one for one in kept if one.priority_class == priority_class and one.preferred < 0]
        assert found == sorted(free, key=lambda one: (one.key, one.order))
