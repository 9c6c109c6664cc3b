"""`sluice train`: from a request log to a predictor, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from typer.testing import Result

from predictor import PrefillPredictor, load
from predictor.features import UNCACHED
from tests.running import sluice
from tests.unit.predictor.made import rows_of, x_of


def run(*args: object) -> Result:
    return sluice("train", *args, COLUMNS="120")


def record_of(x: tuple[float, ...], prefill_s: float, **more: Any) -> dict[str, Any]:
    return {
        "schema": 2,
        "outcome": "ok",
        "model": "m",
        "pool": "short",
        "stream": True,
        "estimate": {"input_tokens": x[0], "output_tokens": x[9]},
        "scheduling": {
            "expected_hit_tokens": x[5],
            "backlog_tokens": x[2],
            "worker_active": x[3],
            "worker_kv_usage": x[4],
            "prefill_s": prefill_s,
        },
        **more,
    }


def write(path: Path, count: int, pools: tuple[str, ...] = ("short",)) -> Path:
    """A log of an engine that is slow with long prompts, which the linear prior cannot follow."""
    lines = [
        json.dumps(
            record_of(
                row.x,
                row.prefill_s * (4 if row.x[UNCACHED] > 3000 else 1),
                worker=f"w{row.worker}",
                pool=pools[i % len(pools)],
            )
        )
        for i, row in enumerate(rows_of(count, 1))
    ]
    path.write_text("\n".join([*lines, '{"outcome": "refused"}', "not json"]) + "\n")
    return path


def test_a_log_becomes_a_predictor_that_the_gateway_loads(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 2000), tmp_path / "predictor.json"
    plot = tmp_path / "plots" / "train.png"
    result = run("--log", log, "-o", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "2,002 lines: 2,000 prefills, 1 other, 0 without the fields, 1 unreadable" in (
        result.output.replace("\n", " ")
    )
    assert "calibrated" in result.output
    section = load(out).section("m", "short")
    mean_s, quantile_s, _ = PrefillPredictor(section, workers=4).predict(0, x_of(2000))
    assert 0.2 < mean_s < 0.4 < quantile_s < 0.7
    assert imread(plot).shape[1] > 1000


def test_machines_are_told_the_report_without_its_points(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 1500), tmp_path / "predictor.json"
    result = run("--log", log, "-o", out, "--boosted", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["log"] == {
        "lines": 1502, "rows": 1500, "unreadable": 1, "other": 1, "lacking": 0,
    }  # fmt: skip
    pool = found["pools"]["m/short"]
    assert set(pool["pinball_s"]) == {
        "tree", "calibrated", "linear", "constant", "prior, learned online",
    }  # fmt: skip
    assert "points" not in pool
    (section,) = load(out).sections
    assert section.boosted is not None


def test_too_few_rows_are_refused_with_what_to_do(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 20), tmp_path / "p.json"
    result = run("--log", log, "-o", out)
    assert result.exit_code == 2
    assert "20 usable rows" in result.output
    assert "fix: serve more requests" in result.output
    assert not out.exists()
    result = run("--log", log, "-o", out, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problem"].startswith("m/short: 20 usable rows")


def test_a_mixed_log_becomes_one_predictor_with_a_section_a_pool(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 2400, ("short", "long")), tmp_path / "p.json"
    plot = tmp_path / "train.png"
    result = run("--log", log, "-o", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert [section.name for section in load(out).sections] == ["m/long", "m/short"]
    assert [section.rows for section in load(out).sections] == [900, 900]
    result = run("--log", log, "-o", out, "--pool", "long")
    assert result.exit_code == 0, result.output
    assert [section.name for section in load(out).sections] == ["m/long"]


def write_drifted(path: Path, pool: str, rows: int = 1600) -> Path:
    """A log whose newest quarter is of an engine 30 times as slow: what was learned is wrong."""
    with path.open("a") as file:
        for number, row in enumerate(rows_of(rows, 2)):
            slow = 1.0 if number < rows * 3 // 4 else 30.0 + 20.0 * (number % 7 == 0)
            record = record_of(row.x, row.prefill_s * slow, worker=f"w{row.worker}", pool=pool)
            file.write(json.dumps(record) + "\n")
    return path


def test_a_tree_that_loses_to_the_untrained_prior_is_not_written(tmp_path: Path) -> None:
    log, out = write_drifted(tmp_path / "log.jsonl", "long"), tmp_path / "p.json"
    result = run("--log", log, "-o", out)
    assert result.exit_code == 1, result.output
    assert not out.exists()
    told = " ".join(result.output.split())
    assert "m/long keeps the untrained prior: its pinball loss is" in told
    assert "wrote nothing" in told
    found = json.loads(run("--log", log, "-o", out, "--json").stdout)
    losses = found["pools"]["m/long"]["pinball_s"]
    assert losses["calibrated"] > losses["prior, learned online"]
    assert (found["ok"], found["file"]) == (False, None)


def test_pools_that_win_are_written_and_the_others_keep_the_prior(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 1600), tmp_path / "p.json"
    write_drifted(log, "long")
    with log.open("a") as file:
        row = rows_of(1, 3)[0]
        file.write(json.dumps(record_of(row.x, row.prefill_s, pool="rare")) + "\n")
    result = run("--log", log, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    assert [section.name for section in load(out).sections] == ["m/short"]
    pools = json.loads(result.stdout)["pools"]
    assert {name: told["written"] for name, told in pools.items()} == {
        "m/long": False,
        "m/rare": False,
        "m/short": True,
    }
    assert pools["m/rare"]["prior_because"].startswith("1 usable rows")
    assert "pinball loss" in pools["m/long"]["prior_because"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--log", "none.jsonl"), "none.jsonl: No such file"),
        (("--log", "log.jsonl", "--alpha", "1"), "--alpha 1"),
        (("--log", "log.jsonl", "-o", "no/such/folder/p.json"), "No such file"),
    ],
)
def test_bad_input_is_refused(
    args: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "log.jsonl", 1000)
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.output


def test_without_scikit_learn_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "log.jsonl", 10)
    monkeypatch.delitem(sys.modules, "predictor.train", raising=False)
    monkeypatch.delitem(sys.modules, "predictor.judge", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    result = run("--log", log, "-o", tmp_path / "p.json")
    assert result.exit_code == 2
    assert "pip install '.[train]'" in result.output
