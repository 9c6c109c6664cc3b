"""Nodes: published constants, rooflines, measured profiles."""

import msgspec
import pytest

from planner.catalogue import GPUS, MODELS
from planner.errors import PlanError
from planner.profile import PAPER_A100, profile_for, profile_from_json


def test_kv_bytes_of_the_published_models() -> None:
    # FleetOpt, section 2.2: 320 KB a token; token-budget paper, Table 5: 23.5 KB a GPU of eight.
    assert MODELS["llama-3-70b"].kv_bytes_per_token(2) == 320 * 1024
    qwen = MODELS["qwen3-235b-a22b"]
    per_gpu = qwen.kv_bytes_per_token(1) * qwen.kv_copies(8) / 8
    assert per_gpu == pytest.approx(23.5 * 1024)
    # A latent cache is kept whole on every GPU.
    deepseek = MODELS["deepseek-v3"]
    assert deepseek.kv_bytes_per_token(2) == 61 * 576 * 2
    assert deepseek.kv_copies(8) == 8


def test_published_constants_are_used_where_they_were_measured() -> None:
    assert profile_for("a100", "Llama-3-70B") == PAPER_A100
    dearer = profile_for("A100", "llama-3-70b", usd_per_gpu_hour=4.0)
    assert dearer.usd_per_node_hour == 32.0
    assert profile_for("A100", "llama-3-70b", gpus=4).source.startswith("roofline")


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_pair_of_the_catalogue_has_a_node(gpu: str, model: str) -> None:
    try:
        node = profile_for(gpu, model, dtype="fp8")
    except PlanError as error:
        assert "does not fit" in str(error)  # noqa: PT017 - some pairs fit no node at all
        return
    weights = MODELS[model].parameters
    assert node.gpus * GPUS[gpu].memory_bytes > weights
    assert 0.002 < node.w_s < 0.2
    assert node.kv_tokens >= 8192


@pytest.mark.parametrize(
    "change",
    [{"w_s": 0}, {"h_s_per_token": -1e-9}, {"kv_tokens": 0}, {"gpus": 0}, {"w_s": "fast"}],
)
def test_profiles_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        profile_from_json({**msgspec.to_builtins(PAPER_A100), **change})


@pytest.mark.parametrize(
    ("gpu", "model", "dtype", "problem"),
    [
        ("V100", "llama-3-70b", None, "unknown GPU V100"),
        ("A100", "gpt", None, "unknown model gpt"),
        ("H100", "llama-3-8b", "fp7", "unknown dtype fp7"),
        ("L40S", "deepseek-v3", "bf16", "does not fit"),
    ],
)
def test_unknown_names_are_refused(gpu: str, model: str, dtype: str | None, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        profile_for(gpu, model, dtype=dtype)
