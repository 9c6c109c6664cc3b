"""Usage for billing: of one request, summed, and asked for."""

from collections.abc import Mapping
from typing import NamedTuple

from gateway.records.record import Record


class UsageLine(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Usage and cost of one request. Cached input is part of the input."""

    id: str
    time_unix_s: float
    """When it was settled."""
    tenant: str
    entitlement: str
    key: str
    """The key's name, or its fingerprint where it has none; empty without a key."""
    model: str
    endpoint: str
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    charge_tokens: int
    """Tokens that the entitlement's bucket paid, by the weights of the model's profile."""
    source: str
    """Source of the usage: engine (reported), counted (by the gateway) or proxy (reported)."""
    status: str
    """The outcome, as in the request log."""
    cost_nano: int | None = None
    """Cost in 1e-9 of the currency; None where the model has no prices."""
    currency: str = ""


class UsageSums(NamedTuple):
    """Usage of several requests."""

    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    charge_tokens: int = 0
    cost_nano: int = 0


class UsageQuery(Record, frozen=True, kw_only=True):
    """What a usage report shall show; `gateway.usage.report` checks it."""

    by: tuple[str, ...]
    """Columns that tell rows apart."""
    first_day: str
    """YYYY-MM-DD, by UTC; this and `last_day` are included."""
    last_day: str
    tenant: str | None = None
    """The only tenant; None for all, and what of the fleet was idle."""


class UsageReport(Record, frozen=True, kw_only=True):
    """Usage by row, each named by its values of the query's columns."""

    query: UsageQuery
    rows: Mapping[tuple[str, ...], UsageSums]
    idle_nano: Mapping[tuple[str, ...], int] = {}
    """What workers with a price by the hour cost beyond the requests' shares; named likewise, with
    `IDLE` for tenant, entitlement and key."""
    currency: str = ""
    """Of its costs; several, joined by a comma, where the sources differ."""
