"""What clients see of a denial, and of the limits in force."""

import pytest

from gateway.admission.decision import Denial, DenialReason
from gateway.admission.denials import limit_lines, limits_of, refusal_of, span
from gateway.errors import BadRequest, Forbidden, RateLimited, TokensLimited, Unavailable
from gateway.payload.head import pairs_of
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
        ("tokens", TokensLimited, 429, "tokens", "rate_limit_exceeded", 7.0),
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


def test_limits_follow_from_a_grant() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, limit=3), slots=(8,))
    limits = limits_of(granted(token_pool, "a", estimate_tokens=250, sequences=2))
    assert (limits.sequences, limits.sequences_free, limits.sequences_reset_s) == (3, 1, 0)
    assert (limits.tokens, limits.tokens_free, limits.tokens_reset_s) == (1000, 750, 2.5)
    limits = limits_of(granted(token_pool, "b"))
    assert limits.sequences_free == 0
    assert limits.sequences_reset_s == pytest.approx(5 / 3)


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


def test_without_a_token_rate_there_are_no_token_headers() -> None:
    limits = limits_of(granted(pool(entitled()), estimate_tokens=250))
    assert [name for name, _ in pairs_of(limit_lines(limits).encode())] == [
        b"x-ratelimit-limit-requests",
        b"x-ratelimit-remaining-requests",
        b"x-ratelimit-reset-requests",
    ]


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
