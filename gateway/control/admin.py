"""Admin routes: reading, workers, budgets, reloading, and modules beside. Closed without a key."""

import asyncio
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.control.admin_entitlements import PAGE, Limit, entitlement_routes, read_object
from gateway.control.admin_tenants import tenant_routes
from gateway.control.fleet_view import describe_fleet
from gateway.control.peers import add_load, find_decision, load_at, newest
from gateway.control.roles import admin_guard, who
from gateway.control.surface import BudgetService, Control, NewWorker
from gateway.control.tenant_decisions import decision_not_found
from gateway.errors import BadRequest, NotFound
from gateway.fleet import members
from gateway.http.data_plane import too_large
from gateway.http.problems import json_response

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
LOOK_EVERY_S: Final = 0.25
LOOKS: Final = 2
"""How often in a row nothing runs there: a request sent just before is counted a moment later."""
LONGEST_WAIT_S: Final = 3600.0
WAIT_S: Final = 600.0


def admin_router(control: Control) -> APIRouter:
    """The admin routes, each for the role that `roles.ROUTES` names."""
    app = APIRouter(dependencies=[Depends(admin_guard(control.keys))])
    _reading_routes(app, control)
    _worker_routes(app, control)
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


def _worker_routes(app: APIRouter, control: Control) -> None:
    _membership(app, control)

    @app.post("/admin/workers/{worker:path}/drain")
    async def drain(
        worker: str,
        *,
        undo: bool = False,
        wait: bool = False,
        timeout_s: Annotated[float, Query(gt=0, le=LONGEST_WAIT_S)] = WAIT_S,
    ) -> Response:
        """Take a worker out of the rotation; its requests finish. `undo=true` puts it back.

        `wait=true` answers when it serves nothing any more, on all replicas, or after `timeout_s`.
        """
        hits = await control.drain(worker, not undo)
        if not hits:
            raise _unknown(worker)
        shown = {"worker": worker, "draining": not undo, "pools": hits}
        if wait and not undo:
            shown["running"] = await _until_idle(control, worker, timeout_s)
        return json_response(shown)


def _membership(app: APIRouter, control: Control) -> None:
    service = control.workers
    if service is None:
        return

    @app.post("/admin/workers")
    async def add(request: Request) -> Response:
        """Add an engine to a pool until it is removed or the gateway restarts."""
        try:
            asked = msgspec.convert(await read_object(request), NewWorker)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{error}.", reason="bad_request") from None
        worker = service.add(asked)
        return json_response({"worker": worker, "model": asked.model, "pool": asked.pool}, 201)

    @app.delete("/admin/workers/{worker:path}")
    async def remove(worker: str) -> Response:
        """Remove an engine: it gets no new requests, finishes those it has, and is gone then."""
        hits = service.remove(worker)
        if not hits:
            raise _unknown(worker)
        running = _running_here(control, worker)
        return json_response({"worker": worker, "pools": hits, "running": running})


def _unknown(worker: str) -> NotFound:
    return NotFound(
        f"No worker '{worker}'. GET /admin/pools lists them.", reason="worker_not_found"
    )


async def _until_idle(control: Control, worker: str, timeout_s: float) -> int:
    """Wait until a worker serves nothing; returns the sequences that run there after that."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + timeout_s
    idle = 0
    while True:
        running = _running_here(control, worker) + await load_at(control.peers, worker)
        idle = 0 if running else idle + 1
        if idle == LOOKS or loop.time() >= ends_s:
            return running
        await asyncio.sleep(LOOK_EVERY_S)


def _running_here(control: Control, worker: str) -> int:
    """Sequences at a worker, or at all ranks of an engine."""
    pools = {id(pool): pool for m in (*control.models, *control.retiring) for pool in m.fleet.pools}
    return sum(
        pool.active[place]
        for pool in pools.values()
        for place, name in members.present(pool)
        if worker in (name, name.partition("#")[0])
    )
