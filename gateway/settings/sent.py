"""A configuration that a caller sent, to be compared with the one in force.

It never meets this machine: neither the environment nor a file that it names is read, for what is
told of it could otherwise tell a secret. A value that stands in for a reference only has to be of
the setting's type; the comparison shows the reference as it was written. Secrets are not compared.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import Secret, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from gateway.records.record import Record, without_credentials
from gateway.settings.config import Config
from gateway.settings.diff import Change, changes_of
from gateway.settings.problems import KeyPath, dotted
from gateway.settings.scalars import EnvValue, stand_in
from gateway.settings.source import Document

_LIMITS: Final = {"ge": 0, "gt": 1, "le": 0, "lt": -1}
"""Bound of a number -> what is to be added for a number within it."""
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
        changes=changes_of(running, sent, _as_written),
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
            found = {document.resolve(each["loc"]): each for each in error.errors()}
        else:
            return
        for path, written in document.references.items():
            detail, section = found.get(path), found.get(path[:-1])
            if detail is None and section is not None and section["type"] == "sluice":
                detail = section  # its settings do not agree
            if detail is not None:
                document.put(path, _value(written, detail, turn))


def only_secrets(references: Mapping[KeyPath, str], config: Config) -> bool:
    """Whether references stand for secrets only, so that all else is as it will be."""
    found = _secrets((), config.model_dump())
    secrets = {path for path, value in found if isinstance(value, SecretStr)}
    return all(path in secrets for path in references)


def _value(written: str, detail: ErrorDetails, turn: int) -> EnvValue:
    """The value to try next for a reference."""
    context = detail.get("ctx", {})
    for name, more in _LIMITS.items():
        if name in context:
            return EnvValue(f"{context[name] + more:g}")
    if choices := re.findall("'([^']+)'", str(context.get("expected", ""))):
        return EnvValue(choices[0])
    digest = hashlib.sha256(written.encode()).hexdigest()
    tried = (
        stand_in(written, "1"),
        *("0", "false", f"sha256:{digest}", f"http://{digest[:16]}.invalid", "memory://"),
        *("dns://reference:1", "day", "UTC", "2100-01-01T00:00:00Z"),
    )
    return EnvValue(tried[turn % len(tried)])


def _as_written(config: Config) -> Any:
    """The settings as plain data: references as they are shown, and no secret."""
    found: Any = _plain(config.model_dump())
    for path, shown in _references(config).items():
        holder, key, inner = found, path[0], found[path[0]]
        for step in path[1:]:
            here = inner if isinstance(inner, dict) else range(len(inner or ()))
            if step not in here:
                break  # the setting has another shape: then all of it is a reference
            holder, key, inner = inner, step, inner[step]
        holder[key] = shown
    return found


def _references(config: Config) -> dict[KeyPath, str]:
    """References as written, but in secrets without what stands beside them."""
    secrets = dict(_secrets((), config.model_dump()))
    found = dict(config.references)
    for path in found.keys() & secrets.keys():
        names = [f"${{{name}}}" for name in re.findall(r"\$\{(\w+)", found[path])]
        if not isinstance(secrets[path], SecretStr):
            found[path] = without_credentials(found[path])
        elif [found[path]] != names:
            found[path] = f"{_SECRET} with {', '.join(names)}"
    return found


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return _SECRET
    if isinstance(value, Secret):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def _secrets(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, SecretStr | Secret[str]]]:
    """Settings that are or may hold a secret."""
    if isinstance(value, SecretStr | Secret):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets((*path, key), inner)
    elif isinstance(value, tuple | list):
        for at, inner in enumerate(value):
            yield from _secrets((*path, at), inner)
