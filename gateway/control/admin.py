"""Admin routes: reading, workers, reloading, and changes of who may. Closed without a key.

Bodies of changes are JSON objects with the configuration file's fields. A change with `If-Match`
applies only if the entitlement or the tenant still has that ETag, and is otherwise answered 412.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.control.peers import (
    add_load,
    attainment,
    find_decision,
    live_demand,
    loads_elsewhere,
    newest,
    own_load,
    proof_in_force,
    running_at,
)
from gateway.control.roles import admin_guard, who
from gateway.control.surface import PAGE, Control, Limit, NewWorker, read_object, read_within
from gateway.control.tenant_api import decision_not_found
from gateway.errors import BadRequest, NotFound
from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.data_plane import too_large
from gateway.http.problems import json_response
from gateway.ports import PoolView
from gateway.records.proof import Proof

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_PROOF_BYTES: Final = 1024 * 1024
MAX_DIGITS: Final = 18
SHOWN: Final = 100
"""Most workers named for an adapter."""
LOOK_EVERY_S: Final = 0.25
LOOKS: Final = 2
"""How often in a row nothing runs there: a request sent just before is counted a moment later."""
LONGEST_WAIT_S: Final = 3600.0
WAIT_S: Final = 600.0


def admin_router(control: Control) -> APIRouter:
    """The admin routes, each for the role that `roles.role_for` names."""
    app = APIRouter(dependencies=[Depends(admin_guard(control.keys))])
    _reading_routes(app, control)
    _demand_route(app, control)
    _worker_routes(app, control)
    _other_changes(app, control)
    entitlement, tenant = "/admin/entitlements/{name}", "/admin/tenants/{name}"
    registry, tenants, key = control.registry, control.tenants, f"{tenant}/keys/{{key}}"
    for method, path, act, body, status in (
        ("POST", "/admin/entitlements", registry.create, BODY, SECRET_201),
        ("PATCH", entitlement, registry.change, BODY, 200),
        ("DELETE", entitlement, registry.delete, NO_BODY, 204),
        ("POST", f"{entitlement}/suspend", registry.suspend, NO_BODY, 200),
        ("POST", f"{entitlement}/resume", partial(registry.suspend, undo=True), NO_BODY, 200),
        ("POST", f"{entitlement}/keys", registry.add_key, NO_BODY, SECRET_201),
        ("DELETE", f"{entitlement}/keys/{{fingerprint}}", registry.revoke_key, NO_BODY, 200),
        ("POST", "/admin/tenants", tenants.create, BODY, 201),
        ("PATCH", tenant, tenants.change, BODY, 200),
        ("POST", f"{tenant}/keys", tenants.add_key, BODY, SECRET_201),
        ("PATCH", key, tenants.change_key, BODY, 200),
        ("POST", f"{key}/rotate", tenants.rotate_key, BODY_IF_ANY, SECRET_200),
        ("DELETE", key, tenants.revoke_key, NO_BODY, 204),
    ):
        app.add_api_route(path, _change(act, body, status), methods=[method])
    return app


BODY, BODY_IF_ANY, NO_BODY = "body", "body if any", "no body"
SECRET_200, SECRET_201 = -200, -201
"""Statuses of answers that contain a key, which caches must not store."""


def _change(
    act: Callable[..., Awaitable[dict[str, object]]], body: str, status: int
) -> Callable[[Request], Awaitable[Response]]:
    """A route that changes something: names of its path, fields of its body, who, If-Match."""

    async def change(request: Request) -> Response:
        given: list[object] = [*request.path_params.values()]
        if body != NO_BODY:
            given.append(await read_object(request, empty=body == BODY_IF_ANY))
        version = {"version": asked_version(request)} if request.path_params else {}
        return _answer(await act(*given, who(request), **version), status)

    return change


def _answer(shown: dict[str, object], status: int = 200) -> Response:
    """What was changed, its revision as the ETag that `If-Match` takes; 204 for what is gone."""
    if status == 204:
        return json_response(shown) if shown else Response(status_code=204)
    response = json_response(shown, abs(status))
    response.headers["etag"] = f'"{shown["revision"]}"'
    if status < 0:
        response.headers["cache-control"] = "no-store"
    return response


def asked_version(request: Request) -> int | None:
    """The revision that `If-Match` asks for; None for any. Raises BadRequest."""
    given = request.headers.get("if-match", "*").strip()
    if given == "*":
        return None
    number = given.removeprefix('"').removesuffix('"')
    if len(number) <= MAX_DIGITS and number.isascii() and number.isdecimal():
        return int(number)
    raise BadRequest(
        "If-Match: give one ETag of an earlier answer, or leave it out.",
        reason="bad_request",
        param="if-match",
    )


def _reading_routes(app: APIRouter, control: Control) -> None:
    @app.get("/admin/pools")
    async def pools() -> Response:
        """Pools and workers: load, health, learned values, admission counters."""
        models = tuple(control.models)  # a reload may change them meanwhile
        shown = await described(control, models)
        for served, model in zip(models, shown, strict=True):
            model["estimator"] = served.estimator.snapshot()
        return json_response(shown)

    @app.get("/admin/decisions")
    async def decisions(limit: int = 50) -> Response:
        """The newest decisions."""
        count = max(1, min(limit, 1000))
        records = await newest(control.peers, "decisions", control.ring.latest(count), count)
        return Response(msgspec.json.encode(records), media_type="application/json")

    @app.get("/admin/decisions/{request_id:path}")
    async def decision(request_id: str) -> Response:
        """The decision record of one request."""
        record = await any_decision(control, request_id)
        return Response(record, media_type="application/json")

    @app.get("/admin/audit")
    async def audit(limit: Limit = PAGE) -> Response:
        """The newest changes of entitlements that this gateway made."""
        own = control.registry.audit(limit)
        return json_response({"data": await newest(control.peers, "audit", own, limit)})

    @app.get("/admin/entitlements")
    async def entitlements(
        model: str | None = None,
        tenant: str | None = None,
        after: str | None = None,
        limit: Limit = PAGE,
    ) -> Response:
        """Entitlements with their counters, oldest first; `next` is `after` for the next page."""
        page = await control.registry.page(model=model, tenant=tenant, after=after, limit=limit)
        await _add_attainment(control, page["data"])
        return json_response(page)

    @app.get("/admin/entitlements/{name}")
    async def entitlement(name: str) -> Response:
        """One entitlement with its counters and its keys' fingerprints."""
        shown = await control.registry.get(name)
        await _add_attainment(control, [shown])
        return _answer(shown)

    @app.get("/admin/tenants")
    async def tenants(after: str | None = None, limit: Limit = PAGE) -> Response:
        """Tenants by name, with the number of their keys; `next` is `after` for the next page."""
        return json_response(await control.tenants.page(after=after, limit=limit))

    @app.get("/admin/tenants/{name}")
    async def tenant(name: str) -> Response:
        """One tenant with its keys by name and fingerprint."""
        return _answer(control.tenants.get(name))

    @app.get("/admin/budgets")
    async def budgets(after: str | None = None, limit: Limit = PAGE) -> Response:
        """Budgets and limits of keys with their counters; `next` is `after` for the next page."""
        return json_response(await control.budgets.page(after, limit))


def _demand_route(app: APIRouter, control: Control) -> None:
    @app.get("/admin/demand")
    async def demand(model: str) -> Response:
        """What was asked of a model in the last week, one row a replica."""
        if rows := await live_demand(control, model):
            return Response(msgspec.json.encode({"data": rows}), media_type="application/json")
        raise NotFound(f"There is no model '{model[:64]}'.", reason="model_not_found")


async def _add_attainment(control: Control, shown: Any) -> None:
    """Add `slo` and `slo_tpot` to those that state a target; null for the others."""
    for topic, field in (("slo", "slo_target_ms"), ("slo_tpot", "slo_tpot_ms")):
        targets = {row["name"]: row[field] for row in shown if row[field]}
        targets_met = await attainment(control.peers, control.metrics, targets, topic)
        for row in shown:
            row[topic] = targets_met.get(row["name"])


def describe_fleet(
    served: ModelRuntime, counted: Sequence[PoolView], now_s: float
) -> dict[str, Any]:
    """Pools and workers of a model: windows, load, health and admission's counters."""
    pools = []
    for index, pool in enumerate(served.fleet.pools):
        shape = served.routing.pools[served.fleet.route_of(index)]
        sound = set(fleet.available(pool, now_s))
        workers = [
            {
                "id": worker,
                "in_rotation": i in sound,
                "up": pool.engine_of[i].up,
                "not_ready": pool.engine_of[i].why_down or None,
                "remark": pool.engine_of[i].remark or None,
                "draining": pool.draining[i] or pool.engine_of[i].leaving,
                "ejected_for_s": max(0.0, pool.engine_of[i].ejected_until_s - now_s),
                "active_sequences": pool.active[i],
                "reserved_tokens": pool.tokens[i],
            }
            for i, worker in members.present(pool)
        ]
        pools.append(
            {
                "name": pool.name,
                "phase": served.fleet.phase_of(index),
                "max_model_len": shape.window_tokens,
                "beyond_window_tokens": pool.beyond_window_tokens,
                "b_short": shape.boundary_tokens,
                "boundary_move": _boundary_move(served, pool.name, now_s),
                "max_num_seqs": pool.slots_per_worker,
                "inflight": served.fleet.inflight(index),
                "ready_slots": len(sound) * pool.slots_per_worker,
                "admission": msgspec.structs.asdict(counted[index])
                if index < len(counted)
                else None,
                "workers": workers,
            }
        )
    return {
        "model": served.name,
        "mode": "observe" if served.routing.observe else "enforce",
        "gamma": None if served.compression is None else served.compression.rules.gamma,
        "adapters": {
            name: {
                pool.name: [pool.workers[i] for i in served.adapters.workers(name, pool)[:SHOWN]]
                for pool in served.fleet.pools
            }
            for name in served.adapters.names
        },
        "pools": pools,
    }


def _boundary_move(served: ModelRuntime, pool: str, now_s: float) -> dict[str, Any] | None:
    """The newest move of the boundary above a pool, made or proposed; None if there was none."""
    watch = served.watch
    if watch is None or watch.control is None or pool not in watch.moves:
        return None
    at_s, move = watch.moves[pool]
    made, ago_s = not watch.control.observe, round(now_s - at_s)
    return {**msgspec.structs.asdict(move), "made": made, "ago_s": ago_s}


async def described(control: Control, models: Sequence[ModelRuntime]) -> list[dict[str, Any]]:
    """Each model's pools and workers, with all replicas' load."""
    shown = []
    for served in models:
        counted = await control.registry.pools(served.name)
        shown.append(describe_fleet(served, counted, control.clock()))
    await add_load(control.peers, shown)
    return shown


async def any_decision(control: Control, request_id: str) -> bytes:
    """The record of a request, of this replica or another one, as JSON. Raises NotFound."""
    record = control.ring.find(request_id)
    record = record or await find_decision(control.peers, request_id)
    if record is None:
        raise decision_not_found(request_id)
    return record


def _other_changes(app: APIRouter, control: Control) -> None:
    """Those whose body or query is their own."""

    @app.post("/admin/entitlements/{name}/expire")
    async def expire(name: str, request: Request) -> Response:
        """End it at `{"at": "2030-12-31T23:59:59Z"}`, or now without a body."""
        fields = await read_object(request, empty=True)
        at = fields.pop("at", None)
        if fields or not (at is None or isinstance(at, str)):
            raise BadRequest(
                'Send {"at": "2030-12-31T23:59:59Z"}, or no body for now.',
                reason="bad_request",
                param="at",
            )
        version = asked_version(request)
        return _answer(await control.registry.expire(name, at, who(request), version=version))

    @app.delete("/admin/tenants/{name}")
    async def delete(name: str, request: Request, *, force: bool = False) -> Response:
        """Delete it with its keys; 409 for one of the file, and without `force` if it is used."""
        version, acts = asked_version(request), who(request)
        warning = await control.tenants.delete(name, acts, version=version, force=force)
        return _answer(warning, 204)

    @app.post("/admin/budgets/{budget:path}/raise")
    async def raise_(budget: str, request: Request) -> Response:
        """Add `{"by": 1000000}` to a budget until its window ends."""
        fields = await read_object(request)
        if set(fields) != {"by"}:
            raise BadRequest('Send {"by": 1000000}.', reason="bad_request", param="by")
        return json_response(await control.budgets.add(budget, fields["by"], who(request)))

    @app.post("/admin/reload")
    async def reload(request: Request, *, dry_run: bool = False, proof: bool = False) -> Response:
        """Read the configuration file anew and apply what needs no restart, on every replica.

        `dry_run=true` compares the body, a file, with the configuration in force instead.
        `proof=true` attaches the body, a proof of the file (`sluice prove --out`); 409 for one of
        another file, and then nothing changes.
        """
        if dry_run:
            body = await read_within(request, MAX_FILE_BYTES, too_large(MAX_FILE_BYTES))
            try:
                text = body.decode("utf-8-sig")
            except UnicodeDecodeError:
                raise BadRequest(
                    "The file is not UTF-8.", reason="bad_configuration", code=None
                ) from None
            outcome = msgspec.to_builtins(await control.compare(text))
        else:
            attached = await _read_proof(request) if proof else None
            outcome = {"changes": msgspec.to_builtins(await control.reload(attached))}
            await control.peers.ask("reload")
            if attached is not None:
                control.registry.note_proof(who(request), attached.id, attached.verdict)
        restart = [row["path"] for row in outcome["changes"] if row["restart"]]
        return json_response({**outcome, "restart_needed": restart})

    @app.get("/admin/proof")
    async def attached() -> Response:
        """The proof of the configuration in force, and since then requests by entitlement."""
        if shown := await proof_in_force(control):
            return json_response(shown)
        raise NotFound("No proof is attached: sluice reload --proof FILE.", reason="no_proof")


async def _read_proof(request: Request) -> Proof:
    body = await read_within(request, MAX_PROOF_BYTES, too_large(MAX_PROOF_BYTES))
    try:
        return msgspec.json.decode(body, type=Proof)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"This is no proof: {error}.", reason="bad_request") from None


def _worker_routes(app: APIRouter, control: Control) -> None:
    @app.post("/admin/workers")
    async def add(request: Request) -> Response:
        """Add an engine to a pool until it is removed or the gateway restarts."""
        try:
            asked = msgspec.convert(await read_object(request), NewWorker)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{error}.", reason="bad_request") from None
        worker = control.add_worker(asked)
        return json_response({"worker": worker, "model": asked.model, "pool": asked.pool}, 201)

    @app.delete("/admin/workers/{worker:path}")
    async def remove(worker: str) -> Response:
        """Remove an engine: it gets no new requests, finishes those it has, and is gone then."""
        hits = control.remove_worker(worker)
        if not hits:
            raise _unknown(worker)
        running = running_at(worker, [own_load(control)])
        return json_response({"worker": worker, "pools": hits, "running": running})

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
        if not wait or undo:
            return json_response(shown)
        loop = asyncio.get_running_loop()
        ends_s, idle = loop.time() + timeout_s, 0
        while True:
            loads = [own_load(control), *await loads_elsewhere(control.peers)]
            running = running_at(worker, loads)
            idle = 0 if running else idle + 1
            if idle == LOOKS or loop.time() >= ends_s:
                return json_response({**shown, "running": running})
            await asyncio.sleep(LOOK_EVERY_S)


def _unknown(worker: str) -> NotFound:
    return NotFound(
        f"No worker '{worker}'. GET /admin/pools lists them.", reason="worker_not_found"
    )
