"""Replays admission decisions from the request log of one gateway with embedded state.

The log holds the decisions and every other change of the token pools (`PoolEvent`). Replaying
them in order of time on an empty token pool repeats each decision, so the log verifies the
policy, and another policy can be tried on it. This holds for logs that begin at the gateway's
start; a log that begins later replays with full buckets and may differ.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.admission import admission, debt
from gateway.admission.terms import AdmissionRequest, Denial, Terms
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import Entitlement
from gateway.records.record import Record


class ReplayedDecision(Record, frozen=True, kw_only=True):
    """One admission, as it was logged and as it is decided now."""

    lease_id: str
    logged: str
    """Reason of the denial, also in observe mode; "" for admitted."""
    decided: str


class _Step(Record, frozen=True, kw_only=True):
    unix_s: float
    kind: str
    line: Mapping[str, Any]
    detail: Any = None


def replay(lines: Iterable[Mapping[str, Any]], model: str) -> list[ReplayedDecision]:
    """Decide the admissions of a model again; `lines` are the log's, decoded from JSON.

    Raises ValueError when the log does not begin with the model's terms.
    """
    steps = sorted(_steps(lines, model), key=lambda step: step.unix_s)
    if not steps or steps[0].kind != "terms":
        raise ValueError(f"the log does not begin with the terms of the model {model}")
    token_pool = TokenPool(msgspec.convert(steps[0].detail, Terms))
    pools: dict[str, int] = {}
    token_pool.ticked_s = steps[0].unix_s
    found: list[ReplayedDecision] = []
    for step in steps:
        if step.kind == "admit":
            found.append(_admitted(token_pool, step, pools))
        else:
            _changed(token_pool, step, pools)
    return found


def _steps(lines: Iterable[Mapping[str, Any]], model: str) -> Iterable[_Step]:
    for line in lines:
        if line.get("model") != model:
            continue
        if "event" in line:
            yield _Step(
                unix_s=line["unix_s"], kind=line["event"], line=line, detail=line.get("detail")
            )
            continue
        request = line
        lease = request.get("admission", {})
        if lease.get("admitted_unix_s") is not None:
            yield _Step(unix_s=lease["admitted_unix_s"], kind="admit", line=request)
            for unix_s, kind, amount in lease.get("lease_changes", ()):
                yield _Step(unix_s=unix_s, kind=kind, line=lease, detail=amount)
            yield _Step(unix_s=lease["settled_unix_s"], kind="settle", line=lease)


def _admitted(token_pool: TokenPool, step: _Step, pools: Mapping[str, int]) -> ReplayedDecision:
    line, lease = step.line, step.line["admission"]
    request = AdmissionRequest(
        lease_id=lease["lease_id"],
        entitlement=line["entitlement"],
        pool=pools[lease["asked_pool"]],
        alternates=tuple(pools[name] for name in lease.get("alternates", ())),
        estimate_tokens=lease["reserved_tokens"],
        kv_bytes=lease.get("reserved_kv_bytes", 0),
        sequences=line.get("estimate", {}).get("sequences", 1),
    )
    decided = admission.admit(token_pool, request, step.unix_s, observe=True)
    return ReplayedDecision(
        lease_id=request.lease_id,
        logged=lease.get("would_deny") or "",
        decided=decided.reason if isinstance(decided, Denial) else decided.would_deny,
    )


def _changed(token_pool: TokenPool, step: _Step, pools: dict[str, int]) -> None:
    detail, lease_id, now_s = step.detail, step.line.get("lease_id", ""), step.unix_s
    match step.kind:
        case "terms":
            token_pool.change(msgspec.convert(detail, Terms))
            pools.update({name: index for index, name in enumerate(step.line["pools"])})
        case "entitlement":
            token_pool.define(msgspec.convert(detail, Entitlement))
        case "removed":
            token_pool.remove(detail)
        case "tick":
            debt.tick(token_pool, list(token_pool.active), detail, now_s)
            debt.close(token_pool, detail, now_s)
        case "resize":
            record = token_pool.leases.get(lease_id)
            per_token = 0 if record is None else record.kv_bytes // max(1, record.estimate_tokens)
            admission.resize(token_pool, lease_id, detail, detail * per_token, now_s)
        case "transfer":
            admission.transfer(token_pool, lease_id, detail, now_s, force=True)
        case "settle":
            admission.settle(token_pool, lease_id, step.line.get("charge_tokens"), now_s)
        case _:
            raise ValueError(f"unknown event: {step.kind}")
