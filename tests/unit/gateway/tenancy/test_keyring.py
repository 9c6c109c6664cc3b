"""The keyring changes while it is used; look-ups stay short and compare in constant time."""

import hashlib
import hmac
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.errors import Forbidden, KeysAwaited, Unauthorized
from gateway.payload.head import digest_of, read_head
from gateway.records.entitlement import key_name
from gateway.records.limit import Limit
from gateway.records.request import OPEN, Principal, TenantKey
from gateway.records.tenancy import TokenIdentity
from gateway.tenancy import keyring as stage
from gateway.tenancy.keyring import (
    Keyring,
    KnownTokens,
    authenticate,
    authenticate_head,
    creator,
    entitled,
)
from tests.builders import keyring_of


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def who(name: str, **more: object) -> Principal:
    return Principal(entitlement=name, tenant="t", **more)  # type: ignore[arg-type]


def found(keyring: Keyring, key: str) -> str | None:
    principal = keyring.find(digest_of(key.encode()))
    return None if principal is None else principal.entitlement


def test_a_keyring_is_open_until_an_entitlement_was_entered_and_never_again() -> None:
    keyring = Keyring()
    assert authenticate(keyring, None, 0.0) is OPEN
    keyring.put(who("a"), ())
    keyring.remove("a")
    with pytest.raises(Unauthorized, match="didn't provide"):
        authenticate(keyring, None, 0.0)
    with pytest.raises(Unauthorized, match="Incorrect"):
        authenticate(keyring, digest_of(b"any"), 0.0)


def test_two_keys_lead_to_one_entitlement_and_each_can_go() -> None:
    keyring = Keyring()
    keyring.put(who("a"), (digest("one"), digest("two")))
    assert (found(keyring, "one"), found(keyring, "two")) == ("a", "a")
    keyring.put(who("a"), (digest("two"), digest("three")))
    assert [found(keyring, k) for k in ("one", "two", "three")] == [None, "a", "a"]
    keyring.remove("a")
    assert [found(keyring, k) for k in ("one", "two", "three")] == [None, None, None]


def test_a_changed_principal_is_what_its_keys_find() -> None:
    keyring = keyring_of({digest("one"): who("a"), digest("two"): who("b")})
    keyring.put(who("a", expires_unix_s=5.0), (digest("one"),))
    with pytest.raises(Forbidden, match="has expired"):
        authenticate(keyring, digest_of(b"one"), 5.0)
    keyring.put(who("a", suspended=True), (digest("one"),))
    with pytest.raises(Forbidden, match="is suspended") as caught:
        authenticate(keyring, digest_of(b"one"), 0.0)
    assert caught.value.reason == "entitlement_suspended"
    assert authenticate(keyring, digest_of(b"two"), 0.0).entitlement == "b"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_several_owners_of_a_key_the_first_has_it_whoever_came_first(order: str) -> None:
    keyring = Keyring()
    keys = {"a": (digest("one"), digest("two")), "b": (digest("one"), digest("one"))}
    for name in order:
        keyring.put(who(name), keys[name])
    assert (found(keyring, "one"), found(keyring, "two")) == ("a", "a")
    keyring.remove("a")
    assert (found(keyring, "one"), found(keyring, "two")) == ("b", None)
    keyring.remove("b")
    keyring.remove("b")
    assert found(keyring, "one") is None


def test_no_look_up_compares_more_than_a_few_of_a_hundred_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keyring = Keyring()
    for n in range(100_000):
        keyring.put(who(f"e{n}"), (digest(f"k{n}"), digest(f"second{n}")))
    compared = []

    def counting(known: bytes, given: bytes) -> bool:
        compared.append(given)
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(stage, "hmac", SimpleNamespace(compare_digest=counting))
    most = 0
    for n in range(0, 100_000, 97):
        compared.clear()
        assert found(keyring, f"k{n}") == f"e{n}"
        most = max(most, len(compared))
    assert most <= 20
    compared.clear()
    assert found(keyring, "nobody's") is None
    assert len(compared) <= 20
    for n in range(100_000):
        keyring.remove(f"e{n}")
    assert (found(keyring, "k1"), keyring._buckets, keyring._own_keys) == (None, {}, {})


def tenant_key(name: str, **more: object) -> TenantKey:
    return TenantKey(tenant="t", name=name, sha256=digest(name), **more)  # type: ignore[arg-type]


def asked(keyring: Keyring, key: str, model: str, *more: Any, now_s: float = 0.0) -> str:
    principal = authenticate(keyring, digest(key), now_s)
    return entitled(principal, model, now_s, *more).entitlement


def test_a_tenants_key_opens_each_of_its_models_by_the_first_entitlement_for_it() -> None:
    keyring = keyring_of(tenant_keys=[tenant_key("web", entitlements=("chat", "code", "batch"))])
    with pytest.raises(Unauthorized):
        authenticate(keyring, None, 0.0)
    for name, model in (("batch", "m"), ("code", "n"), ("chat", "m")):
        keyring.put(who(name, model=model), ())
    keyring.put(who("later", model="n"), ())
    assert (asked(keyring, "web", "m"), asked(keyring, "web", "n")) == ("chat", "code")
    principal = authenticate(keyring, digest("web"), 0.0)
    assert (principal.key, principal.opens("m"), principal.opens("o")) == ("web", True, False)
    assert entitled(principal, "m", 0.0).key == "web"
    with pytest.raises(Forbidden, match="opens: 'm', 'n'") as caught:
        entitled(principal, "o", 0.0)
    assert caught.value.reason == "model_not_entitled"


def test_a_tenants_key_follows_changes_of_its_entitlements() -> None:
    keyring = keyring_of(tenant_keys=[tenant_key("web", entitlements=("a", "b"))])
    keyring.put(who("a", model="m"), (digest("own"),))
    keyring.put(who("b", model="m"), ())
    assert (asked(keyring, "web", "m"), asked(keyring, "own", "m")) == ("a", "a")
    keyring.put(who("a", model="n"), ())
    assert asked(keyring, "web", "m") == "b"
    keyring.remove("b")
    with pytest.raises(Forbidden):
        asked(keyring, "web", "m")
    keyring.put(who("a", model="m", suspended=True), ())
    with pytest.raises(Forbidden, match="'a' is suspended"):
        asked(keyring, "web", "m")
    keyring.put(Principal(entitlement="foreign", tenant="u", model="n"), ())
    with pytest.raises(Forbidden, match="does not open"):
        asked(keyring, "web", "n")


def test_a_key_keeps_to_its_models_and_its_list() -> None:
    only = tenant_key("only", entitlements=("b",), only_listed=True)
    keyring = keyring_of(tenant_keys=[only, tenant_key("some", models=frozenset({"n"}))])
    for name, model in (("a", "m"), ("b", "n")):
        keyring.put(who(name, model=model), ())
    for key in ("only", "some"):
        assert asked(keyring, key, "n") == "b"
        with pytest.raises(Forbidden, match="It opens: 'n'"):
            asked(keyring, key, "m")


def test_a_key_ends_by_itself() -> None:
    keyring = keyring_of(
        tenant_keys=[tenant_key("old", expires_unix_s=5.0), tenant_key("off", suspended=True)]
    )
    keyring.put(who("a", model="m"), ())
    assert asked(keyring, "old", "m", now_s=4.0) == "a"
    for key, reason in (("old", "key_expired"), ("off", "key_suspended")):
        with pytest.raises(Forbidden) as caught:
            asked(keyring, key, "m", now_s=5.0)
        assert caught.value.reason == reason


def test_a_request_chooses_among_the_entitlements_of_its_key() -> None:
    names = ("shared", "batch", "reserved")
    keyring = keyring_of(tenant_keys=[tenant_key("web", entitlements=names)])
    for name, service_class in zip(names, ("elastic", "spot", "guaranteed"), strict=True):
        keyring.put(who(name, model="m", service_class=service_class), (digest(name),))

    def tier(said: str) -> str:
        return asked(keyring, "web", "m", None, {"service_tier": Raw(said.encode())})

    assert [tier(f'"{said}"') for said in ("priority", "flex", "auto", "default")] == [
        *("reserved", "batch", "shared", "shared")
    ]
    assert tier("null") == "shared"
    assert asked(keyring, "web", "m", None, {}) == "shared"
    assert asked(keyring, "web", "m", "batch") == "batch"
    with pytest.raises(Forbidden, match="one of: 'shared', 'batch', 'reserved'") as caught:
        asked(keyring, "web", "m", "theirs")
    assert caught.value.reason == "entitlement_not_of_key"
    assert asked(keyring, "batch", "m", "batch") == "batch", "its own key may say so, too"
    with pytest.raises(Forbidden, match="one of: 'batch'"):
        asked(keyring, "batch", "m", "reserved")
    assert entitled(OPEN, "m", 0.0, "any") is OPEN, "an open gateway has no entitlements to ask for"


def test_a_tier_that_the_key_has_no_entitlement_for_changes_nothing() -> None:
    keyring = keyring_of(tenant_keys=[tenant_key("web", entitlements=("a", "b"))])
    for name in ("a", "b"):
        keyring.put(who(name, model="m"), ())
    for said in (b'"priority"', b'"flex"'):
        assert asked(keyring, "web", "m", None, {"service_tier": Raw(said)}) == "a"


def test_keys_are_named_as_in_the_file_else_by_their_fingerprint() -> None:
    assert key_name(who("a", key="web"), digest("web")) == "web"
    assert key_name(who("a"), digest("one")) == digest("one").hex()[:8]
    assert (key_name(who("a"), None), key_name(OPEN, digest("any"))) == (None, None)


def test_a_tenants_keys_come_and_go_after_its_entitlements() -> None:
    keyring = Keyring()
    keyring.put(who("a", model="m"), (digest("own"),))
    keyring.put_tenant("t", [tenant_key("web"), tenant_key("old"), tenant_key("own")])
    assert [asked(keyring, key, "m") for key in ("web", "old")] == ["a", "a"]
    principal = keyring.find(digest("own"))
    assert principal is not None
    assert principal.key == ""  # the entitlement's own stays that
    keyring.put_tenant("t", [tenant_key("web")])
    assert (found(keyring, "old"), asked(keyring, "web", "m")) == (None, "a")
    keyring.put(who("b", model="n"), (digest("web"),))
    keyring.put_tenant("t", ())
    assert (found(keyring, "web"), found(keyring, "own")) == ("b", "a")
    for name in ("a", "b"):
        keyring.remove(name)
    assert (keyring._buckets, keyring._tenants, keyring._tenant_keys) == ({}, {}, {})
    assert not keyring.open


def test_only_a_gateway_that_never_had_a_key_is_open() -> None:
    keyring = Keyring()
    keyring.put_tenant("t", [])
    assert authenticate(keyring, None, 0.0) is OPEN
    keyring.put_tenant("t", [tenant_key("web")])
    keyring.put_tenant("t", ())
    with pytest.raises(Unauthorized):
        authenticate(keyring, None, 0.0)


def test_a_suspended_tenant_is_refused_by_all_of_its_keys() -> None:
    keyring = keyring_of(tenant_keys=[tenant_key("web")])
    keyring.put(who("a", model="m"), (digest("own"),))
    keyring.put(Principal(entitlement="b", tenant="u", model="m"), (digest("other"),))
    keyring.held.add("t")
    for key in ("web", "own"):
        with pytest.raises(Forbidden, match="tenant 't' is suspended"):
            asked(keyring, key, "m")
    assert asked(keyring, "other", "m") == "b"


def test_a_request_has_the_limits_of_its_key_its_entitlement_and_its_tenant() -> None:
    def limit(name: str, amount: int = 1) -> Limit:
        return Limit(id=name, scope="tenant", name=name, unit="tokens", amount=amount)

    limits = {("entitlement", "chat"): (limit("e"),), ("tenant", "t"): (limit("t"),)}
    keyring = keyring_of(tenant_keys=[tenant_key("web", limits=(limit("k"),))], limits=limits)
    for name, model in (("chat", "m"), ("code", "n")):
        keyring.put(who(name, model=model), [digest(f"own-{name}")])

    def ids(key: str, model: str) -> list[str]:
        principal = authenticate(keyring, digest(key), 0.0)
        return [each.id for each in entitled(principal, model, 0.0).limits]

    assert (ids("web", "m"), ids("web", "n")) == (["k", "e", "t"], ["k", "t"])
    assert (ids("own-chat", "m"), ids("own-code", "n")) == (["e", "t"], ["t"])
    keyring.limit({("entitlement", "code"): (limit("c"),)})
    assert (ids("web", "m"), ids("web", "n"), ids("own-chat", "m")) == (["k"], ["k", "c"], [])


# -- tokens in stage 1: verified once, known by their digest, bounded, and as live as keys


TOKEN = b"eyJ.one"


class Verifier:
    """Counts verifications, and says what it is told."""

    def __init__(self, **said: object) -> None:
        self.said = {"tenant": "t", "until_unix_s": 10_000.0, **said}
        self.verified = 0
        self.waited = 0
        self.away = False
        self.changed: Callable[[], None] = lambda: None

    def verify(self, token: bytes) -> TokenIdentity:
        if self.away:
            raise KeysAwaited("away", reason="token_keys_unavailable")
        self.verified += 1
        known = {"issuer": "i", "name": "jwt:alice", **self.said}
        return TokenIdentity(**known)  # type: ignore[arg-type]

    async def keys_read(self) -> None:
        self.waited += 1
        self.away = False

    def on_change(self, changed: Callable[[], None]) -> None:
        self.changed = changed


def of_verifier(verifier: Verifier, default: TenantKey | None = None) -> Keyring:
    keyring = Keyring(verifier=verifier)
    keyring.default_to("t", default)
    for name in ("b", "a"):
        keyring.put(Principal(entitlement=name, tenant="t", model="m"), (digest_of(b"sk-b"),))
    return keyring


def known(keyring: Keyring, now_s: float = 0.0, token: bytes = TOKEN) -> Principal:
    return authenticate(keyring, digest_of(token), now_s, token)


def uses(keyring: Keyring) -> list[str]:
    return [each.entitlement for each in known(keyring).choices.get("m", ())]


def test_a_token_is_verified_once_then_known_until_it_is_due() -> None:
    verifier = Verifier(until_unix_s=1000.0)
    keyring = of_verifier(verifier)
    first = known(keyring)
    assert known(keyring, 299.0) is first
    assert verifier.verified == 1
    assert (first.tenant, first.key) == ("t", "jwt:alice")
    assert entitled(first, "m", 0.0).key == "jwt:alice"
    known(keyring, 300.0)
    assert verifier.verified == 2
    known(keyring, 700.0)
    known(keyring, 999.0)
    assert verifier.verified == 3
    known(keyring, 1000.0)
    assert verifier.verified == 4, "it has expired, which the verifier says"


def test_other_keys_of_an_issuer_have_all_tokens_verified_again() -> None:
    verifier = Verifier()
    keyring = of_verifier(verifier)
    known(keyring)
    verifier.changed()
    known(keyring)
    assert verifier.verified == 2


def test_what_is_kept_of_tokens_is_bounded() -> None:
    tokens = KnownTokens(most=100)
    identity = Verifier().verify(TOKEN)
    for number in range(1_000):
        tokens.enter(b"%d" % number, identity, 0.0)
    assert len(tokens) == 100
    assert tokens.find(b"899", 0.0) is None
    assert tokens.find(b"900", 0.0) is not None
    tokens.enter(b"950", identity, 0.0)
    assert len(tokens) == 100, "a token that is verified again takes no second place"


def test_a_token_opens_its_tenants_entitlements_as_a_key_without_lists_does() -> None:
    assert uses(of_verifier(Verifier())) == ["a", "b"], "by name"
    default = TenantKey(tenant="t", name="", sha256=b"", entitlements=("b",))
    assert uses(of_verifier(Verifier(), default)) == ["b", "a"], "in the file's order"
    assert uses(of_verifier(Verifier(entitlements=("b",)))) == ["b"]
    assert uses(of_verifier(Verifier(entitlements=("gone",)))) == []
    assert uses(of_verifier(Verifier(entitlements=()))) == []


def test_another_list_of_the_tenants_reaches_known_tokens() -> None:
    keyring = of_verifier(Verifier())
    assert uses(keyring) == ["a", "b"]
    only = TenantKey(tenant="t", name="", sha256=b"", entitlements=("b",), only_listed=True)
    keyring.default_to("t", only)
    assert uses(keyring) == ["b"]
    keyring.default_to("t", None)
    assert uses(keyring) == ["a", "b"]


def test_changes_of_entitlements_reach_known_tokens() -> None:
    keyring = of_verifier(Verifier())
    known(keyring)
    keyring.put(Principal(entitlement="c", tenant="t", model="n"), ())
    assert known(keyring).opens("n")
    keyring.put(Principal(entitlement="a", tenant="t", model="m", suspended=True), ())
    with pytest.raises(Forbidden, match="is suspended"):
        entitled(known(keyring), "m", 0.0)
    for name in ("a", "b", "c"):
        keyring.remove(name)
    with pytest.raises(Forbidden, match="tenant 't', which has no entitlement"):
        known(keyring)


def test_a_tenants_limits_and_suspension_hold_for_its_tokens() -> None:
    limit = Limit(id="b", scope="tenant", name="t", unit="tokens", amount=1, window="day")
    keyring = of_verifier(Verifier())
    assert entitled(known(keyring), "m", 0.0).limits == ()
    keyring.limit({("tenant", "t"): (limit,)})
    assert entitled(known(keyring), "m", 0.0).limits == (limit,)
    keyring.held.add("t")
    with pytest.raises(Forbidden, match="tenant 't' is suspended"):
        known(keyring)


@pytest.mark.parametrize(
    ("tenant", "reason"), [("rival", "token_tenant_unknown"), (None, "token_without_tenant")]
)
def test_a_token_without_a_tenant_of_this_gateway_is_told_so(
    tenant: str | None, reason: str
) -> None:
    keyring = of_verifier(Verifier(tenant=tenant, tenant_claim="org"))
    with pytest.raises(Forbidden, match="'org'") as refused:
        known(keyring)
    assert (refused.value.reason, refused.value.status) == (reason, 403)


def test_keys_stay_keys_and_what_looks_like_neither_is_not_verified() -> None:
    verifier = Verifier()
    keyring = of_verifier(verifier)
    assert authenticate(keyring, digest_of(b"sk-b"), 0.0).entitlement == "a"
    with pytest.raises(Unauthorized, match="Incorrect"):
        authenticate(keyring, digest_of(b"sk-x"), 0.0, None)
    keyring.put(Principal(entitlement="k", tenant="t", model="m"), (digest_of(b"eyJkey"),))
    assert authenticate(keyring, digest_of(b"eyJkey"), 0.0, b"eyJkey").entitlement == "k"
    assert verifier.verified == 0


def test_a_gateway_that_takes_tokens_is_open_to_nobody() -> None:
    with pytest.raises(Unauthorized, match="didn't provide"):
        authenticate(Keyring(verifier=Verifier()), None, 0.0)


async def test_a_request_waits_for_the_keys_once() -> None:
    verifier = Verifier()
    keyring = of_verifier(verifier)
    verifier.away = True
    head = read_head([(b"authorization", b"Bearer " + TOKEN)])
    assert (await authenticate_head(keyring, head, 0.0)).tenant == "t"
    assert verifier.waited == 1


def test_a_head_keeps_a_token_and_no_key_and_shows_neither() -> None:
    for name, value in ((b"authorization", b"Bearer " + TOKEN), (b"x-api-key", TOKEN)):
        head = read_head([(name, value)])
        assert (head.token, head.key_digest) == (TOKEN, digest_of(TOKEN))
        assert "one" not in repr(head)
        assert TOKEN not in head.forwarded
    assert read_head([(b"authorization", b"Bearer sk-key")]).token is None


# -- who made a batch, by names


def test_a_batch_of_a_token_has_what_its_tenants_tokens_open_now() -> None:
    keyring = of_verifier(Verifier())
    made = entitled(known(keyring), "m", 0.0)

    def now() -> Principal:
        return entitled(creator(keyring, "t", made.entitlement, made.key, 0.0), "m", 0.0)

    assert now() == made
    each = Limit(id="k", scope="key", name="t/", unit="requests", amount=1, window="minute")
    default = TenantKey(tenant="t", name="", sha256=b"", limits=(each,))
    keyring.default_to("t", default)
    assert now().limits == (each,)
    keyring.default_to("t", replace(default, models=frozenset({"n"})))
    with pytest.raises(Forbidden, match="does not open"):
        now()
    keyring.default_to("t", replace(default, suspended=True))
    with pytest.raises(Forbidden, match="suspended"):
        now()
    keyring.default_to("t", None)
    keyring.remove(made.entitlement)
    with pytest.raises(Unauthorized, match="gone"):
        now()


def test_a_batch_of_an_entitlements_own_key_goes_no_further_than_the_key() -> None:
    for keyring in (Keyring(), Keyring(verifier=Verifier())):
        keyring.put(who("a"), (digest("one"),))
        assert creator(keyring, "t", "a", "", 0.0).entitlement == "a"
        keyring.put(who("a"), (digest("rotated"),))
        assert creator(keyring, "t", "a", "", 0.0).entitlement == "a"
        keyring.put(who("a"), ())
        with pytest.raises(Unauthorized, match="gone"):
            creator(keyring, "t", "a", "", 0.0)
