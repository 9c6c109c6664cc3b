"""Admin routes: pools, entitlements, decisions, draining. Closed without a key in `server`."""

import msgspec
from fastapi import APIRouter, Depends, Response

from gateway.web.control.admin_entitlements import entitlement_routes
from gateway.web.control.admin_reload import reload_routes
from gateway.web.control.admin_workers import worker_routes
from gateway.web.control.fleet_view import describe_fleet
from gateway.web.control.peers import add_load, find_decision, newest
from gateway.web.control.roles import admin_guard
from gateway.web.control.surface import Control
from gateway.web.control.tenancy.admin_budgets import budget_routes
from gateway.web.control.tenancy.admin_tenants import tenant_routes
from gateway.web.control.tenant_decisions import decision_not_found
from gateway.web.problems import json_response


def admin_router(control: Control) -> APIRouter:
    """The admin routes, each for the role that `roles.ROUTES` names."""
    app = APIRouter(dependencies=[Depends(admin_guard(control.keys))])
    _reading_routes(app, control)
    worker_routes(app, control)
    reload_routes(app, control)
    if control.budgets is not None:
        budget_routes(app, control.budgets)
    if control.registry is not None:
        entitlement_routes(app, control.registry, control.peers, control.attainment)
        if control.tenants is not None:
            tenant_routes(app, control.tenants)
    return app


def _reading_routes(app: APIRouter, control: Control) -> None:
    @app.get("/admin/pools")
    async def pools() -> Response:
        """Pools and workers: load, health, learned values, admission counters."""
        shown = []
        for served in tuple(control.models):
            counted = await control.registry.pools(served.name) if control.registry else []
            fleet = describe_fleet(served, counted, control.clock())
            shown.append({**fleet, "estimator": served.estimator.snapshot()})
        await add_load(control.peers, shown)
        return json_response(shown)

    @app.get("/admin/decisions")
    async def decisions(limit: int = 50) -> Response:
        """The newest decisions."""
        count = max(1, min(limit, 1000))
        found = await newest(control.peers, "decisions", control.latest_decisions(count), count)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @app.get("/admin/decisions/{request_id:path}")
    async def decision(request_id: str) -> Response:
        """The decision record of one request."""
        found = await any_decision(control, request_id)
        return Response(found, media_type="application/json")


async def any_decision(control: Control, request_id: str) -> bytes:
    """The record of a request, of this replica or another one, as JSON. Raises NotFound."""
    found = control.find_decision(request_id)
    found = found or await find_decision(control.peers, request_id)
    if found is None:
        raise decision_not_found(request_id)
    return found
