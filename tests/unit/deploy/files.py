"""Compose file, rules and dashboards, read for the tests."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.image import dockerfile
from tests.running import command

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARDS = sorted(ROOT.glob("deploy/grafana/dashboards/*.json"))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(lock: str) -> dict[str, str]:
    """Package -> version in a file of requirements/."""
    text = (ROOT / f"requirements/{lock}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)(?:\[[a-z0-9,-]+\])?==(\S+)", text, re.MULTILINE))


def load_yaml(path: str | Path) -> Any:
    return yaml.load((ROOT / path).read_bytes(), Loader=yaml.CSafeLoader)


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load_yaml("docker-compose.yml")["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    """Services that run this repository's image."""
    return {name: service for name, service in services().items() if "build" in service}


def servers() -> dict[str, dict[str, Any]]:
    """Those of ours that listen, which the image's own health check asks."""
    return {name: s for name, s in ours().items() if "healthcheck" not in s}


def instruction(name: str) -> str:
    """Arguments of the last one of that name."""
    return [arguments for found, arguments in dockerfile() if found == name][-1]


def health_check() -> list[str]:
    found: list[str] = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    return found


def queries(dashboard: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(panel, PromQL) with the variables set."""
    found = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    found += [(a["name"], a["expr"]) for a in dashboard["annotations"]["list"] if "expr" in a]
    values = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*", "$tenant": ".*"}
    return [(w, re.sub(r"\$\w+", lambda match: values[match[0]], text)) for w, text in found]


def rules() -> list[dict[str, Any]]:
    files = load_yaml(PROMETHEUS / "prometheus.yml")["rule_files"]
    groups = [group for name in files for group in load_yaml(PROMETHEUS / name)["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def parse(arguments: list[str]) -> None:
    """Parse as the `sluice` command does, without running it; what is wrong raises."""
    group = command()
    with group.make_context("sluice", list(arguments), resilient_parsing=False) as context:
        name, verb, rest = group.resolve_command(context, list(arguments))
        verb.make_context(name, rest, parent=context)
