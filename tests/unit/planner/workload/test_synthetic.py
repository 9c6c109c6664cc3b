"""Made-up workloads."""

import numpy as np
import pytest

from planner.errors import PlanError
from planner.workload.synthetic import synthetic


def test_medians_and_bounds_are_as_asked() -> None:
    found = synthetic("prompt=800,answer=200,spread=0.5,longest=4096")
    assert found.pairs is not None
    assert np.median(found.pairs.prompts) == pytest.approx(800, rel=0.03)
    assert np.median(found.pairs.answers) == pytest.approx(200, rel=0.03)
    assert found.pairs.totals.max() <= 4096
    assert found.pairs.prompts.min() >= 1


@pytest.mark.parametrize("spec", ["prompt=x", "size=3", "prompt=0", "spread=9"])
def test_figures_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(PlanError):
        synthetic(spec)
