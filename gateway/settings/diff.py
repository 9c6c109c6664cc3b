"""What a configuration file would change in the one in force, and which of it needs a restart.

Changes are named by dotted paths; models, pools, entitlements, tenants and keys by their names.
Values of secrets are never shown, and hashes of keys by their fingerprints.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pydantic import SecretStr

from gateway.records.record import Record
from gateway.settings.config import Config
from gateway.settings.model import ModelConfig
from gateway.settings.pool import PoolConfig
from gateway.settings.problems import KeyPath, dotted
from gateway.settings.types import Section

FIXED: Final = (
    *("server", "state", "request_log", "usage_export", "telemetry", "compressor"),
    *("decisions_kept", "ledger", "currency"),
)
"""Sections that change only with a restart: most have sockets, files or processes of their own."""
KEYS: Final = ("admin_key", "viewer_key", "admin_keys")
"""Settings of `server` that change without one."""
OWN_PROCESSES: Final = ("enabled", "tokenizer")
"""Settings of a model's `compression` that its processes are started with."""
BY_HOUR: Final = ("gpu_hour", "gpus")
"""Settings of a pool by which its bill is counted from the start."""
_FIXED: Final = re.compile(
    rf"(?!server\.(?:{'|'.join(KEYS)})\b)(?:{'|'.join(FIXED)})(?:\..*)?"
    rf"|models\[[^\]]+\]\.compression\.(?:{'|'.join(OWN_PROCESSES)})"
    rf"|models\[[^\]]+\]\.pools\[[^\]]+\]\.(?:{'|'.join(BY_HOUR)})"
)
_HASH: Final = re.compile(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}")
_NAMED: Final = frozenset({"models", "entitlements", "tenants", "keys", "admin_keys"})
_WHOLE: Final = frozenset({"workers", "aliases", "loras", "api_keys"})


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
    return changes_of(before, after, Config.model_dump)


def changes_of(before: Config, after: Config, read: Callable[[Config], Any]) -> list[Change]:
    """The same, of the settings as `read` gives them."""
    old, new = read(before), read(after)
    found = list(_compared("", old, new))
    known = {model["name"] for model in old["models"]}
    for model in new["models"]:
        if model["name"] not in known and model["compression"]["enabled"]:
            path = f"models[{model['name']}].compression.enabled"
            found.append(Change(path=path, before="False", after="True", restart=True))
    return found


def merged(before: Config, after: Config) -> Config:
    """The configuration in force once `after` is applied without a restart."""
    known = {model.name: model for model in before.models}
    models = []
    for model in after.models:
        old = known.get(model.name)
        kept = (
            {"enabled": False}
            if old is None
            else {name: getattr(old.compression, name) for name in OWN_PROCESSES}
        )
        compression = model.compression.model_copy(update=kept)
        pools = {name: _merged_pool(old, name, pool) for name, pool in model.pools.items()}
        models.append(model.model_copy(update={"compression": compression, "pools": pools}))
    fixed: dict[str, Section] = {name: getattr(before, name) for name in FIXED}
    keys = {name: getattr(after.server, name) for name in KEYS}
    fixed["server"] = fixed["server"].model_copy(update=keys)
    found = after.model_copy(update={**fixed, "models": tuple(models)})
    found.note_references(
        {path: written for path, written in after.references.items() if not _is_fixed(path)}
        | {path: written for path, written in before.references.items() if _is_fixed(path)}
    )
    return found


def _is_fixed(path: KeyPath) -> bool:
    """Whether a setting outside the models changes only with a restart."""
    return path[0] != "models" and _FIXED.fullmatch(dotted(path)) is not None


def _merged_pool(old: ModelConfig | None, name: str, pool: PoolConfig) -> PoolConfig:
    if old is None or name not in old.pools:
        return pool
    return pool.model_copy(update={part: getattr(old.pools[name], part) for part in BY_HOUR})


def _compared(path: str, before: object, after: object) -> Iterator[Change]:
    if before == after:
        return
    last = path.rpartition(".")[2]
    if last in _NAMED and isinstance(before, tuple | list) and isinstance(after, tuple | list):
        before, after = _by_name(before), _by_name(after)
        yield from _members(path, before, after, named=True)
    elif isinstance(before, Mapping) and isinstance(after, Mapping) and last not in _WHOLE:
        yield from _members(path, before, after, named=last == "pools")
    else:
        restart = _FIXED.fullmatch(path) is not None
        yield Change(path=path, before=_shown(before), after=_shown(after), restart=restart)


def _members(
    path: str,
    before: Mapping[str, object],
    after: Mapping[str, object],
    *,
    named: bool,
) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        under = f"{path}[{name}]" if named else f"{path}.{name}".lstrip(".")
        yield from _compared(under, before.get(name), after.get(name))


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
