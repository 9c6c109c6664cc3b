"""The shipped CustomResourceDefinitions, and what their schemas say of an object."""

import functools
from typing import Any

import jsonschema_rs
import yaml

from tests.chart import CHART
from tests.kube.crd import completed, problems
from tests.kubernetes_schema import bare, closed

FILES = sorted((CHART / "files/crds").glob("*.yaml"))


@functools.cache
def definitions() -> dict[str, dict[str, Any]]:
    """By kind."""
    loaded = [yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader) for path in FILES]
    return {crd["spec"]["names"]["kind"]: crd for crd in loaded}


def schema_of(kind: str) -> dict[str, Any]:
    """Its OpenAPI schema."""
    (version,) = definitions()[kind]["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def misfits(manifest: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """What schema and rules refuse, and unknown fields. `old`: the object before its change."""
    schema = schema_of(manifest["kind"])
    named = closed(bare(schema))
    named["properties"]["metadata"] = {"type": "object"}
    errors = jsonschema_rs.Draft202012Validator(named).iter_errors(manifest)
    found = [f"{manifest['kind']}: {error.message} at {error.instance_path}" for error in errors]

    def whole(stated: dict[str, Any]) -> dict[str, Any]:
        return {**completed(schema, stated), "metadata": stated["metadata"]}

    before = None if old is None else whole(old)
    return found or list(problems(schema, whole(manifest), before))
