"""What the claims of a verified token mean here: tenant, entitlements, role, name for the log.

And the tokens that were verified, by digest: bounded, and each until it expires or is due again.
"""

from collections.abc import Mapping
from typing import Final

from gateway.errors import Forbidden
from gateway.records.request import Principal
from gateway.records.tenancy import IssuerRules, TokenIdentity

ROLES: Final = ("viewer", "operator", "owner")
"""Roles on the admin routes; each may do all that those before it may."""
MAX_VALUES: Final = 64
"""Values of one claim that are read."""
MAX_NAME: Final = 64
MAX_TOKENS: Final = 10_000
"""Tokens remembered; the oldest is forgotten first, and verified again."""
VERIFIED_FOR_S: Final = 300.0
"""Time after which a token is verified again."""


def identity_of(claims: Mapping[str, object], rules: IssuerRules, exp: float) -> TokenIdentity:
    """The identity that a token's claims describe; `exp` is its expiry in Unix seconds."""
    listed, tenant = rules.entitlements_claim, _claim(claims, rules.tenant_claim)
    if isinstance(tenant, list) and len(tenant) == 1:
        (tenant,) = tenant  # a text, never a part of it, or a list of one text
    role = None
    if rules.role_claim is not None:  # the highest of those that its values stand for
        said = {rules.roles.get(value) for value in _values(claims, rules.role_claim)}
        role = next((role for role in reversed(ROLES) if role in said), None)
    subject = claims.get("sub")
    name = subject[:MAX_NAME] if isinstance(subject, str) else ""
    return TokenIdentity(
        issuer=rules.issuer,
        name="jwt:" + "".join(c if c.isascii() and c.isprintable() else "?" for c in name),
        until_unix_s=exp + rules.leeway_s,
        tenant=tenant if isinstance(tenant, str) and tenant else None,
        tenant_claim=rules.tenant_claim,
        entitlements=None if listed is None else _values(claims, listed),
        role=role,
    )


def no_tenant(who: TokenIdentity) -> Forbidden:
    """The refusal of a token that names no tenant."""
    return Forbidden(
        f"The token of '{who.issuer}' has no claim '{who.tenant_claim}' that names one tenant. "
        "Have the issuer add it, or set auth.jwt.tenant_claim to the claim that does.",
        reason="token_without_tenant",
    )


def unknown_tenant(who: TokenIdentity) -> Forbidden:
    """The refusal of a token whose tenant has nothing here."""
    return Forbidden(
        f"The token's claim '{who.tenant_claim}' names the tenant '{(who.tenant or '')[:64]}', "
        "which has no entitlement here. Ask whoever runs this gateway to add one.",
        reason="token_tenant_unknown",
    )


def _values(claims: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A claim's values: a list of texts, or one text with blanks between them."""
    value = _claim(claims, name)
    if isinstance(value, str):
        return tuple(value.split()[:MAX_VALUES])
    if isinstance(value, list):
        return tuple(each for each in value[:MAX_VALUES] if isinstance(each, str))
    return ()


def _claim(claims: Mapping[str, object], name: str) -> object:
    """A claim by its name, or by a path of names with dots, as in `realm_access.roles`."""
    if name in claims:
        return claims[name]
    head, dot, rest = name.partition(".")
    inner = claims.get(head)
    return _claim(inner, rest) if dot and isinstance(inner, dict) else None


# -- tokens that were verified


class KnownToken:
    """A verified token, and what it opens as far as that is known."""

    __slots__ = ("identity", "principal", "revision", "until_unix_s")

    def __init__(self, identity: TokenIdentity, until_unix_s: float) -> None:
        self.identity = identity
        self.until_unix_s = until_unix_s
        self.principal: Principal | None = None
        self.revision = -1
        """Of the keyring, when the principal was made."""


class KnownTokens:
    """The verified tokens of one process, by SHA-256 digest."""

    def __init__(self, most: int = MAX_TOKENS) -> None:
        """Remembers `most` at a time."""
        self._most = most
        self._known: dict[bytes, KnownToken] = {}

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._known)

    def find(self, digest: bytes, now_unix_s: float) -> KnownToken | None:
        """A token that needs no verification now."""
        found = self._known.get(digest)
        if found is None or now_unix_s < found.until_unix_s:
            return found
        del self._known[digest]
        return None

    def enter(self, digest: bytes, identity: TokenIdentity, now_unix_s: float) -> KnownToken:
        """Remember a token that was verified just now."""
        until_unix_s = min(identity.until_unix_s, now_unix_s + VERIFIED_FOR_S)
        self._known.pop(digest, None)
        made = self._known[digest] = KnownToken(identity, until_unix_s)
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return made

    def clear(self) -> None:
        """Have all verified again, because an issuer's keys changed."""
        self._known.clear()
