"""Claims of a token: tenant, entitlements, role and name, each where the operator says."""

from typing import Any

import msgspec
import pytest

from gateway.records.tenancy import IssuerRules
from gateway.tenancy.verifier import MAX_NAME, MAX_VALUES, identity_of

RULES = IssuerRules(
    issuer="https://id.example",
    jwks="keys.json",
    audience=("sluice",),
    algorithms=("RS256",),
    leeway_s=30.0,
    refresh_s=300.0,
    max_stale_s=3600.0,
    tenant_claim="tenant",
)


def identity(claims: dict[str, Any], **rules: Any) -> Any:
    return identity_of(claims, msgspec.structs.replace(RULES, **rules), 1000.0)


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
