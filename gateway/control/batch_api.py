"""Files and batches, in OpenAI's shapes.

The presented key selects the tenant, of which ids open only what is its own. A key is checked
before anything of a body is read. An upload is passed on as it comes, and counts in the tenant's
bodies with what the gateway holds of it.
"""

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.batches.service import BatchRequest, BatchService
from gateway.control.surface import MAX_BODY_BYTES, Control, read_within
from gateway.errors import NotFound, Refusal, TooLarge
from gateway.http.body_bytes import BodyBytes, Share
from gateway.http.problems import json_response
from gateway.payload.head import read_head
from gateway.payload.schema import undecodable
from gateway.records.batch import ENDED, OUTPUTS, Batch, Promise, StoredFile, output_id
from gateway.records.request import Principal
from gateway.records.usage import NANO

_RANGE: Final = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_TIMES: Final = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
)
_Opened = Callable[[Request], Awaitable[tuple[BatchService, Principal]]]
"""The service, and whose key a request presents. Raises Refusal."""
_Short = Annotated[str, msgspec.Meta(max_length=512)]


class _Kept(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class _Own(msgspec.Struct, forbid_unknown_fields=True):
    accept_late: bool = False


class _Create(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: _Short = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], _Short], msgspec.Meta(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: _Kept | None = None
    sluice: _Own = msgspec.field(default_factory=_Own)


_create: Final = msgspec.json.Decoder(_Create).decode


def batch_router(control: Control, service: BatchService | None, bodies: BodyBytes) -> APIRouter:
    """The routes; without a service each says how to turn it on."""
    app = APIRouter()

    async def opened(request: Request) -> tuple[BatchService, Principal]:
        principal = await control.principal(request)
        if service is None:
            raise NotFound(
                "This gateway takes no files and batches: its operator can set `batches.url`.",
                reason="batches_off",
            )
        return service, principal

    _file_routes(app, opened, bodies)
    _batch_routes(app, opened)
    return app


def _file_routes(app: APIRouter, opened: _Opened, bodies: BodyBytes) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        """Upload a file of requests: a form with the fields `purpose` (batch) and `file`."""
        batches, principal = await opened(request)
        batches.check_length(int(request.headers.get("content-length", 0)))
        share = Share(bodies, principal.tenant)
        kind = request.headers.get("content-type", "")
        try:
            stored = await batches.upload(principal.tenant, kind, request.stream(), share.cover)
        finally:
            share.give_back()
        return json_response(_file(stored))

    @app.get("/v1/files")
    async def files(
        request: Request,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """The tenant's files, outputs of batches included."""
        batches, principal = await opened(request)
        shown = await batches.files(
            principal.tenant, after, limit + 1, oldest_first=order == "asc", purpose=purpose
        )
        return _page([_file(stored) for stored in shown], limit)

    @app.get("/v1/files/{name}")
    async def file(name: str, request: Request) -> Response:
        """One file."""
        batches, principal = await opened(request)
        return json_response(_file((await batches.file(principal.tenant, name))[0]))

    @app.delete("/v1/files/{name}")
    async def delete(name: str, request: Request) -> Response:
        """Delete a file that no unfinished batch reads."""
        batches, principal = await opened(request)
        await batches.delete_file(principal.tenant, name)
        return json_response({"id": name, "object": "file", "deleted": True})

    @app.get("/v1/files/{name}/content")
    async def content(name: str, request: Request) -> Response:
        """The bytes of a file, or a range of them."""
        batches, principal = await opened(request)
        stored, _ = await batches.file(principal.tenant, name)
        asked = _range(request.headers.get("range", ""), stored.bytes)
        start, end = asked or (0, stored.bytes)
        headers = {"content-length": str(end - start), "accept-ranges": "bytes"}
        if asked:
            headers["content-range"] = f"bytes {start}-{end - 1}/{stored.bytes}"
        return StreamingResponse(
            batches.content(stored, start, end),
            206 if asked else 200,
            headers,
            "application/octet-stream",
        )


def _batch_routes(app: APIRouter, opened: _Opened) -> None:
    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        """Create a batch of an uploaded file."""
        batches, principal = await opened(request)
        refusal = TooLarge(f"The body is over {MAX_BODY_BYTES} bytes.")
        try:
            asked = _create(await read_within(request, MAX_BODY_BYTES, refusal))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise undecodable(error) from None
        kept = asked.output_expires_after
        batch = await batches.create(
            principal,
            BatchRequest(
                input_file_id=asked.input_file_id,
                endpoint=asked.endpoint,
                completion_window=asked.completion_window,
                metadata=asked.metadata,
                keep_s=batches.kept_s(
                    None if kept is None else kept.seconds, "output_expires_after"
                ),
                accept_late=asked.sluice.accept_late,
            ),
            read_head(request.scope["headers"]).entitlement,
        )
        return json_response(batch_object(batch))

    @app.get("/v1/batches")
    async def list_batches(
        request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """The tenant's batches, newest first."""
        batches, principal = await opened(request)
        page = await batches.batches(principal.tenant, after, limit + 1)
        return _page([batch_object(batch) for batch in page], limit)

    @app.get("/v1/batches/{name}")
    async def retrieve(name: str, request: Request) -> Response:
        """One batch."""
        batches, principal = await opened(request)
        return json_response(batch_object((await batches.batch(principal.tenant, name))[0]))

    @app.post("/v1/batches/{name}/cancel")
    async def cancel(name: str, request: Request) -> Response:
        """Cancel a batch; what it has done stays."""
        batches, principal = await opened(request)
        return json_response(batch_object(await batches.cancel(principal.tenant, name)))


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's clients read it, and in `sluice` what was promised and is expected."""
    errors = [msgspec.to_builtins(problem) for problem in batch.problems]
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
        **{f"{name}_at": getattr(batch, f"{name}_unix_s") for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
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
    bad = len(stored.problems)
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created_unix_s,
        "expires_at": stored.expires_unix_s,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "error" if bad else "processed",
        "status_details": f"{stored.problems[0].message} (line {stored.problems[0].line})"
        if bad
        else None,
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
