"""Lengths: what is drawn is what the distribution says."""

import numpy as np
import pytest

from simulator.fleet.traffic import (
    CdfLengths,
    PairLengths,
    SplitLengths,
    Traffic,
    joined,
    selected,
    traffic,
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


def test_a_bucket_without_mass_is_never_drawn() -> None:
    points = [(10, 0.5), (20, 0.5), (30, 1.0)]
    prompts, outputs = CdfLengths(points, 0.5).sample(5000, np.random.default_rng(0))
    totals = prompts + outputs
    assert not ((totals > 10) & (totals <= 20)).any()
    assert (totals > 20).mean() == pytest.approx(0.5, abs=0.05)


def test_normal_shares_are_clipped() -> None:
    prompts, outputs = SplitLengths([(1000, 0.0), (2000, 1.0)], 0.1, 0.5).sample(
        20_000, np.random.default_rng(0)
    )
    share = outputs / (prompts + outputs)
    assert share.min() == pytest.approx(0.02, abs=0.001)
    assert share.max() == pytest.approx(0.95, abs=0.001)
    narrow = SplitLengths([(1000, 0.0), (2000, 1.0)], 0.75, 0.01).sample(
        20_000, np.random.default_rng(0)
    )
    assert (narrow[1] / sum(narrow)).mean() == pytest.approx(0.75, abs=0.001)


def test_pairs_stay_pairs() -> None:
    prompts, outputs = PairLengths([10, 20, 0], [1, 2, 3]).sample(1000, np.random.default_rng(0))
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 1), (20, 2), (1, 3)}


def test_pairs_come_as_often_as_they_weigh() -> None:
    lengths = PairLengths([10, 20, 30], [1.5, 2, 3], [3.0, 0.0, 1.0])
    prompts, outputs = lengths.sample(20_000, np.random.default_rng(0))
    assert (prompts == 10).mean() == pytest.approx(0.75, abs=0.02)
    assert not (prompts == 20).any()
    assert set(outputs.tolist()) == {2, 3}
    with pytest.raises(ValueError, match="weight"):
        PairLengths([1, 2], [1, 2], [1.0])


def test_a_seed_names_the_traffic() -> None:
    def drawn(seed: int) -> bytes:
        random = np.random.default_rng(seed)
        found = traffic(CdfLengths(POINTS), np.arange(50.0), random)
        return found.prompt_tokens.tobytes() + found.output_tokens.tobytes()

    assert drawn(1) == drawn(1) != drawn(2)


def test_what_is_selected_keeps_its_times() -> None:
    found = selected(requests((0.0, 1, 2), (1.0, 3, 4), (4.0, 5, 6)), np.array([True, False, True]))
    assert (found.arrival_s.tolist(), found.total_tokens.tolist()) == ([0.0, 4.0], [3, 11])
    assert found.rate_per_s == 0.5
    both = joined([found, requests((6.0, 7, 8))])
    assert (both.arrival_s.tolist(), both.total_tokens.tolist()) == ([0.0, 4.0, 6.0], [3, 11, 15])


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


def test_no_traffic_is_refused() -> None:
    none = np.array([], dtype=np.int64)
    with pytest.raises(ValueError, match="needs requests"):
        Traffic(arrival_s=none.astype(float), prompt_tokens=none, output_tokens=none)


@pytest.mark.parametrize(
    "points", [[], [(100, 0.5)], [(100, 0.6), (50, 1.0)], [(10, 0.5), (20, 0.4), (30, 1.0)]]
)
def test_what_is_no_distribution_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match=r"breakpoints|shares"):
        CdfLengths(points)


def test_other_lengths_check_their_input() -> None:
    with pytest.raises(ValueError, match="input share"):
        CdfLengths(POINTS, 1.0)
    with pytest.raises(ValueError, match="pairs"):
        PairLengths([1], [1, 2])
