"""Admission over HTTP for other proxies, which ask before they forward and report usage after.

Routes: POST /admission/authorize, POST /admission/usage. Both take the tenant's own key and refuse
in the data plane's format. Bodies are small JSON objects. Unknown fields are refused, because a
misspelt limit must not count as absent.
"""

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from gateway.admission.denials import limit_lines
from gateway.control.external_admission import ExternalRequest, Reporter, UsageReport
from gateway.control.external_admission_service import AdmissionService
from gateway.control.peers import NoPeers, Peers, settle_anywhere
from gateway.control.surface import Authenticate
from gateway.errors import TooLarge
from gateway.payload.body import MAX_CHOICES, MAX_MODEL_CHARS
from gateway.payload.head import MAX_REQUEST_ID, pairs_of, read_head
from gateway.payload.refusals import undecodable
from gateway.records.entitlement import key_name
from gateway.records.lease import Limits
from gateway.records.record import Record

MAX_BODY_BYTES: Final = 65_536
MAX_LEASE_S: Final = 3_600
LEASE_S: Final = 600.0
_MAX_TOKENS: Final = 2_147_483_647

Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_B = TypeVar("_B", bound=msgspec.Struct)


class AuthorizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admission/authorize. `input_tokens` or `text_bytes` is required."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
    input_tokens: Tokens | None = None
    text_bytes: Tokens | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    lease_s: Annotated[float, Meta(ge=1, le=MAX_LEASE_S)] = LEASE_S


class UsageBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admission/usage."""

    lease_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
    status: Literal["ok", "failed", "cancelled"] = "ok"
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    latency_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class AuthorizeAnswer(Record, frozen=True, kw_only=True):
    """A lease. If no usage is reported within `expires_in_s`, its estimate is charged."""

    lease_id: str
    pool: str
    spilled: bool
    weight: float
    reserved_tokens: int
    reserved_kv_bytes: int
    max_tokens: int | None
    expires_in_s: float
    would_deny: str | None
    limits: Limits | None


_authorize: Final = msgspec.json.Decoder(AuthorizeBody).decode
_usage: Final = msgspec.json.Decoder(UsageBody).decode


def admission_router(
    service: AdmissionService, authenticate: Authenticate, peers: Peers | None = None
) -> APIRouter:
    """The two routes over a service; `authenticate` maps a presented key to its principal.

    `peers` are other replicas that serve the same proxy.
    """
    app = APIRouter()
    others = peers or NoPeers()

    @app.post("/admission/authorize")
    async def authorize(request: Request) -> Response:
        """Decide whether a request may be forwarded: 200 with a lease, or a refusal."""
        head = read_head(request.scope["headers"])
        principal = await authenticate(head)
        body = await _read(request, _authorize)
        asked = ExternalRequest(
            **msgspec.structs.asdict(body),
            key=key_name(principal, head.key_digest),
            entitlement=head.entitlement,
        )
        found = await service.admit(principal, asked)
        lease = found.lease
        answer = AuthorizeAnswer(
            lease_id=lease.id,
            pool=found.pool,
            spilled=lease.spilled,
            weight=lease.weight,
            reserved_tokens=lease.cost_tokens,
            reserved_kv_bytes=lease.kv_bytes,
            max_tokens=found.max_tokens,
            expires_in_s=found.expires_in_s,
            would_deny=lease.would_deny or None,
            limits=lease.limits,
        )
        headers = () if lease.limits is None else pairs_of(limit_lines(lease.limits).encode())
        return _answer(answer, {name.decode(): value.decode() for name, value in headers})

    @app.post("/admission/usage")
    async def usage(request: Request) -> Response:
        """Report what the request used, which settles its lease once."""
        principal = await authenticate(read_head(request.scope["headers"]))
        body = await _read(request, _usage)
        report = UsageReport(**msgspec.structs.asdict(body))
        reporter = Reporter(tenant=principal.tenant, trusted=principal.trusted_usage)
        settled = await settle_anywhere(others, service.settle, report, reporter)
        arrival, service.arrival = service.arrival, None
        if arrival is not None:
            await arrival
        return _answer(settled)

    return app


def _answer(content: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


async def _read(request: Request, decode: Callable[[bytes], _B]) -> _B:
    """The decoded body. Raises BadRequest, TooLarge."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise TooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        return decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(error) from None
