"""Stage 1, authenticate: key or token -> principal. Keys are held and compared as digests.

A key of an entitlement's own leads to that entitlement. A key of a tenant leads to whichever of
the tenant's entitlements is for the requested model, which `entitled` chooses in stage 2. So does
a token (JWT), which is verified once and then known by its digest.
"""

import hmac
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from gateway.errors import Forbidden, KeysAwaited, Unauthorized, Unavailable
from gateway.ports import TokenVerifier
from gateway.records.entitlement import RESERVING
from gateway.records.limit import Limit
from gateway.records.request import OPEN, Principal, RequestHead, TenantKey
from gateway.records.tenancy import TOKEN_NAME, TokenIdentity

DIRECTORY: Final = "tenants"
CLUSTER_GRANTS: Final = "the entitlements of the cluster"
"""In `Keyring.unread`."""
PREFIX: Final = 4
OPENED_KEPT: Final = 65_536
UNREAD_RETRY_S: Final = 1.0
VERDICT_RETRY_S: Final = 5.0
"""Retry-After where a cluster's controller has to find capacity."""
MAX_TOKENS: Final = 10_000
"""Tokens remembered; the oldest is forgotten first, and verified again."""
VERIFIED_FOR_S: Final = 300.0
"""Time after which a token is verified again."""
_TIERS: Final = {b'"priority"': RESERVING, b'"flex"': frozenset({"spot"})}
"""Value of `service_tier` -> service classes."""


class _Entry:
    """Who has a digest, and what its key opens as far as that is known."""

    __slots__ = ("digest", "key", "owner", "principal")

    def __init__(
        self, digest: bytes, principal: Principal | None, key: TenantKey | None = None
    ) -> None:
        self.digest = digest
        self.principal = principal
        """None of a tenant's key until it is used, and after a change of its entitlements."""
        self.key = key
        """None for a key of an entitlement's own."""
        name = key.tenant if key is not None else principal.entitlement if principal else ""
        of_cluster = principal is not None and principal.of_cluster
        self.owner = (of_cluster, key is not None, name)
        """Of several who have one digest, the first has it: entitlements before tenants, and what
        a cluster grants last, because whoever may grant there must not take others' keys."""


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
        token = self._known.get(digest)
        if token is None or now_unix_s < token.until_unix_s:
            return token
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


class Keyring:
    """Digests of the live keys, changeable at any time. Buckets keep a look-up short."""

    def __init__(
        self,
        limits: Mapping[tuple[str, str], tuple[Limit, ...]] | None = None,
        verifier: TokenVerifier | None = None,
    ) -> None:
        """`limits` over all models, by (`entitlement` or `tenant`, its name).

        With a `verifier` tokens open what keys do.
        """
        self.limits = limits or {}
        """Of principals; see `limit`."""
        self.open = True
        """Only while there never was an entitlement or a key: deleting the last opens nothing."""
        self.unread: set[str] = set()
        """What was not read since the start: before the directory, which may have revoked it, no
        key opens; before a cluster's grants one that is not known here may be valid."""
        self.held: set[str] = set()
        """Suspended tenants: the gateway refuses all of their keys."""
        self.verifier = verifier
        self.tokens = KnownTokens()
        if verifier is not None:
            verifier.on_change(self.tokens.clear)
        self._defaults: dict[str, TenantKey] = {}
        """By tenant, what a token opens that lists no entitlements; else all, by name."""
        self._revision = 0
        """Counts changes of what tenants have; a token's principal is made anew after one."""
        # A few bytes of the digest choose a bucket; the rest is compared in constant time.
        self._buckets: dict[bytes, tuple[_Entry, ...]] = {}
        self._own_keys: dict[str, tuple[_Entry, ...]] = {}
        """By entitlement."""
        self._tenants: dict[str, dict[str, Principal]] = {}
        """Each tenant's entitlements."""
        self._tenant_keys: dict[str, tuple[_Entry, ...]] = {}
        self._opened: deque[_Entry] = deque()
        """Tenants' keys whose principal is kept, oldest first."""
        self._tenant_of: dict[str, str] = {}

    def put_tenant(self, tenant: str, keys: Sequence[TenantKey]) -> None:
        """Replace a tenant's keys at once; with none it has no key.

        A key that is an entitlement's own opens that one; of two tenants the first by name has it.
        """
        self._drop(self._tenant_keys.pop(tenant, ()))
        if keys:
            self.open = False
            self._tenant_keys[tenant] = self._enter([_Entry(k.sha256, None, k) for k in keys])

    def _enter(self, entries: list[_Entry]) -> tuple[_Entry, ...]:
        for entry in entries:
            bucket = [*self._buckets.get(entry.digest[:PREFIX], ()), entry]
            bucket.sort(key=lambda holder: holder.owner)
            self._buckets[entry.digest[:PREFIX]] = tuple(bucket)
        return tuple(entries)

    def _drop(self, entries: tuple[_Entry, ...]) -> None:
        for entry in entries:
            prefix = entry.digest[:PREFIX]
            others = tuple(holder for holder in self._buckets[prefix] if holder is not entry)
            if others:
                self._buckets[prefix] = others
            else:
                del self._buckets[prefix]

    def default_to(self, tenant: str, key: TenantKey | None) -> None:
        """Have tokens of a tenant that list no entitlements open what this key does; None: all."""
        if key != self._defaults.get(tenant):
            self._revision += 1
            self._defaults.pop(tenant, None)
            if key is not None:
                self._defaults[tenant] = key

    def put(self, principal: Principal, digests: Sequence[bytes]) -> None:
        """Replace an entitlement's principal and its own keys; with no digests it has none."""
        self.open = False
        self.remove(principal.entitlement)
        if self.limits or principal.limits:
            own = self.limits.get(("entitlement", principal.entitlement), ())
            whole = self.limits.get(("tenant", principal.tenant), ())
            principal = msgspec.structs.replace(principal, limits=own + whole)
        entries = [_Entry(digest, principal) for digest in dict.fromkeys(digests)]
        self._own_keys[principal.entitlement] = self._enter(entries)
        self._tenants.setdefault(principal.tenant, {})[principal.entitlement] = principal
        self._tenant_of[principal.entitlement] = principal.tenant
        self._changed(principal.tenant)

    def limit(self, limits: Mapping[tuple[str, str], tuple[Limit, ...]]) -> None:
        """Replace the limits over all models of entitlements and tenants."""
        if limits == self.limits:
            return
        changed = [owner for owner, _ in limits.items() ^ self.limits.items()]
        self.limits = limits
        for tenant in {self._tenant_of.get(n) if of == "entitlement" else n for of, n in changed}:
            for principal in list(self._tenants.get(tenant or "", {}).values()):
                self.put(principal, [own.digest for own in self._own_keys[principal.entitlement]])

    def remove(self, entitlement: str) -> None:
        """Forget an entitlement and its own keys; unknown ones are no failure."""
        self._drop(self._own_keys.pop(entitlement, ()))
        tenant = self._tenant_of.pop(entitlement, None)
        if tenant is not None:
            del self._tenants[tenant][entitlement]
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            self._changed(tenant)

    def entitlements_of(self, tenant: str) -> dict[str, Principal]:
        """A tenant's entitlements by name."""
        return self._tenants.get(tenant, {})

    def _changed(self, tenant: str) -> None:
        self._revision += 1
        for entry in self._tenant_keys.get(tenant, ()):
            entry.principal = None

    def find(self, digest: bytes) -> Principal | None:
        """The owner of a key, by its SHA-256 digest.

        What a tenant's key opens is found out when it is used, and kept of the last OPENED_KEPT.
        """
        for entry in self._buckets.get(digest[:PREFIX], ()):
            if hmac.compare_digest(entry.digest, digest):
                key = entry.key
                if entry.principal is None and key is not None:
                    entry.principal = _opened(key, self.entitlements_of(key.tenant))
                    self._opened.append(entry)
                    if len(self._opened) > OPENED_KEPT:
                        self._opened.popleft().principal = None
                return entry.principal
        return None

    def key_named(self, tenant: str, name: str) -> Principal | None:
        """The owner of a tenant's key, by the key's name; of several, of the one that lasts."""
        entries = self._tenant_keys.get(tenant, ())
        named = [entry for entry in entries if entry.key is not None and entry.key.name == name]
        principals = [owner for e in named if (owner := self.find(e.digest)) is not None]
        return max(principals, key=lambda p: p.expires_unix_s or inf, default=None)

    def has_own_key(self, entitlement: str) -> bool:
        """Whether an entitlement has keys of its own."""
        return bool(self._own_keys.get(entitlement))

    def owners(self, digest: bytes) -> list[tuple[str, str]]:
        """(`tenant` or `entitlement`, its name) of all who have a key."""
        bucket = self._buckets.get(digest[:PREFIX], ())
        return [
            ("tenant" if of_tenant else "entitlement", name)
            for _, of_tenant, name in (entry.owner for entry in bucket if entry.digest == digest)
        ]

    def of_token(
        self, verifier: TokenVerifier, digest: bytes, token: bytes, now_unix_s: float
    ) -> Principal:
        """The principal of a token. Raises Refusal."""
        verified = self.tokens.find(digest, now_unix_s)
        if verified is None:
            verified = self.tokens.enter(digest, verifier.verify(token), now_unix_s)
        if verified.principal is None or verified.revision != self._revision:
            who = verified.identity
            if who.tenant is None:
                raise Forbidden(
                    f"The token of '{who.issuer}' has no claim '{who.tenant_claim}' that names one "
                    "tenant. Have the issuer add it, or set auth.jwt.tenant_claim to the claim "
                    "that does.",
                    reason="token_without_tenant",
                )
            own = self._tenants.get(who.tenant)
            if not own:
                raise Forbidden(
                    f"The token's claim '{who.tenant_claim}' names the tenant "
                    f"'{who.tenant[:64]}', which has no entitlement here. Ask whoever runs this "
                    "gateway to add one.",
                    reason="token_tenant_unknown",
                )
            key = self._defaults.get(who.tenant, TenantKey(tenant=who.tenant, name="", sha256=b""))
            if who.entitlements is not None:
                key = TenantKey(
                    tenant=who.tenant,
                    name="",
                    sha256=b"",
                    entitlements=who.entitlements,
                    only_listed=True,
                )
            verified.principal = _opened(msgspec.structs.replace(key, name=who.name), own)
            verified.revision = self._revision
        return verified.principal

    def past_token(self, tenant: str, name: str, entitlement: str) -> Principal | None:
        """What a token that once used an entitlement opens of it now; None for nothing."""
        own = self._tenants.get(tenant, {})
        if self.verifier is None or entitlement not in own:
            return None
        key = self._defaults.get(tenant)
        if key is None or (key.only_listed and entitlement not in key.entitlements):
            key = TenantKey(tenant=tenant, name="", sha256=b"")  # the token listed it
        listed = {"name": name, "entitlements": (entitlement,), "only_listed": True}
        return _opened(msgspec.structs.replace(key, **listed), own)


def _opened(key: TenantKey, entitlements: Mapping[str, Principal]) -> Principal:
    """The principal of a tenant's key, given its tenant's entitlements by name."""
    names = [name for name in key.entitlements if name in entitlements]
    if not key.only_listed:
        names += sorted(entitlements.keys() - set(names))
    used: dict[str, tuple[Principal, ...]] = {}
    for name in names:
        principal = entitlements[name]
        limits = key.limits + principal.limits
        principal = msgspec.structs.replace(
            principal, key=key.name, limits=limits, queue_status=key.queue_status
        )
        model = principal.model
        if model is not None:
            used[model] = (*used.get(model, ()), principal)
    choices = {m: of for m, of in used.items() if key.models is None or m in key.models}
    return Principal(
        entitlement="",
        tenant=key.tenant,
        key=key.name,
        choices=choices,
        only=key.models,
        behind={} if key.models is None else used,
        expires_unix_s=key.expires_unix_s,
        suspended=key.suspended,
        trusted_usage=any(p.trusted_usage for opened in choices.values() for p in opened),
    )


def authenticate(
    keyring: Keyring, key_digest: bytes | None, now_unix_s: float, token: bytes | None = None
) -> Principal:
    """Who asks, by the SHA-256 digest of the key as presented, and the key if it may be a token.

    Raises Unauthorized for a missing or unknown key, Forbidden for an expired or suspended one,
    KeysAwaited for a token whose key is being read, Unavailable before what matters was read.
    """
    if DIRECTORY in keyring.unread:
        raise _not_read()
    verifier = keyring.verifier
    if keyring.open and verifier is None and not keyring.unread:
        return OPEN
    if key_digest is None:
        raise Unauthorized(
            "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.",
            reason="missing_api_key",
        )
    principal = keyring.find(key_digest)
    if principal is None and verifier is not None and token is not None:
        principal = keyring.of_token(verifier, key_digest, token, now_unix_s)
    if principal is None:
        if keyring.unread:
            raise _not_read()
        raise Unauthorized(
            "Incorrect API key provided. Check the key with whoever runs this gateway.",
            reason="invalid_api_key",
        )
    return _in_force(keyring, principal, now_unix_s)


def _in_force(keyring: Keyring, principal: Principal, now_unix_s: float) -> Principal:
    if keyring.held and principal.tenant in keyring.held:
        raise Forbidden(f"The tenant '{principal.tenant}' is suspended.", reason="tenant_suspended")
    _check_live(principal, now_unix_s)
    return principal


def creator(
    keyring: Keyring, tenant: str, entitlement: str, key: str, now_unix_s: float
) -> Principal:
    """Who made a batch, with the rights of now, by names: its key may have been rotated.

    `key`: empty for a key of the entitlement's own. Raises Refusal as `authenticate` does.
    """
    if DIRECTORY in keyring.unread:
        raise _not_read()
    if keyring.open and keyring.verifier is None and not keyring.unread:
        return OPEN
    if key.startswith(TOKEN_NAME):
        principal = keyring.past_token(tenant, key, entitlement)
    elif key:
        principal = keyring.key_named(tenant, key)
    else:
        own = keyring.entitlements_of(tenant)
        principal = own.get(entitlement) if keyring.has_own_key(entitlement) else None
    if principal is None:
        if keyring.unread:
            raise _not_read()
        what = f"API key '{key}'" if key else f"entitlement '{entitlement}', or every key of it,"
        text = f"The {what} of the tenant '{tenant}' is gone."
        raise Unauthorized(text, reason="invalid_api_key")
    return _in_force(keyring, principal, now_unix_s)


def _not_read() -> Unavailable:
    return Unavailable(
        "This gateway does not know yet which keys are valid and which keys are revoked: it "
        "could not read that since it started. Try again.",
        reason="keys_not_read",
        retry_after_s=UNREAD_RETRY_S,
        should_retry=True,
    )


async def authenticate_head(keyring: Keyring, head: RequestHead, now_unix_s: float) -> Principal:
    """The same for a request's head; waits a bounded time for the keys of a token's issuer."""
    try:
        return authenticate(keyring, head.key_digest, now_unix_s, head.token)
    except KeysAwaited:
        if keyring.verifier is not None:
            await keyring.verifier.keys_read()
        return authenticate(keyring, head.key_digest, now_unix_s, head.token)


def _check_live(principal: Principal, now_unix_s: float) -> None:
    expired = principal.expires_unix_s is not None and principal.expires_unix_s <= now_unix_s
    if not (expired or principal.suspended):
        return
    name = f"The API key '{principal.key}'"
    if principal.entitlement:
        name = f"The entitlement '{principal.entitlement}'"
    if expired:
        reason = "entitlement_expired" if principal.entitlement else "key_expired"
        raise Forbidden(f"{name} has expired.", reason=reason)
    reason = "entitlement_suspended" if principal.entitlement else "key_suspended"
    raise Forbidden(f"{name} is suspended.", reason=reason)


def entitled(
    principal: Principal,
    model: str,
    now_unix_s: float,
    asked: str | None = None,
    members: Mapping[str, msgspec.Raw] | None = None,
    adapter: str = "",
) -> Principal:
    """The principal with the entitlement that a request for this model uses. Raises Forbidden.

    Raises Unavailable where a cluster's controller withholds it.

    `asked` is the entitlement that the client names; `members` are the body's, of which
    `service_tier` chooses among several entitlements for one model. `adapter` is the LoRA adapter
    of the model that the request is for: a key with a list of models opens it by its own name.
    """
    if principal.entitlement:
        if principal.model is not None and principal.model != model:
            raise Forbidden(
                f"This API key is entitled to the model '{principal.model}' only.",
                reason="model_not_entitled",
                param="model",
            )
        if asked is not None and asked != principal.entitlement and principal is not OPEN:
            raise _not_yours(asked, model, (principal,))
        _check_bound(principal)
        return principal
    choices = principal.of(model, adapter)
    if not choices:
        opened = principal.choices if principal.only is None else sorted(principal.only)
        may = ", ".join(f"'{name}'" for name in opened) or "none"
        raise Forbidden(
            f"This API key does not open the model '{adapter or model}'. It opens: {may}.",
            reason="model_not_entitled",
            param="model",
        )
    if asked is not None:
        chosen = next((p for p in choices if p.entitlement == asked), None)
        if chosen is None:
            raise _not_yours(asked, model, choices)
    else:
        chosen = choices[0]
        if len(choices) > 1 and members is not None and (tier := members.get("service_tier")):
            # The first of that tier; the first of all where it names no class.
            wanted = _TIERS.get(bytes(tier), frozenset())
            chosen = next((p for p in choices if p.service_class in wanted), chosen)
    _check_live(chosen, now_unix_s)
    _check_bound(chosen)
    return chosen


def _check_bound(principal: Principal) -> None:
    if principal.verdict:
        why, reason = principal.message.rstrip("."), f"entitlement_{principal.verdict}"
        raise Unavailable(
            f"The entitlement '{principal.entitlement}' is {principal.verdict}: "
            f"{why or 'the cluster has no capacity for it now'}.",
            reason=reason,
            retry_after_s=VERDICT_RETRY_S,
            should_retry=True,
        )


def _not_yours(asked: str, model: str, choices: tuple[Principal, ...]) -> Forbidden:
    may = ", ".join(f"'{choice.entitlement}'" for choice in choices)
    return Forbidden(
        f"This API key has no entitlement '{asked[:64]}' for the model '{model}'. "
        f"Set x-sluice-entitlement to one of: {may}.",
        reason="entitlement_not_of_key",
        param="x-sluice-entitlement",
    )
