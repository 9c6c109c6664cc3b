"""Admin routes of entitlements: list, create, change, suspend, expire, delete, keys, audit.

Bodies are JSON objects of the configuration file's fields, MAX_BODY_BYTES at most. They are
read here, not by FastAPI: its errors would quote what was sent.
"""

from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway.errors import BadRequest, TooLarge
from gateway.web.peers import Peers, newest
from gateway.web.problems import json_response
from gateway.web.surface import EntitlementDesk

MAX_BODY_BYTES: Final = 65_536
PAGE: Final = 100
LARGEST_PAGE: Final = 1_000

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE)]


def entitlement_routes(app: APIRouter, desk: EntitlementDesk, who: str, peers: Peers) -> None:
    """Add the routes; `who` is the admin key's fingerprint."""
    _collection(app, desk, who)
    _states(app, desk, who)
    _audit(app, desk, peers)
    _keys(app, desk, who)


def _collection(app: APIRouter, desk: EntitlementDesk, who: str) -> None:
    @app.get("/admin/entitlements")
    async def entitlements(
        model: str | None = None,
        tenant: str | None = None,
        after: str | None = None,
        limit: Limit = PAGE,
    ) -> Response:
        """Entitlements with their counters, oldest first; `next` is the next page's `after`."""
        return json_response(await desk.page(model=model, tenant=tenant, after=after, limit=limit))

    @app.post("/admin/entitlements")
    async def create(request: Request) -> Response:
        """A new entitlement and its key, which is shown this once."""
        return _secret(await desk.create(await read_object(request), who), 201)

    @app.get("/admin/entitlements/{name}")
    async def entitlement(name: str) -> Response:
        """One entitlement with its counters and its keys' fingerprints."""
        return json_response(await desk.get(name))

    @app.patch("/admin/entitlements/{name}")
    async def change(name: str, request: Request) -> Response:
        """Other values for some fields; null takes one away."""
        return json_response(await desk.change(name, await read_object(request), who))

    @app.delete("/admin/entitlements/{name}")
    async def delete(name: str) -> Response:
        """Forget it; 409 while it has requests in flight."""
        await desk.delete(name, who)
        return Response(status_code=204)


def _states(app: APIRouter, desk: EntitlementDesk, who: str) -> None:
    @app.post("/admin/entitlements/{name}/suspend")
    async def suspend(name: str) -> Response:
        """Refuse its requests from now on; what runs goes on."""
        return json_response(await desk.suspend(name, who))

    @app.post("/admin/entitlements/{name}/resume")
    async def resume(name: str) -> Response:
        """Admit its requests again."""
        return json_response(await desk.suspend(name, who, undo=True))

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
        return json_response(await desk.expire(name, at, who))


def _audit(app: APIRouter, desk: EntitlementDesk, peers: Peers) -> None:
    @app.get("/admin/audit")
    async def audit(limit: Limit = PAGE) -> Response:
        """The newest changes of entitlements that this gateway made."""
        return json_response({"data": await newest(peers, "audit", desk.audit(limit), limit)})


def _keys(app: APIRouter, desk: EntitlementDesk, who: str) -> None:
    @app.post("/admin/entitlements/{name}/keys")
    async def add(name: str) -> Response:
        """A second live key, which is shown this once; 409 when there are two."""
        return _secret(await desk.add_key(name, who), 201)

    @app.delete("/admin/entitlements/{name}/keys/{fingerprint}")
    async def revoke(name: str, fingerprint: str) -> Response:
        """End a key at once."""
        return json_response(await desk.revoke_key(name, fingerprint, who))


async def read_object(request: Request, *, empty: bool = False) -> dict[str, Any]:
    """The body's JSON object; with `empty`, {} for no body. Raises TooLarge, BadRequest."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"The body is over {MAX_BODY_BYTES} bytes.")
    if empty and not body:
        return {}
    try:
        found = orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise BadRequest("The body is not JSON.", reason="invalid_json") from error
    if not isinstance(found, dict):
        raise BadRequest("The body is not a JSON object.", reason="invalid_json")
    return found


def _secret(content: dict[str, object], status: int) -> Response:
    """An answer with a key in it: nothing on its way may keep it."""
    response = json_response(content, status)
    response.headers["cache-control"] = "no-store"
    return response
