"""Tokens: what is taken, and for each of the rest a 401 that says what to change."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.errors import KeysAwaited, Refusal, Unauthorized
from gateway.metrics import Metrics
from gateway.records.tenancy import IssuerRules
from gateway.tenancy import verifier as tokens
from gateway.tenancy.verifier import (
    MAX_NAME,
    MAX_TOKEN_BYTES,
    MAX_VALUES,
    KeySet,
    Verifier,
    identity_of,
)
from tests.fakes import FakeClock
from tests.issuer import AUDIENCE, NAME, Issuer, forged


def rules_of(jwks: str, **more: Any) -> IssuerRules:
    known: dict[str, Any] = {
        "issuer": NAME,
        "jwks": jwks,
        "audience": (AUDIENCE,),
        "algorithms": ("RS256", "ES256"),
        "leeway_s": 10.0,
        "refresh_s": 300.0,
        "max_stale_s": 3600.0,
        "tenant_claim": "tenant",
    }
    return IssuerRules(**{**known, **more})


class Bench:
    """An issuer whose keys are in a file, and a verifier on a clock of its own."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.issuer = Issuer()
        self.file = folder / "jwks.json"
        self.publish()
        self.clock = FakeClock(1_000.0)
        self.metrics = Metrics()
        self.verifier = Verifier([rules_of(str(self.file), **more)], self.metrics, self.clock)

    def publish(self) -> None:
        self.file.write_text(json.dumps(self.issuer.jwks()))

    async def reread(self, token: str) -> None:
        """Have the keys read anew by a token that no known key fits."""
        self.clock.advance(11)
        with pytest.raises(KeysAwaited):
            self.verifier.verify(token.encode())
        await self.verifier.keys_read()

    def reads(self) -> float:
        return sum(self.metrics.token_key_reads.values.values())

    def reason(self, token: str) -> str:
        with pytest.raises(Refusal) as refused:
            self.verifier.verify(token.encode())
        assert isinstance(refused.value, Unauthorized), refused.value
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert token not in refused.value.message
        return refused.value.reason.removeprefix("token_")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.verifier.start()
    yield made
    await made.verifier.close()


async def test_a_token_says_who_it_is(bench: Bench) -> None:
    found = bench.verifier.verify(bench.issuer.token(exp=2_000_000_000).encode())
    assert (found.issuer, found.name, found.tenant) == (NAME, "jwt:alice", "acme")
    assert found.until_unix_s == 2_000_000_010
    assert (found.entitlements, found.role) == (None, None)
    assert bench.metrics.tokens_verified.values == {("ok",): 1}


async def test_an_elliptic_key_signs_as_well(bench: Bench) -> None:
    bench.issuer.keys.clear()
    bench.issuer.rotate("e1", "EC")
    bench.publish()
    await bench.reread(bench.issuer.token(alg="ES256"))
    assert bench.verifier.verify(bench.issuer.token(alg="ES256").encode()).tenant == "acme"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "another"}, "audience_wrong"),
        ({"aud": ["another", AUDIENCE]}, None),
        ({"aud": None}, "claim_missing"),
        ({"exp": None}, "claim_missing"),
        ({"exp": 1_700_000_000}, "expired"),
        ({"exp": "soon"}, "malformed"),
        ({"exp": 1e400}, "malformed"),
        ({"exp": 10**400}, "malformed"),
        ({"nbf": 10**400}, "not_yet_valid"),
        ({"iat": 10**400}, "not_yet_valid"),
        ({"nbf": 4_000_000_000}, "not_yet_valid"),
        ({"iat": 4_000_000_000}, "not_yet_valid"),
        ({"iss": "https://evil.example"}, "issuer_unknown"),
        ({"iss": None}, "issuer_unknown"),
    ],
)
async def test_claims_are_checked(bench: Bench, claims: dict[str, Any], reason: str | None) -> None:
    token = bench.issuer.token(**claims)
    if reason is None:
        assert bench.verifier.verify(token.encode()).tenant == "acme"
    else:
        assert bench.reason(token) == reason
        assert bench.metrics.tokens_verified.values == {(f"token_{reason}",): 1}


async def test_a_clock_may_differ_by_the_leeway(bench: Bench) -> None:
    now = time.time()
    given: tuple[dict[str, Any], ...] = ({"exp": now - 5}, {"nbf": now + 5})
    for said in given:
        assert bench.verifier.verify(bench.issuer.token(**said).encode()).tenant == "acme"
    assert bench.reason(bench.issuer.token(exp=now - 12)) == "expired"


def claims() -> dict[str, Any]:
    return {"iss": NAME, "aud": AUDIENCE, "tenant": "acme", "exp": time.time() + 600}


@pytest.mark.parametrize("alg", ["none", "None", "HS256", "RS512", "", "ES256K"])
async def test_only_the_operators_algorithms_are_taken(bench: Bench, alg: str) -> None:
    assert bench.reason(forged({"alg": alg, "kid": "k1"}, claims())) == "algorithm_refused"


async def test_a_public_key_is_no_secret_to_sign_with(bench: Bench) -> None:
    """The confusion of algorithms: HMAC with the published key as its secret."""
    public = bench.issuer.keys["k1"].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for alg in ("HS256", "RS256"):
        unsigned = forged({"alg": alg, "kid": "k1"}, claims()).rpartition(".")[0]
        mac = hmac.new(pem, unsigned.encode(), hashlib.sha256).digest()
        token = f"{unsigned}.{jwt.utils.base64url_encode(mac).decode()}"
        wanted = "algorithm_refused" if alg == "HS256" else "signature_wrong"
        assert bench.reason(token) == wanted


async def test_a_symmetric_key_in_the_jwks_is_not_taken(tmp_path: Path) -> None:
    secret = jwt.utils.base64url_encode(b"s" * 32).decode()
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [{"kty": "oct", "kid": "o", "k": secret}]}))
    keys = KeySet(rules_of(str(file)), Metrics(), lambda: None)
    await keys.start()
    with pytest.raises(KeysAwaited):
        keys.find("o", "RS256")
    await keys.close()


async def test_another_issuers_signature_is_refused(bench: Bench) -> None:
    assert bench.reason(Issuer().token()) == "signature_wrong"
    head, _, rest = bench.issuer.token().partition(".")
    changed = forged({}, {**claims(), "tenant": "rival"}).split(".")[1]
    assert bench.reason(f"{head}.{changed}.{rest.partition('.')[2]}") == "signature_wrong"


@pytest.mark.parametrize(
    "token",
    [
        "eyJ",
        "eyJ.eyJ",
        "eyJhbGciOiJSUzI1NiJ9.e30.x.y.z",
        "eyJhbGciOiJSUzI1NiJ9.!!!.x",
        forged({"alg": 5}, {}),
        forged({"alg": "RS256", "kid": ["k1"]}, {}),
        forged({"alg": "RS256"}, {"iss": 7}),
    ],
)
async def test_what_is_no_jwt_is_refused(bench: Bench, token: str) -> None:
    assert bench.reason(token) == "malformed"


async def test_depth_does_not_exhaust_the_stack(bench: Bench) -> None:
    deep = jwt.utils.base64url_encode(b'{"iss":' + b"[" * 5_000).decode()
    assert bench.reason(f"eyJhbGciOiJSUzI1NiJ9.{deep}.x") == "malformed"


async def test_a_huge_token_is_refused_before_it_is_read(bench: Bench) -> None:
    assert bench.reason("eyJ" + "x" * (MAX_TOKEN_BYTES - 2)) == "too_large"
    assert bench.reason(bench.issuer.token(pad="x" * MAX_TOKEN_BYTES)) == "too_large"


async def test_keys_rotate_and_old_tokens_end_with_their_key(bench: Bench) -> None:
    changes: list[float] = []
    bench.verifier.on_change(lambda: changes.append(bench.clock()))
    old = bench.issuer.token()
    bench.issuer.rotate("k2")
    bench.publish()
    new = bench.issuer.token()
    await bench.reread(new)
    assert bench.verifier.verify(new.encode()).tenant == "acme"
    assert bench.verifier.verify(old.encode()).tenant == "acme"
    assert changes == [1_011.0]
    del bench.issuer.keys["k1"]
    bench.publish()
    await bench.reread(bench.issuer.token(head={"kid": "other"}))
    assert bench.reason(old) == "key_unknown"


async def test_unknown_keys_cause_one_read_an_interval(bench: Bench) -> None:
    assert bench.reads() == 1
    for _ in range(200):
        assert bench.reason(bench.issuer.token(head={"kid": "wrong"})) == "key_unknown"
    bench.clock.advance(tokens.READ_EVERY_S)
    for _ in range(200):
        with pytest.raises(KeysAwaited) as awaited:
            bench.verifier.verify(bench.issuer.token(head={"kid": "wrong"}).encode())
        assert awaited.value.status == 503
    await bench.verifier.keys_read()
    assert bench.reason(bench.issuer.token(head={"kid": "wrong"})) == "key_unknown"
    assert bench.reads() == 2


async def test_a_token_without_a_kid_is_taken_where_one_key_fits(bench: Bench) -> None:
    token = bench.issuer.token(head={"kid": None})
    assert bench.verifier.verify(token.encode()).tenant == "acme"
    bench.issuer.rotate("k2")
    bench.publish()
    await bench.reread(bench.issuer.token())
    assert bench.reason(token) == "key_unknown"


async def test_known_keys_serve_while_the_issuer_is_away_up_to_a_limit(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.file.unlink()
    token = bench.issuer.token().encode()
    bench.clock.advance(3_600)
    assert bench.verifier.verify(token).tenant == "acme"
    assert bench.verifier.ages() == [(NAME, 3_600.0)]
    bench.clock.advance(1)
    with pytest.raises(KeysAwaited, match="cannot be read"):
        bench.verifier.verify(token)
    await bench.verifier.keys_read()
    assert bench.metrics.token_key_reads.values[NAME, "failed"] == 1
    assert "cannot be read" in caplog.text
    bench.publish()
    await bench.reread(token.decode())
    assert bench.verifier.verify(token).tenant == "acme"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": []}', '{"keys": [{}]}', "[" * 9_999])
async def test_a_bad_jwks_leaves_the_known_keys(bench: Bench, content: str) -> None:
    bench.file.write_text(content)
    await bench.reread(bench.issuer.token(head={"kid": "k2"}))
    assert bench.metrics.token_key_reads.values[NAME, "failed"] == 1
    assert bench.verifier.verify(bench.issuer.token().encode()).tenant == "acme"


async def test_an_issuer_may_speak_for_its_tenants_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tenants=frozenset({"acme"}))
    await bench.verifier.start()
    assert bench.verifier.verify(bench.issuer.token().encode()).tenant == "acme"
    assert bench.reason(bench.issuer.token(tenant="rival")) == "tenant_refused"
    await bench.verifier.close()


async def test_each_of_several_issuers_has_its_own_keys(tmp_path: Path) -> None:
    issuers = [Issuer("https://a.example"), Issuer("https://b.example")]
    rules = []
    for number, issuer in enumerate(issuers):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(issuer.jwks()))
        rules.append(rules_of(str(file), issuer=issuer.name))
    verifier = Verifier(rules, Metrics())
    await verifier.start()
    for issuer in issuers:
        assert verifier.verify(issuer.token().encode()).issuer == issuer.name
    with pytest.raises(Unauthorized) as refused:
        verifier.verify(issuers[0].token(iss="https://b.example").encode())
    assert refused.value.reason == "token_signature_wrong"
    await verifier.close()


async def test_requests_wait_a_bounded_time_for_a_slow_issuer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "KEYS_WAIT_S", 0.1)
    monkeypatch.setattr(tokens, "READ_LIMIT_S", 0.3)
    issuer = Issuer()
    issuer.pause_s = 0.6
    with issuer.serving():
        verifier = Verifier([rules_of(issuer.url)], Metrics())
        began_s = time.monotonic()
        await verifier.start()
        assert 0.1 <= time.monotonic() - began_s < 0.3
        await asyncio.gather(*(verifier.keys_read() for _ in range(50)))
        with pytest.raises(KeysAwaited):
            verifier.verify(issuer.token().encode())
        assert issuer.reads == 1
        await verifier.close()


async def test_an_endless_jwks_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_BYTES", 10)
    await bench.reread(bench.issuer.token(head={"kid": "k2"}))
    assert bench.metrics.token_key_reads.values[NAME, "failed"] == 1


# -- claims of a token: tenant, entitlements, role and name, each where the operator says


def identity(claims: dict[str, Any], **rules: Any) -> Any:
    return identity_of(claims, rules_of("keys.json", **rules), 1000.0)


@pytest.mark.parametrize(
    ("claim", "claims", "tenant"),
    [
        ("tenant", {"tenant": "acme"}, "acme"),
        ("a.b.c", {"a": {"b": {"c": "acme"}}}, "acme"),
        ("https://x.example/tenant", {"https://x.example/tenant": "acme"}, "acme"),
        ("a.b", {"a.b": "whole", "a": {"b": "path"}}, "whole"),
        ("groups", {"groups": ["acme"]}, "acme"),
        ("groups", {"groups": ["acme", "other"]}, None),
        ("groups", {"groups": [["acme"]]}, None),
        ("org", {"org": "acme labs"}, "acme labs"),
        ("org", {"org": ["acme labs"]}, "acme labs"),
        ("tenant", {}, None),
        ("tenant", {"tenant": 5}, None),
        ("tenant", {"tenant": ""}, None),
        ("tenant.x", {"tenant": "acme"}, None),
    ],
)
def test_a_tenant_is_named_by_a_claim(claim: str, claims: dict[str, Any], tenant: str) -> None:
    assert identity(claims, tenant_claim=claim).tenant == tenant


def test_entitlements_are_a_list_or_a_text_with_blanks() -> None:
    assert identity({}).entitlements is None
    for said in (["a", 5, "b"], "a b"):
        assert identity({"e": said}, entitlements_claim="e").entitlements == ("a", "b")
    assert identity({}, entitlements_claim="e").entitlements == ()
    many = [str(number) for number in range(1000)]
    assert len(identity({"e": many}, entitlements_claim="e").entitlements) == MAX_VALUES


def test_the_highest_of_several_roles_counts_and_only_a_configured_claim_gives_one() -> None:
    roles = {"staff": "viewer", "oncall": "operator", "boss": "owner"}
    told = {"role_claim": "groups", "roles": roles}
    assert identity({"groups": ["staff", "boss", "oncall"]}, **told).role == "owner"
    assert identity({"groups": "oncall"}, **told).role == "operator"
    assert identity({"groups": ["owner"]}, **told).role is None, "not a configured value"
    assert identity({"groups": ["boss"]}, roles=roles).role is None, "no claim is configured"


def test_the_name_for_the_log_is_short_and_printable() -> None:
    assert identity({"sub": "alice"}).name == "jwt:alice"
    assert identity({"sub": "a\n\x1b[31mé"}).name == "jwt:a??[31m?"
    assert len(identity({"sub": "x" * 5000}).name) == MAX_NAME + len("jwt:")
    assert identity({"sub": 7}).name == identity({}).name == "jwt:"
