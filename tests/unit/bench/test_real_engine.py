"""The model that real engines load is whole, and a machine without the wheel is told why."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.real_engine import engines as environment
from bench.real_engine import run
from bench.real_engine.tiny_model import TINY, VOCABULARY, make_model


def tensors(file: Path) -> dict[str, np.ndarray]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    head.pop("__metadata__")
    values = data[8 + length :]
    return {
        name: np.frombuffer(values[slice(*one["data_offsets"])], np.float32).reshape(one["shape"])
        for name, one in head.items()
    }


def test_only_printable_ascii_can_be_answered(tmp_path: Path) -> None:
    weights = tensors(make_model(tmp_path, 4096) / "model.safetensors")
    head = weights["lm_head.weight"]
    assert head.shape == (VOCABULARY, TINY.hidden)
    answered = {token for token in range(VOCABULARY) if head[token].any()}
    assert answered == set(range(32, 127))


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
