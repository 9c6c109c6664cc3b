"""TokenPool and TokenEntitlement: schemas that the API server takes, with a bound on everything."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.records.entitlement import CLASSES
from tests.crds import definitions, schema_of

KINDS = ("TokenPool", "TokenEntitlement")


def parts(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, part in node.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    if "items" in node:
        yield from parts(node["items"], f"{path}[]")


SPECS = [(kind, *part) for kind in KINDS for part in parts(schema_of(kind)["properties"]["spec"])]
ALL = [(kind, *part) for kind in KINDS for part in parts(schema_of(kind))]


@pytest.mark.parametrize("kind", KINDS)
def test_names_fit_together_and_uninstalling_keeps_the_objects(kind: str) -> None:
    crd = definitions()[kind]
    spec = crd["spec"]
    assert crd["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (version,) = spec["versions"]
    assert (spec["group"], version["name"], spec["scope"]) == (
        *("sluice.dev", "v1alpha1", "Namespaced"),
    )
    assert version["subresources"]["status"] == {}


@pytest.mark.parametrize(("kind", "path", "part"), ALL)
def test_a_schema_is_structural(kind: str, path: str, part: dict[str, Any]) -> None:
    assert part["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
    if part["type"] == "object" and path != ".metadata":
        assert part["properties"], path
        assert set(part.get("required", ())) <= set(part["properties"]), path
    for rule in part.get("x-kubernetes-validations", ()):
        assert set(rule) == {"rule", "message"}
        assert "\n" not in rule["message"]
        assert "; " in rule["message"], "what is wrong; what to change"


@pytest.mark.parametrize(("kind", "path", "part"), SPECS)
def test_what_people_write_is_bounded(kind: str, path: str, part: dict[str, Any]) -> None:
    bounds = {
        "string": {"maxLength"},
        "integer": {"minimum", "maximum"},
        "number": {"minimum", "maximum"},
        "array": {"maxItems"},
    }.get(part["type"], set())
    assert bounds <= part.keys() or "enum" in part, path


@pytest.mark.parametrize("kind", KINDS)
def test_columns_show_fields_that_there_are(kind: str) -> None:
    known = {path for path, _ in parts(schema_of(kind))} | {".metadata.creationTimestamp"}
    (version,) = definitions()[kind]["spec"]["versions"]
    columns = {c["name"]: c["jsonPath"] for c in version["additionalPrinterColumns"]}
    assert set(columns.values()) <= known
    assert columns["Age"] == ".metadata.creationTimestamp"
    scale = version["subresources"].get("scale", {})
    assert set(scale.values()) <= known


def test_an_autoscaler_finds_what_it_needs_of_a_token_pool() -> None:
    (version,) = definitions()["TokenPool"]["spec"]["versions"]
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_service_classes_are_those_of_the_gateway() -> None:
    qos = schema_of("TokenEntitlement")["properties"]["spec"]["properties"]["qos"]
    assert qos["properties"]["serviceClass"]["enum"] == list(CLASSES)
