"""`scheduling.predictor`: a file that fits no pool, or is old, is refused with line and fix."""

import json
from pathlib import Path

import msgspec
import pytest

from gateway.settings import ConfigError, parse
from predictor.artifact import Artifact, PoolSection, encode
from tests.unit.predictor.made import small_section

FILE = """\
version: 1
models:
  - name: m
    scheduling: {policy: POLICY, predictor: PREDICTOR}
    pools:
      short: {max_model_len: 8192, max_num_seqs: 4, workers: ["http://10.0.0.1:8000"]}
      long: {max_model_len: 65536, max_num_seqs: 4, workers: ["http://10.0.0.2:8000"]}
"""


def write(folder: Path, *sections: PoolSection) -> Path:
    file = folder / "predictor.json"
    file.write_bytes(encode(Artifact(sections=sections)))
    return file


def problems(file: Path, policy: str = "quartz") -> list[str]:
    text = FILE.replace("PREDICTOR", str(file)).replace("POLICY", policy)
    try:
        parse(text, "sluice.yaml", {})
    except ConfigError as error:
        return str(error).splitlines()
    return []


def of(model: str, pool: str, alpha: float = 0.95) -> PoolSection:
    return msgspec.structs.replace(small_section(), model=model, pool=pool, alpha=alpha)


@pytest.mark.parametrize("section", [of("other", "short"), of("m", "middle")])
def test_a_predictor_that_fits_no_pool_is_refused(tmp_path: Path, section: PoolSection) -> None:
    found = problems(write(tmp_path, section))
    assert len(found) == 1
    assert found[0].startswith("sluice.yaml:4:")
    assert f"no section for a pool of this model; it has {section.name}" in found[0]
    assert "train on requests of m in short, long" in found[0]


@pytest.mark.parametrize(
    ("scheduling", "fits"),
    [("least-loaded", True), ("sticky", True), ("least-loaded, shadow: false", False)],
)
def test_a_predictor_serves_any_policy_that_is_shadowed(
    tmp_path: Path, scheduling: str, *, fits: bool
) -> None:
    found = problems(write(tmp_path, of("m", "short")), scheduling)
    assert not found if fits else "no pool is predicted" in found[0]


def test_a_predictor_of_another_format_or_quantile_is_to_be_trained_again(tmp_path: Path) -> None:
    file = write(tmp_path, of("m", "short"))
    old = json.loads(file.read_bytes())
    (section,) = old.pop("sections")
    file.write_text(json.dumps({**old, **section, "schema": 1}))
    (found,) = problems(file)
    assert "schema 1" in found
    assert "train again: `sluice train" in found
    (found,) = problems(write(tmp_path, of("m", "short", alpha=0.9)))
    assert "m/short" in found
    assert "train again with --alpha 0.95" in found
