"""Roles on the admin routes: a viewer reads, an operator runs workers, an owner decides who may.

Every GET is a viewer's, `OPERATED` an operator's, every other change an owner's.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Annotated, Final

import msgspec
from fastapi import Header, Request

from gateway.errors import Forbidden, KeysAwaited, Unauthorized
from gateway.payload.head import read_head
from gateway.ports import TokenVerifier
from gateway.records.record import Record

_THIS_HOST: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_log = logging.getLogger("sluice.admin")


class Role(Enum):
    """The right that an admin key gives. Each may do all that those before it may."""

    VIEWER = "viewer"
    """Reads, and changes nothing."""
    OPERATOR = "operator"
    """Also runs the fleet: workers, drains, reloads."""
    OWNER = "owner"
    """Also decides who may use it: tenants, entitlements, keys."""

    def may(self, needed: "Role") -> bool:
        """Whether this role suffices where `needed` is asked for."""
        return _RANKS.index(self) >= _RANKS.index(needed)


_RANKS: Final = tuple(Role)
OPERATED: Final = frozenset(
    {
        ("POST", "/admin/reload"),
        ("POST", "/admin/workers"),
        ("DELETE", "/admin/workers/{worker:path}"),
        ("POST", "/admin/workers/{worker:path}/drain"),
    }
)
"""Changes that an operator may make, as (method, path)."""


def role_for(method: str, path: str) -> Role:
    """The lowest role that may use a route."""
    if method in ("GET", "HEAD"):
        return Role.VIEWER
    return Role.OPERATOR if (method, path) in OPERATED else Role.OWNER


class NamedKey(Record, frozen=True, kw_only=True):
    """A named key, by the SHA-256 digest of it."""

    name: str
    sha256: bytes
    role: Role


class RoleKeys(msgspec.Struct, kw_only=True):
    """SHA-256 digests of the keys that have a role, and the tokens that may; a reload changes it.

    Each check reads it anew, so a key that is gone opens nothing from the next request on.
    """

    admin_sha256: bytes | None = None
    """An owner's."""
    viewer_sha256: bytes | None = None
    named: tuple[NamedKey, ...] = ()
    tokens: TokenVerifier | None = None
    """Verifies tokens, some of which have a role; None: no token does."""
    open_dashboard: bool = False
    """Whether the dashboard opens without a key, on a gateway that listens on loopback only."""
    revision: int = 0
    """Counts its changes: whoever answers for long ends after one, and has to be asked again."""

    def follow(self, other: "RoleKeys") -> None:
        """Have the other's keys from now on."""
        if other == msgspec.structs.replace(self, revision=other.revision):
            return
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name) if name != "revision" else self.revision + 1)

    def find(self, digest: bytes) -> tuple[str, Role] | None:
        """(name, role) of a presented key by its digest; a short form's name is its fingerprint."""
        short = digest[:4].hex()
        keys = [(short, self.viewer_sha256, Role.VIEWER), (short, self.admin_sha256, Role.OWNER)]
        keys += [(key.name, key.sha256, key.role) for key in self.named]
        owner = None
        for name, sha256, role in keys:  # all of them: the time must not tell which
            if sha256 is not None and hmac.compare_digest(digest, sha256):
                owner = name, role
        return owner

    @property
    def closed(self) -> bool:
        """Whether nothing opens the admin routes."""
        credentials = (self.admin_sha256, self.viewer_sha256, self.tokens)
        return not self.named and all(credential is None for credential in credentials)


Check = Callable[[Request, str], Awaitable[None]]


def admin_guard(keys: RoleKeys) -> Check:
    """The check before an admin route: its role. Raises Refusal."""

    async def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
        name, role = await _identified(keys, authorization)
        needed = role_for(request.method, getattr(request.scope.get("route"), "path", ""))
        if not role.may(needed):
            message = f"This key is a {role.value}'s; this route needs an {needed.value}'s."
            if role is Role.VIEWER:
                raise Forbidden(message, reason="viewer_cannot_change")
            raise Forbidden(message, reason="operator_cannot_change")
        request.state.who = name
        if needed is not Role.VIEWER:
            _log.info("%s (%s): %s %r", name, role.value, request.method, request.url.path)

    return check


def who(request: Request) -> str:
    """The admin key that acts, for the audit: its name, or its fingerprint if it has none."""
    name: str = request.state.who
    return name


def dashboard_guard(keys: RoleKeys) -> Check:
    """The check before the dashboard's figures: any role, or none where it is open."""

    async def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
        if keys.open_dashboard and not authorization:
            # Open to a program on this host that asks for it by name, with no proxy in between: a
            # page of another site could read the figures through a name that resolves to 127.0.0.1.
            host = request.headers.get("host", "").lower()
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            proxied = "forwarded" in request.headers or "x-forwarded-for" in request.headers
            if name in _THIS_HOST and not proxied:
                return
        await _identified(keys, authorization)

    return check


async def _identified(keys: RoleKeys, authorization: str) -> tuple[str, Role]:
    """(name, role) of whoever asks. Raises Refusal."""
    if keys.closed:
        raise Forbidden(
            "Admin is closed: set server.admin_key in the configuration.", reason="admin_closed"
        )
    head = read_head([(b"authorization", authorization.encode("latin-1"))])
    owner = None if head.key_digest is None else keys.find(head.key_digest)
    if owner is None and head.token is not None and keys.tokens is not None:
        try:
            identity = keys.tokens.verify(head.token)
        except KeysAwaited:
            await keys.tokens.keys_read()
            identity = keys.tokens.verify(head.token)
        if identity.role is None:
            raise Forbidden(
                "The token gives no role on the admin routes. Have its issuer put one into the "
                "claim that auth.jwt.role_claim names.",
                reason="token_without_role",
            )
        return identity.name, Role(identity.role)
    if owner is None:
        raise Unauthorized(
            "Send the admin key as 'Authorization: Bearer ADMIN_KEY'.",
            reason="invalid_admin_key",
        )
    return owner
