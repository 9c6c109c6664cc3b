"""What a configuration file would change in the one in force, and which of it needs a restart.

Changes are named by dotted paths; models, pools, entitlements, tenants and keys by their names.
Values of secrets are never shown, and hashes of keys by their fingerprints.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from pydantic import Secret, SecretStr, ValidationError

from gateway.records.record import Record, without_credentials
from gateway.settings.config import Config
from gateway.settings.model import PoolConfig
from gateway.settings.source import Document, KeyPath, dotted
from gateway.settings.types import EnvValue, Section, stand_in

_S = TypeVar("_S", bound=Section)

FIXED: Final = (
    *("server", "state", "request_log", "usage_export", "telemetry", "compressor"),
    *("decisions_kept", "ledger", "batches", "currency"),
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
    rf"|models\[[^\]]+\]\.pools\[[^\]]+\]\.(?:(?:prefill|decode)\.)?(?:{'|'.join(BY_HOUR)})"
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
    return _changes(before.model_dump(), after.model_dump())


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    differences = list(_compared("", old, new))
    names = {model["name"] for model in old["models"]}
    for model in new["models"]:
        if model["name"] not in names and model["compression"]["enabled"]:
            path = f"models[{model['name']}].compression.enabled"
            differences.append(Change(path=path, before="False", after="True", restart=True))
    return differences


def merged(before: Config, after: Config) -> Config:
    """The configuration in force once `after` is applied without a restart."""
    models_before = {model.name: model for model in before.models}
    models = []
    for model in after.models:
        compression, pools = model.compression.model_copy(update={"enabled": False}), model.pools
        if (old := models_before.get(model.name)) is not None:
            compression = _taking(OWN_PROCESSES, old.compression, model.compression)
            pools = {
                name: _billed(old.pools[name], pool) if name in old.pools else pool
                for name, pool in pools.items()
            }
        models.append(model.model_copy(update={"compression": compression, "pools": pools}))
    config = _taking(FIXED, before, after)
    server = _taking(KEYS, after.server, before.server)
    config = config.model_copy(update={"server": server, "models": tuple(models)})
    config.note(
        references={
            path: written
            for source in (before, after)
            for path, written in source.origin.references.items()
            # Of settings that change only with a restart, those before.
            if (path[0] != "models" and _FIXED.fullmatch(dotted(path)) is not None)
            is (source is before)
        }
    )
    return config


def _billed(before: PoolConfig, after: PoolConfig) -> PoolConfig:
    """A pool with the prices by the hour that its engines had."""
    phases = {}
    if after.decode is not None:
        phases["decode"] = _taking(BY_HOUR, before, after.decode)
    if after.prefill is not None and before.prefill is not None:
        phases["prefill"] = _taking(BY_HOUR, before.prefill, after.prefill)
    return _taking(BY_HOUR, before, after).model_copy(update=phases)


def _taking(names: Iterable[str], source: Section, section: _S) -> _S:
    """A section with some settings of another one."""
    return section.model_copy(update={name: getattr(source, name) for name in names})


def _compared(path: str, before: Any, after: Any) -> Iterator[Change]:
    if before == after:
        return
    last = path.rpartition(".")[2]
    if isinstance(before, Mapping) and isinstance(after, Mapping) and "decode" in after:
        before, after = _phased_as(after, before), _phased_as(before, after)
    listed = isinstance(before, tuple | list) and isinstance(after, tuple | list)
    if named := last in _NAMED and listed:
        before, after = ({item["name"]: item for item in items} for items in (before, after))
    if named or (isinstance(before, Mapping) and isinstance(after, Mapping) and last not in _WHOLE):
        for name in dict.fromkeys([*before, *after]):
            inner = f"[{name}]" if named or last == "pools" else f".{name}"
            under = f"{path}{inner}" if path else name
            yield from _compared(under, before.get(name), after.get(name))
    else:
        restart = _FIXED.fullmatch(path) is not None
        yield Change(path=path, before=_shown(before), after=_shown(after), restart=restart)


def _phased_as(other: Mapping[str, Any], pool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A pool; where the other is in phases and it is not, as one whose own engines decode."""
    if pool["decode"] is not None or other["decode"] is None:
        return pool
    outer = {name: pool[name] for name in ("max_model_len", "prefill", "transfer")}
    decode = {name: value for name, value in pool.items() if name not in {*outer, "decode"}}
    return {**outer, "decode": decode}


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


_TRIED: Final = (
    *("1", "0", "60", "false", "memory://", "dns://reference:1", "day", "UTC"),
    "file:///reference",
    "2100-01-01T00:00:00Z",
)
"""Values that take the place of a reference where a text does not do."""
_TURNS: Final = 24
"""Values that are tried for one reference, at most."""
_SECRET: Final = "a secret"  # noqa: S105 - shown instead of one


class Comparison(Record, frozen=True, kw_only=True):
    """What a text would change."""

    changes: list[Change]
    not_compared: list[str]
    """Secrets that stand in the text, by their paths, and references, as written."""


def compare(running: Config, sent: Config) -> Comparison:
    """What a configuration that a caller sent would change in the one in force."""
    referred = _references(sent)
    return Comparison(
        changes=_changes(_as_written(running), _as_written(sent)),
        not_compared=[
            dotted(path)
            for path, value in _secrets((), sent.model_dump())
            if str(value) != value.get_secret_value() and path not in referred
        ]
        + [f"{dotted(path)}: {shown}" for path, shown in referred.items()],
    )


def stand_in_for_references(document: Document) -> None:
    """Give each reference in a sent text a value that its setting takes, if one is found."""
    for turn in range(_TURNS):
        try:
            Config.model_validate(document.data)
        except ValidationError as error:
            details = {document.resolve(d["loc"]): d for d in error.errors()}
        else:
            return
        for path, written in document.references.items():
            detail, section = details.get(path), details.get(path[:-1])
            if detail is None and section is not None and section["type"] == "sluice":
                detail = section  # its settings do not agree
            if detail is None:
                continue
            digest = hashlib.sha256(written.encode()).hexdigest()
            made = f"sha256:{digest}", f"http://{digest[:16]}.invalid"
            tried = (stand_in(written, "1"), *_TRIED, *made)
            choices = re.findall("'([^']+)'", str(detail.get("ctx", {}).get("expected", "")))
            value = choices[0] if choices else tried[turn % len(tried)]
            document.put(path, EnvValue(value))


def only_secrets(references: Mapping[KeyPath, str], config: Config) -> bool:
    """Whether references stand for secrets only, so that all else is as it will be."""
    values = _secrets((), config.model_dump())
    secrets = {path for path, value in values if isinstance(value, SecretStr)}
    return all(path in secrets for path in references)


def _as_written(config: Config) -> Any:
    """The settings as plain data: references as they are shown, and no secret."""
    shown = _references(config)

    def plain(value: object, path: KeyPath) -> object:
        if path in shown:
            return shown[path]
        if isinstance(value, SecretStr):
            return _SECRET
        if isinstance(value, Mapping):
            return {key: plain(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, tuple | list):
            return [plain(inner, (*path, at)) for at, inner in enumerate(value)]
        return str(value) if isinstance(value, Secret) else value

    return plain(config.model_dump(), ())


def _references(config: Config) -> dict[KeyPath, str]:
    """References as written, but in secrets without what stands beside them."""
    secrets = dict(_secrets((), config.model_dump()))
    references = dict(config.origin.references)
    for path in references.keys() & secrets.keys():
        names = [f"${{{name}}}" for name in re.findall(r"\$\{(\w+)", references[path])]
        if not isinstance(secrets[path], SecretStr):
            references[path] = without_credentials(references[path])
        elif [references[path]] != names:
            references[path] = f"{_SECRET} with {', '.join(names)}"
    return references


def _secrets(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, SecretStr | Secret[str]]]:
    """Settings that are or may hold a secret."""
    if isinstance(value, SecretStr | Secret):
        yield path, value
    elif isinstance(value, Mapping | tuple | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _secrets((*path, key), inner)
