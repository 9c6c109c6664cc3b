"""Stage 3, plan: estimate -> primary pool, alternates; no work yet.

In observe mode the boundary is computed and reported, and the request goes to the least
loaded pool that can hold it, as it would behind a bare relay.
"""

from gateway.errors import ContextLengthExceeded
from gateway.fleet.model_runtime import ModelRuntime, ModelScheduling
from gateway.payload.members import Members
from gateway.records.endpoint import Endpoint
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts, Incoming, Principal
from gateway.routing.compression_gate import has_room, promised, requested
from gateway.routing.pool_affinity import mostly_new, stay
from gateway.routing.routing import can_serve, compression_window_of, plan_pool
from gateway.routing.routing_table import CompressionWindow
from gateway.scheduling.prefix_digests import points_of
from gateway.scheduling.scheduler import NO_PREFIX, Prefix

_PARAMS = {"completions": "prompt", "embeddings": "input", "responses": "input"}


def look_up(
    scheduling: ModelScheduling,
    endpoint: Endpoint,
    principal: Principal,
    facts: BodyFacts,
    members: Members,
    tokens: int,
    adapter: str = "",
) -> Prefix:
    """The beginnings of a body of so many tokens, by its members, and where to ask for them.

    Nothing where no index of prefixes is kept.
    """
    if not scheduling.prefixes or not endpoint.generates:
        return NO_PREFIX
    points = points_of(
        endpoint.name,
        members,
        facts.measure.text_bytes,
        principal.tenant,
        adapter,
        salted=scheduling.salted,
    )
    if not points:
        return NO_PREFIX
    tokens_per_byte = tokens / points[-1][0]
    return Prefix(points, scheduling.prefixes, tokens_per_byte, scheduling.follows_prefixes)


def plan(
    served: ModelRuntime, endpoint: Endpoint, estimate: LengthEstimate, prefix: Prefix = NO_PREFIX
) -> Plan:
    """Where the boundary sends the request, or where its conversation is held already.

    Raises ContextLengthExceeded; in observe mode that, too, is only reported.
    """
    try:
        planned = plan_pool(served.routing, estimate, overflow_param(endpoint))
    except ContextLengthExceeded:
        if not served.routing.observe:
            raise
        return Plan(pool=len(served.routing.pools) - 1, alternates=(), reason="would_refuse")
    if not prefix.points or not planned.pool:
        return planned
    held = stay(planned.pool, served.routing, estimate, prefix.hits())
    if held is None:
        return planned
    return Plan(pool=held, alternates=(planned.pool, *planned.alternates), reason="prefix_held")


def compression_window(
    served: ModelRuntime,
    endpoint: Endpoint,
    principal: Principal,
    incoming: Incoming,
    facts: BodyFacts,
    estimate: LengthEstimate,
    planned: Plan,
    prefix: Prefix = NO_PREFIX,
) -> CompressionWindow | str:
    """Whether the request should be compressed, or why not ("" when there is nothing to ask)."""
    compression = served.compression
    if compression is None:
        return ""
    found = compression_window_of(
        served.routing, compression.rules, endpoint, facts, estimate, planned
    )
    if isinstance(found, str):
        return found
    rules, header = compression.rules, incoming.head.compress
    if not requested(rules, header=header):
        return "not_requested" if header is None else "refused_by_client"
    if not principal.compress:
        return "refused_by_entitlement"
    if promise := promised(facts.members):
        return promise
    if facts.previous_response_id is not None:
        return "cached_conversation"
    if rules.only_when_busy and _has_room(served, planned.pool, incoming.received_s):
        return "not_busy"
    tenant = principal.tenant
    points = prefix.points or points_of(
        endpoint.name,
        facts.members,
        facts.measure.text_bytes,
        tenant,
        facts.adapter,
        salted=served.scheduling.salted,
    )
    if compression.conversations.continues(tenant, points):
        return "cached_conversation"
    if not mostly_new(estimate.input_tokens, prefix.hits()):
        return "cached_prefix"
    return found


def _has_room(served: ModelRuntime, pool: int, now_s: float) -> bool:
    views = served.fleet.telemetry
    return has_room(served.fleet.pools[pool], views[pool] if views else None, now_s)


def overflow_param(endpoint: Endpoint) -> str:
    """The body's member that is too long, for the error's `param`."""
    return _PARAMS.get(endpoint.name, "messages")


def applied(served: ModelRuntime, estimate: LengthEstimate, planned: Plan) -> Plan:
    """The plan that is carried out: the boundary's, or in observe mode a bare relay's."""
    if not served.routing.observe:
        return planned
    shapes = served.routing.pools
    able = [i for i, s in enumerate(shapes) if can_serve(estimate, s.window_tokens)]
    able = able or [len(shapes) - 1]
    pool = min(able, key=lambda i: (served.fleet.pools[i].inflight / _slots(served, i), -i))
    return Plan(pool=pool, alternates=tuple(i for i in able if i != pool), reason="observed")


def _slots(served: ModelRuntime, pool: int) -> int:
    state = served.fleet.pools[pool]
    return max(1, sum(state.present) * state.slots_per_worker)
