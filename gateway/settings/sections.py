"""Tenants, and their keys, each of which may open several models."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.settings.budgets import Budgets, KeyLimitsConfig
from gateway.settings.types import Flag, Instant, Label, ModelName, Section, Text, reject

_HASH_FIX = "make one with `sluice hash-key`, which prints `sha256:` and 64 hex digits"


def _key_hash(value: str) -> str:
    if not value.startswith("sha256:"):
        reject("not the hash of a key", _HASH_FIX)
    return _digest(value)


def _digest(value: str) -> str:
    digits = value.removeprefix("sha256:").lower()
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        reject("not the hash of a key", _HASH_FIX)
    return f"sha256:{digits}"


KeyHash = Annotated[
    str,
    AfterValidator(_key_hash),
    Field(json_schema_extra={"pattern": "^sha256:[0-9a-fA-F]{64}$"}),
]
KeyDigest = Annotated[
    str,
    AfterValidator(_digest),
    Field(json_schema_extra={"pattern": "^(sha256:)?[0-9a-fA-F]{64}$"}),
]
"""The same, or the 64 hex digits alone, as other gateways store them."""


class TenantKeyConfig(KeyLimitsConfig):
    """A key of a tenant. It opens every model that its entitlements are for."""

    name: Label
    """Unique in its tenant; shown in the request log and the usage export."""
    sha256: KeyDigest = Field(repr=False)
    """Hash of the key, from `sluice hash-key`; 64 hex digits, with or without `sha256:`."""
    models: tuple[ModelName, ...] | None = None
    """The only models that it opens; absent: all of its entitlements'."""
    entitlements: tuple[Label, ...] | None = None
    """Entitlements that it uses; the first for the requested model counts. Absent: the tenant's."""
    expires_at: Instant | None = None
    """After this the key answers 403; UTC unless an offset is given."""
    suspended: Flag = False
    """The key answers 403 while this is true."""


class TenantConfig(Section):
    """A customer or a team: any number of keys over the entitlements that name it."""

    name: Label
    """Unique; `tenant` of its entitlements."""
    display_name: Text | None = None
    """Its name for people."""
    labels: Mapping[Label, Text] = {}
    """Notes of your own, such as a cost centre; `sluice check --json` shows them."""
    entitlements: tuple[Label, ...] | None = None
    """Entitlements of keys that list none, in order of preference. Absent: all that name this
    tenant, in the order of the file."""
    keys: tuple[TenantKeyConfig, ...] = ()
    """Its keys, any number."""
    budgets: Budgets = ()
    """What all of its keys may use together, over all models."""
    suspended: Flag = False
    """All of its keys and tokens answer 403 while this is true."""
