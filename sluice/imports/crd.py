"""TokenPools, TokenEntitlements and their Secrets -> the section `entitlements` of sluice.yaml."""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from gateway.settings.source import KeyPath
from gateway.settings.tenants import EntitlementConfig
from sluice.imports.report import Report
from sluice.imports.sections import Row, variable

_AMOUNTS: Final = {
    "resources": {
        "tokensPerSecond": "tokens_per_second",
        "kvCacheGiB": "kv_cache_gib",
        "concurrency": "concurrency",
    },
    "limits": {
        "tokensPerSecond": "max_tokens_per_second",
        "kvCacheGiB": "max_kv_cache_gib",
        "concurrency": "max_concurrency",
    },
}
Manifest = tuple[KeyPath, dict[str, Any]]
"""An object and its place in its file."""


def objects_of(data: object) -> list[Manifest]:
    """The objects of a document, with those of a List."""
    if not isinstance(data, dict):
        return []
    items = data.get("items")
    if isinstance(items, list):
        return [(("items", at), item) for at, item in enumerate(items) if isinstance(item, dict)]
    return [((), data)]


def convert(manifests: list[tuple[Manifest, Report]]) -> dict[str, Any]:
    """The section; empty if no entitlement can be one of the file."""
    objects: dict[tuple[str, str], dict[str, Any]] = {}
    for (_, manifest), _ in manifests:
        objects[str(manifest.get("kind")), _name(manifest)] = manifest
    sections = []
    for (path, manifest), report in manifests:
        kind, spec = manifest.get("kind"), _mapping(manifest, "spec")
        if kind == "TokenEntitlement":
            section = _entitlement(path, manifest, objects, report)
            if section is not None:
                sections.append(section)
        elif kind == "TokenPool":
            report.approximated(
                (*path, "spec"),
                f"the file's own: models[].pools of `{spec.get('model')}` has workers and slots",
            )
        elif kind != "Secret":
            report.left_out(path, f"no {kind} is read")
    return {"entitlements": sections} if sections else {}


def _entitlement(
    path: KeyPath,
    manifest: Mapping[str, Any],
    objects: Mapping[tuple[str, str], dict[str, Any]],
    report: Report,
) -> Row | None:
    spec, name = _mapping(manifest, "spec"), _name(manifest)
    reference = str(_mapping(spec, "poolRef").get("name"))
    token_pool = objects.get(("TokenPool", reference))
    if token_pool is None:
        report.left_out((*path, "spec", "poolRef"), f"give the file of the TokenPool {reference}")
        return None
    pool, qos = _mapping(token_pool, "spec"), _mapping(spec, "qos")
    section = Row(name=name, tenant=spec.get("tenantId"), model=pool.get("model"))
    section["service_class"] = qos.get("serviceClass", "elastic")
    if "sloTargetMs" in qos:
        section["slo_target_ms"] = qos["sloTargetMs"]
    for part, fields in _AMOUNTS.items():
        amounts = _mapping(spec, part)
        section |= {field: amounts[said] for said, field in fields.items() if said in amounts}
    if "pool" in pool and "concurrency" in section:
        section["concurrency"] = {pool["pool"]: section["concurrency"]}
    if "expiresAt" in spec:
        section["expires_at"] = str(spec["expiresAt"])
    try:
        EntitlementConfig.model_validate(section)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        report.left_out(path, f"{place}: {problem['msg']}")
        return None
    keys = [_key(key, objects) for key in spec.get("keys", [])]
    if keys:
        section["api_keys"] = keys
    if spec.get("suspend"):
        report.left_out(
            (*path, "spec", "suspend"), "the file has no such setting: `sluice entitlement suspend`"
        )
    report.taken(path, "an entitlement")
    return section


def _key(key: Mapping[str, Any], objects: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """The hash of a key, of its Secret where that was given too, else of a variable."""
    reference = _mapping(key, "secretRef")
    secret = objects.get(("Secret", str(reference.get("name"))), {})
    entry = str(reference.get("key"))
    text = _mapping(secret, "stringData").get(entry)
    try:
        value = base64.b64decode(_mapping(secret, "data").get(entry, ""), validate=True)
        value = value if text is None else str(text).encode()
    except (ValueError, binascii.Error):
        value = b""
    value = value.strip()
    if not value:
        return "${" + variable(f"{reference.get('name')}_{entry}") + "}"
    if value.startswith(b"sha256:"):
        return value.decode()
    return f"sha256:{hashlib.sha256(value).hexdigest()}"


def _mapping(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _name(manifest: Mapping[str, Any]) -> str:
    return str(_mapping(manifest, "metadata").get("name"))
