"""Stage 4, admit: one atomic call -> lease. The store decides on spillover in the same call.

A model none of whose entitlements states a limit or a class is not managed: there the store
counts and spills over, and refuses nobody.
"""

from gateway.domain import Ask, Lease, LengthEstimate, Plan, Principal
from gateway.policy.served import ServedModel
from gateway.ports import LeaseStore


async def admit(
    store: LeaseStore,
    served: ServedModel,
    principal: Principal,
    lease_id: str,
    estimate: LengthEstimate,
    plan: Plan,
) -> Lease:
    """Take the request's one lease. Raises Refusal."""
    return await store.admit(
        Ask(
            lease_id=lease_id,
            model=served.name,
            entitlement=principal.entitlement,
            pool=plan.pool,
            alternates=plan.alternates,
            cost_tokens=estimate.cost_tokens,
            sequences=estimate.sequences,
            kv_bytes=estimate.cost_tokens * served.kv_bytes_per_token,
        )
    )
