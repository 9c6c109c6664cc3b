"""`bench bfio`, in small: its rows, its oracle, its workloads, and what it says without theory."""

from pathlib import Path

import numpy as np
import pytest

from bench.bfio import theory
from bench.bfio.solver import least_objective, objective


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


def test_traces_are_read_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "AzureLLMInferenceTrace_code.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,40,3\n"
        "2023-11-16 18:15:50,10,7\n"
    )
    found = theory.read(file)
    assert found.prompt_tokens.tolist() == [40, 10]
    assert found.output_tokens.tolist() == [3, 7]


def test_the_smallest_group_of_the_theorem_keeps_its_bounds() -> None:
    plain, ours = theory.imbalances(16, 9)
    assert 270 <= plain / (16 * np.sqrt(9 * np.log(16))) <= 370
    assert ours < 15 * theory.LONGEST_PROMPT
