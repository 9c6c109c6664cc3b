"""The entitlements that a fleet is planned for, from a sluice.yaml or a file of their own."""

import os
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.policy.entitlements.terms import GIB
from gateway.settings import Config, ConfigError, parse
from gateway.settings.config import EntitlementConfig
from planner.errors import PlanError
from planner.records import Reserved

_FIX = "give a sluice.yaml, or a YAML file with `entitlements:`"
_ROOM = 1_000_000
"""Slots of the stand-in model by which entitlements alone are checked."""


class PlannedTenants(msgspec.Struct, frozen=True, kw_only=True):
    """Entitlements of one model."""

    sections: tuple[Mapping[str, Any], ...]
    """As they are written, without `model`."""
    reserved: Reserved


def load_tenants(path: Path, model: str | None) -> PlannedTenants:
    """The entitlements of one model of a file; PlanError says what to change."""
    config = _config(path)
    models = {e.model for e in config.entitlements}
    if model is None and len(models) > 1:
        raise PlanError(
            f"{path} has entitlements of {len(models)} models",
            f"give --serves with one of: {', '.join(sorted(models))}",
        )
    found = [e for e in config.entitlements if model in {None, e.model}]
    if not found:
        raise PlanError(f"{path} has no entitlements{f' of {model}' if model else ''}", _FIX)
    return PlannedTenants(
        sections=tuple(map(_section, found)),
        reserved=Reserved(
            entitlements=sum(e.reserves for e in found),
            sequences=sum(e.baseline for e in found if e.reserves),
            kv_bytes=round(GIB * sum(e.kv_cache_gib or 0.0 for e in found if e.reserves)),
            tokens_per_s=sum(e.tokens_per_second or 0.0 for e in found if e.reserves),
        ),
    )


def _section(entitlement: EntitlementConfig) -> Mapping[str, Any]:
    said: dict[str, Any] = entitlement.model_dump(mode="json", exclude_defaults=True)
    said["api_keys"] = list(entitlement.api_keys)
    # The pools are being planned: a baseline is split over them by their slots.
    if not isinstance(said.get("concurrency", 0), int):
        said["concurrency"] = entitlement.baseline
    return {name: value for name, value in said.items() if name != "model" and value != []}


def _config(path: Path) -> Config:
    """The file, with a stand-in for each model where it has entitlements alone."""
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: {error}", _FIX) from None
    if not isinstance(document, dict):
        raise PlanError(f"{path} is no mapping", _FIX)
    if not document.get("entitlements"):
        raise PlanError(f"{path} has no entitlements", _FIX)
    if "models" not in document:
        listed = document.get("entitlements")
        rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        names = sorted({str(row["model"]) for row in rows if "model" in row})
        text += "" if "version" in document else "\nversion: 1"
        text += "\nmodels:\n" + "".join(starmap(_stand_in, enumerate(names)))
    try:
        return parse(text, str(path), os.environ)
    except ConfigError as error:
        raise PlanError(str(error), _FIX) from None


def _stand_in(number: int, model: str) -> str:
    window = f"max_model_len: {_ROOM}, max_num_seqs: {_ROOM}"
    return (
        f"  - {{name: {model!r}, kv_bytes_per_token: 1, pools: "
        f"{{all: {{{window}, workers: ['http://planned-{number}.invalid']}}}}}}\n"
    )
