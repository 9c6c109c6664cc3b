"""Stage 4, admit: one atomic call -> lease. The store decides on spillover in the same call.

A model none of whose entitlements states a limit or a class is not managed: there the store
counts and spills over, and refuses nobody.
"""

from math import ceil

import msgspec

from gateway.admission.terms import AdmissionRequest
from gateway.errors import BadRequest
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import LeaseStore
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import Principal
from gateway.records.usage import cost_nano


async def admit(
    store: LeaseStore,
    served: ModelRuntime,
    principal: Principal,
    lease_id: str,
    estimate: LengthEstimate,
    plan: Plan,
) -> Lease:
    """Take the request's one lease. Raises Refusal.

    Reserved is the careful estimate, and of budgets all that the request may use at most: what was
    learned of a tenant never decides how far a tenant passes a hard limit. What would be refused
    for ever by the estimate alone is asked for once more by the lowest count that is plausible:
    its bucket pays what it turns out to use.
    """
    cost_tokens = estimate.cost_tokens
    window_tokens = served.routing.pools[-1].window_tokens
    if estimate.sequences == 1 and cost_tokens > window_tokens:
        cost_tokens = window_tokens  # no engine can use more for one sequence
    most_tokens = _most_tokens(estimate, window_tokens) if principal.limits else 0
    priced = any(limit.unit == "money" for limit in principal.limits)
    ask = AdmissionRequest(
        lease_id=lease_id,
        model=served.name,
        entitlement=principal.entitlement,
        pool=plan.pool,
        alternates=plan.alternates,
        pools=served.fleet.pools,
        estimate_tokens=cost_tokens,
        sequences=estimate.sequences,
        kv_bytes=cost_tokens * served.admission.kv_bytes_per_token,
        limits=principal.limits,
        money=_cost(served, estimate, cost_tokens) if priced else 0,
        most_tokens=most_tokens,
        most_money=_most_cost(served, estimate, most_tokens) if priced else 0,
    )
    try:
        return await store.admit(ask)
    except BadRequest as refusal:
        lowest = lowest_cost_tokens(estimate)
        if refusal.reason != "exceeds_entitlement" or lowest >= cost_tokens:
            raise
    kv_bytes = lowest * served.admission.kv_bytes_per_token
    money = ask.money and _cost(served, estimate, lowest)
    return await store.admit(
        msgspec.structs.replace(ask, estimate_tokens=lowest, kv_bytes=kv_bytes, money=money)
    )


def _most_tokens(estimate: LengthEstimate, window_tokens: int) -> int:
    """What the request may use at most: its prompts' bytes and its limit, or whole windows."""
    windows = estimate.sequences * window_tokens
    if estimate.most_input_tokens is None or estimate.limit_tokens is None:
        return windows
    return min(windows, estimate.most_input_tokens + estimate.sequences * estimate.limit_tokens)


def _cost(served: ModelRuntime, estimate: LengthEstimate, cost_tokens: int) -> int:
    """What so many tokens are expected to cost, none of them cached.

    Nobody knows what time at workers will cost; but it is not nothing, which always fits.
    """
    if served.price is None:
        return int(served.by_hour and cost_tokens > 0)
    prompt_tokens = min(estimate.input_tokens_total, cost_tokens)
    return cost_nano(served.price, prompt_tokens, cost_tokens - prompt_tokens)


def _most_cost(served: ModelRuntime, estimate: LengthEstimate, most_tokens: int) -> int:
    """What so many tokens cost at most, however many of them are the answer's."""
    if served.price is None:
        return 0
    answer_tokens = most_tokens
    if estimate.limit_tokens is not None:
        answer_tokens = min(most_tokens, estimate.sequences * estimate.limit_tokens)
    return max(
        cost_nano(served.price, most_tokens, 0),
        cost_nano(served.price, most_tokens - answer_tokens, answer_tokens),
    )


def lowest_cost_tokens(estimate: LengthEstimate) -> int:
    """What the request may take at least: its prompts at their lowest plausible count."""
    longest = max(estimate.input_tokens, 1)
    doubt = 1 - min(estimate.input_tokens_lowest / longest, 1.0)
    return ceil(estimate.cost_tokens - estimate.input_tokens_total * doubt)
