"""Stage 9, dispatch: the call that a worker receives, byte for byte the client's but for splices.

What is edited: the model's name where the worker knows another, a defaulted output limit,
`stream_options.include_usage` so that every stream is metered, and fields that steer an
engine, which are removed; the class's own `priority` where the engines have such a field. Of
the headers only those listed in `gateway.policy.head` travel: client keys never do.
"""

import orjson

from gateway.domain import (
    Binding,
    BodyFacts,
    Endpoint,
    Incoming,
    Lease,
    LengthEstimate,
    Principal,
    Prompt,
    WorkerAddress,
)
from gateway.policy.multipart import with_model
from gateway.policy.pools import defaulted_cap
from gateway.policy.served import ServedModel
from gateway.policy.splice import splice, with_usage
from gateway.policy.sse import streams_usage_chunk
from gateway.ports import UpstreamCall

_RANKS = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 3}
_CAP_FIELDS = {"responses": "max_output_tokens"}


def upstream_call(
    served: ServedModel,
    incoming: Incoming,
    facts: BodyFacts,
    estimate: LengthEstimate,
    prompt: Prompt,
    binding: Binding,
    priority: int | None = None,
) -> UpstreamCall:
    """The request that the bound worker receives; `priority` as `engine_priority` gives it."""
    worker = served.workers[binding.pool][binding.worker]
    default_cap = None
    if incoming.endpoint.generates:
        default_cap = defaulted_cap(served.routing, estimate, binding.pool)
    return UpstreamCall(
        method="POST",
        path=incoming.endpoint.path,
        headers=(*incoming.head.forwarded, (b"x-request-id", incoming.request_id.encode())),
        body=_edited(served, worker, incoming.endpoint, facts, default_cap, prompt.body, priority),
        timeouts=served.timeouts,
    )


def injects_usage(served: ServedModel, endpoint: Endpoint, facts: BodyFacts) -> bool:
    """Whether the gateway asks for the usage chunk that the client did not ask for.

    Not in observe mode: there the engines receive what a bare relay would send.
    """
    return (
        facts.stream
        and not facts.include_usage
        and streams_usage_chunk(endpoint)
        and not served.observe
    )


def engine_priority(served: ServedModel, principal: Principal, lease: Lease) -> int | None:
    """The engine's own priority of a request, from its class; None where engines have none.

    vLLM serves lower numbers first, SGLang higher ones. Spilled work ranks as spot.
    """
    if served.engine_priority == "none" or served.observe or lease.limits is None:
        return None
    rank = _RANKS[principal.service_class]
    if lease.spilled:
        rank = max(rank, _RANKS["spot"])
    return rank if served.engine_priority == "vllm" else _RANKS["preemptible"] - rank


def repeatable(facts: BodyFacts) -> bool:
    """Whether sending the request to a second engine is safe: it continues nobody's state."""
    return facts.previous_response_id is None


def _edited(
    served: ServedModel,
    worker: WorkerAddress,
    endpoint: Endpoint,
    facts: BodyFacts,
    default_cap: int | None,
    body: bytes,
    priority: int | None,
) -> bytes:
    name = worker.served_model or served.name
    if endpoint.multipart:
        return body if name == facts.model else with_model(body, name)
    edits = name != facts.model or default_cap is not None or priority is not None
    if edits or facts.steering_fields:
        insert = {}
        if priority is not None:
            insert["priority"] = b"%d" % priority
        if default_cap is not None:
            field = _CAP_FIELDS.get(endpoint.name, "max_tokens")
            insert[field] = b"%d" % default_cap
        body = splice(
            body,
            replace={"model": orjson.dumps(name)} if name != facts.model else {},
            insert=insert,
            remove=facts.steering_fields,
        )
    return with_usage(body, facts) if injects_usage(served, endpoint, facts) else body
