"""The chart's generated files and its golden outputs, which `make chart` writes anew.

`values.schema.json` is the chart's own schema (deploy/helm/values.schema.yaml) with the settings'
as `config`. Rules, alerts and dashboard are copies, since a chart holds all that it needs. A golden
output is what `helm template` makes of a file of tests/unit/deploy/chart/values.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.settings.config import schema

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "deploy/helm/sluice"
COPIES: Final = {
    "files/rules.yml": "deploy/prometheus/rules.yml",
    "files/alerts.yml": "deploy/prometheus/alerts.yml",
    "files/dashboard.json": "deploy/grafana/dashboards/sluice.json",
}

VALUES: Final = sorted((ROOT / "tests/unit/deploy/chart/values").glob("*.yaml"))
HELM: Final = shutil.which(
    "helm", path=os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
)
"""The program, from PATH or beside this Python; None where it is not installed."""
Manifest = dict[str, Any]


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Helm, which may fail."""
    command = [HELM or "helm", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(*options: str) -> list[Manifest]:
    """What `helm template` makes of the chart in the namespace `prod`, by kind and name."""
    done = helm("template", "sluice", str(CHART), "--namespace=prod", *options)
    if done.returncode:
        raise ValueError(done.stderr)
    # By libyaml, which takes a tenth of the time.
    found = [m for m in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if m]
    return sorted(found, key=lambda m: (m["kind"], m["metadata"]["name"]))


def golden_of(values: Path) -> Path:
    """The golden output of a file of values."""
    return values.parents[1] / "golden" / values.name


def golden_text(manifests: list[Manifest]) -> str:
    """Manifests as a golden file holds them: a copy of a shipped file stands there by its name."""
    groups = [g for name in COPIES if name.endswith(".yml") for g in _groups(name)]
    dashboard = (CHART / "files/dashboard.json").read_text(encoding="utf-8")
    for manifest in manifests:
        if manifest["kind"] == "CustomResourceDefinition":
            path = f"files/crds/{manifest['spec']['names']['plural']}.yaml"
            if manifest == yaml.safe_load((CHART / path).read_text(encoding="utf-8")):
                manifest["spec"] = f"<{path}>"
        elif manifest.get("spec", {}).get("groups") == groups:
            manifest["spec"]["groups"] = "<rules.yml, alerts.yml>"
        if manifest.get("data", {}).get("sluice.json") == dashboard:
            manifest["data"]["sluice.json"] = "<dashboard.json>"
    return yaml.safe_dump_all(manifests, sort_keys=False, width=100)


def _groups(name: str) -> list[Any]:
    return list(yaml.safe_load((CHART / name).read_text(encoding="utf-8"))["groups"])


def generated() -> dict[str, str]:
    """Path in the chart -> text of every generated file."""
    copies = {name: (ROOT / source).read_text("utf-8") for name, source in COPIES.items()}
    return {**copies, "values.schema.json": json.dumps(values_schema(), indent=1) + "\n"}


def values_schema() -> dict[str, Any]:
    """JSON Schema of values.yaml. Keys in `config` can only be references to the environment."""
    text = (ROOT / "deploy/helm/values.schema.yaml").read_text(encoding="utf-8")
    own = _closed(yaml.safe_load(text))
    settings = _keyless(schema())
    parts = settings.pop("$defs")
    del settings["$schema"]
    parts["StateConfig"]["properties"]["url"]["not"] = {"pattern": "://[^@/]*:[^@/$]+@"}
    parts["KeyReference"] = {
        "description": "`${NAME}`: a key comes from the Secret, never from the values.",
        "type": "string",
        "pattern": r"^\$\{[A-Za-z_][A-Za-z0-9_]*\}$",
    }
    own["$defs"] |= {"Config": settings, **parts}
    return dict(own)


def _closed(node: Any) -> Any:
    """Refuse unknown keys wherever the known ones are listed."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {name: _closed(part) for name, part in node.items()}
    if isinstance(node.get("properties"), dict):
        return {"type": "object", "additionalProperties": False, **found}
    return found


def _keyless(node: Any) -> Any:
    """Replace what is secret (`writeOnly`) by a reference to the Secret."""
    if isinstance(node, list):
        return [_keyless(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("writeOnly"):
        return {"$ref": "#/$defs/KeyReference"}
    return {name: _keyless(part) for name, part in node.items()}


def main() -> None:
    """Write all; without Helm no golden outputs."""
    for name, text in generated().items():
        (CHART / name).write_text(text, encoding="utf-8")
    for values in VALUES if HELM else ():
        text = golden_text(rendered(f"--values={values}"))
        golden_of(values).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
