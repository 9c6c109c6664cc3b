"""Lengths: what is drawn is what the distribution says."""

import numpy as np
import pytest

from simulator.fleet.traffic import (
    CdfLengths,
    PairLengths,
)
from tests.unit.simulator.fleets import requests

POINTS = [(100, 0.25), (1000, 0.75), (10_000, 1.0)]


def test_totals_follow_the_breakpoints_and_split_as_the_paper_says() -> None:
    prompts, outputs = CdfLengths(POINTS, 0.8).sample(200_000, np.random.default_rng(0))
    totals = prompts + outputs
    for tokens, share in [*POINTS, (550, 0.5), (5500, 0.875)]:
        assert (totals <= tokens).mean() == pytest.approx(share, abs=0.005)
    assert totals.min() == 2  # a total of one token still has a prompt and an answer
    long = totals > 10
    assert (prompts[long] == (0.8 * totals[long]).astype(int)).all()


def test_pairs_come_as_often_as_they_weigh() -> None:
    lengths = PairLengths([10, 20, 30], [1.5, 2, 3], [3.0, 0.0, 1.0])
    prompts, outputs = lengths.sample(20_000, np.random.default_rng(0))
    assert (prompts == 10).mean() == pytest.approx(0.75, abs=0.02)
    assert not (prompts == 20).any()
    assert set(outputs.tolist()) == {2, 3}
    with pytest.raises(ValueError, match="weight"):
        PairLengths([1, 2], [1, 2], [1.0])


@pytest.mark.parametrize(
    "rows",
    [
        ((1.0, 1, 1), (0.5, 1, 1)),
        ((-1.0, 1, 1),),
        ((float("nan"), 1, 1),),
        ((0.0, 0, 1),),
        ((0.0, 1, 0),),
    ],
)
def test_impossible_traffic_is_refused(rows: tuple[tuple[float, int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        requests(*rows)


@pytest.mark.parametrize(
    "points", [[], [(100, 0.5)], [(100, 0.6), (50, 1.0)], [(10, 0.5), (20, 0.4), (30, 1.0)]]
)
def test_what_is_no_distribution_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match=r"breakpoints|shares"):
        CdfLengths(points)
