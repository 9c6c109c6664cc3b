"""Costs per token of a LiteLLM row -> prices per million tokens of its model."""

from decimal import Decimal, InvalidOperation
from typing import Any, Final

from gateway.policy.prices import DECIMALS
from gateway.settings.problems import KeyPath
from sluice.imports.fleet import Model
from sluice.imports.report import Report

_NAMES: Final = {
    "input_cost_per_token": "input",
    "cache_read_input_token_cost": "cached_input",
    "output_cost_per_token": "output",
}
"""LiteLLM's name -> of `price`, in the order of the file."""
_NEEDED: Final = ("input", "output")
_MAX_PRICE: Final = 1_000_000
"""Highest price that the file may have."""


def read_price(path: KeyPath, entry: dict[str, Any], owner: Model, report: Report) -> None:
    """The price of a row's model, which rows give in `litellm_params` or in `model_info`."""
    found: dict[str, float] = {}
    told: list[tuple[KeyPath, str]] = []
    for name, ours in _NAMES.items():
        for part in ("litellm_params", "model_info"):
            section = entry.get(part)
            given = section.get(name) if isinstance(section, dict) else None
            if given is None:
                continue
            where = (*path, part, name)
            price = _per_million(given)
            if price is None:
                report.left_out(where, "not the cost of a token")
            elif ours not in found:
                found[ours] = price
                told.append((where, f"price.{ours}: {price:g} per million tokens"))
            else:
                report.left_out(where, "litellm_params has it as well, and counts")
    if not found:
        return
    if owner.price is None:
        _complete(found, told, report)
        owner.price = found
    elif any(owner.price.get(name) != price for name, price in found.items()):
        for where, _ in told:
            report.left_out(where, f"`{owner.name}` has one price, that of its first row")
        return
    for where, note in told:
        report.taken(where, note)


def _complete(found: dict[str, float], told: list[tuple[KeyPath, str]], report: Report) -> None:
    """Fill in what a price needs, and leave out what the file would refuse."""
    for name in _NEEDED:
        if name not in found:
            found[name] = 0.0
            report.approximated(told[0][0], f"no cost of {name} tokens is given: they are free")
    if found.get("cached_input", 0.0) > found["input"]:
        del found["cached_input"]
        where = next(where for where, _ in told if where[-1] == "cache_read_input_token_cost")
        told[:] = [line for line in told if line[0] != where]
        report.left_out(where, "more than other input costs: it costs the same")


def _per_million(given: object) -> float | None:
    """The price of a million tokens; None if `given` is no cost of one."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        exact = Decimal(str(given)) * 1_000_000
    except InvalidOperation:
        return None
    return float(round(exact, DECIMALS)) if 0 <= exact <= _MAX_PRICE else None
