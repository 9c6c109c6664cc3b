"""A denial by a limit of the key, the entitlement or the tenant, as clients see it.

A request larger than a whole limit is a 400. A limit of requests or sequences is a 429 worth
waiting for. So is a budget of which running requests reserve the rest; one that is used up is a 429
of type `insufficient_quota`, which official clients do not repeat; clients with loops of their own
read in Retry-After when the budget resets.
"""

from datetime import UTC, datetime
from math import ceil
from typing import Final
from zoneinfo import ZoneInfo

from gateway.admission.decision import Denial
from gateway.admission.retry_after import retry_after_s
from gateway.errors import BadRequest, QuotaExceeded, RateLimited, Refusal
from gateway.records.limit import Limit
from gateway.records.usage import in_units

_SCOPES: Final = {"key": "API key", "entitlement": "entitlement", "tenant": "tenant"}
_SPREAD_S: Final = 2.0
WHERE: Final = "GET /v1/sluice/me shows your limits."
"""Ends what a client reads of a limit of its own."""


def figures_of(denial: Denial, limit: Limit | None) -> str:
    """What a denial is about in figures, for the client and the decision record alike."""
    if not denial.limit:
        return ""
    amounts = (denial.limit, denial.used, denial.requested)
    most, used, requested = (f"{n:.0f}" if limit is None else shown(limit, n) for n in amounts)
    return f"limit {most}, used {used}, requested {requested}"


def limit_refusal(denial: Denial, limit: Limit, jitter: float) -> Refusal:
    """The refusal to send; `jitter` in [0, 1] spreads the retries."""
    if denial.reason == "budget":
        resets = resets_at(limit, denial.resets_unix_s)
        spent = shown(limit, denial.used - denial.reserved)
        return QuotaExceeded(
            f"You exceeded the {title(limit)} of {owner(limit)}: {spent} of "
            f"{shown(limit, denial.limit)} are used, and this request needs "
            f"{shown(limit, denial.requested)}. resets_at: {resets}. {WHERE}",
            reason="budget",
            code="insufficient_quota",
            retry_after_s=float(ceil(max(1.0, denial.wait_s))),
            should_retry=False,
        )
    if denial.reason == "exceeds_entitlement":
        return _too_large(denial, limit)
    wait_s = float(retry_after_s(denial.wait_s, jitter))
    if denial.reason == "key_requests":
        wait_s = float(ceil(max(1.0, denial.wait_s + jitter * _SPREAD_S)))
    what = {"key_requests": "requests a minute", "key_concurrency": "requests in flight"}.get(
        denial.reason, f"{title(limit)}, the rest of which running requests reserve"
    )
    return RateLimited(
        f"Rate limit reached for {owner(limit)} on {what}: {figures_of(denial, limit)}. "
        f"Please try again in {wait_s:.0f}s. {WHERE}",
        reason=denial.reason,
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
        should_retry=True,
        headers=() if limit.budget else _reported(denial, wait_s),
    )


def _too_large(denial: Denial, limit: Limit) -> BadRequest:
    what, advice = title(limit), "Send a shorter prompt, ask for fewer output tokens or choices"
    if not limit.budget:
        what, advice = "limit of requests in flight", "Send fewer prompts or ask for fewer choices"
    return BadRequest(
        f"This request needs {shown(limit, denial.requested)}, and the {what} of {owner(limit)} is "
        f"{shown(limit, denial.limit)}, however long you wait. {advice}, in several requests.",
        reason="exceeds_entitlement",
        code="exceeds_entitlement",
    )


def owner(limit: Limit) -> str:
    """The owner of a limit, for people; a key is named without its tenant."""
    name = limit.name.rpartition("/")[2] if limit.scope == "key" else limit.name
    return f"the {_SCOPES[limit.scope]} '{name}'"


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


def _reported(denial: Denial, wait_s: float) -> tuple[tuple[bytes, bytes], ...]:
    left = max(0, int(denial.limit - denial.used))
    return (
        (b"x-ratelimit-limit-requests", b"%d" % int(denial.limit)),
        (b"x-ratelimit-remaining-requests", b"%d" % left),
        (b"x-ratelimit-reset-requests", b"%ds" % int(wait_s)),
    )
