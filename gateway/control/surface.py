"""The control plane's dependencies, provided by the composition root, and how it reads bodies."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson
from fastapi import Query, Request

from gateway.admission.entitlement_terms import ModelShape
from gateway.control.metrics_page import MetricsPage
from gateway.control.roles import RoleKeys
from gateway.errors import BadRequest, Refusal, TooLarge
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.body_bytes import Share
from gateway.http.wrong_keys import WrongKeys
from gateway.metrics import Metrics
from gateway.payload.head import read_head
from gateway.ports import AccountView
from gateway.records.batch import Batch
from gateway.records.proof import Proof
from gateway.records.request import Principal, RequestHead
from gateway.replicas.calls import ReplicaCalls
from gateway.tenancy.entitlement_admin import EntitlementAdmin
from gateway.tenancy.tenant_admin import TenantAdmin
from gateway.usage.budgets import BudgetService
from gateway.usage.claims import Claims
from gateway.usage.request_log import DecisionRing

MAX_BODY_BYTES: Final = 65_536
PAGE: Final = 100
LARGEST_PAGE: Final = 1_000

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE)]
Authenticate = Callable[[RequestHead], Awaitable[Principal]]
"""Maps a request's head, with the presented key or token, to its principal. Raises Refusal."""


class NewWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that an admin adds; its CA and way of ranks are those of the pool's first.

    It gets no key of the file's, unless the file names its address.
    """

    model: str
    pool: str
    url: str
    served_model: str | None = None
    """Model name that it serves; None as configured."""
    ranks: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Data-parallel ranks; 0 as configured."""
    api_key: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,4096}\Z")] | None = None
    """The engine's own key; None: the file's for this address, else none."""

    def __repr__(self) -> str:
        return f"NewWorker({self.model}/{self.pool})"  # neither its key nor its URL's


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane's dependencies."""

    models: Sequence[ModelRuntime]
    """Those that are served now: a reload changes them in place, and `names` and `splits`."""
    retiring: Sequence[ModelRuntime] = ()
    """Models, or parts of them, that a reload removed and whose requests still run."""
    names: Mapping[str, str]
    """Name or alias -> model, without patterns of names."""
    splits: Mapping[str, tuple[str, ...]] = {}
    """Alias -> the models that it is split over."""
    metrics: Metrics
    page: MetricsPage
    batches: Callable[[], Sequence[Batch]] = tuple
    """The open ones of all tenants, those promised soonest first."""
    ring: DecisionRing
    """The newest decisions of this replica."""
    registry: EntitlementAdmin
    tenants: TenantAdmin
    budgets: BudgetService
    add_worker: Callable[[NewWorker], str]
    """Add an engine; returns its id. Idempotent. Raises Refusal."""
    remove_worker: Callable[[str], int]
    """Have an engine drain and go; returns the number of its pools."""
    reload: Callable[[Proof | None], Awaitable[Sequence[msgspec.Struct]]]
    """Read the file, apply it and attach its proof; returns what changed.

    Raises Refusal; then nothing changed."""
    claims: Claims
    compare: Callable[[str], Awaitable[msgspec.Struct]]
    """What a file with this text would change. Raises Refusal."""
    view: Callable[[str, Sequence[str]], Awaitable[list[AccountView]]]
    """`TokenPools.view`; called for managed models only."""
    managed: Callable[[str], bool]
    """Whether the model of this name is managed."""
    shapes: Mapping[str, ModelShape]
    """By model name."""
    drain: Callable[[str, bool], Awaitable[int]]
    """Take a worker out of the rotations of all replicas (True) or put it back.

    Returns the number of its pools; 0 if no replica has it.
    """
    peers: ReplicaCalls
    """Other replicas that serve the same clients."""
    replicas: Callable[[], int]
    """How many live, this one included."""
    store_up: Callable[[], bool]
    """Whether all shared and persistent state is reachable."""
    management_port: int = 0
    """Port that serves metrics and admin routes; 0: every port does."""
    draining: Callable[[], bool]
    unread: Callable[[], Collection[str]] = tuple
    """Directories to read before any key opens."""
    clock: Callable[[], float]
    keys: RoleKeys
    authenticate: Authenticate
    version: str
    created_unix_s: int
    wrong_keys: WrongKeys = msgspec.field(default_factory=WrongKeys)

    async def principal(self, request: Request) -> Principal:
        """Whose key or token the request presents. Raises Refusal."""
        return await self.authenticate(read_head(request.scope["headers"]))


async def read_within(
    request: Request, most_bytes: int, refusal: Refusal, share: Share | None = None
) -> bytes:
    """The body, counted in `share`; raises the refusal as soon as it is longer."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise refusal
        if share is not None:
            share.cover(len(body))
    return bytes(body)


async def read_object(request: Request, *, empty: bool = False) -> dict[str, Any]:
    """The body's JSON object; with `empty`, {} for no body. Raises TooLarge, BadRequest.

    Not read by FastAPI, whose errors would quote the body.
    """
    refusal = TooLarge(f"The body is over {MAX_BODY_BYTES} bytes.")
    body = await read_within(request, MAX_BODY_BYTES, refusal)
    if empty and not body:
        return {}
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest("The body is not JSON.", reason="invalid_json") from error
    if not isinstance(content, dict):
        raise BadRequest("The body is not a JSON object.", reason="invalid_json")
    return content
