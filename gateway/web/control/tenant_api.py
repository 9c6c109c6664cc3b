"""The tenant API: terms, counters and refusals of an entitlement, and decisions of its tenant.

The presented key alone selects the entitlement. No route or query contains the name of one, so no
tenant can ask for another's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.metrics import Metrics
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.entitlements.terms import ModelShape, fields_from
from gateway.policy.request.head import read_head
from gateway.ports import AccountView
from gateway.records.limit import Limit
from gateway.records.record import Record
from gateway.records.request import Principal
from gateway.web.control.attainment import Attainment
from gateway.web.control.peers import NoPeers, Peers, all_refusals, find_tenant_decision
from gateway.web.control.surface import Authenticate
from gateway.web.control.tenant_decisions import FindDecision, decision_not_found
from gateway.web.problems import json_response


class TenantView(Record, frozen=True, kw_only=True):
    """The route's dependencies, provided by the composition root."""

    authenticate: Authenticate
    terms: Callable[[str], Entitlement | None]
    """Current terms of an entitlement, by name."""
    view: Callable[[str, Sequence[str]], Awaitable[list[AccountView]]]
    """`TokenPools.view`; called for managed models only."""
    limits: Callable[[Sequence[Limit]], Awaitable[list[dict[str, object]]]]
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
    async def me(request: Request) -> Response:
        """What the presented key opens: terms, state, usage, debt, SLO attainment."""
        principal = await tenant.authenticate(read_head(request.scope["headers"]))
        if principal.entitlement:
            return json_response(await _describe(tenant, principal))
        opened = [choice for choices in principal.choices.values() for choice in choices]
        return json_response(
            {
                "tenant": principal.tenant,
                "key": principal.key,
                "entitlements": [await _describe(tenant, choice) for choice in opened],
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


async def _describe(tenant: TenantView, principal: Principal) -> dict[str, Any]:
    name, model = principal.entitlement, principal.model
    found: dict[str, Any] = {
        "entitlement": name,
        "tenant": principal.tenant,
        "model": model,
        "managed": model is not None and tenant.managed(model),
        "refused": await all_refusals(tenant.peers, refusals(tenant.metrics, name), name),
    }
    if principal.limits:
        found["limits"] = await tenant.limits(principal.limits)
    terms = tenant.terms(name)
    shape = None if model is None else tenant.shapes.get(model)
    if model is None or terms is None or shape is None:
        return found
    fields = fields_from(terms, shape)
    for known in ("name", "tenant", "model"):
        fields.pop(known, None)
    found["terms"] = fields
    if terms.slo_ms:
        board = Attainment(tenant.metrics, tenant.peers)
        found["slo"] = (await board.of({name: terms.slo_ms}))[name]
    if not found["managed"]:
        return found
    for account in await tenant.view(model, [name]):
        found["state"] = account.state
        found["usage"] = _usage(account, shape)
    return found


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


def refusals(metrics: Metrics, name: str) -> dict[str, int]:
    """Refusals of an entitlement by reason, counted by this replica since its start."""
    return {
        reason: int(count)
        for (entitlement, decision, reason), count in metrics.admission.values.items()
        if entitlement == name and decision == "denied"
    }
