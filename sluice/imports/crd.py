"""TokenPools, TokenEntitlements and their Secrets -> the section `entitlements` of sluice.yaml."""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from controller.objects import read_claim, read_pool
from controller.records import TOKEN_ENTITLEMENTS, TOKEN_POOLS, Object
from gateway.settings.source import KeyPath
from sluice.imports.report import Report
from sluice.imports.sections import Row, variable

Manifest = tuple[KeyPath, Object]
"""An object and its place in its file."""
Objects = Mapping[tuple[str, str], Object]
"""By kind and name."""


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
    objects = {
        (str(manifest.get("kind")), str(_mapping(manifest, "metadata").get("name"))): manifest
        for (_, manifest), _ in manifests
    }
    sections = []
    for (path, manifest), report in manifests:
        kind = manifest.get("kind")
        if kind == TOKEN_ENTITLEMENTS.kind:
            section = _entitlement(path, manifest, objects, report)
            if section is not None:
                sections.append(section)
        elif kind == TOKEN_POOLS.kind:
            model = _mapping(manifest, "spec").get("model")
            report.approximated(
                (*path, "spec"),
                f"the file's own: models[].pools of `{model}` has workers and slots",
            )
        elif kind != "Secret":
            report.left_out(path, f"no {kind} is read")
    return {"entitlements": sections} if sections else {}


def _entitlement(path: KeyPath, manifest: Object, objects: Objects, report: Report) -> Row | None:
    """Its section, as the controller reads it."""
    spec = _mapping(manifest, "spec")
    reference = str(_mapping(spec, "poolRef").get("name"))
    token_pool = objects.get((TOKEN_POOLS.kind, reference))
    if token_pool is None:
        report.left_out((*path, "spec", "poolRef"), f"give the file of the TokenPool {reference}")
        return None
    pool = read_pool(token_pool)
    if pool.problem:
        report.left_out(path, f"TokenPool {reference}: {pool.problem}")
        return None
    claim = read_claim({**manifest, "status": {}}, {reference: pool}, {}, {})
    if claim.problem is not None:
        report.left_out(path, claim.problem[1])
        return None
    section = Row({name: claim.fields[name] for name in ("name", "tenant", "model")})
    section |= claim.fields
    keys = [_key(_mapping(key, "secretRef"), objects) for key in spec.get("keys") or ()]
    if keys:
        section["api_keys"] = keys
    if claim.suspended:
        report.left_out(
            (*path, "spec", "suspend"), "the file has no such setting: `sluice entitlement suspend`"
        )
    report.taken(path, "an entitlement")
    return section


def _key(reference: Mapping[str, Any], objects: Objects) -> str:
    """The hash of a key, of its Secret where that was given too, else of a variable."""
    name, entry = str(reference.get("name")), str(reference.get("key"))
    secret = objects.get(("Secret", name), {})
    text = _mapping(secret, "stringData").get(entry)
    try:
        encoded = str(_mapping(secret, "data").get(entry, ""))
        key = base64.b64decode(encoded, validate=True) if text is None else str(text).encode()
    except (ValueError, binascii.Error):
        key = b""
    key = key.rstrip(b"\r\n")
    if not key:
        return "${" + variable(f"{name}_{entry}") + "}"
    if key.startswith(b"sha256:"):
        return key.decode(errors="replace")
    return f"sha256:{hashlib.sha256(key).hexdigest()}"


def _mapping(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}
