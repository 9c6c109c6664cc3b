"""A machine without the wheel is told why."""

import sys
from pathlib import Path

import pytest

from bench.real_engine import engines as environment
from bench.real_engine import run


def test_without_the_wheel_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_REAL_ENGINE", str(tmp_path))
    monkeypatch.setattr(environment, "PACKAGE", str(tmp_path / "no-such-wheel"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    rows = run.planned()
    assert [row.metric for row in rows] == ["load of the machine before", "skipped"]
    assert "cannot be had" in str(rows[1].measured)


def test_without_what_moves_kv_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "TRANSFER", str(tmp_path / "no-such-wheel"))
    with pytest.raises(environment.Unavailable, match="no-such-wheel cannot be had"):
        environment.add_transfer(Path(sys.executable))
