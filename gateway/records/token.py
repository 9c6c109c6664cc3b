"""Tokens (JWT): whose are trusted, and what a verified one says."""

from collections.abc import Mapping

from gateway.records.record import Record


class IssuerRules(Record, frozen=True, kw_only=True):
    """An issuer of tokens, and what its tokens may do."""

    issuer: str
    """`iss` of its tokens."""
    jwks: str
    """Its public keys: an https URL, or a file."""
    ca_file: str | None = None
    """Certificates that its URL is verified against; None for the system's."""
    audience: tuple[str, ...]
    """Of `aud`, one is required."""
    algorithms: tuple[str, ...]
    leeway_s: float
    refresh_s: float
    max_stale_s: float
    """How long its keys serve after they were last read."""
    tenant_claim: str
    entitlements_claim: str | None = None
    tenants: frozenset[str] | None = None
    """The only tenants that its tokens may name; None for any."""
    role_claim: str | None = None
    roles: Mapping[str, str] = {}
    """Value of the role's claim -> role on the admin routes."""


class TokenIdentity(Record, frozen=True, kw_only=True):
    """Who a verified token is, and until when it counts."""

    issuer: str
    name: str
    """`jwt:` and its subject, for the request log."""
    until_unix_s: float
    """Its expiry, the leeway included."""
    tenant: str | None = None
    """None if it names no tenant."""
    tenant_claim: str = ""
    """Where it should."""
    entitlements: tuple[str, ...] | None = None
    """Those it may use; None for all of its tenant's."""
    role: str | None = None
    """The role on the admin routes; None for none."""
