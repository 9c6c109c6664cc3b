"""The control plane in FastAPI: health, readiness, metrics, models, admin, OpenAPI.

The admin routes have their own key and are closed without one. Errors have the data plane's
format, so clients parse only one.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from gateway.control.admin import admin_router
from gateway.control.management_port import managed
from gateway.control.metrics_page import write
from gateway.control.openapi import openapi_document
from gateway.control.surface import Control, read_within
from gateway.errors import (
    BadRequest,
    NotFound,
    Refusal,
    StateFailure,
    StorageFull,
    Unauthorized,
    Unavailable,
)
from gateway.fleet import fleet, members
from gateway.fleet.fleet import EngineState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.data_plane import too_large
from gateway.http.problems import dialect_of, error_body, error_headers, json_response
from gateway.http.wrong_keys import WrongKeys
from gateway.records.endpoint import Dialect
from gateway.records.request import Principal

_log = logging.getLogger("sluice.control")
REPLICAS: Final = "/internal/replicas/"
MAX_ASKED_BYTES: Final = 1 << 20
"""Largest body of a call from another replica; the names of a page of entitlements fit."""
SHOWN: Final = 100
"""Most workers that /ready names."""


def control_app(control: Control, *further: APIRouter) -> FastAPI:
    """The FastAPI application for every path outside the data plane; adds `further` routes."""
    app = FastAPI(title="Sluice", version=control.version, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # it would redirect to whatever host the client names
    document = openapi_document(control.version)
    app.openapi = lambda: document  # type: ignore[method-assign]
    _handle_errors(app, control.wrong_keys)
    _public_routes(app, control)
    _model_routes(app, control)
    app.include_router(admin_router(control))

    @app.post(REPLICAS + "{topic}", include_in_schema=False)
    async def replica_asks(topic: str, request: Request) -> Response:
        """Call from another replica, with the token that this replica registered on Redis."""
        _, _, token = request.headers.get("authorization", "").partition(" ")
        if not control.peers.knows(token):
            raise Unauthorized(
                "Only replicas of this gateway ask here.",
                reason="invalid_admin_key",
            )
        asked = await read_within(request, MAX_ASKED_BYTES, too_large(MAX_ASKED_BYTES))
        try:
            reply = control.peers.answer(topic, asked)
        except (KeyError, ValueError, msgspec.MsgspecError):
            raise BadRequest("Not understood.", reason="bad_request") from None
        if reply is None:
            return Response(status_code=204)
        return Response(reply, media_type="application/octet-stream")

    for router in further:
        app.include_router(router)
    return app


def _public_routes(app: FastAPI, control: Control) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """The gateway can serve: not draining, keys known, and a model has a worker in rotation.

        One without takes no traffic from the others: `models_not_ready` names it. A pool of
        discovered workers may be empty: its requests wait for the first one.
        `workers` names workers outside the rotation, with the reason; `remarks` those inside whose
        window is not the configured one. `adapters` names the LoRA adapters of each model that
        a worker in the rotation has; `adapters_missing` those of the file that none has.
        """
        now_s = control.clock()
        missing = [
            served.name
            for served in control.models
            if not any(
                fleet.available(pool, now_s) or (pool.may_be_empty and not any(pool.present))
                for pool in served.fleet.pools
            )
        ]
        problem = "draining" if control.draining() else ""
        if unread := control.unread():
            problem = problem or f"the state store was not read: {', '.join(sorted(unread))}"
        if len(missing) == len(control.models):
            problem = problem or f"no ready engine for {', '.join(missing)}"
        body: dict[str, Any] = {"status": problem or "ready"}
        details = {
            "models_not_ready": missing,
            "workers": _by_worker(control.models, lambda e: None if e.up else e.why_down),
            "remarks": _by_worker(control.models, lambda e: e.remark or None),
            **_adapters(control.models, now_s),
        }
        body |= {key: named for key, named in details.items() if named}
        return json_response(body, 503 if problem else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(await write(control.page.collect()), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/")
    async def root(request: Request) -> Response:
        """The dashboard; name of the service and links for programs that ask for JSON."""
        inner = managed(request.scope, control.management_port)
        if inner and "application/json" not in request.headers.get("accept", ""):
            return RedirectResponse("/dashboard")
        about = {
            "name": "sluice",
            "version": control.version,
            "base_url_of_clients": "/v1",
            "paths": {
                "API description": "/docs",
                "OpenAPI": "/openapi.json",
                "models": "/v1/models",
                "alive": "/health",
                "ready": "/ready",
                **({"Prometheus": "/metrics", "dashboard": "/dashboard"} if inner else {}),
            },
        }
        return json_response(about)


def _model_routes(app: FastAPI, control: Control) -> None:
    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Models and aliases that this key may use."""
        cards = _cards(control, await control.principal(request))
        if dialect_of(request.url.path, request.headers) is not Dialect.ANTHROPIC:
            return json_response({"object": "list", "data": cards})
        ids = [card["id"] for card in cards] or [None]
        rows = [_as_anthropic(card) for card in cards]  # all of them on one page
        return json_response(
            {"data": rows, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """One model."""
        principal = await control.principal(request)
        card = next((c for c in _cards(control, principal) if c["id"] == name), None)
        if card is None:
            raise NotFound(
                f"The model '{name}' does not exist. GET /v1/models lists those that do.",
                reason="model_not_found",
                param="model",
            )
        anthropic = dialect_of(request.url.path, request.headers) is Dialect.ANTHROPIC
        return json_response(_as_anthropic(card) if anthropic else card)


def _cards(control: Control, principal: Principal) -> list[dict[str, Any]]:
    """The models that a key may use, by name and alias, then LoRA adapters with their `parent`."""
    windows = {s.name: s.routing.pools[-1].window_tokens for s in control.models}
    usable = {name: model for name, model in control.names.items() if principal.opens(model)}
    for alias, models in control.splits.items():
        opened = [model for model in models if principal.opens(model)]
        if opened:
            usable[alias] = opened[0]
    adapters = [
        (name, served.name, {"parent": served.name})
        for served in control.models
        for name in served.adapters.names
        if name not in control.names and principal.opens(served.name, name)
    ]
    return [
        {
            "id": name,
            "object": "model",
            "created": control.created_unix_s,
            "owned_by": "sluice",
            "root": model,
            "max_model_len": windows[model],
            **more,
        }
        for name, model, more in [*((name, model, {}) for name, model in usable.items()), *adapters]
    ]


def _as_anthropic(card: dict[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's clients read it."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "max_input_tokens": card["max_model_len"],
    }


def _adapters(models: Iterable[ModelRuntime], now_s: float) -> dict[str, dict[str, list[str]]]:
    """The adapters of each model that a worker in the rotation has, and those that none has."""
    by_state: dict[str, dict[str, list[str]]] = {"adapters": {}, "adapters_missing": {}}
    for served in models:
        for name in served.adapters.names:
            ready = served.adapters.ready(name, served.fleet.pools, now_s)
            key = "adapters" if ready else "adapters_missing"
            by_state[key].setdefault(served.name, []).append(name)
    return by_state


def _by_worker(
    models: Iterable[ModelRuntime], note_of: Callable[[EngineState], str | None]
) -> dict[str, str]:
    """model/pool/worker -> what is to be told of its engine; at most SHOWN."""
    notes = (
        (f"{served.name}/{pool.name}/{worker}", note)
        for served in models
        for pool in served.fleet.pools
        for i, worker in members.present(pool)
        if (note := note_of(pool.engine_of[i])) is not None
    )
    return dict(islice(notes, SHOWN))


def _without_state(failure: StateFailure) -> Refusal:
    if isinstance(failure, StorageFull):
        return Refusal(
            "The gateway's storage has no room left, and nothing of this was kept. Delete files, "
            "or have its operator make room.",
            reason="storage_full",
            should_retry=False,
        )
    return Unavailable(
        "What the gateway keeps of this cannot be read or written now. Try again shortly.",
        reason="state_unavailable",
        retry_after_s=2.0,
    )


def _handle_errors(app: FastAPI, wrong_keys: WrongKeys) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        if refusal.status == 401 and request.client is not None:
            await asyncio.sleep(wrong_keys.delay_s(request.client.host))
        headers = {n.decode(): v.decode() for n, v in error_headers(refusal)}
        body = error_body(refusal, dialect_of(request.url.path, request.headers))
        return Response(body, status_code=refusal.status, headers=headers)

    @app.exception_handler(StateFailure)
    async def away(request: Request, failure: StateFailure) -> Response:
        _log.error("%s %s: %s", request.method, request.url.path, failure)
        return await refused(request, _without_state(failure))

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # unread: the client left while sending its body

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            refusal: Refusal = NotFound(
                f"Unknown path {request.url.path}. The API is under /v1; GET /docs lists it.",
                reason="unknown_path",
            )
        elif error.status_code == 405:
            methods = ["OPTIONS"]
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                scope = {**request.scope, "method": method}
                if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
                    methods += ("GET", "HEAD") if method == "GET" else (method,)
            allowed = ", ".join(sorted(methods))
            if request.method == "OPTIONS":
                return Response(status_code=204, headers={"allow": allowed})
            error.headers = {"allow": allowed}
            refusal = Refusal(
                f"{request.method} is not allowed on {request.url.path}.",
                reason="method_not_allowed",
            )
        else:
            refusal = BadRequest(str(error.detail), reason="bad_request")
            refusal.status = error.status_code
        response = await refused(request, refusal)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        refusal = BadRequest(f"{where}: {first['msg']}.", reason="bad_request", param=where)
        return await refused(request, refusal)
