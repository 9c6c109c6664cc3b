"""Stage 1, authenticate: API key -> principal. Keys are held and compared as SHA-256 digests."""

import hashlib
import hmac
from collections.abc import Mapping

from gateway.domain import Principal
from gateway.errors import Forbidden, Unauthorized

OPEN = Principal(entitlement="open", tenant="open")
"""Whoever asks while no entitlements are configured."""


class Keyring:
    """Digests of the live keys. `open` when no entitlement is configured."""

    def __init__(self, principals: Mapping[bytes, Principal]) -> None:
        """`principals` by SHA-256 digest of the key (32 bytes)."""
        self.open = not principals
        # Two bytes of the digest choose a bucket; the rest is compared in constant time.
        self._buckets: dict[bytes, list[tuple[bytes, Principal]]] = {}
        for digest, principal in principals.items():
            self._buckets.setdefault(digest[:2], []).append((digest, principal))

    def find(self, key: bytes) -> Principal | None:
        """The key's owner. The digest, not the key, meets the table."""
        digest = hashlib.sha256(key).digest()
        for known, principal in self._buckets.get(digest[:2], ()):
            if hmac.compare_digest(known, digest):
                return principal
        return None


def authenticate(keyring: Keyring, key: bytes | None, now_unix_s: float) -> Principal:
    """Who asks, by the key as presented.

    Raises Unauthorized for a missing or unknown key, Forbidden for an expired one.
    """
    if keyring.open:
        return OPEN
    if not key:
        raise Unauthorized(
            "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.",
            reason="missing_api_key",
            code="invalid_api_key",
        )
    principal = keyring.find(key)
    if principal is None:
        raise Unauthorized(
            "Incorrect API key provided. Check the key with whoever runs this gateway.",
            reason="invalid_api_key",
            code="invalid_api_key",
        )
    if principal.expires_unix_s is not None and principal.expires_unix_s <= now_unix_s:
        raise Forbidden(
            f"The entitlement '{principal.entitlement}' has expired.",
            reason="entitlement_expired",
            code="entitlement_expired",
        )
    return principal


def permit_model(principal: Principal, model: str) -> None:
    """Check that the key's entitlement is for this model. Raises Forbidden."""
    if principal.model is not None and principal.model != model:
        raise Forbidden(
            f"This API key is entitled to the model '{principal.model}' only.",
            reason="model_not_entitled",
            code="model_not_entitled",
            param="model",
        )
