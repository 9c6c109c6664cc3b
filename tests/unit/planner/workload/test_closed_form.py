"""Closed forms: savings, the best boundary, archetypes."""

import numpy as np
import pytest
from hypothesis import given, settings

from planner.workload.closed_form import best_boundary, shape_of
from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED
from planner.workload.workload import from_cdf
from tests.unit.planner.lengths import cdfs, whole_lengths


@pytest.mark.parametrize(
    ("name", "boundary"), [("azure", 8192), ("lmsys", 8192), ("agent-heavy", 24_576)]
)
def test_best_boundaries(name: str, boundary: int) -> None:
    assert best_boundary(SHIPPED[name].workload, 65_536) == boundary


@settings(max_examples=40, deadline=None)
@given(cdf=cdfs())
def test_no_whole_length_is_a_better_boundary(cdf: Cdf) -> None:
    lengths = whole_lengths(cdf)
    steps = lengths.weight * (np.ceil(lengths.prompt / 512) + lengths.answer)
    below = np.cumsum(steps)
    nodes = lengths.total * below + 65_536 * (below[-1] - below)
    found = best_boundary(from_cdf(cdf), 65_536)
    inside = nodes[: min(65_535, nodes.size)]
    assert nodes[found - 1] <= inside.min() * 1.01


@pytest.mark.parametrize(
    ("name", "b_short", "archetype"),
    [
        ("azure", 4096, "I"),
        ("lmsys", 1536, "I"),
        ("agent-heavy", 8192, "II"),
        ("agent-heavy", 2048, "III"),
    ],
)
def test_archetypes(name: str, b_short: int, archetype: str) -> None:
    assert shape_of(SHIPPED[name].workload, b_short, 1.5).archetype == archetype
