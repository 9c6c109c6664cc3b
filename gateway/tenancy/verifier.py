"""Verifies tokens (JWT): size, form, issuer, algorithm, key, signature, audience, times.

In this order, so that nothing expensive happens for what is refused anyway. PyJWT checks signature,
audience and times; the algorithm is the operator's choice, never the token's.

An issuer's public keys (a JWKS) come from a URL or a file and are kept current:

- They are read at the start, then every `refresh_s`, and when a token names an unknown key: by one
  reader at a time, at most every READ_EVERY_S. Requests wait KEYS_WAIT_S at most, however many.
- While they cannot be read, the known ones serve, for `max_stale_s`.
- Only keys of asymmetric algorithms are taken, each for the algorithms that the operator allows.
"""

import asyncio
import logging
import random
import ssl
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK, PyJWTError

from gateway.errors import KeysAwaited, Refusal, Unauthorized
from gateway.metrics import Metrics
from gateway.records.tenancy import TOKEN_NAME, IssuerRules, TokenIdentity

ROLES: Final = ("viewer", "operator", "owner")
"""Roles on the admin routes; each may do all that those before it may."""
MAX_VALUES: Final = 64
"""Values of one claim that are read."""
MAX_NAME: Final = 64
MAX_TOKEN_BYTES: Final = 8192
_REQUIRED: Final = ["exp", "iss", "aud"]
_log = logging.getLogger("sluice.tokens")
_S = TypeVar("_S")
READ_EVERY_S: Final = 10.0
KEYS_WAIT_S: Final = 2.0
READ_LIMIT_S: Final = 5.0
MAX_BYTES: Final = 1_048_576
MAX_KEYS: Final = 100
MIN_RSA_BITS: Final = 2048
_OWN: Final = ("issuer", "jwks", "ca_file", "algorithms", "refresh_s", "max_stale_s")
"""Rules that the keys depend on."""
_FAMILIES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""First letters of an algorithm -> type of its keys. Keys of HMAC (`oct`) are never taken."""


class _Jwks(msgspec.Struct, frozen=True):
    keys: list[Any]


Keys = dict[tuple[str, str], PyJWK]
"""By key id ("" for none) and algorithm."""


class KeySet:
    """The keys of one issuer."""

    def __init__(
        self,
        rules: IssuerRules,
        metrics: Metrics,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called after other keys were read."""
        self._rules = rules
        self._changed = changed
        self._metrics = metrics
        self._clock = clock
        self._keys: Keys = {}
        self._source: object = None
        """Content of the JWKS that the keys were made from, to notice a change."""
        self._read_at_s: float | None = None
        self._begun_at_s: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._failing = False
        tls = rules.jwks.startswith("https:")
        self._tls = ssl.create_default_context(cafile=rules.ca_file) if tls else False

    @property
    def age_s(self) -> float | None:
        """Time since the keys were last read; None if they never were."""
        return None if self._read_at_s is None else self._clock() - self._read_at_s

    def fits(self, rules: IssuerRules) -> bool:
        """Whether these are the keys of an issuer with other rules, too."""
        return all(getattr(rules, name) == getattr(self._rules, name) for name in _OWN)

    async def start(self) -> None:
        """Read the keys, within KEYS_WAIT_S if possible, and keep them current from now on."""

        async def refresh() -> None:
            while True:
                pause_s = READ_EVERY_S if self._failing else self._rules.refresh_s
                await asyncio.sleep(pause_s * random.uniform(1.0, 1.1))
                self._ask()

        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(refresh())
            self._ask()
        await self.read()

    async def close(self) -> None:
        tasks = self.stop()
        if tasks:
            await asyncio.wait(tasks)

    def stop(self) -> list[asyncio.Task[None]]:
        """Stop soon; returns what is to end."""
        tasks = [task for task in (self._refreshing, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def read(self) -> None:
        """Wait until the keys that are being read are known, KEYS_WAIT_S at most."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=KEYS_WAIT_S)

    def find(self, kid: str | None, algorithm: str) -> PyJWK:
        """The key of a token. Raises Unauthorized, KeysAwaited."""
        issuer, age_s = self._rules.issuer, self.age_s
        if age_s is None or age_s > self._rules.max_stale_s:
            self._ask()
            raise KeysAwaited(
                f"The keys of the token issuer '{issuer}' cannot be read at the moment. Try again.",
                reason="token_keys_unavailable",
                retry_after_s=2.0,
                should_retry=True,
            )
        fit = [key for (name, use), key in self._keys.items() if use == algorithm]
        if kid is None and len(fit) == 1:
            return fit[0]
        key = self._keys.get((kid or "", algorithm))
        if key is not None:
            return key
        if kid is not None and self._ask():
            raise KeysAwaited(
                f"The keys of the token issuer '{issuer}' are being read anew. Try again.",
                reason="token_keys_unavailable",
                retry_after_s=1.0,
                should_retry=True,
            )
        which = "names no key (kid)" if kid is None else f"names the key '{kid[:64]}'"
        raise Unauthorized(
            f"The token {which}, and '{issuer}' publishes no such key for {algorithm}. "
            "Get a new token from it.",
            reason="token_key_unknown",
        )

    def _ask(self) -> bool:
        """Read the keys soon, if that is not too early; whether they are being read."""
        if self._reading is not None and not self._reading.done():
            return True
        now_s = self._clock()
        if self._begun_at_s is not None and now_s - self._begun_at_s < READ_EVERY_S:
            return False
        self._begun_at_s = now_s
        self._reading = asyncio.get_running_loop().create_task(self._try_to_read())
        return True

    async def _try_to_read(self) -> None:
        jwks, content = self._rules.jwks, bytearray()

        def read() -> None:
            with Path(jwks).open("rb") as file:
                content.extend(file.read(MAX_BYTES + 1))

        try:
            async with asyncio.timeout(READ_LIMIT_S):
                if jwks.startswith(("https:", "http:")):
                    async with (
                        # Without proxies and keys that the environment names.
                        httpx.AsyncClient(
                            verify=self._tls, trust_env=False, timeout=READ_LIMIT_S
                        ) as client,
                        client.stream("GET", jwks) as answer,
                    ):
                        if answer.status_code != 200:
                            raise ValueError(f"{jwks} answered {answer.status_code}")
                        async for part in answer.aiter_bytes():
                            content += part
                            if len(content) > MAX_BYTES:
                                break
                else:
                    await asyncio.to_thread(read)
            if len(content) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            keys = _keys_of(content, self._rules.algorithms)
        except (OSError, TimeoutError, httpx.HTTPError, ValueError, RecursionError) as error:
            if not self._failing:
                why = f"{type(error).__name__}: {error}"
                _log.warning("the keys of %s cannot be read: %s", self._rules.issuer, why[:300])
            self._failing = True
            self._metrics.token_key_reads.add(self._rules.issuer, "failed")
            return
        if self._failing:
            _log.info("the keys of %s can be read again", self._rules.issuer)
        self._failing, self._read_at_s = False, self._clock()
        self._metrics.token_key_reads.add(self._rules.issuer, "ok")
        if content != self._source:
            self._keys, self._source = keys, content
            self._changed()


def _keys_of(content: bytearray, algorithms: tuple[str, ...]) -> Keys:
    """The usable keys of a JWKS. Raises ValueError if there are none."""
    keys: Keys = {}
    for jwk in msgspec.json.decode(content, type=_Jwks).keys[:MAX_KEYS]:
        # A private key has no place in a JWKS: whoever reads it there can sign.
        if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig" or "d" in jwk:
            continue
        for algorithm in algorithms:
            family = _FAMILIES[algorithm[:2]]
            if jwk.get("kty") != family or jwk.get("alg", algorithm) != algorithm:
                continue
            try:
                key = PyJWK(jwk, algorithm)
            except (PyJWTError, KeyError, TypeError, ValueError):
                continue
            weak = isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS
            if not weak:
                keys[str(jwk.get("kid") or ""), algorithm] = key
    if not keys:
        raise ValueError(f"a JWKS without a usable key for {', '.join(algorithms)}")
    return keys


# -- tokens


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
        self._key_set = partial(KeySet, metrics=metrics, changed=self._changed, clock=clock)
        self._trusted: dict[str, tuple[IssuerRules, KeySet]] = {}
        self._coming = {rules.issuer: (rules, self._key_set(rules)) for rules in issuers}
        self.use()

    async def start(self) -> None:
        """Read all keys and keep them current."""
        await asyncio.gather(*(keys.start() for _, keys in self._trusted.values()))

    async def prepare(self, issuers: Sequence[IssuerRules]) -> None:
        """Read the keys of the issuers that `use` will trust, within KEYS_WAIT_S if possible."""
        present = {**self._coming, **self._trusted}
        coming: dict[str, tuple[IssuerRules, KeySet]] = {}
        for rules in issuers:
            keys = present[rules.issuer][1] if rules.issuer in present else None
            if keys is None or not keys.fits(rules):
                keys = self._key_set(rules)
            coming[rules.issuer] = rules, keys
        before, self._coming = self._coming, coming
        self._drop(before)
        await asyncio.gather(*(keys.start() for _, keys in self._coming.values()))

    def use(self) -> None:
        """Trust the issuers that were prepared, and no others; after a change verify anew."""
        before, self._trusted = self._trusted, self._coming
        self._drop(before)
        if self._trusted != before:
            self._changed()

    def _drop(self, before: Mapping[str, tuple[IssuerRules, KeySet]]) -> None:
        """Stop the keys of those that no issuer has now or will have."""
        wanted = {keys for _, keys in (*self._trusted.values(), *self._coming.values())}
        for _, keys in before.values():
            if keys not in wanted:
                keys.stop()

    async def close(self) -> None:
        await asyncio.gather(*(keys.close() for _, keys in self._trusted.values()))

    async def keys_read(self) -> None:
        await asyncio.gather(*(keys.read() for _, keys in self._trusted.values()))

    def on_change(self, changed: Callable[[], None]) -> None:
        self._listeners.append(changed)

    def ages(self) -> list[tuple[str, float]]:
        """(issuer, seconds since its keys were read) of those whose keys were."""
        ages = ((issuer, keys.age_s) for issuer, (_, keys) in self._trusted.items())
        return [(issuer, age_s) for issuer, age_s in ages if age_s is not None]

    def verify(self, token: bytes) -> TokenIdentity:
        try:
            if len(token) > MAX_TOKEN_BYTES:
                raise _refused(
                    f"is longer than {MAX_TOKEN_BYTES} bytes. Have the issuer put fewer claims "
                    "into it.",
                    reason="token_too_large",
                )
            parts = token.split(b".")
            if len(parts) != 3:
                raise _malformed("it has not the three parts of a signed JWT")
            header, issuer = _decoded(parts[0], _Header), _decoded(parts[1], _Claims).iss
            if issuer not in self._trusted:
                raise _refused(
                    f"comes from the issuer '{issuer[:128]}', which this gateway does not trust. "
                    f"Get one from: {', '.join(self._trusted)}.",
                    reason="token_issuer_unknown",
                )
            rules, keys = self._trusted[issuer]
            if header.alg not in rules.algorithms:
                raise _refused(
                    f"is signed with '{header.alg[:16]}'; this gateway takes "
                    f"{', '.join(rules.algorithms)} from '{issuer}'.",
                    reason="token_algorithm_refused",
                )
            claims = _checked(token, keys.find(header.kid, header.alg), rules)
            identity = identity_of(claims, rules, claims["exp"])
            if rules.tenants is not None and identity.tenant not in {None, *rules.tenants}:
                raise _refused(
                    f"names the tenant '{(identity.tenant or '')[:64]}', for which '{issuer}' "
                    "may not speak. It would have to stand in the issuer's auth.jwt.tenants.",
                    reason="token_tenant_refused",
                )
        except Refusal as refusal:
            self._metrics.tokens_verified.add(refusal.reason)
            raise
        self._metrics.tokens_verified.add("ok")
        return identity

    def _changed(self) -> None:
        for changed in self._listeners:
            changed()


def _decoded(part: bytes, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(urlsafe_b64decode(part + b"=" * (-len(part) % 4)), type=kind)
    except (ValueError, RecursionError):
        raise _malformed("its header or its claims are not JSON in base64url") from None


def _checked(token: bytes, key: PyJWK, rules: IssuerRules) -> dict[str, Any]:
    """The claims, once signature and times are right; `exp` is a float. Raises Unauthorized."""
    issuer = rules.issuer
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
        refused = _refused(f"has expired. Get a new one from '{issuer}'.", reason="token_expired")
    except jwt.ImmatureSignatureError:
        why = "is not valid yet (nbf, iat). Wait, or set the issuer's clock."
        refused = _refused(why, reason="token_not_yet_valid")
    except jwt.InvalidAudienceError:
        why = f"is for another audience. Ask '{issuer}' for one for: {', '.join(rules.audience)}."
        refused = _refused(why, reason="token_audience_wrong")
    except jwt.MissingRequiredClaimError as error:
        why = f"has no claim '{error.claim}'. Have '{issuer}' add it."
        refused = _refused(why, reason="token_claim_missing")
    except jwt.InvalidSignatureError:
        why = f"is not signed by '{issuer}'. Get a new one from it."
        refused = _refused(why, reason="token_signature_wrong")
    except (PyJWTError, ValueError, OverflowError, RecursionError):  # a time of any size
        refused = _malformed("its claims are not those of a JWT")
    raise refused


def _malformed(why: str) -> Unauthorized:
    return _refused(
        f"cannot be read: {why}. Send it as the issuer made it.", reason="token_malformed"
    )


def _refused(what: str, *, reason: str) -> Unauthorized:
    return Unauthorized(f"The token {what}", reason=reason)


# -- what verified claims mean here


def identity_of(claims: Mapping[str, object], rules: IssuerRules, exp: float) -> TokenIdentity:
    """The identity that a token's claims describe; `exp` is its expiry in Unix seconds."""
    listed, tenant = rules.entitlements_claim, _claim(claims, rules.tenant_claim)
    if isinstance(tenant, list) and len(tenant) == 1:
        (tenant,) = tenant  # a text, never a part of it, or a list of one text
    role = None
    if rules.role_claim is not None:  # the highest of those that its values stand for
        roles = {rules.roles.get(value) for value in _values(claims, rules.role_claim)}
        role = next((role for role in reversed(ROLES) if role in roles), None)
    subject = claims.get("sub")
    name = subject[:MAX_NAME] if isinstance(subject, str) else ""
    return TokenIdentity(
        issuer=rules.issuer,
        name=TOKEN_NAME + "".join(c if c.isascii() and c.isprintable() else "?" for c in name),
        until_unix_s=exp + rules.leeway_s,
        tenant=tenant if isinstance(tenant, str) and tenant else None,
        tenant_claim=rules.tenant_claim,
        entitlements=None if listed is None else _values(claims, listed),
        role=role,
    )


def _values(claims: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A claim's values: a list of texts, or one text with blanks between them."""
    value = _claim(claims, name)
    if isinstance(value, str):
        return tuple(value.split()[:MAX_VALUES])
    if isinstance(value, list):
        return tuple(item for item in value[:MAX_VALUES] if isinstance(item, str))
    return ()


def _claim(claims: Mapping[str, object], name: str) -> object:
    """A claim by its name, or by a path of names with dots, as in `realm_access.roles`."""
    if name in claims:
        return claims[name]
    head, dot, rest = name.partition(".")
    inner = claims.get(head)
    return _claim(inner, rest) if dot and isinstance(inner, dict) else None
