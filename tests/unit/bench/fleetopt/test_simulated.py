"""Rows of `bench fleetopt` that are simulated: verdicts, agreement, paged engines, speed."""

import pytest

from bench.common.report import Row
from bench.fleetopt import simulated


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Row]:
    """Short runs, one after the other: long enough for queues to run away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "RATES", {"azure": 1000.0})
        patch.setattr(simulated, "REQUESTS", {"azure": 400_000})
        rows = simulated.verdict_rows(0.25, processes=1)
    assert len({row.metric for row in rows}) == len(rows)
    return {row.metric: row for row in rows}


@pytest.fixture(scope="module")
def paged() -> dict[str, Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "RATES", {"azure": 1000.0})
        return {row.metric: row for row in simulated.paged_rows(8000, processes=1)}


def test_published_fleets_that_compress_are_rejected_and_corrected_ones_accepted(
    verdicts: dict[str, Row],
) -> None:
    rejected = [row for row in verdicts.values() if row.target == "rejected"]
    assert [row.metric.partition(": ")[2] for row in rejected] == [
        "Azure 47 + 45 (gamma 1.5)",
        "Azure 48 + 2 (gamma 2)",
        "LMSYS 7 + 52 (gamma 2)",
    ]
    accepted = [row for row in verdicts.values() if row.target == "accepted"]
    assert [row.metric.partition(": ")[2] for row in accepted] == [
        "Azure 277",
        "Azure 39 + 121 (gamma 1)",
        "Azure 68 + 41 (gamma 1.5)",
        "Azure 80 + 2 (gamma 2)",
    ]
    assert all(row.holds for row in (*rejected, *accepted))
    assert all("growing" in row.note for row in rejected)
    assert not any("growing" in row.note for row in accepted)


def test_every_corrected_pool_is_compared(verdicts: dict[str, Row]) -> None:
    compared = {name: row for name, row in verdicts.items() if name.startswith("corrected")}
    assert "corrected, Azure 277, all: slots in use, %" in compared
    # Hardly a request reaches the long pool of 80 + 2.
    assert not any("80 + 2" in name and "long" in name for name in compared)
    for row in compared.values():
        assert 0.5 < (row.ratio or 0) < 2
        limit = float((row.target or "").split()[2])
        assert row.holds == (abs(100 * ((row.ratio or 0) - 1)) <= limit)
        assert row.holds or ";" in row.note


def test_a_shorter_iteration_is_not_the_published_use(verdicts: dict[str, Row]) -> None:
    short = verdicts["Table 5, Azure: rho simulated, short"]
    assert (short.published, short.target) == (0.865, None)
    assert 0.4 < float(short.measured or 0) < 0.7


def test_three_paged_fleets_get_a_verdict(paged: dict[str, Row]) -> None:
    for label, nodes in (
        ("homogeneous by slots", "28"),
        ("homogeneous paged", "10"),
        ("two pools", "4 + 6"),
    ):
        row = paged[f"paged engines, Azure: {label}"]
        assert row.measured == f"{nodes}: holds"
        assert "a short run" in row.note
    ratios = [row.ratio for name, row in paged.items() if name.endswith("two pools, ms")]
    assert len(ratios) == 4
    assert all(ratio is not None and 0.1 < ratio < 10 for ratio in ratios)
