"""Tokens that were verified, by digest: bounded, and each until it expires or is due again."""

from typing import Final

from gateway.records.request import Principal
from gateway.records.tenancy import TokenIdentity

MAX_TOKENS: Final = 10_000
"""Tokens remembered; the oldest is forgotten first, and verified again."""
VERIFIED_FOR_S: Final = 300.0
"""Time after which a token is verified again."""


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
