"""Prefix sums equal sums over every whole length, and over every request of a trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED
from planner.workload.moments import (
    HELD,
    MASS,
    PROMPT,
    STEP_TOKENS,
    STEPS,
    STEPS2,
    boundaries_of,
    prepare,
)
from planner.workload.workload import from_cdf
from tests.unit.planner.lengths import Lengths, cdfs, made_up_trace, whole_lengths


def sums_of(lengths: Lengths) -> dict[int, float]:
    """Rows of planner.workload.moments, request by request."""
    steps = np.ceil(lengths.prompt / 512) + lengths.answer
    held = steps * lengths.prompt + lengths.answer**2 / 2
    rows = {
        MASS: np.ones_like(steps),
        STEPS: steps,
        STEP_TOKENS: steps * lengths.total,
        STEPS2: steps**2,
        PROMPT: lengths.prompt,
        HELD: held,
    }
    return {row: float((lengths.weight * value).sum()) for row, value in rows.items()}


@pytest.mark.parametrize("name", list(SHIPPED))
def test_a_distribution_sums_as_its_whole_lengths_do(name: str) -> None:
    shipped = SHIPPED[name]
    assert shipped.workload.cdf is not None
    lengths = whole_lengths(shipped.workload.cdf)
    sums = prepare(shipped.workload, boundaries=(shipped.b_short,), gammas=(1.0, 1.5))
    below = sums_of(lengths.only(lengths.total <= shipped.b_short))
    reach = sums_of(lengths.only(lengths.total <= int(1.5 * shipped.b_short)))
    for row, value in sums_of(lengths).items():
        assert sums.whole[row] == pytest.approx(value, rel=2e-4)
        assert sums.below[row, 0] == pytest.approx(below[row], rel=1e-3)
        assert sums.reached[row, 0, 1] == pytest.approx(reach[row], rel=1e-3)


@pytest.mark.parametrize("max_cut", [1.0, 0.3])
def test_compressed_requests_of_a_trace_sum_one_by_one(max_cut: float) -> None:
    trace = made_up_trace()
    assert trace.pairs is not None
    pairs = trace.pairs
    lengths = Lengths(pairs.totals, pairs.prompts, pairs.answers, pairs.weights)
    sums = prepare(trace, boundaries=(1024, 3072), gammas=(1.0, 1.3, 2.0), max_cut=max_cut)
    for at, b_short in enumerate((1024, 3072)):
        for column, gamma in enumerate((1.0, 1.3, 2.0)):
            priority_class = lengths.only(
                (lengths.total > b_short) & (lengths.total <= int(gamma * b_short))
            )
            room = b_short - priority_class.answer
            fits = (room >= 1) & (priority_class.prompt - room <= max_cut * priority_class.prompt)
            kept = priority_class.only(fits)
            after = Lengths(
                np.full(kept.total.shape, float(b_short)), room[fits], kept.answer, kept.weight
            )
            for row, value in sums_of(kept).items():
                assert sums.before[row, at, column] == pytest.approx(value, abs=1e-9, rel=1e-9)
            for row, value in sums_of(after).items():
                assert sums.after[row, at, column] == pytest.approx(value, abs=1e-9, rel=1e-9)
            chunks = np.ceil(room[fits] / 512)
            for level, counted in zip(sums.levels, sums.prompts_after[:, at, column], strict=True):
                wanted = kept.weight[chunks * 512 <= level].sum()
                assert counted == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(cdf=cdfs(), gamma=st.sampled_from([1.0, 1.1, 1.6, 2.0]))
def test_parts_make_up_the_whole(cdf: Cdf, gamma: float) -> None:
    workload = from_cdf(cdf)
    boundaries = boundaries_of(workload, 2**17)
    sums = prepare(workload, boundaries=boundaries, gammas=(1.0, gamma))
    assert sums.whole[MASS] == pytest.approx(1.0)
    for at, b_short in enumerate(boundaries):
        assert sums.below[MASS, at] == pytest.approx(cdf.share(b_short), abs=1e-12)
        reached = cdf.share(int(gamma * b_short))
        assert sums.reached[MASS, at, 1] == pytest.approx(reached, abs=1e-12)
        # Compression keeps answers, shortens prompts, and loses nobody.
        assert sums.after[MASS, at, 1] == pytest.approx(sums.before[MASS, at, 1], abs=1e-12)
        assert (sums.after[:, at, 1] <= sums.before[:, at, 1] * (1 + 1e-9) + 1e-9).all()
        assert sums.prompts_whole[-1] == pytest.approx(1.0)
        assert (np.diff(sums.prompts_below[:, at]) >= -1e-12).all()
