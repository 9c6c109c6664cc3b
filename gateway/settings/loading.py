"""Reads a file or a text into a Config; raises ConfigError with all its problems."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gateway.settings.config import Config, EntitlementConfig
from gateway.settings.entitlement_checks import check_entitlements, check_tenants
from gateway.settings.explain import explain
from gateway.settings.model import ModelConfig
from gateway.settings.model_checks import check_models
from gateway.settings.name_checks import check_references
from gateway.settings.problems import ConfigError, Problem
from gateway.settings.sent import only_secrets, stand_in_for_references
from gateway.settings.server_checks import check_auth, check_config
from gateway.settings.source import MAX_BYTES, Document, read
from gateway.settings.types import Section

_S = TypeVar("_S", bound=Section)


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
        raise _unreadable(
            name, 1, 1, f"cannot read the file: {reason}", "check the path"
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise _unreadable(name, line, column, "not UTF-8", "save the file as UTF-8") from error
    config = parse(text, name, os.environ if environ is None else environ)
    config.note_file(name, raw, modified_unix_s)
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
        _check_relations(document, config)
    if document.problems or config is None:
        raise ConfigError(document.problems)
    config.note_references(document.references)
    return config


def _check_relations(document: Document, config: Config | None) -> None:
    """What settings must agree on; without a configuration, those of its valid sections."""
    if config is not None:  # all sections are valid; validating again would double the time
        check_config(document, config)
        check_auth(document, config)
        models = list(enumerate(config.models))
        entitlements = list(enumerate(config.entitlements))
    else:
        models = _valid(document, "models", ModelConfig)
        entitlements = _valid(document, "entitlements", EntitlementConfig)
    check_models(document, models)
    check_entitlements(document, entitlements, models, _model_names(document))
    if config is not None:  # where an entitlement is invalid, lists would seem to name nothing
        check_references(document, config)
        loras = {model.name: model.loras for _, model in models}
        check_tenants(document, list(enumerate(config.tenants)), entitlements, loras)


def _valid(document: Document, key: str, section: type[_S]) -> list[tuple[int, _S]]:
    """The items of a list that are valid by themselves, with their indices."""
    items = document.value((key,))
    found = []
    for index, item in enumerate(items if isinstance(items, list) else []):
        try:
            found.append((index, section.model_validate(item)))
        except ValidationError:
            continue
    return found


def _model_names(document: Document) -> set[str] | None:
    """Names of all models, including invalid ones; None if a name cannot be read."""
    models = document.value(("models",))
    items = models if isinstance(models, list) else [None]
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    found = {str(name) for name in names if isinstance(name, str)}
    return found if len(found) == len(set(map(repr, names))) else None


def _unreadable(file: str, line: int, column: int, message: str, fix: str) -> ConfigError:
    return ConfigError(
        [Problem(file=file, line=line, column=column, path="", message=message, fix=fix)]
    )
