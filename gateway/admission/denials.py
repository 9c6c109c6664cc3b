"""A denial as clients see it: status, type, code, wait, and the limits in force.

Denials over the token rate are 429 with type `tokens`; over concurrency, KV or priority, 429 with
type `requests`. A request that can never fit is a 400, an expired or suspended entitlement a 403,
an entitlement without capacity a 503.
"""

from collections.abc import Sequence
from math import ceil

from gateway.admission.admission import Denial, Grant
from gateway.admission.limit_refusals import WHERE, figures_of, limit_refusal
from gateway.admission.retry_after import MAX_S, retry_after_s
from gateway.errors import BadRequest, Forbidden, RateLimited, Refusal, TokensLimited, Unavailable
from gateway.records.lease import Limits
from gateway.records.limit import Limit

Headers = tuple[tuple[bytes, bytes], ...]


def refusal_of(
    denial: Denial, entitlement: str, jitter: float, limits: Sequence[Limit] = ()
) -> Refusal:
    """The refusal to send; `jitter` in [0, 1] spreads the retries. `limits` were the request's."""
    limit = limits[denial.limit_index] if denial.limit_index >= 0 else None
    figures = figures_of(denial, limit)
    if limit is None:
        refusal = _refusal_of(denial, entitlement, figures, jitter)
    else:
        refusal = limit_refusal(denial, limit, jitter)
    refusal.figures = figures
    return refusal


def _refusal_of(denial: Denial, entitlement: str, figures: str, jitter: float) -> Refusal:
    reason = denial.reason
    match reason:
        case "entitlement_expired" | "entitlement_suspended" | "entitlement_unknown":
            what = {"expired": "has expired", "suspended": "is suspended"}
            said = what.get(reason.removeprefix("entitlement_"), "is not in force")
            return Forbidden(
                f"The entitlement '{entitlement}' {said}. Ask whoever runs this gateway.",
                reason=reason,
            )
        case "entitlement_pending" | "entitlement_degraded":
            return Unavailable(
                f"There is no capacity for the entitlement '{entitlement}' at the moment.",
                reason=reason,
                retry_after_s=float(retry_after_s(denial.wait_s, jitter)),
                should_retry=True,
            )
        case "exceeds_entitlement":
            return BadRequest(
                f"This request needs {denial.requested:.0f} {denial.unit}, and the entitlement "
                f"'{entitlement}' gets {denial.limit:.0f} at most, however long you wait. Send a "
                "shorter prompt, ask for fewer output tokens or fewer choices.",
                reason=reason,
                code=reason,
            )
    wait_s = float(retry_after_s(denial.wait_s, jitter))
    if reason == "tokens":
        return TokensLimited(
            f"Rate limit reached for the entitlement '{entitlement}' on tokens: {figures}. "
            f"Please try again in {wait_s:.0f}s. {WHERE}",
            reason=reason,
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
            should_retry=True,
            headers=_reported_limits(denial),
        )
    whose = {"concurrency": "requests in flight", "kv": "KV cache bytes"}.get(
        reason, "the pool's slots, taken by traffic of at least this priority"
    )
    return RateLimited(
        f"Rate limit reached for the entitlement '{entitlement}' on {whose}: {figures}. "
        f"Please try again in {wait_s:.0f}s. {WHERE}",
        reason=reason,
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
        should_retry=True,
        headers=_reported_limits(denial),
    )


def _reported_limits(denial: Denial) -> Headers:
    """The entitlement's limit that was hit, as x-ratelimit-*; empty for limits of a pool."""
    if denial.of_pool or denial.reason not in ("tokens", "concurrency"):
        return ()
    kind = b"tokens" if denial.reason == "tokens" else b"requests"
    left = max(0, int(denial.limit - denial.used))
    return (
        (b"x-ratelimit-limit-" + kind, b"%d" % int(denial.limit)),
        (b"x-ratelimit-remaining-" + kind, b"%d" % left),
        (b"x-ratelimit-reset-" + kind, span(min(MAX_S, max(0.0, denial.wait_s))).encode()),
    )


def limits_of(grant: Grant) -> Limits:
    """The limits in force after a grant."""
    free = max(0, grant.limit_sequences - grant.inflight_sequences)
    rate = grant.rate_tokens_per_s
    return Limits(
        sequences=grant.limit_sequences,
        sequences_free=free,
        sequences_reset_s=0.0
        if free
        else min(MAX_S, grant.service_s / max(1, grant.inflight_sequences)),
        tokens=int(grant.depth_tokens),
        tokens_free=max(0, int(grant.level_tokens)),
        tokens_reset_s=max(0.0, grant.depth_tokens - grant.level_tokens) / rate if rate else 0.0,
    )


def limit_lines(limits: Limits) -> str:
    """x-ratelimit-*: requests are sequences in flight; tokens are left out where unlimited."""
    lines = (
        f"x-ratelimit-limit-requests: {limits.sequences}\r\n"
        f"x-ratelimit-remaining-requests: {limits.sequences_free}\r\n"
        f"x-ratelimit-reset-requests: {span(limits.sequences_reset_s)}\r\n"
    )
    if not limits.tokens:
        return lines
    return (
        f"{lines}x-ratelimit-limit-tokens: {limits.tokens}\r\n"
        f"x-ratelimit-remaining-tokens: {limits.tokens_free}\r\n"
        f"x-ratelimit-reset-tokens: {span(limits.tokens_reset_s)}\r\n"
    )


def span(seconds: float) -> str:
    """A duration as OpenAI writes it, rounded up: 12ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1000)}ms"
    whole = ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
