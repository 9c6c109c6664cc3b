"""The file that a fleet is planned for: a sluice.yaml, or a file of entitlements alone."""

import os
from itertools import starmap
from pathlib import Path

import msgspec
import yaml

from gateway.policy.entitlements.terms import GIB
from gateway.settings import Config, ConfigError, parse
from planner.errors import PlanError
from planner.records import Reserved

_FIX = "give a sluice.yaml, or a YAML file with `entitlements:`"
_ROOM = 1_000_000
"""Slots of the stand-in model by which entitlements alone are checked."""


class PlannedTenants(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a file that is planned, and its entitlements."""

    text: str
    """The file, which `-o` changes."""
    model: str
    reserved: Reserved


def load_tenants(path: Path, model: str | None) -> PlannedTenants:
    """The entitlements of one model of a file; PlanError says what to change."""
    text, config = _config(path)
    models = {e.model for e in config.entitlements} or {m.name for m in config.models}
    if model is None and len(models) > 1:
        raise PlanError(
            f"{path} has entitlements of {len(models)} models",
            f"give --serves with one of: {', '.join(sorted(models))}",
        )
    planned = model or models.pop()
    if planned not in {m.name for m in config.models}:
        raise PlanError(f"{path} has no model {planned}", _FIX)
    found = [e for e in config.entitlements if e.model == planned]
    return PlannedTenants(
        text=text,
        model=planned,
        reserved=Reserved(
            entitlements=sum(e.reserves for e in found),
            sequences=sum(e.baseline for e in found if e.reserves),
            kv_bytes=round(GIB * sum(e.kv_cache_gib or 0.0 for e in found if e.reserves)),
            tokens_per_s=sum(e.tokens_per_second or 0.0 for e in found if e.reserves),
        ),
    )


def _config(path: Path) -> tuple[str, Config]:
    """The file, read with a stand-in for each model where it has entitlements alone."""
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: {error}", _FIX) from None
    if not isinstance(document, dict):
        raise PlanError(f"{path} is no mapping", _FIX)
    if not document.get("entitlements") and "models" not in document:
        raise PlanError(f"{path} has no entitlements", _FIX)
    complete = text
    if "models" not in document:
        listed = document.get("entitlements")
        rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        names = sorted({str(row["model"]) for row in rows if "model" in row})
        complete += "" if "version" in document else "\nversion: 1"
        complete += "\nmodels:\n" + "".join(starmap(_stand_in, enumerate(names)))
    try:
        return text, parse(complete, str(path), os.environ)
    except ConfigError as error:
        raise PlanError(str(error), _FIX) from None


def _stand_in(number: int, model: str) -> str:
    window = f"max_model_len: {_ROOM}, max_num_seqs: {_ROOM}"
    return (
        f"  - {{name: {model!r}, kv_bytes_per_token: 1, pools: "
        f"{{all: {{{window}, workers: ['http://planned-{number}.invalid']}}}}}}\n"
    )
