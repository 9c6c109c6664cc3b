"""What clients are told when a limit of their key, entitlement or tenant is reached."""

from typing import Any

from gateway.admission.decision import Denial
from gateway.admission.limit_refusals import limit_refusal, title
from gateway.errors import BadRequest, QuotaExceeded
from gateway.records.limit import Limit


def limit(**changes: Any) -> Limit:
    known = {"id": "x", "scope": "tenant", "name": "acme", "unit": "money", "amount": 10**10}
    return Limit(**{**known, "window": "month", "zone": "Asia/Tokyo", "currency": "EUR", **changes})


def denial(reason: Any, **changes: Any) -> Denial:
    known = {"limit": 10.5e9, "used": 10.25e9, "requested": 3e8, "limit_index": 0}
    return Denial(reason=reason, **{**known, "resets_unix_s": 1_767_193_200.0, **changes})


def test_a_budget_in_money_is_told_in_its_currency_and_zone() -> None:
    found = limit_refusal(denial("budget", wait_s=86_399.1), limit(), 0.5)
    assert isinstance(found, QuotaExceeded)
    assert found.message == (
        "You exceeded the budget of EUR a month of the tenant 'acme': 10.25 EUR of 10.50 EUR are "
        "used, and this request needs 0.30 EUR. resets_at: 2026-01-01T00:00:00+09:00. "
        "GET /v1/sluice/me shows your limits."
    )
    assert (found.type, found.code, found.reason) == (*["insufficient_quota"] * 2, "budget")
    assert (found.should_retry, found.retry_after_s) == (False, 86_400)


def test_a_key_s_limit_names_the_key_and_how_long_to_wait() -> None:
    key = limit(scope="key", name="acme/web", unit="requests", window="minute")
    found = limit_refusal(
        denial("key_requests", limit=60, used=60, requested=1, wait_s=61.2), key, 0.0
    )
    assert found.message == (
        "Rate limit reached for the API key 'web' on requests a minute: limit 60, used 60, "
        "requested 1. Please try again in 62s. GET /v1/sluice/me shows your limits."
    )
    assert (found.type, found.code, found.should_retry) == ("requests", "rate_limit_exceeded", True)
    assert found.retry_after_s == 62
    assert (b"x-ratelimit-limit-requests", b"60") in found.headers
    crowded = denial("key_concurrency", limit=8, used=8, requested=2, wait_s=0.2)
    found = limit_refusal(crowded, limit(scope="key", name="acme/web", unit="sequences"), 0.9)
    assert "the API key 'web' on requests in flight: limit 8, used 8, requested 2" in found.message
    assert found.retry_after_s == 1


def test_what_is_only_reserved_is_no_used_up_budget() -> None:
    found = limit_refusal(
        denial("budget_reserved", limit=900, used=890, requested=20, wait_s=2.0),
        limit(unit="tokens", currency="", window="30d"),
        0.0,
    )
    assert not isinstance(found, QuotaExceeded)
    assert "budget of tokens in 30 days, the rest of which running requests" in found.message
    assert (found.code, found.should_retry) == ("rate_limit_exceeded", True)


def test_a_request_larger_than_a_limit_is_told_what_to_change() -> None:
    key = limit(scope="key", name="acme/web", unit="sequences")
    found = limit_refusal(denial("exceeds_entitlement", limit=64, requested=100), key, 0.0)
    assert isinstance(found, BadRequest)
    assert found.message == (
        "This request needs 100, and the limit of requests in flight of the API key 'web' is 64, "
        "however long you wait. Send fewer prompts or ask for fewer choices, in several requests."
    )
    assert (found.status, found.code, found.should_retry) == (400, "exceeds_entitlement", None)
    found = limit_refusal(denial("exceeds_entitlement", requested=11e9), limit(), 0.0)
    assert "needs 11.00 EUR, and the budget of EUR a month of the tenant 'acme' is 10.50 EUR" in (
        found.message
    )


def test_budgets_are_called_by_their_window() -> None:
    assert title(limit(window="hour", unit="tokens", currency="")) == "budget of tokens an hour"
    assert title(limit(window="day")) == "budget of EUR a day"
