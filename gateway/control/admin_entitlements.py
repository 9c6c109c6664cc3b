"""Admin routes of entitlements: list, create, change, suspend, expire, delete, keys, audit.

Bodies are JSON objects with the configuration file's fields, MAX_BODY_BYTES at most. They are read
here, because errors of FastAPI would quote the body. A change with `If-Match` applies only if the
entitlement still has that ETag, and is otherwise answered 412.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway.control.attainment import Attainment
from gateway.control.peers import Peers, newest
from gateway.control.roles import who
from gateway.control.surface import EntitlementService
from gateway.errors import BadRequest, TooLarge
from gateway.http.problems import json_response

MAX_BODY_BYTES: Final = 65_536
PAGE: Final = 100
LARGEST_PAGE: Final = 1_000
MAX_DIGITS: Final = 18

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE)]


def entitlement_routes(
    app: APIRouter, service: EntitlementService, peers: Peers, attainment: Attainment
) -> None:
    """Add the routes."""
    _reading(app, service, attainment)
    _collection(app, service)
    _states(app, service)
    _audit(app, service, peers)
    _keys(app, service)


def _reading(app: APIRouter, service: EntitlementService, attainment: Attainment) -> None:
    @app.get("/admin/entitlements")
    async def entitlements(
        model: str | None = None,
        tenant: str | None = None,
        after: str | None = None,
        limit: Limit = PAGE,
    ) -> Response:
        """Entitlements with their counters, oldest first; `next` is `after` for the next page."""
        page = await service.page(model=model, tenant=tenant, after=after, limit=limit)
        await _add_attainment(attainment, page["data"])
        return json_response(page)

    @app.get("/admin/entitlements/{name}")
    async def entitlement(name: str) -> Response:
        """One entitlement with its counters and its keys' fingerprints."""
        found = await service.get(name)
        await _add_attainment(attainment, [found])
        return tagged_answer(found)


async def _add_attainment(attainment: Attainment, shown: Sequence[dict[str, Any]]) -> None:
    """Add `slo` to those that state a target; null for the others."""
    targets = {each["name"]: each["slo_target_ms"] for each in shown if each["slo_target_ms"]}
    kept = await attainment.of(targets)
    for each in shown:
        each["slo"] = kept.get(each["name"])


def _collection(app: APIRouter, service: EntitlementService) -> None:
    @app.post("/admin/entitlements")
    async def create(request: Request) -> Response:
        """Create an entitlement; its key is shown only in this answer."""
        return secret_answer(await service.create(await read_object(request), who(request)), 201)

    @app.patch("/admin/entitlements/{name}")
    async def change(name: str, request: Request) -> Response:
        """Change some fields; null removes one."""
        fields = await read_object(request)
        return tagged_answer(
            await service.change(name, fields, who(request), version=asked_version(request))
        )

    @app.delete("/admin/entitlements/{name}")
    async def delete(name: str, request: Request) -> Response:
        """Delete it; 409 while it has requests in flight."""
        return deleted(await service.delete(name, who(request), version=asked_version(request)))


def _states(app: APIRouter, service: EntitlementService) -> None:
    @app.post("/admin/entitlements/{name}/suspend")
    async def suspend(name: str, request: Request) -> Response:
        """Refuse its new requests; running ones continue."""
        return tagged_answer(
            await service.suspend(name, who(request), version=asked_version(request))
        )

    @app.post("/admin/entitlements/{name}/resume")
    async def resume(name: str, request: Request) -> Response:
        """Admit its requests again."""
        return tagged_answer(
            await service.suspend(name, who(request), undo=True, version=asked_version(request))
        )

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
        return tagged_answer(
            await service.expire(name, at, who(request), version=asked_version(request))
        )


def _audit(app: APIRouter, service: EntitlementService, peers: Peers) -> None:
    @app.get("/admin/audit")
    async def audit(limit: Limit = PAGE) -> Response:
        """The newest changes of entitlements that this gateway made."""
        return json_response({"data": await newest(peers, "audit", service.audit(limit), limit)})


def _keys(app: APIRouter, service: EntitlementService) -> None:
    @app.post("/admin/entitlements/{name}/keys")
    async def add(name: str, request: Request) -> Response:
        """Add a second valid key, shown only in this answer; 409 if there are two already."""
        return secret_answer(
            await service.add_key(name, who(request), version=asked_version(request)), 201
        )

    @app.delete("/admin/entitlements/{name}/keys/{fingerprint}")
    async def revoke(name: str, fingerprint: str, request: Request) -> Response:
        """Revoke a key at once."""
        version = asked_version(request)
        return tagged_answer(
            await service.revoke_key(name, fingerprint, who(request), version=version)
        )


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


def deleted(said: dict[str, object]) -> Response:
    """204, or what has to be said of the change."""
    return json_response(said) if said else Response(status_code=204)


def secret_answer(content: dict[str, object], status: int = 200) -> Response:
    """An answer that contains a key; caches must not store it."""
    response = tagged_answer(content, status)
    response.headers["cache-control"] = "no-store"
    return response


def tagged_answer(content: dict[str, object], status: int = 200) -> Response:
    """An entitlement or a tenant, with its revision as the ETag that `If-Match` takes."""
    response = json_response(content, status)
    response.headers["etag"] = f'"{content["revision"]}"'
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
