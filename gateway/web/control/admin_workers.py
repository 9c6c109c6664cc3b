"""Admin routes of workers: add one, remove one, drain one and wait until it serves nothing."""

import asyncio
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response

from gateway.errors import BadRequest, NotFound
from gateway.policy.fleet import members
from gateway.web.control.admin_entitlements import read_object
from gateway.web.control.peers import load_at
from gateway.web.control.surface import Control, NewWorker
from gateway.web.problems import json_response

LOOK_EVERY_S: Final = 0.25
LOOKS: Final = 2
"""How often in a row nothing runs there: a request sent just before is counted a moment later."""
LONGEST_WAIT_S: Final = 3600.0
WAIT_S: Final = 600.0


def worker_routes(app: APIRouter, control: Control) -> None:
    """Add the routes."""
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
