"""The least weight in force, whatever came and went, and no step that grows with all of them."""

from random import Random

import pytest

from gateway.policy.token_pool.counters import MAX_RUN, LeaseWeights


@pytest.mark.parametrize("different", [1, 40, 1_000_000])
def test_the_least_is_that_of_the_leases_in_force(different: int) -> None:
    draw = Random(different)
    weights, held = LeaseWeights(), list[float]()
    for number in range(8_000):
        if held and draw.random() < 0.48:
            weights.discard(held.pop(draw.randrange(len(held))))
        else:
            held.append(float(draw.randrange(different)))
            weights.add(held[-1])
        if number % 20 == 0:
            assert weights.lowest() == min(held, default=0.0)
    assert list(weights) == sorted(held)
    assert len(weights) == len(held)


def test_no_change_moves_more_than_a_part() -> None:
    weights = LeaseWeights()
    for number in range(50_000):
        weights.add(number * 7919 % 50_000)
        if number % 1000 == 0:
            assert weights.longest_run <= MAX_RUN
    for number in range(0, 50_000, 2):
        weights.discard(number)
    assert len(weights) == 25_000
    assert weights.longest_run <= MAX_RUN


def test_what_is_not_there_is_no_failure() -> None:
    weights = LeaseWeights()
    weights.discard(1.0)
    weights.add(2.0)
    for other in (1.0, 3.0):
        weights.discard(other)
    assert list(weights) == [2.0]
    weights.discard(2.0)
    assert (len(weights), weights.lowest()) == (0, 0.0)
