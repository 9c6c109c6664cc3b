"""Limits of the request's key, entitlement and tenant, which count over all models.

They come before all other checks: who is over one is told so, and no other model is asked.
"""

from typing import Final

import msgspec

from gateway.policy.admission.decision import AdmissionRequest, Denial, DenialReason, Unit
from gateway.policy.budgets.limit_book import Over, Wanted, Weighed
from gateway.policy.token_pool.token_pool import TokenPool
from gateway.records.limit import Limit

_UNITS: Final[dict[str, Unit]] = {
    "sequences": "sequences",
    "requests": "requests",
    "tokens": "tokens",
    "money": "money",
}


def wanted(request: AdmissionRequest) -> Wanted:
    """What a request would take of its limits."""
    return Wanted(
        request.sequences,
        request.estimate_tokens,
        request.money,
        request.most_tokens,
        request.most_money,
    )


def weigh(
    token_pool: TokenPool, request: AdmissionRequest, now_s: float
) -> tuple[list[Weighed], Denial | None, AdmissionRequest]:
    """Its limits, the denial by one of them, and the request, which a budget may have demoted."""
    now_s = token_pool.limits.time_s(now_s)
    weighed, over, demoted = token_pool.limits.weigh(request.limits, wanted(request), now_s)
    if demoted:
        request = msgspec.structs.replace(request, demoted=True)
    if over is None:
        return weighed, None, request
    limit = request.limits[over.place]
    service_s = token_pool.pools[request.pool].service_s
    return weighed, _denial(over, limit, service_s, now_s), request


def _denial(over: Over, limit: Limit, service_s: float, now_s: float) -> Denial:
    reason: DenialReason = "key_requests"
    wait_s = over.resets_s - now_s
    if over.never:
        reason, wait_s = "exceeds_entitlement", 0.0
    elif limit.unit == "sequences":
        reason, wait_s = "key_concurrency", service_s / max(1, over.used)
    elif limit.budget:
        # What only reservations use up may be given back: that is worth waiting for.
        waits = over.used - over.reserved + over.requested <= over.amount
        reason = "budget_reserved" if waits else "budget"
        wait_s = service_s / max(1, over.reserved // max(1, over.requested)) if waits else wait_s
    return Denial(
        reason=reason,
        wait_s=wait_s,
        limit=over.amount,
        used=over.used,
        requested=over.requested,
        unit=_UNITS[limit.unit],
        limit_index=over.place,
        reserved=over.reserved,
        resets_unix_s=over.resets_s,
    )
