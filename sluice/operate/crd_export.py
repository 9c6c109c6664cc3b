"""`sluice entitlement export --crd`: what a gateway grants, as TokenPools and TokenEntitlements.

No key is ever written. Where the gateway's file names the hash of one, a Secret holds the hash.
"""

import re
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, Final

import yaml

from gateway.admission.entitlement_terms import GIB
from gateway.records.tenancy import fingerprint
from gateway.settings import Config
from gateway.settings.model import PoolConfig
from sluice.imports.report import Fate, Report

API_VERSION: Final = "sluice.dev/v1alpha1"
KEY_ENTRY: Final = "api-key"
_RESOURCES: Final[tuple[tuple[str, str, str], ...]] = (
    # Field of an object, its name in the gateway, and its limit there.
    ("tokensPerSecond", "tokens_per_second", "max_tokens_per_second"),
    ("kvCacheGiB", "kv_cache_gib", "max_kv_cache_gib"),
    ("concurrency", "concurrency", "max_concurrency"),
)
_UNSAID: Final = (
    ("mode", "enforce", "mode: observe. Objects enforce"),
    ("compression", "allow", "compression: refuse. Its prompts may be compressed"),
    ("trusted_usage", False, "trusted_usage. Reports of its proxy teach no estimates"),
)
"""Fields that objects do not have, the value that needs no word, and what is lost otherwise."""
HEADS: Final[Mapping[Fate, str]] = {
    "left out": "Left out ({}): objects cannot say it.",
    "approximated": "Set or check ({}): objects say nearly the same.",
}


def manifests(
    rows: Iterable[Mapping[str, Any]],
    models: Iterable[Mapping[str, Any]],
    budgets: Iterable[Mapping[str, Any]],
    report: Report,
    *,
    pool: str | None,
    config: Config | None,
) -> list[dict[str, Any]]:
    """TokenPools, then Secrets and TokenEntitlements, of the admin API's answers.

    `pool`: only this pool of the models, each TokenPool for it alone. `config`: the gateway's
    file, which knows rates of pools and hashes of keys.
    """
    budgeted = {b["name"]: b["id"] for b in budgets if b["scope"] == "entitlement"}
    token_pools: dict[str, dict[str, Any]] = {}
    granted: list[dict[str, Any]] = []
    names: set[str] = set()
    shapes = {model["model"]: model["pools"] for model in models}
    for row in rows:
        shape, path = shapes.get(row["model"], []), ("entitlements", str(row["name"]))
        if row["origin"] not in {"file", "admin"}:
            report.left_out(path, "it is an object already")
            continue
        if pool is not None and pool not in {part["name"] for part in shape}:
            continue
        concurrency = _sequences(row["concurrency"], pool, path, report)
        if row["concurrency"] and not concurrency:
            continue
        for field, silent, loss in _UNSAID:
            if row[field] != silent:
                report.left_out((*path, field), loss)
        if row["name"] in budgeted:
            report.left_out((*path, "budgets"), "budgets. Give them to its tenant, in the file")
        if row["model"] not in token_pools:
            others = {made["metadata"]["name"] for made in token_pools.values()}
            made = _token_pool(row["model"], shape, report, pool, config, others)
            token_pools[row["model"]] = made
        name = dns_name(row["name"], names)
        if name != row["name"]:
            report.approximated((*path, "name"), "objects have names of a-z, 0-9, - and .")
        keys, secrets = _keys(name, row, report, config)
        granted += secrets
        reference = token_pools[row["model"]]["metadata"]["name"]
        terms = {**row, "concurrency": concurrency}
        granted.append(_entitlement(name, reference, terms, keys, report))
    return [*token_pools.values(), *granted]


def text_of(objects: Iterable[Mapping[str, Any]]) -> str:
    """The manifests as YAML."""
    return yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=100)


def dns_name(text: str, taken: set[str]) -> str:
    """A name that Kubernetes allows, and none of those taken, to which it is added."""
    base = re.sub(r"[^a-z0-9.-]+|(?<=\.)[.-]+|-+(?=\.)", "-", text.lower())[:60].strip("-.")
    name, number = base or "unnamed", 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _token_pool(
    model: str,
    shape: list[Mapping[str, Any]],
    report: Report,
    pool: str | None,
    config: Config | None,
    taken: set[str],
) -> dict[str, Any]:
    """A TokenPool of one pool's replicas or, of a model with several pools, of all it has now."""
    path = ("models", model)
    listed = next((m.pools for m in config.models if m.name == model), {}) if config else {}
    short = model.rpartition("/")[2]
    name = dns_name(f"{short}-{pool}" if pool else short, taken)
    spec: dict[str, Any] = {"model": model, **({"pool": pool} if pool else {})}
    chosen = [part for part in shape if pool in (None, part["name"])]
    per_replica = [_per_worker(part, listed.get(part["name"])) for part in chosen]
    workers = [_ready(part) for part in chosen]
    if len(chosen) == 1:
        bounds = listed[chosen[0]["name"]].replicas if chosen[0]["name"] in listed else None
        spec["perReplica"] = per_replica[0]
        if bounds is not None and bounds.max is not None:
            spec["scaling"] = {"minReplicas": bounds.min or 0, "maxReplicas": bounds.max}
        spec["replicas"] = workers[0]
        note = "name the engines in backendRef and remove replicas, so that the ready ones count"
    else:
        spec["perReplica"] = {
            field: total
            for field in ("concurrency", "tokensPerSecond", "kvCacheGiB")
            if all(field in part for part in per_replica)
            and (total := _total([part[field] for part in per_replica], workers))
        }
        spec["perReplica"].setdefault("concurrency", 1)
        spec["replicas"] = 1
        note = "one replica has what all pools have now; a TokenPool of each: --pool NAME"
    report.approximated((*path, "pools"), note)
    if config is None:
        report.approximated(path, "tokensPerSecond: give it, or the gateway's file with -c")
    return {
        "apiVersion": API_VERSION,
        "kind": "TokenPool",
        "metadata": {"name": name},
        "spec": spec,
    }


def _per_worker(pool: Mapping[str, Any], listed: PoolConfig | None) -> dict[str, Any]:
    """Capacity of one worker: of the file, else what the gateway counts."""
    capacity: dict[str, Any] = {"concurrency": pool["max_num_seqs"]}
    if listed is not None and listed.tokens_per_second:
        capacity["tokensPerSecond"] = ceil(listed.tokens_per_second)
    counted = (pool["admission"] or {}).get("kv_capacity_bytes", 0) / GIB
    gib = (listed.kv_cache_gib if listed else None) or counted / max(1, _ready(pool))
    if gib:
        capacity["kvCacheGiB"] = max(0.001, round(gib, 3))
    return capacity


def _ready(pool: Mapping[str, Any]) -> int:
    return sum(bool(worker["in_rotation"]) for worker in pool["workers"])


def _total(of_one: list[float], workers: list[int]) -> float:
    total = sum(amount * many for amount, many in zip(of_one, workers, strict=True))
    return round(total, 3)


def _entitlement(
    name: str,
    token_pool: str,
    terms: Mapping[str, Any],
    keys: list[dict[str, Any]],
    report: Report,
) -> dict[str, Any]:
    path = ("entitlements", str(terms["name"]))
    qos: dict[str, Any] = {"serviceClass": terms["service_class"]}
    if terms["slo_target_ms"]:
        qos["sloTargetMs"] = ceil(terms["slo_target_ms"])
    if terms.get("slo_tpot_ms"):
        qos["sloTpotMs"] = max(1, ceil(terms["slo_tpot_ms"]))
    spec: dict[str, Any] = {
        "tenantId": terms["tenant"],
        "poolRef": {"name": token_pool},
        "qos": qos,
    }
    for section, column in (("resources", 1), ("limits", 2)):
        for names in _RESOURCES:
            stated = terms[names[column]]
            if not stated:
                continue
            amount = max(0.001, round(stated, 3)) if names[0] == "kvCacheGiB" else ceil(stated)
            spec.setdefault(section, {})[names[0]] = amount
            if amount != stated:
                report.approximated((*path, names[column]), "rounded to what objects can say")
    if keys:
        spec["keys"] = keys
    if terms["expires_at"]:
        spec["expiresAt"] = str(terms["expires_at"]).replace("+00:00", "Z")
    if terms["suspended"]:
        spec["suspend"] = True
    report.taken(path, "a TokenEntitlement")
    return {
        "apiVersion": API_VERSION,
        "kind": "TokenEntitlement",
        "metadata": {"name": name},
        "spec": spec,
    }


def _sequences(stated: Any, pool: str | None, path: tuple[str, ...], report: Report) -> int | None:
    """A baseline over all pools, or that of one."""
    if not isinstance(stated, Mapping):
        return None if stated is None else int(stated)
    if pool is not None:
        others = [name for name, many in stated.items() if many and name != pool]
        if others:
            report.left_out((*path, "concurrency"), f"its baseline in other pools than {pool}")
        return int(stated.get(pool, 0)) or None
    report.left_out(
        (*path, "concurrency"),
        "its split over pools. The pools' slots decide it; or export with --pool",
    )
    return sum(stated.values()) or None


def _keys(
    name: str, row: Mapping[str, Any], report: Report, config: Config | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """References to Secrets, and the Secrets whose hash the file knows."""
    known = {
        fingerprint(digest): digest
        for entitlement in (config.entitlements if config else ())
        for digest in (key.removeprefix("sha256:") for key in entitlement.api_keys)
    }
    references, secrets = [], []
    for number, print_ in enumerate(row["keys"], start=1):
        secret = f"{name}-key" if number == 1 else f"{name}-key-{number}"
        references.append({"secretRef": {"name": secret, "key": KEY_ENTRY}})
        if print_ in known:
            data = {KEY_ENTRY: f"sha256:{known[print_]}"}
            secrets.append(
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": secret},
                    "stringData": data,
                }
            )
        else:
            report.approximated(
                ("entitlements", str(row["name"]), "keys", print_),
                f"make the Secret of each key, with the entry {KEY_ENTRY}: the key, or sha256: "
                "and its hash; the gateway shows neither",
            )
    return references, secrets
