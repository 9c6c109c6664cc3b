"""Roles of keys on the admin routes: a viewer reads, an admin also changes."""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Final

from fastapi import Header, Request

from gateway.errors import Forbidden, Unauthorized
from gateway.records.record import Record

_READS: Final = frozenset({"GET", "HEAD"})
_THIS_HOST: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Role(Enum):
    """The right that an admin key gives."""

    VIEWER = "viewer"
    """Reads, and changes nothing."""
    ADMIN = "admin"


class RoleKeys(Record, frozen=True, kw_only=True):
    """SHA-256 digests of the keys that have a role."""

    admin_sha256: bytes | None = None
    viewer_sha256: bytes | None = None
    open_dashboard: bool = False
    """Whether the dashboard opens without a key, on a gateway that listens on loopback only."""

    def role_of(self, key: str) -> Role | None:
        """The role of a presented key; None if it has none."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for role, known in (
            (Role.VIEWER, self.viewer_sha256),
            (Role.ADMIN, self.admin_sha256),
        ):
            if known is not None and hmac.compare_digest(digest, known):
                found = role
        return found

    @property
    def closed(self) -> bool:
        """Whether no key opens the admin routes."""
        return self.admin_sha256 is None and self.viewer_sha256 is None


Check = Callable[[Request, str], None]


def admin_guard(keys: RoleKeys) -> Check:
    """The check before an admin route: viewers read, admins change. Raises Refusal."""

    def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
        role = _role(keys, authorization)
        if role is Role.VIEWER and request.method not in _READS:
            raise Forbidden(
                "The viewer key reads; send the admin key to change something.",
                reason="viewer_cannot_change",
                code="viewer_cannot_change",
            )

    return check


def dashboard_guard(keys: RoleKeys) -> Check:
    """The check before the dashboard's figures: any role, or none where it is open."""

    def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
        if not (keys.open_dashboard and not authorization and _from_this_host(request.headers)):
            _role(keys, authorization)

    return check


def _role(keys: RoleKeys, authorization: str) -> Role:
    if keys.closed:
        raise Forbidden(
            "Admin is closed: set server.admin_key in the configuration.",
            reason="admin_closed",
            code="admin_closed",
        )
    scheme, _, key = authorization.partition(" ")
    role = keys.role_of(key.strip()) if scheme.lower() == "bearer" else None
    if role is None:
        raise Unauthorized(
            "Send the admin key as 'Authorization: Bearer ADMIN_KEY'.",
            reason="invalid_admin_key",
            code="invalid_api_key",
        )
    return role


def _from_this_host(headers: Mapping[str, str]) -> bool:
    """Whether a program on this host asks for this host by name, with no proxy in between.

    A page of another site could otherwise read the figures through a name of its own that
    resolves to 127.0.0.1.
    """
    host = headers.get("host", "").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    proxied = "forwarded" in headers or "x-forwarded-for" in headers
    return name in _THIS_HOST and not proxied
