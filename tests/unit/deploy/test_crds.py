"""TokenPool and TokenEntitlement: schemas that the API server takes, with a bound on everything."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.records.entitlement import CLASSES
from tests.crds import definitions, misfits, schema_of

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


POOL: dict[str, Any] = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "TokenPool",
    "metadata": {"name": "p"},
    "spec": {"model": "m", "perReplica": {"concurrency": 8}},
}
ENTITLEMENT: dict[str, Any] = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "TokenEntitlement",
    "metadata": {"name": "e"},
    "spec": {"tenantId": "t", "poolRef": {"name": "p"}},
}


def changed(base: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """The object with other fields of its spec; None removes one."""
    merged = {name: value for name, value in {**base["spec"], **spec}.items() if value is not None}
    return {**base, "spec": merged}


def backend(kind: str, version: str) -> dict[str, Any]:
    return {"backendRef": {"apiVersion": version, "kind": kind, "name": "engines"}}


@pytest.mark.parametrize(
    "good",
    [
        POOL,
        changed(POOL, **backend("Deployment", "apps/v1")),
        changed(POOL, **backend("StatefulSet", "apps/v1")),
        changed(POOL, **backend("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")),
        changed(POOL, **backend("InferencePool", "inference.networking.k8s.io/v1")),
        changed(POOL, scaling={"maxReplicas": 1}, replicas=0),
        *(
            changed(POOL, perReplica={"concurrency": 1, "kvCacheGiB": gib})
            for gib in (1, 0.001, 1.001, 2.3, 16.35, 123456.789, 1_000_000)
        ),
        ENTITLEMENT,
        changed(
            ENTITLEMENT,
            qos={"serviceClass": "guaranteed"},
            resources={"concurrency": 4},
            limits={"concurrency": 4},
        ),
        changed(
            ENTITLEMENT,
            resources={"tokensPerSecond": 1, "kvCacheGiB": 1.5},
            limits={"tokensPerSecond": 1, "kvCacheGiB": 1.5, "concurrency": 2},
        ),
    ],
    ids=str,
)
def test_what_is_right_is_taken(good: dict[str, Any]) -> None:
    assert misfits(good) == []


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (
            changed(POOL, **backend("Deployment", "leaderworkerset.x-k8s.io/v1")),
            "write apps/v1 for",
        ),
        (
            changed(POOL, **backend("InferencePool", "apps/v1")),
            "inference.networking.k8s.io/v1 for",
        ),
        (changed(POOL, scaling={"minReplicas": 3, "maxReplicas": 2}), "or raise maxReplicas"),
        (changed(POOL, perReplica={"concurrency": 1, "kvCacheGiB": 1.0005}), "round it"),
        (changed(POOL, perReplica={"concurrency": 1, "kvCacheGiB": 1.9999}), "round it"),
        ({**POOL, "metadata": {"name": "p" * 64}}, "shorten it"),
        (changed(ENTITLEMENT, qos={"serviceClass": "guaranteed"}), "give resources.concurrency"),
        (
            changed(
                ENTITLEMENT,
                qos={"serviceClass": "guaranteed"},
                resources={"concurrency": 4},
                limits={"concurrency": 5},
            ),
            "raise resources.concurrency, or choose dedicated",
        ),
        (
            changed(
                ENTITLEMENT, qos={"serviceClass": "preemptible"}, limits={"tokensPerSecond": 9}
            ),
            "or choose dedicated, elastic or spot",
        ),
        *(
            (
                changed(ENTITLEMENT, resources={field: 2}, limits={field: 1}),
                f"limits.{field} is below resources.{field}; raise the limit",
            )
            for field in ("tokensPerSecond", "kvCacheGiB", "concurrency")
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_fix(wrong: dict[str, Any], fix: str) -> None:
    (problem,) = misfits(wrong)
    assert fix in problem


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (POOL, {"model": "other"}),
        (POOL, {"pool": "short"}),
        (changed(POOL, pool="short"), {"pool": "long"}),
        (changed(POOL, pool="short"), {"pool": None}),
        (ENTITLEMENT, {"tenantId": "other"}),
        (ENTITLEMENT, {"poolRef": {"name": "other"}}),
    ],
    ids=str,
)
def test_what_an_object_is_about_never_changes(old: dict[str, Any], new: dict[str, Any]) -> None:
    (problem,) = misfits(changed(old, **new), old)
    assert "create another" in problem
    assert misfits(old, old) == []
