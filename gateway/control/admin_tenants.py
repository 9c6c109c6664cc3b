"""Admin routes of tenants and their keys: list, create, change, rotate, revoke, delete.

Bodies are JSON objects with the configuration file's fields. A change with `If-Match` applies only
if the tenant still has that ETag, and is otherwise answered 412. Keys of entitlements' own are in
`gateway.control.admin_entitlements`.
"""

from fastapi import APIRouter, Request, Response

from gateway.control.admin_entitlements import (
    PAGE,
    Limit,
    asked_version,
    deleted,
    read_object,
    secret_answer,
    tagged_answer,
)
from gateway.control.roles import who
from gateway.control.surface import TenantService
from gateway.http.problems import json_response


def tenant_routes(app: APIRouter, service: TenantService) -> None:
    """Add the routes."""
    _tenants(app, service)
    _keys(app, service)


def _tenants(app: APIRouter, service: TenantService) -> None:
    @app.get("/admin/tenants")
    async def tenants(after: str | None = None, limit: Limit = PAGE) -> Response:
        """Tenants by name, with the number of their keys; `next` is `after` for the next page."""
        return json_response(await service.page(after=after, limit=limit))

    @app.post("/admin/tenants")
    async def create(request: Request) -> Response:
        """Create a tenant: `{"name": …}`, `display_name`, `labels`, `entitlements`."""
        return tagged_answer(await service.create(await read_object(request), who(request)), 201)

    @app.get("/admin/tenants/{name}")
    async def tenant(name: str) -> Response:
        """One tenant with its keys by name and fingerprint."""
        return tagged_answer(service.get(name))

    @app.patch("/admin/tenants/{name}")
    async def change(name: str, request: Request) -> Response:
        """Change some fields; null removes one. `suspended` refuses all of the tenant's keys."""
        fields = await read_object(request)
        return tagged_answer(
            await service.change(name, fields, who(request), version=asked_version(request))
        )

    @app.delete("/admin/tenants/{name}")
    async def delete(name: str, request: Request, force: bool = False) -> Response:  # noqa: FBT001, FBT002 - a query parameter
        """Delete it with its keys; 409 for one of the file, and without `force` if it is used."""
        version = asked_version(request)
        return deleted(await service.delete(name, who(request), version=version, force=force))


def _keys(app: APIRouter, service: TenantService) -> None:
    @app.post("/admin/tenants/{name}/keys")
    async def add(name: str, request: Request) -> Response:
        """Add a key, shown only in this answer; with `sha256` one that exists."""
        fields, version = await read_object(request), asked_version(request)
        return secret_answer(
            await service.add_key(name, fields, who(request), version=version), 201
        )

    @app.patch("/admin/tenants/{name}/keys/{key}")
    async def change_key(name: str, key: str, request: Request) -> Response:
        """Change some fields of a key (name or fingerprint); null removes one."""
        fields, version = await read_object(request), asked_version(request)
        return tagged_answer(
            await service.change_key(name, key, fields, who(request), version=version)
        )

    @app.post("/admin/tenants/{name}/keys/{key}/rotate")
    async def rotate(name: str, key: str, request: Request) -> Response:
        """Give a key a new value; the old one opens for `grace_s` more, a day by default."""
        fields, version = await read_object(request, empty=True), asked_version(request)
        return secret_answer(
            await service.rotate_key(name, key, fields, who(request), version=version)
        )

    @app.delete("/admin/tenants/{name}/keys/{key}")
    async def revoke(name: str, key: str, request: Request) -> Response:
        """End a key for good, at once; requests admitted with it run on."""
        version = asked_version(request)
        return deleted(await service.revoke_key(name, key, who(request), version=version))
