"""Tokens (JWT) of identity providers, and named keys of the admin routes."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from gateway.settings.sections import KeyDigest
from gateway.settings.types import Label, Seconds, Section, Text, reject

RoleName = Literal["viewer", "operator", "owner"]
"""Roles on the admin routes; each may do all that those before it may."""
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signatures with a private key only: whoever could check another one could also forge it."""


def _jwks(value: str) -> str:
    try:
        url = urlsplit(value)
        plain = url.scheme == "http" and not ip_address(url.hostname or "").is_loopback
    except ValueError:  # a name, or no URL
        plain = value.startswith("http:")
    if plain:
        reject(
            "keys that come over plain http can be replaced on the way",
            "write https://, or keep the keys in a file and name it here",
        )
    scheme, is_url, rest = value.partition("://")
    if is_url and (scheme not in {"http", "https"} or "@" in rest.partition("/")[0]):
        reject("not a plain https URL", "write https://HOST/PATH without credentials, or a path")
    return value


class AdminKeyConfig(Section):
    """A named key of the admin routes."""

    name: Label
    """Unique; the audit names it."""
    sha256: KeyDigest = Field(repr=False)
    """Hash of the key, from `sluice hash-key`."""
    role: RoleName
    """viewer reads; operator also runs workers and reloads; owner also changes who may use what."""


class JwtIssuerConfig(Section):
    """An identity provider whose tokens open models as keys do, or the admin routes."""

    issuer: Text
    """`iss` of its tokens, to the letter."""
    jwks: Annotated[Text, AfterValidator(_jwks)]
    """Its public keys: an https URL that answers a JWKS, or a file with one."""
    ca_file: Path | None = None
    """Certificates to verify that URL against. Absent: the system's."""
    audience: Annotated[tuple[Text, ...], Field(min_length=1, max_length=16)]
    """`aud` of its tokens for this gateway; one of these is required."""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256",)
    """Algorithms of its signatures. No others are taken, whatever a token says."""
    leeway_s: Annotated[Seconds, Field(le=600)] = 30.0
    """By how much its clock and this one may differ."""
    refresh_s: Annotated[Seconds, Field(ge=10)] = 300.0
    """Between two reads of its keys. A key that is new to the gateway is asked for at once."""
    max_stale_s: Seconds = 86_400.0
    """How long known keys serve while they cannot be read; then its tokens answer 503."""
    tenant_claim: Text = "tenant"
    """Claim that names the tenant; a path with dots leads into nested claims."""
    entitlements_claim: Text | None = None
    """Claim that lists the entitlements a token may use. Absent: all of its tenant's."""
    tenants: Annotated[tuple[Label, ...], Field(min_length=1)] | None = None
    """The only tenants that its tokens may name. Absent: any."""
    role_claim: Text | None = None
    """Claim that gives a role on the admin routes. Absent: its tokens do not open them."""
    roles: Mapping[Annotated[str, Field(min_length=1, max_length=256)], RoleName] = {
        "viewer": "viewer",
        "operator": "operator",
        "owner": "owner",
    }
    """Value of that claim -> role."""


class AuthConfig(Section):
    """Who may send requests, besides the keys of tenants and entitlements."""

    jwt: Annotated[tuple[JwtIssuerConfig, ...], Field(max_length=16)] = ()
    """Issuers of tokens. Needs the extra `jwt`."""
