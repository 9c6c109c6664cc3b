"""The shipped CustomResourceDefinitions, and what their schemas say of an object."""

import functools
from typing import Any

import jsonschema_rs
import yaml

from tests.chart import CHART
from tests.kubernetes_schema import bare, closed

FILES = sorted((CHART / "files/crds").glob("*.yaml"))


@functools.cache
def definitions() -> dict[str, dict[str, Any]]:
    """By kind."""
    loaded = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in FILES]
    return {crd["spec"]["names"]["kind"]: crd for crd in loaded}


def schema_of(kind: str) -> dict[str, Any]:
    """Its OpenAPI schema."""
    (version,) = definitions()[kind]["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def misfits(manifest: dict[str, Any]) -> list[str]:
    """What the schema refuses, and fields that it does not know. Its rules in CEL are not asked."""
    schema = closed(bare(schema_of(manifest["kind"])))
    schema["properties"]["metadata"] = {"type": "object"}
    errors = jsonschema_rs.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{manifest['kind']}: {error.message} at {error.instance_path}" for error in errors]
