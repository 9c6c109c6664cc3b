"""Rows of LiteLLM's tables: what a key or a team says, read without trust."""

import hashlib
import re
from datetime import UTC, datetime
from typing import Any, Final

from gateway.settings.source import KeyPath

_ALL: Final = frozenset({"all-team-models", "all-proxy-models", "*"})
_HEX: Final = re.compile(r"[0-9a-f]{64}\Z")
_MAX_AMOUNT: Final = 1 << 53
"""Highest number that the file may have."""


def rows_of(tables: dict[str, Any], *names: str) -> list[tuple[KeyPath, dict[str, Any]]]:
    """(path, row) of every row of these tables."""
    return [
        ((name, index), row)
        for name in names
        for index, row in enumerate(listed(tables, name))
        if isinstance(row, dict)
    ]


def listed(tables: dict[str, Any], name: str) -> list[Any]:
    """A table as it stands; empty without one."""
    found = tables.get(name)
    return found if isinstance(found, list) else []


def models_in(row: dict[str, Any]) -> list[str] | None:
    """The models that a row lists, empty where it means all; None where it does not say."""
    given = row.get("models", "")
    if given is None:
        return []
    if not isinstance(given, list):
        return None
    names = [str(name) for name in given]
    return [] if _ALL.intersection(names) else names


def number(value: object) -> float | None:
    """A number, also where a dump has it as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) <= _MAX_AMOUNT else None


def whole(value: object) -> int | None:
    """A number as above, without its fraction."""
    found = number(value)
    return None if found is None else int(found)


def digest_of(row: dict[str, Any]) -> str | None:
    """LiteLLM's own hash of a key; a token that is none is hashed as LiteLLM does."""
    token = row.get("token") or row.get("key")
    if not isinstance(token, str) or not token:
        return None
    known = token.lower()
    return known if _HEX.match(known) else hashlib.sha256(token.encode()).hexdigest()


def instant_of(value: object) -> str | None:
    """An expiry in UTC; LiteLLM's times without an offset are UTC."""
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return found.isoformat(timespec="seconds").replace("+00:00", "Z")
