"""What a configuration file would change in the one in force, and which of it needs a restart.

Changes are named by dotted paths; models, pools, entitlements, tenants and keys by their names.
Values of secrets are never shown, and hashes of keys by their fingerprints.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import SecretStr

from gateway.records.record import Record
from gateway.settings.config import Config
from gateway.settings.fleet import ModelConfig
from gateway.settings.token_pools import limits_tenants, managed

LIVE: Final = (
    r"(entitlements|tenants)\[.*",
    r"(health|timeouts|retry)\.\w+",
    r"models\[[^\]]+\]\.pools\[[^\]]+\]\.(workers|max_model_len|max_num_seqs|replicas.*)",
    r"models\[[^\]]+\]\.pools\[[^\]]+\]\.(tokens_per_second|kv_cache_gib)",
    r"models\[[^\]]+\]\.(default_max_tokens|spill_queue|cache_salt|engine_priority|timeouts.*)",
    r"models\[[^\]]+\]\.price.*",
    r"models\[[^\]]+\]\.(boundary\.(b_short|gamma)|compression\.max_cut)",
    r"models\[[^\]]+\]\.scheduling\.(queue_limit|queue_timeout_s)",
    r"models\[[^\]]+\]\.admission\.\w+",
)
"""Paths that change without a restart."""
_LIVE: Final = re.compile("|".join(f"(?:{path})" for path in LIVE))
_HASH: Final = re.compile(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}")
_NAMED: Final = frozenset({"models", "entitlements", "tenants", "keys"})
_WHOLE: Final = frozenset({"workers", "aliases", "api_keys"})


class Change(Record, frozen=True, kw_only=True):
    """One setting that a file changes."""

    path: str
    before: str
    """As text; "" for none. Secrets are not shown."""
    after: str
    restart: bool
    """Whether it takes effect only after a restart."""


def changes(before: Config, after: Config) -> list[Change]:
    """Every setting that differs, in the file's order."""
    return list(_compared("", before.model_dump(), after.model_dump(), _fixed(before, after)))


def merged(before: Config, after: Config) -> Config:
    """The configuration in force once `after` is applied without a restart."""
    known = {model.name: model for model in after.models}
    fixed = _fixed(before, after)
    models = tuple(
        _merged_model(model, known[model.name])
        if model.name in known and f"models[{model.name}]" not in fixed
        else model
        for model in before.models
    )
    update = {name: getattr(after, name) for name in ("health", "timeouts", "retry")}
    if "tenants" not in fixed:
        update["tenants"] = after.tenants
    if not any(path.startswith("entitlements") for path in fixed):
        update["entitlements"] = after.entitlements
    found = before.model_copy(update={**update, "models": models})
    found.note_modified(after.modified_unix_s)
    return found


def _merged_model(before: ModelConfig, after: ModelConfig) -> ModelConfig:
    kept = ("scheduling", "gpu_hour", "gpus")
    pools = {
        name: pool.model_copy(update={part: getattr(before.pools[name], part) for part in kept})
        for name, pool in after.pools.items()
    }
    own = ("default_max_tokens", "spill_queue", "cache_salt", "engine_priority", "timeouts")
    update: dict[str, Any] = {name: getattr(after, name) for name in (*own, "admission", "price")}
    queue = ("queue_limit", "queue_timeout_s")
    parts = {"boundary": ("b_short", "gamma"), "compression": ("max_cut",), "scheduling": queue}
    for part, names in parts.items():
        there = getattr(after, part)
        changed = {name: getattr(there, name) for name in names}
        update[part] = getattr(before, part).model_copy(update=changed)
    return before.model_copy(update={**update, "pools": pools})


def _fixed(before: Config, after: Config) -> frozenset[str]:
    """Models whose shape changes, so that nothing of them changes without a restart."""
    known = {model.name: model for model in after.models}
    found = set()
    for model in before.models:
        other = known.get(model.name)
        same = other is not None and (
            list(model.pools) == list(other.pools)
            and managed(before, model) == managed(after, other)
            and len(model.boundaries) == len(other.boundaries)
            and model.policies(before.server.workers) == other.policies(before.server.workers)
        )
        if not same:
            found.add(f"models[{model.name}]")
    if found or {model.name for model in before.models} != set(known):
        # Limits of entitlements are checked against the models of the same file.
        found.add("entitlements")
    if limits_tenants(before) != limits_tenants(after):
        found.add("tenants")  # all models become managed, or no longer are
    return frozenset(found)


def _compared(path: str, before: object, after: object, fixed: frozenset[str]) -> Iterator[Change]:
    if before == after:
        return
    last = path.rpartition(".")[2]
    if last in _NAMED and isinstance(before, tuple | list) and isinstance(after, tuple | list):
        before, after = _by_name(before), _by_name(after)
        yield from _members(path, before, after, fixed, named=True)
    elif isinstance(before, Mapping) and isinstance(after, Mapping) and last not in _WHOLE:
        yield from _members(path, before, after, fixed, named=last == "pools")
    else:
        live = _LIVE.fullmatch(path) is not None
        live = live and not any(path.startswith(prefix) for prefix in fixed)
        yield Change(path=path, before=_shown(before), after=_shown(after), restart=not live)


def _members(
    path: str,
    before: Mapping[str, object],
    after: Mapping[str, object],
    fixed: frozenset[str],
    *,
    named: bool,
) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        under = f"{path}[{name}]" if named else f"{path}.{name}".lstrip(".")
        yield from _compared(under, before.get(name), after.get(name), fixed)


def _by_name(items: Any) -> dict[str, object]:
    return {item["name"]: item for item in items}


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, SecretStr):
        return "a secret"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{k}: {_shown(v)}" for k, v in value.items() if v not in (None, ()))
        return f"{{{inner}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    return _HASH.sub(r"\1…", str(value))
