"""Costs per token become prices per million, and nothing is guessed silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.records.usage import cost_nano
from gateway.settings import Config, parse
from sluice import cli

if not cli.app.registered_commands:
    cli.register()


def row(*, url: str = "http://a:8000", info: Any = None, **params: Any) -> dict[str, Any]:
    found = {"model": "hosted_vllm/m", "api_base": url, **params}
    return {"model_name": "m", "litellm_params": found, "model_info": info or {}}


def imported(folder: Path, *rows: dict[str, Any]) -> tuple[Config, str]:
    """The written file, and the report's lines about costs."""
    file, output = folder / "litellm.yaml", folder / "sluice.yaml"
    file.write_text(yaml.safe_dump({"model_list": list(rows)}))
    given = ["import", "litellm", str(file), "-o", str(output), "--json"]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["lines"]
    lines = [f"{each['fate']}: {each['path']}: {each['note']}" for each in found]
    said = [line for line in lines if "cost" in line or "price" in line]
    return parse(output.read_text(), "sluice.yaml", {}), "\n".join(said)


def test_costs_per_token_become_the_models_price(tmp_path: Path) -> None:
    config, said = imported(
        tmp_path,
        row(
            input_cost_per_token=6e-7,
            output_cost_per_token=0.0000018,
            info={"cache_read_input_token_cost": "1.5e-07"},
        ),
    )
    price = config.models[0].price
    assert price is not None
    assert (price.input, price.cached_input, price.output) == (0.6, 0.15, 1.8)
    assert cost_nano(price.per_token(), 1000, 10, 400) == 600 * 600 + 400 * 150 + 10 * 1800
    assert "taken: model_list[0].litellm_params.input_cost_per_token: price.input: 0.6" in said
    assert "taken: model_list[0].model_info.cache_read_input_token_cost" in said


def test_a_model_without_costs_has_no_price(tmp_path: Path) -> None:
    config, said = imported(tmp_path, row())
    assert (config.models[0].price, said) == (None, "")


def test_a_missing_cost_is_free_and_told(tmp_path: Path) -> None:
    config, said = imported(tmp_path, row(output_cost_per_token=1e-6))
    price = config.models[0].price
    assert price is not None
    assert (price.input, price.output) == (0.0, 1.0)
    assert "approximated: model_list[0].litellm_params.output_cost_per_token: no cost of input" in (
        said
    )


def test_the_first_rows_price_counts_and_another_is_told(tmp_path: Path) -> None:
    costs: dict[str, Any] = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}
    config, said = imported(
        tmp_path,
        row(**costs),
        row(url="http://b:8000", **costs),
        row(url="http://c:8000", **{**costs, "input_cost_per_token": 9e-6}),
    )
    price = config.models[0].price
    assert price is not None
    assert price.input == 1.0
    assert "taken: model_list[1].litellm_params.input_cost_per_token" in said
    assert "left out: model_list[2].litellm_params.input_cost_per_token: `m` has one price" in said


@pytest.mark.parametrize("given", ["cheap", -1e-6, 5, True])
def test_what_is_no_cost_of_a_token_is_left_out(tmp_path: Path, given: object) -> None:
    config, said = imported(tmp_path, row(input_cost_per_token=given))
    assert config.models[0].price is None
    assert "left out: model_list[0].litellm_params.input_cost_per_token: not the cost" in said


def test_cached_input_that_costs_more_than_other_input_costs_the_same(tmp_path: Path) -> None:
    config, said = imported(
        tmp_path,
        row(
            input_cost_per_token=1e-6,
            output_cost_per_token=1e-6,
            cache_read_input_token_cost=2e-6,
        ),
    )
    price = config.models[0].price
    assert price is not None
    assert price.cached_input is None
    assert "left out: model_list[0].litellm_params.cache_read_input_token_cost: more than" in said
