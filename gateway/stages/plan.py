"""Stage 3, plan: estimate -> primary pool, alternates; no work yet.

In observe mode the boundary is computed and reported, and the request goes to the least
loaded pool that can hold it, as it would behind a bare relay.
"""

from gateway.domain import BodyFacts, Endpoint, Incoming, LengthEstimate, Plan, Principal
from gateway.errors import ContextLengthExceeded
from gateway.policy.band import Band, band_of
from gateway.policy.pools import can_serve, plan_pool
from gateway.policy.served import ServedModel

_PARAMS = {"completions": "prompt", "embeddings": "input", "responses": "input"}


def plan(served: ServedModel, endpoint: Endpoint, estimate: LengthEstimate) -> Plan:
    """Where the boundary sends the request.

    Raises ContextLengthExceeded; in observe mode that, too, is only reported.
    """
    try:
        return plan_pool(served.routing, estimate, overflow_param(endpoint))
    except ContextLengthExceeded:
        if not served.observe:
            raise
        return Plan(pool=len(served.routing.pools) - 1, alternates=(), reason="would_refuse")


def band(
    served: ServedModel,
    endpoint: Endpoint,
    principal: Principal,
    incoming: Incoming,
    facts: BodyFacts,
    estimate: LengthEstimate,
    planned: Plan,
) -> Band | str:
    """Whether the request should be compressed, or why not ("" when there is nothing to ask)."""
    if served.compression is None:
        return ""
    found = band_of(served.routing, served.compression, endpoint, facts, estimate, planned)
    if isinstance(found, str):
        return found
    if not incoming.head.compress:
        return "refused_by_client"
    if not principal.compress:
        return "refused_by_entitlement"
    if served.conversations.continues(principal.tenant, incoming.body):
        return "cached_conversation"
    return found


def overflow_param(endpoint: Endpoint) -> str:
    """The body's member that is too long, for the error's `param`."""
    return _PARAMS.get(endpoint.name, "messages")


def applied(served: ServedModel, estimate: LengthEstimate, planned: Plan) -> Plan:
    """The plan that is carried out: the boundary's, or in observe mode a bare relay's."""
    if not served.observe:
        return planned
    shapes = served.routing.pools
    able = [i for i, s in enumerate(shapes) if can_serve(estimate, s.window_tokens)]
    able = able or [len(shapes) - 1]
    pool = min(able, key=lambda i: (served.pools[i].inflight / _slots(served, i), -i))
    return Plan(pool=pool, alternates=tuple(i for i in able if i != pool), reason="observed")


def _slots(served: ServedModel, pool: int) -> int:
    return max(1, len(served.pools[pool].workers) * served.pools[pool].slots_per_worker)
