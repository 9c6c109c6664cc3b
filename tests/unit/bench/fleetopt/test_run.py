"""`bench fleetopt`: every row with a target holds; traces are read where they are."""

from pathlib import Path

import numpy as np
import pytest

from bench.common.report import Row
from bench.fleetopt import run as fleetopt
from bench.fleetopt.run import AZURE_FILES, TRACE_REQUESTS, azure_pairs, made_up_trace, run


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
    slow = [row.metric for row in ours if not row.holds and "timing" not in row.metric]
    assert slow == []


def test_traces_are_not_measured_without_a_folder(rows: dict[str, Row]) -> None:
    assert rows["Azure pairs"].measured == "not measured"
    assert rows["Azure pairs"].target is None


def write_traces(folder: Path) -> None:
    trace = made_up_trace()
    assert trace.pairs is not None
    pairs = np.column_stack((trace.pairs.prompts, trace.pairs.answers)).astype(int)
    for name, part in zip(AZURE_FILES, np.array_split(pairs, 2), strict=True):
        lines = [f"2023-11-16 18:17:03.9,{prompt},{answer}" for prompt, answer in part]
        text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
        (folder / name).write_text(text, encoding="utf-8")


def test_both_files_are_read_as_one_trace(tmp_path: Path) -> None:
    assert azure_pairs(tmp_path) is None
    write_traces(tmp_path)
    found = azure_pairs(tmp_path)
    assert found is not None
    assert found.pairs is not None
    assert found.pairs.prompts.size == TRACE_REQUESTS
    assert found.mean_lengths() == pytest.approx(made_up_trace().mean_lengths())
