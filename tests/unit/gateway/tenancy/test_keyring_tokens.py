"""Tokens in stage 1: verified once, known by their digest, bounded, and as live as keys."""

from collections.abc import Callable

import pytest

from gateway.errors import Forbidden, KeysAwaited, Unauthorized
from gateway.payload.head import digest_of, read_head
from gateway.records.limit import Limit
from gateway.records.request import Principal, TenantKey
from gateway.records.tenancy import TokenIdentity
from gateway.tenancy.keyring import Keyring, KnownTokens, authenticate, authenticate_head, entitled

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


def keyring_of(verifier: Verifier, default: TenantKey | None = None) -> Keyring:
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
    keyring = keyring_of(verifier)
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
    keyring = keyring_of(verifier)
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
    assert uses(keyring_of(Verifier())) == ["a", "b"], "by name"
    default = TenantKey(tenant="t", name="", sha256=b"", entitlements=("b",))
    assert uses(keyring_of(Verifier(), default)) == ["b", "a"], "in the file's order"
    assert uses(keyring_of(Verifier(entitlements=("b",)))) == ["b"]
    assert uses(keyring_of(Verifier(entitlements=("gone",)))) == []
    assert uses(keyring_of(Verifier(entitlements=()))) == []


def test_another_list_of_the_tenants_reaches_known_tokens() -> None:
    keyring = keyring_of(Verifier())
    assert uses(keyring) == ["a", "b"]
    only = TenantKey(tenant="t", name="", sha256=b"", entitlements=("b",), only_listed=True)
    keyring.default_to("t", only)
    assert uses(keyring) == ["b"]
    keyring.default_to("t", None)
    assert uses(keyring) == ["a", "b"]


def test_changes_of_entitlements_reach_known_tokens() -> None:
    keyring = keyring_of(Verifier())
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
    keyring = keyring_of(Verifier())
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
    keyring = keyring_of(Verifier(tenant=tenant, tenant_claim="org"))
    with pytest.raises(Forbidden, match="'org'") as refused:
        known(keyring)
    assert (refused.value.reason, refused.value.status) == (reason, 403)


def test_keys_stay_keys_and_what_looks_like_neither_is_not_verified() -> None:
    verifier = Verifier()
    keyring = keyring_of(verifier)
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
    keyring = keyring_of(verifier)
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
