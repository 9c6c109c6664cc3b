"""The tenant API: terms, counters and refusals of an entitlement, and decisions of its tenant.

The presented key alone selects the entitlement. No route or query contains the name of one, so no
tenant can ask for another's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway.admission.entitlement_terms import ModelShape, fields_from
from gateway.control.admin_entitlements import PAGE, Limit
from gateway.control.attainment import Attainment
from gateway.control.peers import Counts, NoPeers, Peers, all_counts, find_tenant_decision
from gateway.control.surface import Authenticate
from gateway.control.tenant_decisions import FindDecision, decision_not_found
from gateway.errors import BadRequest
from gateway.http.problems import json_response
from gateway.metrics import Metrics
from gateway.payload.head import read_head
from gateway.ports import AccountView
from gateway.records.entitlement import Entitlement
from gateway.records.limit import Limit as KeyLimit
from gateway.records.record import Record
from gateway.records.request import Principal

REFUSED: Final = "refused"
"""The replicas' question of how often they refused entitlements."""


class TenantView(Record, frozen=True, kw_only=True):
    """The route's dependencies, provided by the composition root."""

    authenticate: Authenticate
    terms: Callable[[str], Entitlement | None]
    """Current terms of an entitlement, by name."""
    view: Callable[[str, Sequence[str]], Awaitable[list[AccountView]]]
    """`TokenPools.view`; called for managed models only."""
    limits: Callable[[Sequence[KeyLimit]], Awaitable[list[dict[str, object]]]]
    """Limits over all models, with their counters."""
    managed: Callable[[str], bool]
    """Whether the model of this name is managed."""
    shapes: Mapping[str, ModelShape]
    """By model name."""
    metrics: Metrics
    find_decision: FindDecision
    """What a tenant may see of a request: `tenant_decisions.finder`."""
    peers: Peers = NoPeers()
    """Other replicas that refuse the same tenants."""


def tenant_router(tenant: TenantView) -> APIRouter:
    """GET /v1/sluice/me and /v1/sluice/decisions/ID."""
    app = APIRouter()

    @app.get("/v1/sluice/me")
    async def me(request: Request, after: str | None = None, limit: Limit = PAGE) -> Response:
        """What the presented key opens: terms, state, usage, debt, SLO attainment.

        Of a tenant's key, a page of its entitlements; `next` is `after` for the next page.
        """
        principal = await tenant.authenticate(read_head(request.scope["headers"]))
        if principal.entitlement:
            return json_response((await _described(tenant, [principal]))[0])
        opened = {c.entitlement: c for choices in principal.choices.values() for c in choices}
        names = list(opened)
        if after is not None and after not in opened:
            raise BadRequest(
                "The key opens no such entitlement now. Begin with the first page.",
                reason="invalid_cursor",
                param="after",
            )
        start = 0 if after is None else names.index(after) + 1
        page = names[start : start + limit]
        return json_response(
            {
                "tenant": principal.tenant,
                "key": principal.key,
                "entitlements": await _described(tenant, [opened[name] for name in page]),
                "next": page[-1] if start + limit < len(names) else None,
            }
        )

    @app.get("/v1/sluice/decisions/{request_id:path}")
    async def decision(request_id: str, request: Request) -> Response:
        """Why a request of this key's tenant went as it did; nothing of other tenants'."""
        principal = await tenant.authenticate(read_head(request.scope["headers"]))
        found = tenant.find_decision(request_id, principal.tenant)
        found = found or await find_tenant_decision(tenant.peers, request_id, principal.tenant)
        if found is None:
            raise decision_not_found(request_id)
        return Response(found, media_type="application/json")

    return app


async def _described(tenant: TenantView, opened: Sequence[Principal]) -> list[dict[str, Any]]:
    """Each entitlement, with one question a store and model, and one of a kind to the replicas."""
    names = [principal.entitlement for principal in opened]
    refused = await all_counts(tenant.peers, REFUSED, refusals(tenant.metrics, names))
    distinct = {limit.id: limit for principal in opened for limit in principal.limits}
    shown = await tenant.limits(list(distinct.values()))
    limits = dict(zip(distinct, shown, strict=True))
    terms = {name: tenant.terms(name) for name in names}
    targets = {name: found.slo_ms for name, found in terms.items() if found and found.slo_ms}
    kept = await Attainment(tenant.metrics, tenant.peers).of(targets)
    of_model: dict[str, list[str]] = {}
    for principal in opened:
        model = principal.model
        if model is not None and model in tenant.shapes and tenant.managed(model):
            of_model.setdefault(model, []).append(principal.entitlement)
    views = await asyncio.gather(*(tenant.view(model, of_model[model]) for model in of_model))
    accounts = {account.name: account for found in views for account in found}
    described = []
    for principal in opened:
        name, model = principal.entitlement, principal.model
        found: dict[str, Any] = {
            "entitlement": name,
            "tenant": principal.tenant,
            "model": model,
            "managed": model is not None and tenant.managed(model),
            "refused": refused[name],
        }
        if principal.limits:
            found["limits"] = [limits[limit.id] for limit in principal.limits]
        shape = None if model is None else tenant.shapes.get(model)
        stated = terms[name]
        if stated is not None and shape is not None:
            fields = fields_from(stated, shape)
            of_key = ("name", "tenant", "model")
            found["terms"] = {field: v for field, v in fields.items() if field not in of_key}
            if name in kept:
                found["slo"] = kept[name]
            if (account := accounts.get(name)) is not None:
                found["state"] = account.state
                found["usage"] = _usage(account, shape)
        described.append(found)
    return described


def _usage(account: AccountView, shape: ModelShape) -> dict[str, Any]:
    return {
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


def refusals(metrics: Metrics, names: Collection[str]) -> Counts:
    """Refusals of entitlements by reason, counted by this replica since its start."""
    found: Counts = {name: {} for name in names}
    for (entitlement, decision, reason), count in metrics.admission.values.items():
        if decision == "denied" and entitlement in found:
            found[entitlement][reason] = int(count)
    return found
