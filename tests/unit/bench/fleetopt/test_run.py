"""`bench fleetopt`: every row with a target holds; traces are read where they are."""

from pathlib import Path

import pytest

from bench.common.report import Row
from bench.fleetopt import run as fleetopt
from bench.fleetopt.run import AZURE_FILES, azure_pairs, run


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleetopt, "simulated", list)
        found = run().rows
    named = {row.metric: row for row in found}
    assert len(named) == len(found)
    return named


def test_every_published_cell_is_there_and_equal(rows: dict[str, Row]) -> None:
    published = [row for row in rows.values() if row.published is not None]
    tables = {metric.partition(",")[0] for metric in rows}
    assert {"Table 2", "Table 3", "Table 5", "Table 6", "Section 7.4"} <= tables
    assert len(published) > 70
    assert [row.metric for row in published if row.holds is not True] == []


def test_our_columns_hold(rows: dict[str, Row]) -> None:
    ours = [row for row in rows.values() if row.published is None and row.target is not None]
    modes = {row.metric.partition(",")[0] for row in ours}
    assert {"exact", "mix", "corrected", "paged"} <= modes
    assert [row.metric for row in ours if not row.holds] == []


def test_traces_are_not_measured_without_a_folder(rows: dict[str, Row]) -> None:
    assert rows["Azure pairs"].measured == "not measured"
    assert rows["Azure pairs"].target is None


def test_both_files_are_read_as_one_trace(tmp_path: Path) -> None:
    assert azure_pairs(tmp_path) is None
    for name, answer in zip(AZURE_FILES, (40, 60), strict=True):
        text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,500,{answer}\n"
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = azure_pairs(tmp_path)
    assert found is not None
    assert found.pairs is not None
    assert (found.pairs.prompts.tolist(), sorted(found.pairs.answers)) == ([500, 500], [40, 60])
