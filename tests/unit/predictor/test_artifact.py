"""A predictor's file: what is written can be read, and nothing else can."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.artifact import (
    MAX_BYTES,
    Artifact,
    ArtifactError,
    PoolSection,
    decode,
    encode,
    load,
)
from predictor.online import PrefillPredictor
from predictor.train import train
from tests.unit.predictor.made import rows_of, small_section, x_of

BOOSTED: dict[str, Any] = {
    "start": 0.0,
    "trees": [
        {
            "feature": [0, -1, -1],
            "threshold": [1000.0, 0.0, 0.0],
            "left": [1, 0, 0],
            "right": [2, 0, 0],
            "value": [0.0, -1.0, 1.0],
        }
    ],
}


def file_of(*sections: PoolSection) -> bytes:
    return encode(Artifact(sections=sections))


def document() -> dict[str, Any]:
    """A file with one section."""
    found: dict[str, Any] = json.loads(file_of(small_section()))
    return found


def bytes_of(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_trained_predictor_survives_the_file(tmp_path: Path) -> None:
    section = train(rows_of(2000, 1), boosted=True, model="m", pool="p")
    file = tmp_path / "predictor.json"
    file.write_bytes(file_of(section))
    assert load(file).sections == (section,)
    x = x_of(900, 100, 50)
    predictors = [PrefillPredictor(s, workers=1) for s in (section, load(file).section("m", "p"))]
    assert predictors[0].predict(0, x) == predictors[1].predict(0, x)


FILE = {"schema", "kind", "features", "sections", "exec"}
"""Fields of the file; all others are a section's."""


def changed(path: str, value: object) -> bytes:
    found = document()
    *steps, last = path.split(".")
    part: Any = found if path.partition(".")[0] in FILE else found["sections"][0]
    found["sections"][0]["boosted"] = copy.deepcopy(BOOSTED)
    for step in steps:
        part = part[int(step)] if step.isdigit() else part[step]
    part[int(last) if last.isdigit() else last] = value
    return bytes_of(found)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("schema", 3, "schema 3"),
        ("kind", "pickle", "'pickle'"),
        ("sections", [], "1 to 256 sections"),
        ("sections.0.trees", [], "unknown field"),
        ("alpha", 1.0, "alpha"),
        ("alpha", 0.1, "alpha"),
        ("features", ["prompt_tokens"], "features"),
        ("longest_uncached_tokens", 0, "longest_uncached_tokens"),
        ("rows", 0, "rows"),
        ("exec", "import os", "unknown field"),
        ("tree.feature.0", 99, "does not exist"),
        ("tree.feature.0", -2, "does not exist"),
        ("tree.left.0", 0, "not a later node of its own"),
        ("tree.right.0", 1, "not a later node of its own"),
        ("tree.right.0", 7, "not a later node of its own"),
        ("tree.left", [1, 0], "differ in length"),
        ("tree.mean_s.1", 0.0, "seconds"),
        ("tree.quantile_s.2", 1e9, "seconds"),
        ("tree.mean_s.1", -1.0, "seconds"),
        ("tree.threshold.0", None, "float"),
        ("rates.prefill_tokens_per_s", 0, "prefill_tokens_per_s"),
        ("rates.within_gate", -1, "within_gate"),
        ("boosted.start", 700.0, "absurd time"),
        ("boosted.trees", [], "trees"),
        ("boosted.trees", BOOSTED["trees"] * 300, "trees"),
        ("boosted.trees.0.value.1", 1e6, "absurd time"),
        ("boosted.trees.0.left.0", 2, "not a later node of its own"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(path: str, value: object, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        decode(changed(path, value))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    data = file_of(small_section()).replace(b"1000.0", number.encode())
    assert data != file_of(small_section())
    with pytest.raises(ArtifactError):
        decode(data)


def test_a_node_without_a_parent_is_refused() -> None:
    found = document()
    tree = found["sections"][0]["tree"]
    for name, value in (("feature", -1), ("threshold", 0.0), ("left", 0), ("right", 0)):
        tree[name].append(value)
    tree["mean_s"].append(1.0)
    tree["quantile_s"].append(1.0)
    with pytest.raises(ArtifactError, match="no parent"):
        decode(bytes_of(found))


def test_a_tree_that_is_all_depth_is_refused() -> None:
    found = document()
    depth = 100
    count = 2 * depth + 1
    found["sections"][0]["tree"] = {
        "feature": [0, -1] * depth + [-1],
        "threshold": [0.0] * count,
        "left": [i + 1 if i % 2 == 0 and i < 2 * depth else 0 for i in range(count)],
        "right": [i + 2 if i % 2 == 0 and i < 2 * depth else 0 for i in range(count)],
        "mean_s": [1.0] * count,
        "quantile_s": [1.0] * count,
    }
    with pytest.raises(ArtifactError, match="deeper"):
        decode(bytes_of(found))


def test_a_file_of_the_first_format_is_refused_and_the_fix_is_to_train_again(
    tmp_path: Path,
) -> None:
    section = document()["sections"][0]
    first = {"schema": 1, "kind": "sluice-prefill-predictor", "trained_on": "m/short"} | section
    file = tmp_path / "old.json"
    file.write_bytes(bytes_of(first))
    with pytest.raises(ArtifactError, match="schema 1") as refused:
        load(file)
    assert refused.value.fix.startswith("train again")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    file.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ArtifactError, match="more than"):
        load(file)
    with pytest.raises(ArtifactError, match="No such file"):
        load(tmp_path / "none.json")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        decode(data)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
paths = st.sampled_from(
    [
        *("schema", "kind", "alpha", "features", "tree", "rates", "rows", "boosted"),
        *("sections", "sections.0", "model", "pool", "report"),
        *("tree.feature.0", "tree.threshold.0", "tree.left.0", "tree.right.0", "tree.mean_s.1"),
        *("tree.feature.1", "tree.quantile_s.2", "rates.step_s", "rates.gate_tokens"),
        *("boosted.start", "boosted.trees.0.value.2", "boosted.trees.0.feature.0"),
    ]
)


@given(paths, values)
def test_one_changed_value_is_refused_or_harmless(path: str, value: object) -> None:
    try:
        (section,) = decode(changed(path, value)).sections
    except ArtifactError:
        return
    for x in (x_of(), x_of(10, 0), x_of(100_000, 0, 100_000)):
        mean_s, quantile_s, bucket = PrefillPredictor(
            section, workers=1, alpha=section.alpha
        ).predict(0, x)
        assert 0 < mean_s < 1e6
        assert 0 < quantile_s < 1e15
        assert 0 <= bucket < 27
