"""Builders of the records and engine answers that tests need; each states only what matters."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import convert
from msgspec.structs import fields

from gateway.admission.terms import AdmissionRequest
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.model_runtime import (
    NO_PREFIX,
    ModelAdmission,
    ModelFleet,
    ModelRuntime,
    Pool,
)
from gateway.payload.body import read_body
from gateway.payload.head import read_head
from gateway.pipeline.plan import Asked
from gateway.pipeline.request_progress import Attempts, RequestLease, Sending
from gateway.ports import LeaseStore
from gateway.records.attempt import HealthRules, WorkerAddress
from gateway.records.decision import DECISION_SCHEMA, DecisionRecord
from gateway.records.endpoint import CHAT, Endpoint
from gateway.records.estimate import LengthEstimate, Observation, Plan
from gateway.records.lease import Lease
from gateway.records.record import Record
from gateway.records.request import (
    OPEN,
    BodyFacts,
    Incoming,
    Measure,
    Principal,
    Prompt,
    TenantKey,
)
from gateway.records.usage import UsageLine
from gateway.routing.routing import PoolShape, ResponseAffinity, Routing
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy.keyring import Keyring

SHORT, LONG = 0, 1
OUT_OF_RANGE = (
    "9999-12-31T23:59:59-14:00",
    "9999-01-01T00:00:00Z",
    "0001-01-01T00:00:00+14:00",
    "0001-01-01",
    "1970-01-01T00:00:00Z",
)
"""Times that no `expires_at` may have."""


def length_estimate(
    input_tokens: int = 200,
    *,
    cap: int | None = None,
    output: int | None = None,
    lowest: int | None = None,
    sequences: int = 1,
) -> LengthEstimate:
    """An estimate of one prompt; `output` is L_out (default: the cap, else 100)."""
    out = output if output is not None else 100 if cap is None else cap
    return LengthEstimate(
        category="prose",
        text_bytes=input_tokens * 4,
        ratio=4.4,
        ratio_conservative=4.0,
        template_tokens=0,
        input_tokens=input_tokens,
        input_tokens_total=input_tokens,
        input_tokens_lowest=input_tokens // 2 if lowest is None else lowest,
        cap_tokens=cap,
        expected_output_tokens=out,
        output_tokens=out,
        fit_tokens=input_tokens + out,
        cost_tokens=input_tokens + out * sequences,
        sequences=sequences,
    )


def measure(text_bytes: int, **more: Any) -> Measure:
    """Of a chat of one message."""
    known = {"longest_text_bytes": text_bytes, "messages": 1, **more}
    return Measure(text_bytes=text_bytes, **known)


def observation(found: Measure, prompt_tokens: Any, **more: Any) -> Observation:
    """Of a served chat of the tenant t."""
    known: dict[str, Any] = {
        "endpoint": "chat",
        "tenant": "t",
        "completion_tokens": 50,
        "sequences": 1,
        "output_censored": False,
        **more,
    }
    return Observation(measure=found, prompt_tokens=prompt_tokens, **known)


def routing(
    *pools: tuple[str, int, int | None],
    default_max_tokens: int | None = None,
    observe: bool = False,
) -> Routing:
    """A routing table of (name, window, boundary)."""
    return Routing(
        pools=tuple(
            PoolShape(name=name, window_tokens=window, boundary_tokens=boundary)
            for name, window, boundary in pools
        ),
        default_max_tokens=default_max_tokens,
        observe=observe,
    )


def short_and_long(*, default_max_tokens: int | None = None, observe: bool = False) -> Routing:
    """The usual fleet: 8,192 tokens and 65,536."""
    return routing(
        ("short", 8192, 8192),
        ("long", 65536, None),
        default_max_tokens=default_max_tokens,
        observe=observe,
    )


def address(
    worker: str = "w0", *, host: str = "127.0.0.1", port: int = 9, **more: Any
) -> WorkerAddress:
    """A worker's address."""
    return WorkerAddress(id=worker, scheme=more.pop("scheme", "http"), host=host, port=port, **more)


def served_model(
    *,
    name: str = "m",
    table: Routing | None = None,
    workers: Sequence[int] = (2, 2),
    slots: int = 8,
    spill_queue: int = 4,
    max_attempts: int = 3,
    eject_after: int = 3,
) -> ModelRuntime:
    """A model whose pools have `workers[i]` workers, named `<pool>-<n>`."""
    table = table or short_and_long()
    ids = [
        [f"{shape.name}-{n}" for n in range(count)]
        for shape, count in zip(table.pools, workers, strict=True)
    ]
    pools = tuple(
        Pool(shape.name, [address(w, host=f"{name}-{w}") for w in known], slots)
        for shape, known in zip(table.pools, ids, strict=True)
    )
    return ModelRuntime(
        name=name,
        routing=table,
        estimator=LengthEstimator(),
        fleet=ModelFleet(
            pools=pools,
            health=HealthRules(eject_after=eject_after),
            response_affinity=ResponseAffinity(),
            max_attempts=max_attempts,
        ),
        admission=ModelAdmission(spill_queue=spill_queue),
    )


def changed(model: ModelRuntime, **values: Any) -> ModelRuntime:
    """The model with other values; a field is changed in the part that has it.

    What pools own is given by pool, and changed there.
    """
    if "prefixes" in values:
        values["indexed"] = True
    pools = values.get("pools", model.fleet.pools)
    for name in ("scheduler", "predictor", "prefixes", "addresses"):
        for pool, value in zip(pools, values.pop(name, ()), strict=False):
            setattr(pool, name, list(value) if name == "addresses" else value)
    own = {name: value for name, value in values.items() if name in _fields(model)}
    for part in ("fleet", "admission", "scheduling"):
        before = getattr(model, part)
        told = {name: value for name, value in values.items() if name in _fields(before)}
        if told:
            own[part] = dataclasses.replace(before, **told)
        values = {name: value for name, value in values.items() if name not in told}
    assert not values.keys() - own.keys()
    return dataclasses.replace(model, **own)


def _fields(record: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def ask(
    lease_id: str = "l1",
    *,
    model: str = "m",
    pool: int = SHORT,
    alternates: tuple[int, ...] = (),
    sequences: int = 1,
    cost_tokens: int = 100,
) -> AdmissionRequest:
    """A question to admission."""
    return AdmissionRequest(
        lease_id=lease_id,
        model=model,
        entitlement="open",
        pool=pool,
        alternates=alternates,
        estimate_tokens=cost_tokens,
        sequences=sequences,
    )


def attempts_of(
    served: ModelRuntime,
    asked: Incoming,
    *,
    facts: BodyFacts | None = None,
    principal: Principal = OPEN,
    estimate: LengthEstimate | None = None,
    plan: Plan | None = None,
    lease: Lease | None = None,
    prompt: Prompt | None = None,
    store: LeaseStore | None = None,
) -> Attempts:
    """A request that holds a lease, on its way to an engine."""
    facts = facts or read_body(asked.endpoint, asked.body)
    estimate = estimate or served.estimator.estimate(asked.endpoint, facts, principal.tenant)
    plan = plan or Plan(pool=SHORT, alternates=(), reason="only_pool")
    lease = lease or Lease(
        id=asked.lease_id,
        model=served.name,
        entitlement=principal.entitlement,
        pool=plan.pool,
        spilled=False,
        cost_tokens=estimate.cost_tokens,
        sequences=1,
    )
    sending = Sending(prompt or Prompt(body=asked.body), estimate, plan, NO_PREFIX)
    held = RequestLease(store or MemoryLeases({}, time.monotonic), time.time, plan, lease)
    return Attempts(Asked(asked, principal, facts, served, estimate), held, sending)


_SECTIONS = {
    field.name: field.type.__struct_fields__
    for field in fields(DecisionRecord)
    if isinstance(field.default, Record)
}


def usage_line(name: str = "l1", **more: object) -> UsageLine:
    """The usage of one request at noon of 2023-11-15."""
    fields = {
        "id": name,
        "time_unix_s": 1_700_049_600.0,
        "tenant": "acme",
        "entitlement": "chat",
        "key": "web",
        "model": "m",
        "endpoint": "chat",
        "input_tokens": 10,
        "cached_input_tokens": 4,
        "output_tokens": 3,
        "charge_tokens": 11,
        "source": "engine",
        "status": "ok",
        "cost_nano": 500,
    }
    return convert({**fields, **more}, UsageLine)


ITEM: Any = {"batch": "batch_1", "custom_id": "1", "index": 0}
"""Of a decision record: a request is this item of a batch."""


def decision(request_id: str = "r1", **more: Any) -> DecisionRecord:
    """A decision record; a field is put into the section that has it."""
    given: dict[str, Any] = {
        "schema": DECISION_SCHEMA,
        "time_unix_s": 1.0,
        "request_id": request_id,
        "endpoint": "chat",
        "outcome": "ok",
        "status": 200,
    }
    for name, value in more.items():
        if name in DecisionRecord.__struct_fields__:
            given[name] = value
        else:
            section = next(key for key, names in _SECTIONS.items() if name in names)
            given.setdefault(section, {})[name] = value
    return convert(given, DecisionRecord)


def chat_body(text: str = "hello", **more: Any) -> bytes:
    """A chat request."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return json.dumps(body).encode()


def incoming(
    body: bytes | None = None,
    *,
    endpoint: Endpoint = CHAT,
    request_id: str = "r1",
    lease_id: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Incoming:
    """A request as the data plane hands it on, received at 100 s."""
    return Incoming(
        request_id=request_id,
        lease_id=lease_id or f"lease of {request_id}",
        endpoint=endpoint,
        head=read_head([(b"content-type", b"application/json"), *headers]),
        body=chat_body() if body is None else body,
        received_s=100.0,
        received_unix_s=1_000.0,
    )


# -- what engines say


def event(data: Any, *, name: str | None = None, end: bytes = b"\n\n") -> bytes:
    """One server-sent event; compact JSON as engines send it."""
    line = end[: len(end) // 2]
    head = b"" if name is None else b"event: " + name.encode() + line
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + end


def chunk(
    content: str = "", *, finish: str | None = None, end: bytes = b"\n\n", **more: Any
) -> bytes:
    """One chunk of a chat stream, as bytes."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return event({"id": "c1", "model": "m", "choices": [choice], **more}, end=end)


def usage_object(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_chunk(
    prompt: int = 10, completion: int = 3, cached: int = 0, *, end: bytes = b"\n\n"
) -> bytes:
    """The extra chunk of include_usage: empty choices."""
    usage = usage_object(prompt, completion, cached)
    return event({"id": "c1", "model": "m", "choices": [], "usage": usage}, end=end)


def answer_body(text: str = "hi", *, prompt: int = 10, completion: int = 3, **more: Any) -> bytes:
    """A whole chat answer."""
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return json.dumps(
        {"id": "c1", "choices": [choice], "usage": usage_object(prompt, completion), **more}
    ).encode()


def error_answer(message: str, *, code: int = 400) -> bytes:
    """A vLLM error body: its code is an int."""
    return json.dumps(
        {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}
    ).encode()


OVERFLOWS = (
    (
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens "
        "(5000 in the messages, 4000 in the completion). Please reduce the length of the messages "
        "or completion."
    ),
    (
        "You passed 8193 input tokens and requested 100 output tokens. However, the model's "
        "context length is only 8192 tokens, resulting in a maximum input length of 8092 tokens."
    ),
    (
        "This model's maximum context length is 8192 tokens. However, you requested 100 output "
        "tokens and your prompt contains 8193 input tokens, for a total of 8293 tokens."
    ),
    (
        "This model's maximum context length is 8192 tokens. However, you requested 100 output "
        "tokens and your prompt contains at least 8193 input tokens, for a total of at least "
        "8293 tokens."
    ),
    (
        "This model's maximum context length is 2048 tokens. However, your prompt contains at "
        "least 2049 input tokens. Please reduce the length of the input prompt."
    ),
    "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
)
"""How engines word a context overflow."""


def keyring_of(
    principals: Mapping[bytes, Principal] | None = None,
    tenant_keys: Sequence[TenantKey] = (),
    **more: Any,
) -> Keyring:
    """A keyring of entitlements' own keys, by SHA-256 digest, and of tenants' keys."""
    made, own = Keyring(**more), principals or {}
    for tenant in dict.fromkeys(key.tenant for key in tenant_keys):
        made.put_tenant(tenant, [key for key in tenant_keys if key.tenant == tenant])
    for principal in {principal.entitlement: principal for principal in own.values()}.values():
        name = principal.entitlement
        made.put(principal, [digest for digest, of in own.items() if of.entitlement == name])
    return made
