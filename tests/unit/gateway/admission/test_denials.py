"""What clients see of a denial, and of the limits in force."""

from typing import Any

import pytest

from gateway.admission.denials import limit_lines, limits_of, refusal_of, span
from gateway.admission.terms import Denial, DenialReason
from gateway.errors import (
    BadRequest,
    Forbidden,
    RateLimited,
    Refusal,
    Unavailable,
)
from gateway.payload.head import pairs_of
from gateway.records.limit import Limit
from tests.token_pools import entitled, granted, pool


@pytest.mark.parametrize(
    ("reason", "kind", "status", "error_type", "code", "retry"),
    [
        ("entitlement_unknown", Forbidden, 403, "permission_denied", None, None),
        ("entitlement_expired", Forbidden, 403, "permission_denied", None, None),
        ("entitlement_suspended", Forbidden, 403, "permission_denied", None, None),
        ("entitlement_pending", Unavailable, 503, "server_error", None, 7.0),
        ("entitlement_degraded", Unavailable, 503, "server_error", None, 7.0),
        ("exceeds_entitlement", BadRequest, 400, "invalid_request_error", None, None),
        ("tokens", RateLimited, 429, "tokens", "rate_limit_exceeded", 7.0),
        ("concurrency", RateLimited, 429, "requests", "rate_limit_exceeded", 7.0),
        ("kv", RateLimited, 429, "requests", "rate_limit_exceeded", 7.0),
        ("priority", RateLimited, 429, "requests", "rate_limit_exceeded", 7.0),
    ],
)
def test_each_reason_has_its_status_and_type(
    reason: DenialReason,
    kind: type,
    status: int,
    error_type: str,
    code: str | None,
    retry: float | None,
) -> None:
    refusal = refusal_of(Denial(reason=reason, wait_s=6.1), "acme", 0.0)
    assert type(refusal) is kind
    assert (refusal.status, refusal.type, refusal.code) == (status, error_type, code or reason)
    assert refusal.reason == reason
    assert refusal.retry_after_s == retry
    assert refusal.should_retry == (True if retry else None)
    assert "acme" in refusal.message
    if reason not in ("tokens", "concurrency"):
        assert refusal.headers == ()


@pytest.mark.parametrize(("reason", "kind"), [("tokens", "tokens"), ("concurrency", "requests")])
def test_a_429_tells_the_limit_it_ran_into(reason: DenialReason, kind: str) -> None:
    denial = Denial(reason=reason, wait_s=2.5, limit=10.0, used=8.0, requested=4.0)
    assert dict(refusal_of(denial, "acme", 0.0).headers) == {
        f"x-ratelimit-limit-{kind}".encode(): b"10",
        f"x-ratelimit-remaining-{kind}".encode(): b"2",
        f"x-ratelimit-reset-{kind}".encode(): b"3s",
    }


def test_a_429_names_limit_use_request_and_wait() -> None:
    denial = Denial(reason="tokens", wait_s=2.0, limit=1000, used=900.4, requested=400)
    assert refusal_of(denial, "acme", 1.0).message == (
        "Rate limit reached for the entitlement 'acme' on tokens: limit 1000, used 900, "
        "requested 400. Please try again in 3s. GET /v1/sluice/me shows your limits."
    )


def test_a_misfit_names_the_unit_and_no_wait() -> None:
    denial = Denial(reason="exceeds_entitlement", limit=10, requested=40, unit="sequences")
    message = refusal_of(denial, "acme", 0.0).message
    assert "needs 40 sequences" in message
    assert "gets 10 at most, however long you wait" in message


@pytest.mark.parametrize(("wait_s", "jitter", "told"), [(0, 0, 1), (1e9, 1, 60), (10, 0.5, 13)])
def test_waits_are_spread_and_bounded(wait_s: float, jitter: float, told: float) -> None:
    refusal = refusal_of(Denial(reason="priority", wait_s=wait_s), "acme", jitter)
    assert refusal.retry_after_s == told


def test_headers_are_those_of_openai() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, limit=3), slots=(8,))
    limits = limits_of(granted(token_pool, estimate_tokens=250))
    assert tuple(pairs_of(limit_lines(limits).encode())) == (
        (b"x-ratelimit-limit-requests", b"3"),
        (b"x-ratelimit-remaining-requests", b"2"),
        (b"x-ratelimit-reset-requests", b"0ms"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"750"),
        (b"x-ratelimit-reset-tokens", b"3s"),
    )


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0ms"),
        (0.0119, "12ms"),
        (1, "1s"),
        (59.1, "1m0s"),
        (360, "6m0s"),
        (3661, "1h1m1s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, written: str) -> None:
    assert span(seconds) == written


# -- limits of keys, entitlements and tenants over all models


def limit(**changes: Any) -> Limit:
    known = {"id": "x", "scope": "tenant", "name": "acme", "unit": "money", "amount": 10**10}
    return Limit(**{**known, "window": "month", "zone": "Asia/Tokyo", "currency": "EUR", **changes})


def of_limit(found: Denial, of: Limit, jitter: float) -> Refusal:
    return refusal_of(found, "acme", jitter, [of])


def denial(reason: Any, **changes: Any) -> Denial:
    known = {"limit": 10.5e9, "used": 10.25e9, "requested": 3e8, "limit_index": 0}
    return Denial(reason=reason, **{**known, "resets_unix_s": 1_767_193_200.0, **changes})


def test_a_budget_in_money_is_told_in_its_currency_and_zone() -> None:
    found = of_limit(denial("budget", wait_s=86_399.1), limit(), 0.5)
    assert found.message == (
        "You exceeded the budget of EUR a month of the tenant 'acme': 10.25 EUR of 10.50 EUR are "
        "used, and this request needs 0.30 EUR. resets_at: 2026-01-01T00:00:00+09:00. "
        "GET /v1/sluice/me shows your limits."
    )
    assert (found.type, found.code, found.reason) == (*["insufficient_quota"] * 2, "budget")
    assert (found.should_retry, found.retry_after_s) == (False, 86_400)


def test_a_key_s_limit_names_the_key_and_how_long_to_wait() -> None:
    key = limit(scope="key", name="acme/web", unit="requests", window="minute")
    found = of_limit(denial("key_requests", limit=60, used=60, requested=1, wait_s=61.2), key, 0.0)
    assert found.message == (
        "Rate limit reached for the API key 'web' on requests a minute: limit 60, used 60, "
        "requested 1. Please try again in 62s. GET /v1/sluice/me shows your limits."
    )
    assert (found.type, found.code, found.should_retry) == ("requests", "rate_limit_exceeded", True)
    assert found.retry_after_s == 62
    assert (b"x-ratelimit-limit-requests", b"60") in found.headers
    crowded = denial("key_concurrency", limit=8, used=8, requested=2, wait_s=0.2)
    found = of_limit(crowded, limit(scope="key", name="acme/web", unit="sequences"), 0.9)
    assert "the API key 'web' on requests in flight: limit 8, used 8, requested 2" in found.message
    assert found.retry_after_s == 1


def test_what_is_only_reserved_is_no_used_up_budget() -> None:
    found = of_limit(
        denial("budget_reserved", limit=900, used=890, requested=20, wait_s=2.0),
        limit(unit="tokens", currency="", window="30d"),
        0.0,
    )
    assert "budget of tokens in 30 days, the rest of which running requests" in found.message
    assert (found.code, found.should_retry) == ("rate_limit_exceeded", True)


def test_a_request_larger_than_a_limit_is_told_what_to_change() -> None:
    key = limit(scope="key", name="acme/web", unit="sequences")
    found = of_limit(denial("exceeds_entitlement", limit=64, requested=100), key, 0.0)
    assert isinstance(found, BadRequest)
    assert found.message == (
        "This request needs 100, and the limit of requests in flight of the API key 'web' is 64, "
        "however long you wait. Send fewer prompts or ask for fewer choices, in several requests."
    )
    assert (found.status, found.code, found.should_retry) == (400, "exceeds_entitlement", None)
    found = of_limit(denial("exceeds_entitlement", requested=11e9), limit(), 0.0)
    assert "needs 11.00 EUR, and the budget of EUR a month of the tenant 'acme' is 10.50 EUR" in (
        found.message
    )
