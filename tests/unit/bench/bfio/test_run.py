"""`bench bfio`, in small: its rows, its oracle, its workloads, and what it says without traces."""

from pathlib import Path

import numpy as np
import pytest

from bench.bfio import runs, solver, theory, traces
from bench.bfio.runs import by_class, by_kaplan_meier, mean_of
from bench.bfio.solver import least_objective, small_instance, tight_instance
from bench.bfio.table import spread
from bench.common.report import between
from bench.common.steps import no_bar
from gateway.scheduling.rank_solver import assign, objective
from simulator.barrier.work import like_burst


def test_the_oracle_finds_what_trying_everything_finds() -> None:
    load = np.array([[10.0], [4.0], [7.0]])
    sizes = [5.0, 3.0, 2.0]
    tried = [objective(load, sizes, [(a, 1), (b, 2)]) for a in range(3) for b in range(3) if a != b]
    assert least_objective(load, [0, 1, 1], sizes) == pytest.approx(min(tried))
    # All must go, and a worker may take two.
    tried = [
        objective(load, sizes, [(a, 1), (b, 1), (c, 2)])
        for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    ]
    assert least_objective(load, [0, 2, 1], sizes) == pytest.approx(min(tried))


def test_the_oracle_looks_ahead() -> None:
    load = np.array([[10.0, 10.0], [4.0, 4.0], [6.0, 0.0]])
    found = least_objective(load, [0, 1, 1], [4.0])
    assert found == pytest.approx(objective(load, [4.0], [(0, 2)]))


@pytest.mark.parametrize("make", [small_instance, tight_instance])
def test_an_instance_is_named_by_its_seed(make: solver.Make) -> None:
    first, again, other = make(1, 3), make(1, 3), make(2, 3)
    assert first[0].tolist() == again[0].tolist()
    assert first[1:] == again[1:]
    assert first[0].tolist() != other[0].tolist()
    assert first[0].shape[1] == 4


def test_what_is_timed_fills_all_its_slots() -> None:
    load, cap, sizes, waits = solver.instance(np.random.default_rng(0), 8, 20)
    assert load.shape == (64, 21)
    assert len(assign(load, cap, sizes, waits, maxage=500.0)) == sum(cap) == 8
    assert max(waits) < 500, "none is forced"


def test_a_range_holds_at_its_ends_and_not_beyond() -> None:
    verdicts = [between("x", value, 1.0, 2.0).holds for value in (0.99, 1.0, 2.0, 2.01)]
    assert verdicts == [False, True, True, False]


def test_spread_is_the_mean_distance_of_fullest_and_emptiest() -> None:
    assert spread(np.array([[1.0, 5.0, 3.0], [2.0, 2.0, 4.0]])) == 3.0


def test_without_traces_nothing_is_measured() -> None:
    rows = traces.rows(None, no_bar)
    assert [row.measured for row in rows] == ["not measured"] * 3
    assert all(row.holds is None for row in rows)


def test_traces_are_read_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "AzureLLMInferenceTrace_code.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,40,3\n"
        "2023-11-16 18:15:50,10,7\n"
    )
    found = traces.read(file)
    assert found.prompt_tokens.tolist() == [40, 10]
    assert found.output_tokens.tolist() == [3, 7]


def test_the_smallest_group_of_the_theorem_keeps_its_bounds() -> None:
    plain, ours = theory.imbalances(16, 9)
    assert 270 <= plain / (16 * np.sqrt(9 * np.log(16))) <= 370
    assert ours < 15 * theory.LONGEST_PROMPT


def test_outputs_go_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "REQUESTS", 4000)
    work, kinds = by_class(0)
    means = [work.output_tokens[np.array(kinds) == kind].mean() for kind in runs.CLASSES]
    assert means == pytest.approx([51, 153, 306, 510], rel=0.03)
    assert work.output_tokens.max() < runs.LONGEST_TOKENS


def test_survival_is_learned_in_the_run_it_is_used_in() -> None:
    work = like_burst(7000, np.random.default_rng(0))
    found = by_kaplan_meier(work, 5, [0] * 7000)
    assert found.completed > 0
    assert mean_of([found, found], "throughput") == found.throughput
