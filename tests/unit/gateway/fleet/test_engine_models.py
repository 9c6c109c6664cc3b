"""What an engine's list of models says, whatever it holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.engine_models import EngineModel, adapters, not_served, read_models

VLLM = {
    "object": "list",
    "data": [
        {"id": "base", "root": "org/base", "parent": None, "max_model_len": 8192},
        {"id": "sql", "root": "/loras/sql", "parent": "base", "max_model_len": None},
        {"id": "second-name", "root": "org/base", "parent": None, "max_model_len": 8192},
    ],
}


def test_models_and_adapters_are_told_apart() -> None:
    models = read_models(json.dumps(VLLM).encode())
    assert models[1] == EngineModel("sql", None, "base")
    assert adapters(models) == ["sql"]
    assert not_served(models, "second-name") == ""


def test_what_is_served_instead_is_named() -> None:
    models = [EngineModel(f"m{n}", None, None) for n in range(9)]
    assert not_served(models, "m8") == ""
    assert not_served(models, "x") == (
        "it serves 'm0', 'm1', 'm2', 'm3', 'm4' and 4 more, not 'x': set the worker's `model`"
    )
    assert not_served([], "x") == "", "a list of nothing decides nothing"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"data": 5}', b'{"data": [3, {"id": 4}, {"max_model_len": 1}]}'],
)
def test_what_is_no_list_of_models_holds_none(body: bytes) -> None:
    assert read_models(body) == []


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(
    st.sampled_from(["data", "id", "parent", "max_model_len"]), s)))  # fmt: skip
def test_nothing_an_engine_lists_raises(told: object) -> None:
    read_models(json.dumps(told).encode())
