"""Verifies tokens (JWT): size, form, issuer, algorithm, key, signature, audience, times.

In this order, so that nothing expensive happens for what is refused anyway. PyJWT checks signature,
audience and times; the algorithm is the operator's choice, never the token's.
"""

import asyncio
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import jwt
import msgspec

from gateway.errors import Refusal, Unauthorized
from gateway.metrics import Metrics
from gateway.records.tenancy import IssuerRules, TokenIdentity
from gateway.tenancy.key_set import KeySet
from gateway.tenancy.token_claims import identity_of

MAX_TOKEN_BYTES: Final = 8192
_REQUIRED: Final = ["exp", "iss", "aud"]
_S = TypeVar("_S")


class _Header(msgspec.Struct, frozen=True):
    alg: str
    kid: str | None = None


class _Claims(msgspec.Struct, frozen=True):
    iss: str = ""


class Verifier:
    """See `gateway.ports.TokenVerifier`."""

    def __init__(
        self,
        issuers: Sequence[IssuerRules],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` monotonic, in seconds; expiry is compared with the wall clock."""
        self._metrics = metrics
        self._listeners: list[Callable[[], None]] = []
        self._rules: dict[str, IssuerRules] = {}
        self._keys: dict[str, KeySet] = {}
        self._coming = {rules.issuer: (rules, self._key_set(rules, clock)) for rules in issuers}
        self._clock = clock
        self.use()

    def _key_set(self, rules: IssuerRules, clock: Callable[[], float]) -> KeySet:
        return KeySet(rules, self._changed, self._noted, clock)

    async def start(self) -> None:
        """Read all keys and keep them current."""
        await asyncio.gather(*(keys.start() for keys in self._keys.values()))

    async def prepare(self, issuers: Sequence[IssuerRules]) -> None:
        """Read the keys of the issuers that `use` will trust, within KEYS_WAIT_S if possible."""
        before = {name: keys for name, (_, keys) in self._coming.items()}
        known = {**before, **self._keys}
        coming = {}
        for rules in issuers:
            keys = known.get(rules.issuer)
            if keys is None or not keys.fits(rules):
                keys = self._key_set(rules, self._clock)
            coming[rules.issuer] = rules, keys
        self._coming = coming
        self._drop(before.values())
        await asyncio.gather(*(keys.start() for _, keys in coming.values()))

    def use(self) -> None:
        """Trust the issuers that were prepared, and no others; after a change verify anew."""
        before, rules_before = self._keys, self._rules
        self._rules = {name: rules for name, (rules, _) in self._coming.items()}
        self._keys = {name: keys for name, (_, keys) in self._coming.items()}
        self._drop(before.values())
        if self._rules != rules_before:
            self._changed()

    def _drop(self, key_sets: Iterable[KeySet]) -> None:
        """Stop those that no issuer has now or will have."""
        kept = [*self._keys.values(), *(keys for _, keys in self._coming.values())]
        for keys in key_sets:
            if keys not in kept:
                keys.stop()

    async def close(self) -> None:
        await asyncio.gather(*(keys.close() for keys in self._keys.values()))

    async def keys_read(self) -> None:
        await asyncio.gather(*(keys.read() for keys in self._keys.values()))

    def on_change(self, changed: Callable[[], None]) -> None:
        self._listeners.append(changed)

    def ages(self) -> list[tuple[str, float]]:
        """(issuer, seconds since its keys were read) of those whose keys were."""
        found = ((issuer, keys.age_s) for issuer, keys in self._keys.items())
        return [(issuer, age_s) for issuer, age_s in found if age_s is not None]

    def verify(self, token: bytes) -> TokenIdentity:
        try:
            found = self._verified(token)
        except Refusal as refusal:
            self._metrics.tokens_verified.add(refusal.reason)
            raise
        self._metrics.tokens_verified.add("ok")
        return found

    def _verified(self, token: bytes) -> TokenIdentity:
        header, claimed = _peek(token)
        rules = self._rules.get(claimed.iss)
        if rules is None:
            raise _refused(
                f"comes from the issuer '{claimed.iss[:128]}', which this gateway does not trust. "
                f"Get one from: {', '.join(self._rules)}.",
                reason="token_issuer_unknown",
            )
        if header.alg not in rules.algorithms:
            raise _refused(
                f"is signed with '{header.alg[:16]}'; this gateway takes "
                f"{', '.join(rules.algorithms)} from '{rules.issuer}'.",
                reason="token_algorithm_refused",
            )
        key = self._keys[rules.issuer].find(header.kid, header.alg)
        claims = _checked(token, key, rules)
        identity = identity_of(claims, rules, claims["exp"])
        if rules.tenants is not None and identity.tenant not in {None, *rules.tenants}:
            raise _refused(
                f"names the tenant '{(identity.tenant or '')[:64]}', for which '{rules.issuer}' "
                "may not speak. It would have to stand in the issuer's auth.jwt.tenants.",
                reason="token_tenant_refused",
            )
        return identity

    def _changed(self) -> None:
        for changed in self._listeners:
            changed()

    def _noted(self, issuer: str, successful: bool) -> None:  # noqa: FBT001 - how it went
        self._metrics.token_key_reads.add(issuer, "ok" if successful else "failed")


def _peek(token: bytes) -> tuple[_Header, _Claims]:
    """Header and issuer of a token that is not verified yet. Raises Unauthorized."""
    if len(token) > MAX_TOKEN_BYTES:
        raise _refused(
            f"is longer than {MAX_TOKEN_BYTES} bytes. Have the issuer put fewer claims into it.",
            reason="token_too_large",
        )
    parts = token.split(b".")
    if len(parts) != 3:
        raise _malformed("it has not the three parts of a signed JWT")
    return _decoded(parts[0], _Header), _decoded(parts[1], _Claims)


def _decoded(part: bytes, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(urlsafe_b64decode(part + b"=" * (-len(part) % 4)), type=kind)
    except (ValueError, RecursionError):
        raise _malformed("its header or its claims are not JSON in base64url") from None


def _checked(token: bytes, key: jwt.PyJWK, rules: IssuerRules) -> dict[str, Any]:
    """The claims, once signature and times are right; `exp` is a float. Raises Unauthorized."""
    issuer, audience = rules.issuer, ", ".join(rules.audience)
    try:
        claims = jwt.decode(
            token,
            key,
            algorithms=list(rules.algorithms),
            audience=rules.audience,
            issuer=issuer,
            leeway=rules.leeway_s,
            options={"require": _REQUIRED},
        )
        return {**claims, "exp": float(claims["exp"])}
    except jwt.ExpiredSignatureError:
        raise _refused(
            f"has expired. Get a new one from '{issuer}'.", reason="token_expired"
        ) from None
    except jwt.ImmatureSignatureError:
        raise _refused(
            "is not valid yet (nbf, iat). Wait, or set the issuer's clock.",
            reason="token_not_yet_valid",
        ) from None
    except jwt.InvalidAudienceError:
        raise _refused(
            f"is for another audience. Ask '{issuer}' for one for: {audience}.",
            reason="token_audience_wrong",
        ) from None
    except jwt.MissingRequiredClaimError as error:
        raise _refused(
            f"has no claim '{error.claim}'. Have '{issuer}' add it.", reason="token_claim_missing"
        ) from None
    except jwt.InvalidSignatureError:
        raise _refused(
            f"is not signed by '{issuer}'. Get a new one from it.", reason="token_signature_wrong"
        ) from None
    except (jwt.PyJWTError, ValueError, OverflowError, RecursionError):  # a time of any size
        raise _malformed("its claims are not those of a JWT") from None


def _malformed(why: str) -> Unauthorized:
    return _refused(
        f"cannot be read: {why}. Send it as the issuer made it.", reason="token_malformed"
    )


def _refused(what: str, *, reason: str) -> Unauthorized:
    return Unauthorized(f"The token {what}", reason=reason, code="invalid_api_key")
