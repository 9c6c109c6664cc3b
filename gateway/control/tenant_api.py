"""The tenant API: terms, counters, refusals and usage of a key, and decisions of its tenant.

The presented key alone selects the entitlement and the tenant. No route or query contains the name
of one, so no tenant can ask for another's. Of its own requests a tenant sees the figures; of
workers only what the answers' headers said. GET /admin/usage reports the ledger for all tenants.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.admission.entitlement_terms import fields_from
from gateway.control.peers import attainment, counts, find_decision
from gateway.control.roles import admin_guard
from gateway.control.surface import PAGE, Control, Limit, read_within
from gateway.errors import BadRequest, NotFound, RateLimited, TooLarge, Unavailable
from gateway.http.body_bytes import BodyBytes, Share
from gateway.http.problems import json_response
from gateway.payload.head import read_head
from gateway.pipeline.quote import MAX_BYTES, Quoter
from gateway.records.decision import NO_SCHEDULING, AdmissionSection, DecisionRecord
from gateway.records.request import Principal
from gateway.records.story import story_of
from gateway.records.usage import UsageQuery, UsageReport
from gateway.usage.report import figures, lines_of, query_of, total
from gateway.usage.request_log import DecisionRing

_OWN: Final = (
    *("service_class", "spilled", "admitted_unix_s", "settled_unix_s", "reserved_tokens"),
    *("reserved_kv_bytes", "priority", "would_deny", "evicted", "charge_tokens"),
)
"""What a tenant sees of its lease."""
_decode: Final = msgspec.json.Decoder(DecisionRecord).decode


def tenant_router(control: Control, quoter: Quoter, bodies: BodyBytes) -> APIRouter:
    """GET /v1/sluice/me and /v1/sluice/decisions/ID, POST /v1/sluice/quote."""
    app = APIRouter()

    @app.post("/v1/sluice/quote")
    async def quote(request: Request) -> Response:
        """What would come of a request now; nothing is sent or reserved."""
        share = Share(bodies, (await control.principal(request)).tenant)
        most = f"A quote's body is at most {MAX_BYTES} bytes. Send model, input_tokens, max_tokens."
        try:
            body = await read_within(request, MAX_BYTES, TooLarge(most), share)
            quoted = await quoter.quote(read_head(request.scope["headers"]), body)
        finally:
            share.give_back()
        return Response(msgspec.json.encode(quoted), media_type="application/json")

    @app.get("/v1/sluice/me")
    async def me(request: Request, after: str | None = None, limit: Limit = PAGE) -> Response:
        """What the presented key opens: terms, state, usage, debt, SLO attainment.

        Of a tenant's key, a page of its entitlements; `next` is `after` for the next page.
        """
        principal = await control.principal(request)
        if principal.entitlement:
            return json_response((await _described(control, [principal]))[0])
        opened = {c.entitlement: c for choices in principal.choices.values() for c in choices}
        names = list(opened)
        if after is not None and after not in opened:
            raise BadRequest(
                "The key opens no such entitlement now. Begin with the first page.",
                reason="invalid_cursor",
                code=None,
                param="after",
            )
        start = 0 if after is None else names.index(after) + 1
        page = names[start : start + limit]
        return json_response(
            {
                "tenant": principal.tenant,
                "key": principal.key,
                "entitlements": await _described(control, [opened[name] for name in page]),
                "next": page[-1] if start + limit < len(names) else None,
            }
        )

    @app.get("/v1/sluice/decisions/{request_id:path}")
    async def decision(request_id: str, request: Request) -> Response:
        """Why a request of this key's tenant went as it did; nothing of other tenants'."""
        principal = await control.principal(request)
        record = own_decision(control.ring, request_id, principal.tenant)
        record = record or await find_decision(control.peers, request_id, principal.tenant)
        if record is None:
            raise decision_not_found(request_id)
        return Response(record, media_type="application/json")

    return app


async def _described(control: Control, opened: Sequence[Principal]) -> list[dict[str, Any]]:
    """Each entitlement, with one question a store and model, and one of a kind to the replicas."""
    names = [principal.entitlement for principal in opened]
    refused = await counts(control.peers, control.metrics, "refused", names)
    distinct = {limit.id: limit for principal in opened for limit in principal.limits}
    shown = await control.budgets.shown(list(distinct.values()))
    limits = dict(zip(distinct, shown, strict=True))
    terms = {name: control.registry.find(name) for name in names}
    targets = {name: t.slo_ms for name, t in terms.items() if t and t.slo_ms}
    targets_met = await attainment(control.peers, control.metrics, targets)
    paces = {name: t.slo_tpot_ms for name, t in terms.items() if t and t.slo_tpot_ms}
    paces_met = await attainment(control.peers, control.metrics, paces, "slo_tpot")
    of_model: dict[str, list[str]] = {}
    for principal in opened:
        model = principal.model
        if model is not None and model in control.shapes and control.managed(model):
            of_model.setdefault(model, []).append(principal.entitlement)
    views = await asyncio.gather(*(control.view(model, of_model[model]) for model in of_model))
    accounts = {account.name: account for of_names in views for account in of_names}
    described = []
    for principal in opened:
        name, model = principal.entitlement, principal.model
        row: dict[str, Any] = {
            "entitlement": name,
            "tenant": principal.tenant,
            "model": model,
            "managed": model is not None and control.managed(model),
            "refused": refused[name],
        }
        if principal.limits:
            row["limits"] = [limits[limit.id] for limit in principal.limits]
        shape = None if model is None else control.shapes.get(model)
        stated = terms[name]
        if stated is not None and shape is not None:
            fields = fields_from(stated, shape)
            of_key = ("name", "tenant", "model")
            row["terms"] = {field: v for field, v in fields.items() if field not in of_key}
            if name in targets_met:
                row["slo"] = targets_met[name]
            if name in paces_met:
                row["slo_tpot"] = paces_met[name]
            if (account := accounts.get(name)) is not None:
                row["state"] = principal.verdict or account.state
                row["usage"] = {
                    "in_flight": dict(zip(shape.pools, account.inflight, strict=False)),
                    "kv_bytes": account.kv_bytes,
                    "bucket_tokens": account.level_tokens,
                    "bucket_depth_tokens": account.depth_tokens,
                    "debt": account.debt,
                    "burst": account.burst,
                    "weight": account.weight,
                    "debited_tokens": account.debited,
                    "refunded_tokens": account.refunded,
                    "used_tokens": account.used,
                }
        described.append(row)
    return described


def own_decision(ring: DecisionRing, request_id: str, tenant: str) -> bytes | None:
    """What a tenant may see of a request, as JSON; None if the ring has none of it."""
    line = ring.find(request_id, tenant)
    record = None if line is None else _decode(line)
    if record is None or (record.request_id, record.tenant) != (request_id, tenant):
        return None  # nothing, or another record with the same hash
    section = record.admission
    own = msgspec.structs.replace(
        record,
        attempts=(),  # other workers' names and faults
        scheduling=NO_SCHEDULING,  # other workers' scores and load
        request=msgspec.structs.replace(record.request, prompt_digests=()),  # under our key
        prefill=msgspec.structs.replace(
            record.prefill, candidates=(), predicted_s=None, expected_hit_tokens=None
        ),
        admission=AdmissionSection(**{name: getattr(section, name) for name in _OWN}),
        prompt=None,
    )
    fields = msgspec.to_builtins(own)
    return msgspec.json.encode({**fields, "story": story_of(own)})


def decision_not_found(request_id: str) -> NotFound:
    """The refusal of a look-up; the same for a request of somebody else."""
    return NotFound(
        f"No decision is kept for request id '{request_id[:128]}': it is unknown or too old.",
        reason="decision_not_found",
    )


MAX_ROWS: Final = 10_000
"""Of one answer; `sluice usage` has no such limit."""
MAX_AT_ONCE: Final = 4
"""Reports read at the same time; of one tenant, or of all, only one."""
MAX_WAITING: Final = 4
"""Reports of one tenant that wait for one another."""
ReadReport = Callable[[UsageQuery, int], UsageReport]
"""Reads the ledger: a query, and the most rows. Blocks; raises OSError."""
Day = Annotated[str | None, Query(max_length=32)]
By = Annotated[str, Query(max_length=128)]

_log = logging.getLogger("sluice.usage")


def usage_router(control: Control, read: ReadReport | None) -> APIRouter:
    """The routes; `read` is None where there is no ledger."""
    app = APIRouter()
    turns = _Turns()

    async def answer(by: str, first: str | None, last: str | None, tenant: str | None) -> Response:
        """The rows, or where there are too many, the first of them and no total."""
        try:
            query = query_of(by, first, last, tenant)
        except ValueError as error:
            raise BadRequest(f"{error}.", reason="bad_request") from None
        if read is None:
            raise NotFound(
                "This gateway keeps no ledger: its operator can set `ledger.path`.",
                reason="no_ledger",
            )
        async with turns.of(query.tenant):  # a report may read much
            try:
                report = await asyncio.to_thread(read, query, MAX_ROWS + 1)
            except OSError as error:
                _log.error("the ledger cannot be read: %s", error)
                raise Unavailable(
                    "The ledger cannot be read now.", reason="ledger_unavailable"
                ) from None
        more, rows = len(report.rows) > MAX_ROWS, lines_of(report)
        return json_response(
            {
                "by": query.by,
                "from": query.first_day,
                "to": query.last_day,
                "currency": report.currency,
                "rows": rows[:MAX_ROWS],
                "more": more,
                "total": None if more else figures(total(report)),
            }
        )

    @app.get("/admin/usage", dependencies=[Depends(admin_guard(control.keys))])
    async def usage(
        by: By = "tenant,model",
        first: Annotated[Day, Query(alias="from")] = None,
        last: Annotated[Day, Query(alias="to")] = None,
    ) -> Response:
        """Usage and cost of all tenants."""
        return await answer(by, first, last, None)

    @app.get("/v1/sluice/usage")
    async def own_usage(
        request: Request,
        by: By = "day,model",
        first: Annotated[Day, Query(alias="from")] = None,
        last: Annotated[Day, Query(alias="to")] = None,
    ) -> Response:
        """Usage and cost of this key's tenant."""
        principal = await control.principal(request)
        return await answer(by, first, last, principal.tenant)

    return app


class _Turns:
    """Has the reports of one tenant wait for one another, not for other tenants'."""

    def __init__(self) -> None:
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._locks: dict[str | None, asyncio.Lock] = {}
        self._asked: dict[str | None, int] = {}

    @asynccontextmanager
    async def of(self, tenant: str | None) -> AsyncIterator[None]:
        """The tenant's turn; None for the report of all. Raises RateLimited."""
        asked = self._asked.get(tenant, 0)
        if asked > MAX_WAITING:
            raise RateLimited(
                "Too many usage reports are waiting. Ask for one at a time.",
                reason="too_many_reports",
                retry_after_s=1.0,
            )
        self._asked[tenant] = asked + 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()), self._at_once:
                yield
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant], self._locks[tenant]
