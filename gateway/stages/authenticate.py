"""Stage 1, authenticate: API key -> principal. Keys are held and compared as SHA-256 digests."""

import hmac
from collections.abc import Mapping, Sequence

from gateway.errors import Forbidden, Unauthorized
from gateway.records.request import OPEN, Principal


class Keyring:
    """Digests of the live keys, changeable at any time. Buckets keep a look-up short.

    `open` only while no entitlement was ever entered: whoever deletes the last one must not
    open the gateway by it.
    """

    def __init__(self, principals: Mapping[bytes, Principal] | None = None) -> None:
        """`principals` by SHA-256 digest of the key (32 bytes); None and none are an open one."""
        self.open = True
        # Two bytes of the digest choose a bucket; the rest is compared in constant time.
        self._buckets: dict[bytes, list[tuple[bytes, Principal]]] = {}
        self._digests: dict[str, tuple[bytes, ...]] = {}
        of: dict[str, list[bytes]] = {}
        for digest, principal in (principals or {}).items():
            of.setdefault(principal.entitlement, []).append(digest)
        for digests in of.values():
            self.put((principals or {})[digests[0]], digests)

    def put(self, principal: Principal, digests: Sequence[bytes]) -> None:
        """Replace an entitlement's principal and its keys; with no digests it has no key.

        A key that was another entitlement's is this one's from now on.
        """
        self.open = False
        self.remove(principal.entitlement)
        mine = tuple(dict.fromkeys(digests))
        for digest in mine:
            bucket = self._buckets.setdefault(digest[:2], [])
            for at, (known, owner) in enumerate(bucket):
                if known == digest:
                    del bucket[at]
                    kept = self._digests[owner.entitlement]
                    self._digests[owner.entitlement] = tuple(d for d in kept if d != digest)
                    break
            bucket.append((digest, principal))
        self._digests[principal.entitlement] = mine

    def remove(self, entitlement: str) -> None:
        """Forget an entitlement and its keys; unknown ones are no failure."""
        for digest in self._digests.pop(entitlement, ()):
            left = [pair for pair in self._buckets[digest[:2]] if pair[0] != digest]
            if left:
                self._buckets[digest[:2]] = left
            else:
                del self._buckets[digest[:2]]

    def find(self, digest: bytes) -> Principal | None:
        """The owner of a key, by its SHA-256 digest."""
        for known, principal in self._buckets.get(digest[:2], ()):
            if hmac.compare_digest(known, digest):
                return principal
        return None


def authenticate(keyring: Keyring, key_digest: bytes | None, now_unix_s: float) -> Principal:
    """Who asks, by the SHA-256 digest of the key as presented.

    Raises Unauthorized for a missing or unknown key, Forbidden for an expired or suspended one.
    """
    if keyring.open:
        return OPEN
    if key_digest is None:
        raise Unauthorized(
            "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.",
            reason="missing_api_key",
            code="invalid_api_key",
        )
    principal = keyring.find(key_digest)
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
    if principal.suspended:
        raise Forbidden(
            f"The entitlement '{principal.entitlement}' is suspended.",
            reason="entitlement_suspended",
            code="entitlement_suspended",
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
