"""A denial as clients see it: status, type, code, wait, and the limits in force.

Denials over the token rate are 429 with type `tokens`; over concurrency, KV or priority, 429 with
type `requests`. A request that can never fit is a 400, an expired or suspended entitlement a 403,
an entitlement without capacity a 503.

Of the limits of the key, the entitlement or the tenant over all models, requests and sequences are
a 429 worth waiting for. So is a budget of which running requests reserve the rest. One that is used
up is a 429 of type `insufficient_quota`, which official clients do not repeat; clients with loops
of their own read in Retry-After when the budget resets.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Final
from zoneinfo import ZoneInfo

from gateway.admission.terms import Denial, Grant
from gateway.admission.token_pool import MAX_S
from gateway.errors import BadRequest, Forbidden, RateLimited, Refusal, Unavailable
from gateway.records.lease import Limits
from gateway.records.limit import Limit
from gateway.records.usage import in_units

Headers = tuple[tuple[bytes, bytes], ...]
MIN_S: Final = 1.0
JITTER: Final = 0.5
WHERE: Final = "GET /v1/sluice/me shows your limits."
"""Ends what a client reads of a limit of its own."""
_SCOPES: Final = {"key": "API key", "entitlement": "entitlement", "tenant": "tenant"}
_SPREAD_S: Final = 2.0
_IN_FORCE: Final = {
    "entitlement_expired": "has expired",
    "entitlement_suspended": "is suspended",
    "entitlement_unknown": "is not in force",
}
_LIMITED: Final = {
    "tokens": "tokens",
    "concurrency": "requests in flight",
    "kv": "KV cache bytes",
    "priority": "the pool's slots, taken by traffic of at least this priority",
}


def retry_after_s(wait_s: float, jitter: float) -> int:
    """Whole seconds for Retry-After: the wait times 1 to 1.5 (`jitter` in [0, 1]), in [1, 60]."""
    return ceil(min(max(wait_s * (1.0 + JITTER * jitter), MIN_S), MAX_S))


def refusal_of(
    denial: Denial, entitlement: str, jitter: float, limits: Sequence[Limit] = ()
) -> Refusal:
    """The refusal to send; `jitter` in [0, 1] spreads the retries. `limits` were the request's."""
    limit = limits[denial.limit_index] if denial.limit_index >= 0 else None
    figures, reason = "", denial.reason
    if denial.limit:
        amounts = (denial.limit, denial.used, denial.requested)
        most, used, requested = (f"{n:.0f}" if limit is None else shown(limit, n) for n in amounts)
        figures = f"limit {most}, used {used}, requested {requested}"
    wait_s, owner = float(retry_after_s(denial.wait_s, jitter)), f"the entitlement '{entitlement}'"
    refusal: Refusal
    if limit is not None:
        refusal = _of_limit(denial, limit, figures, jitter)
    elif reason in _IN_FORCE:
        refusal = Forbidden(
            f"The entitlement '{entitlement}' {_IN_FORCE[reason]}. Ask whoever runs this gateway.",
            reason=reason,
        )
    elif reason in ("entitlement_pending", "entitlement_degraded"):
        refusal = Unavailable(
            f"There is no capacity for {owner} at the moment.",
            reason=reason,
            retry_after_s=wait_s,
            should_retry=True,
        )
    elif reason == "exceeds_entitlement":
        refusal = BadRequest(
            f"This request needs {denial.requested:.0f} {denial.unit}, and {owner} gets "
            f"{denial.limit:.0f} at most, however long you wait. Send a shorter prompt, ask for "
            "fewer output tokens or fewer choices.",
            reason=reason,
        )
    else:
        headers: Headers = ()
        if reason in ("tokens", "concurrency") and not denial.of_pool:
            kind = b"tokens" if reason == "tokens" else b"requests"
            headers = _reported(denial, kind, span(min(MAX_S, max(0.0, denial.wait_s))))
        refusal = _limited(reason, owner, _LIMITED[reason], figures, wait_s, headers)
    refusal.figures = figures
    return refusal


def _of_limit(denial: Denial, limit: Limit, figures: str, jitter: float) -> Refusal:
    """By a limit of the key, the entitlement or the tenant, over all models."""
    reason, requested = denial.reason, shown(limit, denial.requested)
    most = shown(limit, denial.limit)
    # A key is named without its tenant.
    name = limit.name.rpartition("/")[2] if limit.scope == "key" else limit.name
    owner = f"the {_SCOPES[limit.scope]} '{name}'"
    if reason == "budget":
        return RateLimited(
            f"You exceeded the {title(limit)} of {owner}: "
            f"{shown(limit, denial.used - denial.reserved)} of {most} are used, and this request "
            f"needs {requested}. resets_at: {resets_at(limit, denial.resets_unix_s)}. {WHERE}",
            reason=reason,
            retry_after_s=float(ceil(max(1.0, denial.wait_s))),
            should_retry=False,
        )
    if reason == "exceeds_entitlement":
        what, advice = "limit of requests in flight", "Send fewer prompts or ask for fewer choices"
        if limit.budget:
            what = title(limit)
            advice = "Send a shorter prompt, ask for fewer output tokens or choices"
        return BadRequest(
            f"This request needs {requested}, and the {what} of {owner} is {most}, however "
            f"long you wait. {advice}, in several requests.",
            reason=reason,
        )
    wait_s = float(retry_after_s(denial.wait_s, jitter))
    if reason == "key_requests":
        wait_s = float(ceil(max(1.0, denial.wait_s + jitter * _SPREAD_S)))
    what = {"key_requests": "requests a minute", "key_concurrency": "requests in flight"}.get(
        reason, f"{title(limit)}, the rest of which running requests reserve"
    )
    headers = () if limit.budget else _reported(denial, b"requests", f"{wait_s:.0f}s")
    return _limited(reason, owner, what, figures, wait_s, headers)


def _limited(
    reason: str, owner: str, what: str, figures: str, wait_s: float, headers: Headers
) -> RateLimited:
    return RateLimited(
        f"Rate limit reached for {owner} on {what}: {figures}. "
        f"Please try again in {wait_s:.0f}s. {WHERE}",
        reason=reason,
        retry_after_s=wait_s,
        should_retry=True,
        headers=headers,
    )


def _reported(denial: Denial, kind: bytes, reset: str) -> Headers:
    """The limit that was hit, as x-ratelimit-*."""
    left = max(0, int(denial.limit - denial.used))
    return (
        (b"x-ratelimit-limit-" + kind, b"%d" % int(denial.limit)),
        (b"x-ratelimit-remaining-" + kind, b"%d" % left),
        (b"x-ratelimit-reset-" + kind, reset.encode()),
    )


def title(limit: Limit) -> str:
    """The name of a budget, such as: budget of tokens a month."""
    span = limit.window
    if span.endswith("d"):
        span = f"in {span.removesuffix('d')} days"
    else:
        span = f"{'an' if span == 'hour' else 'a'} {span}"
    return f"budget of {limit.currency or limit.unit} {span}"


def shown(limit: Limit, amount: float) -> str:
    """An amount with its unit, where it has one."""
    if limit.unit == "money":
        return f"{in_units(int(amount))} {limit.currency}".rstrip()
    return f"{int(amount)} tokens" if limit.unit == "tokens" else str(int(amount))


def resets_at(limit: Limit, unix_s: float) -> str:
    """A time in the limit's own zone, in ISO 8601."""
    zone = UTC if limit.zone == "UTC" else ZoneInfo(limit.zone)
    return datetime.fromtimestamp(round(unix_s), zone).isoformat()


def limits_of(grant: Grant) -> Limits:
    """The limits in force after a grant."""
    free = max(0, grant.limit_sequences - grant.inflight_sequences)
    reset_s = 0.0 if free else min(MAX_S, grant.service_s / max(1, grant.inflight_sequences))
    rate = grant.rate_tokens_per_s
    return Limits(
        sequences=grant.limit_sequences,
        sequences_free=free,
        sequences_reset_s=reset_s,
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
    minutes, left = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
