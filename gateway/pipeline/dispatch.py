"""Stage 9, dispatch: the call that a worker receives, byte for byte the client's but for splices.

What is edited: the model's name where the worker knows another (never to the base's where the
client named a LoRA adapter), the adapter's name in SGLang's field, a defaulted output limit,
`stream_options` so that every stream is metered, and fields that steer an engine,
which are removed; the class's own `priority` where the engines have such a field, and the
data-parallel rank where the worker is one (a header, or a field for older SGLang). Of the
headers only those listed in `gateway.payload.head` travel: client keys never do. Each
attempt has an id of its own at the engine. In observe mode the engines receive what a bare relay
would send: only names are rewritten and steering fields removed.
"""

import hashlib
import secrets
from typing import Final

import orjson

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
from gateway.pipeline.request_progress import Attempts
from gateway.ports import UpstreamCall
from gateway.records.attempt import Binding
from gateway.routing.routing import defaulted_cap

_RANKS: Final = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 3}
_JOINED_BYTES: Final = 256 * 1024
"""Of a body that is sent in one piece."""
_CAP_FIELDS: Final = {"responses": "max_output_tokens"}


def upstream_call(
    attempts: Attempts, binding: Binding, *, usage: bool, running: bool
) -> UpstreamCall:
    """The request that the bound worker receives; `usage`, `running`: as `asks_usage` says."""
    served, incoming, facts = attempts.served, attempts.incoming, attempts.facts
    endpoint, body = incoming.endpoint, attempts.sending.prompt.body
    worker = served.fleet.pools[binding.pool].addresses[binding.worker]
    lines = incoming.head.forwarded
    if incoming.trace.trace_id:
        # The attempt's span is the parent of the engine's.
        lines = lines_to_engine(lines, incoming.trace, len(attempts.done) + 1)
    # The engine's log is searched by the part of the id that is the lease's. Engines that refuse
    # an id in use, or abort by id, would let whoever knows another's id in advance end its
    # requests. So it is never the client's, and nobody can predict it.
    engine_id = f"{incoming.lease_id}-{secrets.token_hex(8)}".encode()
    lines = b"%bx-request-id: %b\r\n" % (lines, engine_id)
    if not served.routing.observe and served.routing.pools[binding.pool].tells_flow:
        lines += _flow_lines(attempts)
    if worker.rank is not None and (worker.rank_by != "body" or endpoint.multipart):
        lines += b"x-data-parallel-rank: %d\r\n" % worker.rank
    name = facts.adapter or worker.served_model or served.name
    if endpoint.multipart:
        # A form is written anew, and so is the header that says how to read it.
        boundary = secrets.token_hex(16).encode()
        kept = [pair for pair in pairs_of(lines) if pair[0] != b"content-type"]
        kept.append((b"content-type", b"multipart/form-data; boundary=" + boundary))
        form = written(body, facts.parts, name, boundary)
        return _call(attempts, lines_of(kept), form)
    replace: dict[str, bytes] = {}
    insert: dict[str, bytes] = {}
    if name != facts.model:
        replace["model"] = orjson.dumps(name)
    if facts.adapter:
        # SGLang takes no adapter's name as the model, and would have the base answer.
        insert[ADAPTER_FIELD] = orjson.dumps(facts.adapter)
    if worker.rank is not None and worker.rank_by == "body":
        insert["data_parallel_rank"] = b"%d" % worker.rank
    if not served.routing.observe:
        _add(attempts, binding, replace, insert)
    if usage or running:
        options = with_usage(facts.members.get("stream_options"), running=running)
        (replace if facts.has_stream_options else insert)["stream_options"] = options
    # A compressed body is another one. What is inserted steers: a client's own is removed.
    places = facts.places if body is incoming.body else ()
    edited = edits(
        body, replace=replace, insert=insert, remove=facts.steering_fields, places=places
    )
    return _call(attempts, lines, [body] if edited is None else edited)


def _add(
    attempts: Attempts, binding: Binding, replace: dict[str, bytes], insert: dict[str, bytes]
) -> None:
    """What the gateway itself wants of the engine: an output limit, a priority, a cache's salt."""
    served, facts, lease = attempts.served, attempts.facts, attempts.lease.current
    endpoint, scheduling = attempts.incoming.endpoint, served.scheduling
    cap = None
    if endpoint.generates:
        cap = defaulted_cap(served.routing, attempts.sending.estimate, binding.pool)
    if cap is not None:
        field = _CAP_FIELDS.get(endpoint.name, "max_tokens")
        # The client's own may be there, and null: of two the engine would take the last.
        (replace if field in facts.members else insert)[field] = b"%d" % cap
    # vLLM serves lower numbers first, SGLang higher ones. Spilled work ranks as spot. What only
    # counts tokens is not scheduled, and engines need not know the field there.
    kind = scheduling.engine_priority
    if kind != "none" and lease.limits is not None and endpoint.computes:
        rank = _RANKS[attempts.principal.service_class]
        if lease.spilled:
            rank = max(rank, _RANKS["spot"])
        insert["priority"] = b"%d" % (rank if kind == "vllm" else _RANKS["preemptible"] - rank)
    if scheduling.salted and endpoint.generates:  # keeps a tenant's prefix cache apart
        salt = hashlib.sha256(b"sluice:" + attempts.principal.tenant.encode()).hexdigest()
        insert["cache_salt"] = b'"%b"' % salt[:32].encode()


def asks_usage(attempts: Attempts, binding: Binding) -> tuple[bool, bool]:
    """Whether the gateway asks for a usage chunk unasked, and for usage in every chunk.

    The latter, so that a stream that is cut counts right; only where limits apply, of engines that
    are known to have the option, and of one choice: they count each choice by itself.
    """
    served, facts, lease = attempts.served, attempts.facts, attempts.lease.current
    if (
        not facts.stream
        or served.routing.observe
        or not stream_shape(attempts.incoming.endpoint).in_chunks
    ):
        return False, False
    running = False
    if lease.limits is not None and lease.sequences == 1:
        options = facts.members.get("stream_options")
        view = served.fleet.pools[binding.pool].view
        running = view.samples[binding.worker].engine == "vllm" and (
            options is None or RUNNING_USAGE.encode() not in bytes(options)
        )
    return not facts.include_usage, running


def _flow_lines(attempts: Attempts) -> bytes:
    """Header lines that tell an inference gateway before the engines whose a request is.

    Its flow control shares by tenant and ranks by class. The names are the llm-d router's, and
    those of the Gateway API Inference Extension before it. A client's own are never forwarded.
    """
    tenant = attempts.principal.tenant.encode()
    objective = attempts.principal.service_class.encode()
    return b"".join(
        b"x-%b-inference-fairness-id: %b\r\nx-%b-inference-objective: %b\r\n"
        % (who, tenant, who, objective)
        for who in (b"llm-d", b"gateway")
    )


def _call(attempts: Attempts, lines: bytes, pieces: Pieces) -> UpstreamCall:
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
        path=attempts.incoming.endpoint.path,
        lines=lines,
        body=body,
        rest=tuple(pieces) if large else (),
        timeouts=attempts.served.fleet.timeouts,
    )
