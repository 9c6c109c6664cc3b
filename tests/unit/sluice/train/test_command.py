"""`sluice train`: from a request log to a predictor, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from predictor import PrefillPredictor, load
from sluice.train.command import train
from tests.unit.predictor.made import rows_of, x_of


def run(*args: object) -> Result:
    app = typer.Typer()
    app.command()(train)
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(arg) for arg in args])


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
    lines = [
        json.dumps(
            record_of(
                row.x,
                row.prefill_s,
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
    artifact = load(out)
    assert artifact.trained_on == "m/short"
    mean_s, quantile_s, _ = PrefillPredictor(artifact, workers=4).predict(0, x_of(2000))
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
    assert set(found["pinball_s"]) == {
        "tree", "calibrated", "linear", "constant", "prior, learned online",
    }  # fmt: skip
    assert "points" not in found
    assert load(out).boosted is not None


def test_several_logs_are_read_in_turn(tmp_path: Path) -> None:
    logs = [write(tmp_path / name, 600) for name in ("a.jsonl", "b.jsonl")]
    out = tmp_path / "p.json"
    result = run("--log", logs[0], "--log", logs[1], "-o", out, "--json")
    assert json.loads(result.stdout)["log"]["rows"] == 1200


def test_too_few_rows_are_refused_with_what_to_do(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 20), tmp_path / "p.json"
    result = run("--log", log, "-o", out)
    assert result.exit_code == 2
    assert "20 usable rows" in result.output
    assert "fix: serve more requests" in result.output
    assert not out.exists()
    result = run("--log", log, "-o", out, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problem"].startswith("20 usable rows")


def test_rows_of_several_pools_are_not_mixed(tmp_path: Path) -> None:
    log, out = write(tmp_path / "log.jsonl", 2400, ("short", "long")), tmp_path / "p.json"
    result = run("--log", log, "-o", out)
    assert result.exit_code == 2
    assert "m/long (1200), m/short (1200)" in result.output
    result = run("--log", log, "-o", out, "--pool", "long")
    assert result.exit_code == 0, result.output
    assert load(out).trained_on == "m/long"


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
    assert "pip install 'sluice-gateway[train]'" in result.output
