"""The keyring changes while it is used; look-ups stay short and compare in constant time."""

import hashlib
import hmac
from types import SimpleNamespace

import pytest

from gateway.errors import Forbidden, Unauthorized
from gateway.policy.request.head import digest_of
from gateway.records.request import OPEN, Principal
from gateway.stages import authenticate as stage
from gateway.stages.authenticate import Keyring, authenticate


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def who(name: str, **more: object) -> Principal:
    return Principal(entitlement=name, tenant="t", **more)  # type: ignore[arg-type]


def found(keyring: Keyring, key: str) -> str | None:
    principal = keyring.find(digest_of(key.encode()))
    return None if principal is None else principal.entitlement


def test_a_keyring_is_open_until_an_entitlement_was_entered_and_never_again() -> None:
    keyring = Keyring({})
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
    keyring = Keyring({digest("one"): who("a"), digest("two"): who("b")})
    keyring.put(who("a", expires_unix_s=5.0), (digest("one"),))
    with pytest.raises(Forbidden, match="has expired"):
        authenticate(keyring, digest_of(b"one"), 5.0)
    keyring.put(who("a", suspended=True), (digest("one"),))
    with pytest.raises(Forbidden, match="is suspended") as caught:
        authenticate(keyring, digest_of(b"one"), 0.0)
    assert caught.value.reason == "entitlement_suspended"
    assert authenticate(keyring, digest_of(b"two"), 0.0).entitlement == "b"


def test_a_key_that_changes_hands_is_the_last_owner_s() -> None:
    keyring = Keyring()
    keyring.put(who("a"), (digest("one"), digest("two")))
    keyring.put(who("b"), (digest("one"), digest("one")))
    assert (found(keyring, "one"), found(keyring, "two")) == ("b", "a")
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
    assert (found(keyring, "k1"), keyring._buckets, keyring._digests) == (None, {}, {})
