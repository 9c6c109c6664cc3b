"""Costs per token become prices per million, and nothing is guessed silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.records.usage import cost_nano
from gateway.settings import parse
from gateway.settings.tenants import PriceConfig
from tests.running import sluice

PARAMS = "model_list[0].litellm_params"


def row(*, url: str = "http://a:8000", info: Any = None, **params: Any) -> dict[str, Any]:
    found = {"model": "hosted_vllm/m", "api_base": url, **params}
    return {"model_name": "m", "litellm_params": found, "model_info": info or {}}


def imported(folder: Path, *rows: dict[str, Any]) -> tuple[PriceConfig | None, str]:
    """The price of the written file, and the report's lines about costs."""
    file, output = folder / "litellm.yaml", folder / "sluice.yaml"
    file.write_text(yaml.safe_dump({"model_list": list(rows)}))
    done = sluice("import", "litellm", file, "-o", output, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["lines"]
    lines = [f"{each['fate']}: {each['path']}: {each['note']}" for each in found]
    said = [line for line in lines if "cost" in line or "price" in line]
    return parse(output.read_text(), "sluice.yaml", {}).models[0].price, "\n".join(said)


def test_costs_per_token_become_the_models_price(tmp_path: Path) -> None:
    costs: dict[str, Any] = {"input_cost_per_token": 6e-7, "output_cost_per_token": 0.0000018}
    price, said = imported(tmp_path, row(info={"cache_read_input_token_cost": "1.5e-07"}, **costs))
    assert price is not None
    assert (price.input, price.cached_input, price.output) == (0.6, 0.15, 1.8)
    assert cost_nano(price.per_token(), 1000, 10, 400) == 600 * 600 + 400 * 150 + 10 * 1800
    assert f"taken: {PARAMS}.input_cost_per_token: price.input: 0.6" in said
    assert "taken: model_list[0].model_info.cache_read_input_token_cost" in said


NO_COST = (None, f"left out: {PARAMS}.input_cost_per_token: not the cost")


@pytest.mark.parametrize(
    ("costs", "price", "said"),
    [
        ({}, None, ""),
        (
            {"output_cost_per_token": 1e-6},
            (0.0, None, 1.0),
            f"approximated: {PARAMS}.output_cost_per_token: no cost of input",
        ),
        (
            {
                **dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), 1e-6),
                "cache_read_input_token_cost": 2e-6,
            },
            (1.0, None, 1.0),
            f"left out: {PARAMS}.cache_read_input_token_cost: more than",
        ),
        *(({"input_cost_per_token": bad}, *NO_COST) for bad in ("cheap", -1e-6, 5, True)),
    ],
)
def test_what_is_missing_or_no_cost_is_told(
    tmp_path: Path, costs: dict[str, Any], price: tuple[float | None, ...] | None, said: str
) -> None:
    found, told = imported(tmp_path, row(**costs))
    assert (found and (found.input, found.cached_input, found.output)) == price
    assert said in told if said else not told


def test_the_first_rows_price_counts_and_another_is_told(tmp_path: Path) -> None:
    costs: dict[str, Any] = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}
    others = (row(url="http://b:8000", **costs), row(url="http://c:8000", **costs))
    others[1]["litellm_params"]["input_cost_per_token"] = 9e-6
    price, said = imported(tmp_path, row(**costs), *others)
    assert price is not None
    assert price.input == 1.0
    assert "taken: model_list[1].litellm_params.input_cost_per_token" in said
    assert "left out: model_list[2].litellm_params.input_cost_per_token: `m` has one price" in said
