"""Files and batches, in OpenAI's shapes.

The presented key selects the tenant, of which ids open only what is its own. A key is checked
before anything of a body is read. An upload is passed on as it comes, and counts in the tenant's
bodies with what the gateway holds of it.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.batches.service import BatchRequest, BatchService
from gateway.control.surface import MAX_BODY_BYTES, Control, read_within
from gateway.errors import NotFound, Refusal, TooLarge
from gateway.http.body_bytes import BodyBytes, Share
from gateway.http.problems import json_response
from gateway.payload.head import read_head
from gateway.payload.schema import undecodable
from gateway.records.batch import (
    ENDED,
    OUTPUTS,
    Batch,
    Promise,
    Status,
    StoredFile,
    output_id,
)
from gateway.records.request import Principal
from gateway.records.usage import NANO

_RANGE: Final = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_STATES: Final = tuple(state for state in get_args(Status) if state != "validating")
_decode: Final = msgspec.json.Decoder(BatchRequest).decode


def batch_router(control: Control, service: BatchService | None, bodies: BodyBytes) -> APIRouter:
    """The routes; without a service each says how to turn it on."""
    app, principal = APIRouter(), Depends(control.principal)
    if service is not None:
        _file_routes(app, service, principal, bodies)
        _batch_routes(app, service, principal)
        return app

    async def off() -> Response:
        raise NotFound(
            "This gateway takes no files and batches: its operator can set `batches.url`.",
            reason="batches_off",
        )

    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
        methods = ["GET", "POST", "DELETE"]
        app.add_api_route(path, off, dependencies=[principal], methods=methods)
    return app


def _file_routes(app: APIRouter, batches: BatchService, principal: Any, bodies: BodyBytes) -> None:
    @app.post("/v1/files")
    async def upload(request: Request, own: Principal = principal) -> Response:
        """Upload a file of requests: a form with the fields `purpose` (batch) and `file`."""
        share = Share(bodies, own.tenant)
        kind = request.headers.get("content-type", "")
        try:
            stored = await batches.upload(own.tenant, kind, request.stream(), share.cover)
        finally:
            share.give_back()
        return json_response(_file(stored))

    @app.get("/v1/files")
    async def files(
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
        own: Principal = principal,
    ) -> Response:
        """The tenant's files, outputs of batches included."""
        page = await batches.files(
            own.tenant, after, limit + 1, oldest_first=order == "asc", purpose=purpose
        )
        return _page([_file(stored) for stored in page], limit)

    @app.get("/v1/files/{name}")
    async def file(name: str, own: Principal = principal) -> Response:
        """One file."""
        return json_response(_file((await batches.own(StoredFile, own.tenant, name))[0]))

    @app.delete("/v1/files/{name}")
    async def delete(name: str, own: Principal = principal) -> Response:
        """Delete a file that no unfinished batch reads."""
        await batches.delete_file(own.tenant, name)
        return json_response({"id": name, "object": "file", "deleted": True})

    @app.api_route("/v1/files/{name}/content", methods=["GET", "HEAD"])
    async def content(name: str, request: Request, own: Principal = principal) -> Response:
        """The bytes of a file, or a range of them."""
        stored, _ = await batches.own(StoredFile, own.tenant, name)
        asked = _range(request.headers.get("range", ""), stored.bytes)
        start, end = asked or (0, stored.bytes)
        headers = {"content-length": str(end - start), "accept-ranges": "bytes"}
        if asked:
            headers["content-range"] = f"bytes {start}-{end - 1}/{stored.bytes}"
        status, kind = 206 if asked else 200, "application/octet-stream"
        if request.method == "HEAD":
            return Response(None, status, headers, kind)
        pieces = batches.content(stored, start, end)
        return StreamingResponse(pieces, status, headers, kind)


def _batch_routes(app: APIRouter, batches: BatchService, principal: Any) -> None:
    @app.post("/v1/batches")
    async def create(request: Request, own: Principal = principal) -> Response:
        """Create a batch of an uploaded file."""
        refusal = TooLarge(f"The body is over {MAX_BODY_BYTES} bytes.")
        try:
            asked = _decode(await read_within(request, MAX_BODY_BYTES, refusal))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise undecodable(error) from None
        entitlement = read_head(request.scope["headers"]).entitlement
        return json_response(batch_object(await batches.create(own, asked, entitlement)))

    @app.get("/v1/batches")
    async def list_batches(
        own: Principal = principal, after: str = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """The tenant's batches, newest first."""
        page = await batches.batches(own.tenant, after, limit + 1)
        return _page([batch_object(batch) for batch in page], limit)

    @app.get("/v1/batches/{name}")
    async def retrieve(name: str, own: Principal = principal) -> Response:
        """One batch."""
        return json_response(batch_object((await batches.own(Batch, own.tenant, name))[0]))

    @app.post("/v1/batches/{name}/cancel")
    async def cancel(name: str, own: Principal = principal) -> Response:
        """Cancel a batch; what it has done stays."""
        return json_response(batch_object(await batches.cancel(own.tenant, name)))


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's clients read it, and in `sluice` what was promised and is expected."""
    errors = msgspec.to_builtins(batch.problems)
    read = sum(part.input_tokens for part in batch.parts)
    written = sum(part.output_tokens for part in batch.parts)
    output, error = (
        output_id(batch.id, suffix)
        if batch.status in ENDED and batch.output_bytes(suffix)
        else None
        for suffix in OUTPUTS
    )
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": output,
        "error_file_id": error,
        "created_at": batch.created_unix_s,
        "expires_at": batch.expires_unix_s,
        **{f"{state}_at": batch.reached_unix_s.get(state) for state in _STATES},
        "request_counts": {n: getattr(batch, n) for n in ("total", "completed", "failed")},
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": sum(p.cached_tokens for p in batch.parts)},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
        "metadata": batch.metadata,
        "sluice": {
            **_promise(batch.promise),
            "forecast": _promise(batch.forecast) if batch.forecast else None,
            "accept_late": batch.accept_late,
            "message": batch.message or None,
        },
    }


def _promise(promise: Promise | None) -> dict[str, Any]:
    if promise is None:
        return dict.fromkeys(("finish_p50", "finish_p95", "cost", "promised_by"))
    return {
        "finish_p50": _instant(promise.finish_p50_unix_s),
        "finish_p95": _instant(promise.finish_p95_unix_s),
        "cost": promise.cost_nano / NANO,
        "promised_by": _instant(promise.promised_by_unix_s),
    }


def _instant(unix_s: int | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat()


def _file(stored: StoredFile) -> dict[str, Any]:
    bad = stored.problems[0] if stored.problems else None
    at = f" (line {bad.line})" if bad and bad.line else ""
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created_unix_s,
        "expires_at": stored.expires_unix_s,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "error" if bad else "processed",
        "status_details": bad and f"{bad.message}{at}",
    }


def _page(rows: list[dict[str, Any]], limit: int) -> Response:
    shown = rows[:limit]
    ids = [row["id"] for row in shown] or [None]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": ids[0],
            "last_id": ids[-1],
            "has_more": len(rows) > limit,
        }
    )


def _range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a range; None for the whole. Raises Refusal."""
    matched = _RANGE.fullmatch(header.strip())
    if matched is None or matched[0] == "bytes=-":
        return None
    first, last = matched.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise Refusal(
            f"The file has {size} bytes.",
            reason="range_not_satisfiable",
            headers=((b"content-range", b"bytes */%d" % size),),
        )
    return start, end
