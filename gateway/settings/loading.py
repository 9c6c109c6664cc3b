"""Reads a file, a text, or what an administrator sends; raises ConfigError with all problems."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from gateway.records.tenancy import RowKind
from gateway.settings.checks import check_relations, unfit_limits
from gateway.settings.compare import only_secrets, stand_in_for_references
from gateway.settings.config import Config, digest_of
from gateway.settings.explain import explain, first_problem
from gateway.settings.source import MAX_BYTES, ConfigError, Problem, dotted, read
from gateway.settings.tenants import (
    EntitlementConfig,
    KeyLimitsConfig,
    TenantConfig,
    TenantKeyConfig,
)
from gateway.settings.types import Section

_SECTIONS: Final[dict[RowKind, type[Section]]] = {
    "entitlement": EntitlementConfig,
    "tenant": TenantConfig,
    "key": TenantKeyConfig,
}
_BUDGETS: Final = {"budgets": "set it in the configuration file"}
_IN_FILE: Final[dict[RowKind, dict[str, str]]] = {
    "entitlement": {"api_keys": "add a key with POST /admin/entitlements/{name}/keys"} | _BUDGETS,
    "tenant": {"keys": "add each with POST /admin/tenants/{name}/keys"} | _BUDGETS,
    "key": {},
}


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration file; `environ` is the process's environment unless given."""
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
            # With a modification time in the future, every later file would seem older.
            modified_unix_s = min(os.fstat(file.fileno()).st_mtime, time.time())
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not a usable path"
        raise _refused(name, "", f"cannot read the file: {reason}", "check the path") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        place = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise _refused(name, "", "not UTF-8", "save the file as UTF-8", *place) from error
    config = parse(text, name, os.environ if environ is None else environ)
    config.note(file=name, digest=digest_of(raw), modified_unix_s=modified_unix_s)
    return config


def parse(text: str, filename: str, environ: Mapping[str, str] | None) -> Config:
    """Read a configuration from text. Raises ConfigError, and nothing else.

    A text that a caller sent has no environment: it could name secrets in what is told of it.
    """
    document = read(text, filename, environ)
    if document.sent:
        stand_in_for_references(document)
    config: Config | None = None
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        explain(document, error)
    if not document.sent or (config is not None and only_secrets(document.references, config)):
        check_relations(document, config)
    if document.problems or config is None:
        raise ConfigError(document.problems)
    config.note(references=document.references)
    return config


def read_admin_fields(
    config: Config, kind: RowKind, fields: Mapping[str, object]
) -> dict[str, Any]:
    """What an administrator sends of a tenant, an entitlement or a key, as JSON.

    The file's own section checks it, with the same words and fixes. Keys and budgets of an
    entitlement or a tenant are set in the file only, or by routes of their own. Raises ConfigError
    with the first problem.
    """
    for name, fix in _IN_FILE[kind].items():
        if name in fields:
            raise _refused("request", name, "cannot be sent here", fix)
    section = _SECTIONS[kind]
    try:
        found = section.model_validate(fields)
    except ValidationError as error:
        path, message, fix = first_problem(error, section)
        raise _refused("request", dotted(path), message, fix) from None
    limits = [name for name in KeyLimitsConfig.model_fields if name in fields]
    if kind == "key" and limits and (unfit := unfit_limits(config)) is not None:
        raise _refused("request", limits[0], *unfit)
    return found.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _refused(
    file: str, path: str, message: str, fix: str, line: int = 1, column: int = 1
) -> ConfigError:
    return ConfigError(
        [Problem(file=file, line=line, column=column, path=path, message=message, fix=fix)]
    )
