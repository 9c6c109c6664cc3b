"""Admin routes: reading, budgets, reloading, and those of modules beside. Closed without a key."""

from typing import Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from gateway.errors import BadRequest
from gateway.web.control.admin_entitlements import PAGE, Limit, entitlement_routes, read_object
from gateway.web.control.admin_workers import worker_routes
from gateway.web.control.fleet_view import describe_fleet
from gateway.web.control.peers import add_load, find_decision, newest
from gateway.web.control.roles import admin_guard, who
from gateway.web.control.surface import BudgetService, Control
from gateway.web.control.tenancy.admin_tenants import tenant_routes
from gateway.web.control.tenant_decisions import decision_not_found
from gateway.web.http.data_plane import too_large
from gateway.web.problems import json_response

MAX_FILE_BYTES: Final = 16 * 1024 * 1024


def admin_router(control: Control) -> APIRouter:
    """The admin routes, each for the role that `roles.ROUTES` names."""
    app = APIRouter(dependencies=[Depends(admin_guard(control.keys))])
    _reading_routes(app, control)
    worker_routes(app, control)
    _reload_routes(app, control)
    if control.budgets is not None:
        _budget_routes(app, control.budgets)
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


def _budget_routes(app: APIRouter, service: BudgetService) -> None:
    @app.get("/admin/budgets")
    async def budgets(after: str | None = None, limit: Limit = PAGE) -> Response:
        """Budgets and limits of keys with their counters; `next` is `after` for the next page."""
        return json_response(await service.page(after, limit))

    @app.post("/admin/budgets/{budget:path}/raise")
    async def raise_(budget: str, request: Request) -> Response:
        """Add `{"by": 1000000}` to a budget until its window ends."""
        fields = await read_object(request)
        if set(fields) != {"by"}:
            raise BadRequest('Send {"by": 1000000}.', reason="bad_request", param="by")
        return json_response(await service.add(budget, fields["by"], who(request)))


def _reload_routes(app: APIRouter, control: Control) -> None:
    service = control.reload
    if service is None:
        return

    @app.post("/admin/reload")
    async def reload(request: Request, *, dry_run: bool = False) -> Response:
        """Read the configuration file anew and apply what needs no restart, on every replica.

        `dry_run=true` compares the body, a file, with the configuration in force instead.
        """
        if dry_run:
            found = msgspec.to_builtins(await service.compare(await _text(request)))
        else:
            found = {"changes": msgspec.to_builtins(await service.reload())}
            await control.peers.ask("reload")
        restart = [row["path"] for row in found["changes"] if row["restart"]]
        return json_response({**found, "restart_needed": restart})


async def _text(request: Request) -> str:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_FILE_BYTES:
            raise too_large(MAX_FILE_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("The file is not UTF-8.", reason="bad_configuration") from None


async def any_decision(control: Control, request_id: str) -> bytes:
    """The record of a request, of this replica or another one, as JSON. Raises NotFound."""
    found = control.find_decision(request_id)
    found = found or await find_decision(control.peers, request_id)
    if found is None:
        raise decision_not_found(request_id)
    return found
