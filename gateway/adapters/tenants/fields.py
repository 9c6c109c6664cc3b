"""What an administrator may send for a tenant or a key, checked field by field."""

import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.errors import BadRequest
from gateway.policy.entitlements.expiry import INSTANT, in_utc
from gateway.records.request import Principal

Name = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Model = Annotated[str, Meta(min_length=1, max_length=256)]
Labels = Annotated[dict[Name, Text], Meta(max_length=64)]
Names = Annotated[list[Name], Meta(max_length=1_000)]
Models = Annotated[list[Model], Meta(max_length=1_000)]
Digest = Annotated[str, Meta(pattern=r"^(sha256:)?[0-9a-fA-F]{64}\Z")]
MAX_GRACE_S: Final = 90 * 86_400.0
_FIELD: Final = re.compile(r"`\$\.(\w+)")
GRACE_S: Final = 86_400.0
"""How long the old key opens after a rotation that says nothing."""
LIMITS: Final = ("requests_per_minute", "max_concurrency", "budgets")
"""A key's own."""


class TenantFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's fields; None removes one."""

    name: Name | UnsetType = UNSET
    display_name: Text | UnsetType | None = UNSET
    labels: Labels | UnsetType | None = UNSET
    entitlements: Names | UnsetType | None = UNSET
    suspended: bool | UnsetType = UNSET


class KeyFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key's fields; None removes one."""

    name: Name | UnsetType = UNSET
    models: Models | UnsetType | None = UNSET
    entitlements: Names | UnsetType | None = UNSET
    expires_at: datetime | UnsetType | None = UNSET
    suspended: bool | UnsetType = UNSET
    requests_per_minute: Any = UNSET
    max_concurrency: Any = UNSET
    budgets: Any = UNSET
    """As in the file; whoever reads the file checks these three."""
    sha256: Digest | UnsetType = UNSET
    """The hash of a key that exists; without it the gateway makes one."""

    @property
    def limits(self) -> dict[str, object]:
        """Those of the limits that are given, unchecked."""
        given = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in given.items() if value is not UNSET}


class RotateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a key is rotated."""

    grace_s: Annotated[float, Meta(ge=0, le=MAX_GRACE_S)] = GRACE_S
    """How long the old key opens beside the new one."""
    sha256: Digest | UnsetType = UNSET


_F = TypeVar("_F", TenantFields, KeyFields, RotateFields)


def read(fields: Mapping[str, object], kind: type[_F]) -> _F:
    """The fields, checked. Raises BadRequest, which names the first bad one."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        where = _FIELD.search(str(error))
        field = None if where is None else where[1]
        message = str(error).partition(" - at ")[0]
        raise invalid(field, f"{field}: {message}." if field else f"{message}.") from None


def unix_s(at: datetime | None) -> float:
    """An expiry in Unix seconds, 0 for none. Raises BadRequest for one out of range."""
    if at is None:
        return 0.0
    found = in_utc(at)
    if found is None:
        raise invalid("expires_at", f"expires_at: not {INSTANT}.")
    return found.timestamp()


def hex_digest(digest: str) -> str:
    """Its 64 hex digits, as a key's digest is written everywhere."""
    return bytes.fromhex(digest.removeprefix("sha256:")).hex()


def check_lists(
    tenant: str,
    entitlements: Collection[str] | UnsetType | None,
    models: Collection[str] | UnsetType | None,
    own: Mapping[str, Principal],
    adapters: Callable[[str], Collection[str]] = lambda _model: (),
) -> None:
    """Refuse entitlements and models that the tenant does not have. Raises BadRequest.

    `adapters`: the LoRA adapters of a model.
    """
    bases = {principal.model for principal in own.values() if principal.model}
    opened = bases.union(*map(adapters, bases))
    for field, given, known in (
        ("entitlements", entitlements, set(own)),
        ("models", models, opened),
    ):
        for name in given or ():
            if name not in known:
                near = get_close_matches(name, known, 1)
                has = f"Did you mean '{near[0]}'?" if near else f"It has: {_listed(known)}."
                raise invalid(
                    field, f"{field}: the tenant '{tenant}' has no '{name[:64]}' here. {has}"
                )


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)[:20]) or "none"


def invalid(field: str | None, message: str) -> BadRequest:
    """The 400 answer for a bad field."""
    return BadRequest(message, reason="invalid_tenant", code="invalid_tenant", param=field)
