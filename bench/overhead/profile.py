"""`bench overhead --profile`: cost of each stage, called hot in this process.

Figures are the best of several repetitions of the shipped functions on a 2 KB chat body. They
leave out sockets, the event loop and cold caches, which the rest of `bench overhead` includes.
"""

import asyncio
import timeit
from collections.abc import Callable
from hashlib import sha256

from bench.common.report import Row
from bench.overhead.scheduling import scheduling_rows
from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.metrics import Metrics
from gateway.payload.head import read_head
from gateway.payload.sse import StreamMeter
from gateway.pipeline import (
    admit,
    authenticate,
    bind,
    decision_record,
    dispatch,
    estimate,
    plan,
    settle,
)
from gateway.pipeline.request_progress import response_lines
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import Entitlement
from gateway.records.request import OPEN, Incoming, Prompt, RequestHead
from gateway.settings import parse
from gateway.store.memory_leases import MemoryLeases
from gateway.wiring.models import served_model

_TIMES = 2000
_KEY = b"sk-profile"
_CONFIG = f"""version: 1
models:
  - name: m
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 128, workers: ["http://a:1", "http://b:1"]}}
      long: {{max_model_len: 65536, max_num_seqs: 16, workers: ["http://c:1"]}}
entitlements:
  - {{name: e, tenant: t, model: m, api_keys: ["sha256:{sha256(_KEY).hexdigest()}"]}}
"""
_CHUNK = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def profile_rows(body: bytes) -> list[Row]:
    """CPU-us of each stage for one request with this body."""
    config = parse(_CONFIG, "profile.yaml", {})
    served = served_model(config, config.models[0])
    keyring = authenticate.Keyring({sha256(_KEY).digest(): OPEN})
    headers = [
        (b"host", b"localhost"),
        (b"authorization", b"Bearer " + _KEY),
        (b"content-type", b"application/json"),
        (b"content-length", b"2000"),
        (b"user-agent", b"profile"),
    ]
    head = read_head(headers)
    principal = authenticate.authenticate(keyring, head.key_digest, 0.0)
    facts = estimate.read(CHAT, body, RequestHead())
    lengths = estimate.estimate(served, CHAT, facts, principal)
    planned = plan.plan(served, CHAT, lengths)
    store = MemoryLeases({"m": served}, lambda: 0.0)
    lease = asyncio.run(admit.admit(store, served, principal, "id", lengths, planned))
    binding: Binding = bind.bind(served, (0,), (), 0.0)
    prompt = Prompt(body=body)
    incoming = Incoming(
        request_id="r", lease_id="r", endpoint=CHAT, head=head, body=body,
        received_s=0.0, received_unix_s=0.0,
    )  # fmt: skip
    usage = Usage(prompt_tokens=400, completion_tokens=64)
    outcome = Outcome(
        label="ok", status=200, usage=usage, finish_reason="stop", completed=True, ttft_s=0.1
    )
    meter = StreamMeter(CHAT, strip_usage=True)
    metrics = Metrics()

    def record() -> DecisionRecord:
        return decision_record.decision_record(
            incoming=incoming,
            principal=principal,
            facts=facts,
            served=served,
            outcome=outcome,
            told=None,
            binding=binding,
            rescued=False,
            estimate=decision_record.estimate_section(lengths),
            plan=decision_record.plan_section(served=served, planned=planned, plan=planned),
            admission=decision_record.admission_section(
                lease_id="r",
                lease=lease,
                asked=planned,
                taken=lease,
                principal=principal,
                served=served,
                charged=usage,
                lease_changes=(),
                evicted=False,
                settled_unix_s=1.0,
            ),
            compression=decision_record.compression_section(served, prompt),
            scheduling=decision_record.scheduling_section(
                served=served, binding=binding, job=None, first_s=None
            ),
            attempts=(),
            usage=decision_record.usage_section(usage),
            timing=decision_record.timing_section(
                outcome=outcome,
                received_s=0.0,
                sent_s=0.0,
                ended_s=1.0,
                queue_s=0.0,
                compress_s=None,
            ),
            prompts=False,
        )

    found = record()

    async def lease_and_release(leases: MemoryLeases, times: int) -> None:
        for _ in range(times):
            taken = await admit.admit(leases, served, principal, "x", lengths, planned)
            settle.settle(leases, taken, outcome, lengths, served, dispatched=True)

    parts: list[tuple[str, Callable[[], object]]] = [
        ("head", lambda: read_head(headers)),
        ("1 authenticate", lambda: authenticate.authenticate(keyring, head.key_digest, 0.0)),
        ("2 read body", lambda: estimate.read(CHAT, body, RequestHead())),
        ("2 estimate", lambda: estimate.estimate(served, CHAT, facts, principal)),
        ("3 plan", lambda: plan.plan(served, CHAT, lengths)),
        ("7 bind", lambda: bind.bind(served, (0,), (), 0.0)),
        (
            "9 call",
            lambda: dispatch.upstream_call(
                served=served,
                incoming=incoming,
                facts=facts,
                principal=principal,
                estimate=lengths,
                lease=lease,
                prompt=prompt,
                binding=binding,
            ),
        ),
        (
            "9 headers",
            lambda: response_lines("r", served, lengths, lease, binding, prompt, 0.0),
        ),
        ("9 one streamed chunk", lambda: meter.feed(_CHUNK)),
        (
            "10 learn",
            lambda: settle.learn(
                served.estimator, CHAT, principal, facts, lengths, prompt, outcome
            ),
        ),
        ("10 record", record),
        ("10 count", lambda: settle.count(metrics, found, lengths, served, lease)),
    ]
    rows = [_row(name, call) for name, call in parts]
    token_pool = TokenPool(Terms(slots=(256, 16), tokens_per_s=1e9, largest_tokens=65_536))
    token_pool.define(
        Entitlement(
            name=principal.entitlement, model="m", baseline=(64, 4), tokens_per_s=1e8, slo_ms=500
        )
    )
    managed = MemoryLeases({"m": served}, lambda: 0.0, {"m": token_pool})
    cost_us = {}
    for name, leases in (("not managed", store), ("token pools", managed)):
        spent_s = min(
            timeit.repeat(
                lambda leases=leases: asyncio.run(lease_and_release(leases, _TIMES)),  # type: ignore[misc]
                number=1,
                repeat=9,
            )
        )
        cost_us[name] = spent_s / _TIMES * 1e6
        rows.append(Row(metric=f"4 admit + 10 settle, {name}, us", measured=cost_us[name]))
    added_us = cost_us["token pools"] - cost_us["not managed"]
    rows.append(Row(metric="token pools add, us", measured=added_us))
    return [*rows, *scheduling_rows()]


def _row(name: str, call: Callable[[], object]) -> Row:
    call()
    times = 2000
    best = min(timeit.repeat(call, number=times, repeat=7)) / times
    return Row(metric=f"{name}, us", measured=best * 1e6)
