"""Stage 9, dispatch: the call that a worker receives, byte for byte the client's but for splices.

What is edited: the model's name where the worker knows another (never to the base's where the
client named a LoRA adapter), the adapter's name in SGLang's field, a defaulted output limit,
`stream_options` so that every stream is metered, and fields that steer an engine,
which are removed; the class's own `priority` where the engines have such a field, and the
data-parallel rank where the worker is one (a header, or a field for older SGLang). Of the
headers only those listed in `gateway.payload.head` travel: client keys never do. Each
attempt has an id of its own at the engine.
"""

import hashlib
import secrets

import orjson

from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.dialects import stream_shape
from gateway.payload.head import lines_of, lines_to_engine, pairs_of
from gateway.payload.members import (
    ADAPTER_FIELD,
    RUNNING_USAGE,
    Pieces,
    edits,
    with_usage,
)
from gateway.payload.multipart import written
from gateway.ports import UpstreamCall
from gateway.records.attempt import Binding, WorkerAddress
from gateway.records.endpoint import Endpoint
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt
from gateway.routing.routing import defaulted_cap

_RANKS = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 3}
_JOINED_BYTES = 256 * 1024
"""Of a body that is sent in one piece."""
_CAP_FIELDS = {"responses": "max_output_tokens"}


def upstream_call(
    *,
    served: ModelRuntime,
    incoming: Incoming,
    facts: BodyFacts,
    principal: Principal,
    estimate: LengthEstimate,
    lease: Lease,
    prompt: Prompt,
    binding: Binding,
    attempt: int = 1,
) -> UpstreamCall:
    """The request that the bound worker receives.

    `attempt` counts from 1; its span is the parent of the engine's.
    """
    worker = served.fleet.workers[binding.pool][binding.worker]
    default_cap = None
    if incoming.endpoint.generates:
        default_cap = defaulted_cap(served.routing, estimate, binding.pool)
    lines = incoming.head.forwarded
    if incoming.trace.trace_id:
        lines = lines_to_engine(lines, incoming.trace, attempt)
    flow = _flow_lines(served, principal, binding)
    lines = b"%bx-request-id: %b\r\n%b" % (lines, _engine_id(incoming), flow)
    if incoming.endpoint.multipart:
        return _form_call(served, worker, incoming, facts, prompt, lines)
    if worker.rank is not None and worker.rank_by != "body":
        lines += b"x-data-parallel-rank: %d\r\n" % worker.rank
    options = None
    running = asks_running_usage(served, incoming.endpoint, facts, lease, binding)
    if running or injects_usage(served, incoming.endpoint, facts):
        options = with_usage(facts.members.get("stream_options"), running=running)
    priority = _engine_priority(served, principal, lease, incoming.endpoint)
    salt = _cache_salt(served, principal, incoming.endpoint)
    edited = _edits(
        served, worker, incoming, facts, default_cap, prompt.body, priority, salt, options
    )
    return _call(served, incoming, lines, [prompt.body] if edited is None else edited)


def _engine_id(incoming: Incoming) -> bytes:
    """The id of one attempt at its engine; its log is searched by the part that is the lease's.

    Engines that refuse an id in use, or abort by id, would let whoever knows another's id in
    advance end its requests. So it is never the client's, and nobody can predict it.
    """
    return f"{incoming.lease_id}-{secrets.token_hex(8)}".encode()


def injects_usage(served: ModelRuntime, endpoint: Endpoint, facts: BodyFacts) -> bool:
    """Whether the gateway asks for the usage chunk that the client did not ask for.

    Not in observe mode: there the engines receive what a bare relay would send.
    """
    return (
        facts.stream
        and not facts.include_usage
        and stream_shape(endpoint).in_chunks
        and not served.routing.observe
    )


def asks_running_usage(
    served: ModelRuntime, endpoint: Endpoint, facts: BodyFacts, lease: Lease, binding: Binding
) -> bool:
    """Whether the gateway asks for usage in every chunk, so that a stream that is cut counts right.

    Only where limits apply, of engines that are known to have the option, and of one choice: they
    count each choice by itself.
    """
    telemetry = served.fleet.telemetry
    if (
        not facts.stream
        or lease.limits is None
        or not telemetry
        or lease.sequences > 1
        or not stream_shape(endpoint).in_chunks
        or served.routing.observe
        or telemetry[binding.pool].samples[binding.worker].engine != "vllm"
    ):
        return False
    options = facts.members.get("stream_options")
    return options is None or RUNNING_USAGE.encode() not in bytes(options)


def _engine_priority(
    served: ModelRuntime, principal: Principal, lease: Lease, endpoint: Endpoint
) -> int | None:
    """The engine's own priority of a request, from its class; None where engines have none.

    vLLM serves lower numbers first, SGLang higher ones. Spilled work ranks as spot. What only
    counts tokens is not scheduled, and engines need not know the field there.
    """
    if (
        served.scheduling.engine_priority == "none"
        or served.routing.observe
        or lease.limits is None
        or not endpoint.computes
    ):
        return None
    rank = _RANKS[principal.service_class]
    if lease.spilled:
        rank = max(rank, _RANKS["spot"])
    return rank if served.scheduling.engine_priority == "vllm" else _RANKS["preemptible"] - rank


def _cache_salt(served: ModelRuntime, principal: Principal, endpoint: Endpoint) -> str | None:
    """What keeps a tenant's prefix cache apart from others'; None where they share one."""
    if not served.scheduling.salted or served.routing.observe or not endpoint.generates:
        return None
    return hashlib.sha256(b"sluice:" + principal.tenant.encode()).hexdigest()[:32]


def _flow_lines(served: ModelRuntime, principal: Principal, binding: Binding) -> bytes:
    """Header lines that tell an inference gateway before the engines whose a request is.

    Its flow control shares by tenant and ranks by class. The names are the llm-d router's, and
    those of the Gateway API Inference Extension before it. A client's own are never forwarded.
    """
    if not served.routing.pools[binding.pool].tells_flow or served.routing.observe:
        return b""
    tenant, objective = principal.tenant.encode(), principal.service_class.encode()
    return b"".join(
        b"x-%b-inference-fairness-id: %b\r\nx-%b-inference-objective: %b\r\n"
        % (who, tenant, who, objective)
        for who in (b"llm-d", b"gateway")
    )


def repeatable(facts: BodyFacts) -> bool:
    """Whether sending the request to a second engine is safe: it continues nobody's state."""
    return facts.previous_response_id is None


def _form_call(
    served: ModelRuntime,
    worker: WorkerAddress,
    incoming: Incoming,
    facts: BodyFacts,
    prompt: Prompt,
    lines: bytes,
) -> UpstreamCall:
    """A form is written anew, and so is the header that says how to read it."""
    boundary = secrets.token_hex(16).encode()
    kept = [pair for pair in pairs_of(lines) if pair[0] != b"content-type"]
    kept.append((b"content-type", b"multipart/form-data; boundary=" + boundary))
    if worker.rank is not None:
        kept.append((b"x-data-parallel-rank", b"%d" % worker.rank))
    name = facts.adapter or worker.served_model or served.name
    form = written(prompt.body, facts.parts, name, boundary)
    return _call(served, incoming, lines_of(kept), form)


def _call(served: ModelRuntime, incoming: Incoming, lines: bytes, pieces: Pieces) -> UpstreamCall:
    """The call with a body in pieces, which are joined unless they are large."""
    large = sum(map(len, pieces)) > _JOINED_BYTES
    if large:
        body = b""
    elif len(pieces) == 1:
        body = bytes(pieces[0])
    else:
        body = b"".join(pieces)
    return UpstreamCall(
        method="POST",
        path=incoming.endpoint.path,
        lines=lines,
        body=body,
        rest=tuple(pieces) if large else (),
        timeouts=served.fleet.timeouts,
    )


def _edits(
    served: ModelRuntime,
    worker: WorkerAddress,
    incoming: Incoming,
    facts: BodyFacts,
    default_cap: int | None,
    body: bytes,
    priority: int | None,
    salt: str | None,
    stream_options: bytes | None,
) -> Pieces | None:
    name = facts.adapter or worker.served_model or served.name
    replace: dict[str, bytes] = {}
    insert: dict[str, bytes] = {}
    if name != facts.model:
        replace["model"] = orjson.dumps(name)
    if default_cap is not None:
        field = _CAP_FIELDS.get(incoming.endpoint.name, "max_tokens")
        # The client's own may be there, and null: of two the engine would take the last.
        (replace if field in facts.members else insert)[field] = b"%d" % default_cap
    if stream_options is not None:
        (replace if facts.has_stream_options else insert)["stream_options"] = stream_options
    if facts.adapter:
        # SGLang takes no adapter's name as the model, and would have the base answer.
        insert[ADAPTER_FIELD] = orjson.dumps(facts.adapter)
    if worker.rank is not None and worker.rank_by == "body":
        insert["data_parallel_rank"] = b"%d" % worker.rank
    if priority is not None:
        insert["priority"] = b"%d" % priority
    if salt is not None:
        insert["cache_salt"] = b'"%b"' % salt.encode()
    # A compressed body is another one.
    places = facts.places if body is incoming.body else ()
    # What is inserted steers: a client's own is removed.
    return edits(body, replace=replace, insert=insert, remove=facts.steering_fields, places=places)
