"""The control plane's dependencies, provided by the composition root."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from gateway.control.attainment import Attainment
from gateway.control.metrics_page import MetricsPage
from gateway.control.peers import Answers, NoPeers, Peers
from gateway.control.roles import RoleKeys
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.wrong_keys import WrongKeys
from gateway.metrics import Metrics
from gateway.ports import PoolView
from gateway.records.request import Principal, RequestHead

Authenticate = Callable[[RequestHead], Awaitable[Principal]]
"""Maps a request's head, with the presented key or token, to its principal. Raises Refusal."""


class EntitlementService(Protocol):
    """Entitlements at run time, as the admin routes use them. All methods raise Refusal.

    `who` is the admin key that acts, for the audit. An entitlement is returned as a mapping of
    the file's fields and its counters; a new key is under "key", in one answer only.
    """

    async def page(
        self, *, model: str | None, tenant: str | None, after: str | None, limit: int
    ) -> dict[str, Any]:
        """One page, oldest first: "data", and in "next" the `after` of the next page."""

    async def get(self, name: str) -> dict[str, object]:
        """One entitlement."""

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create an entitlement with its first key."""

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Change some fields; None removes one.

        `version`, here and below: the "revision" that the entitlement must have; None for any.
        """

    async def suspend(
        self, name: str, who: str, *, undo: bool = False, version: int | None = None
    ) -> dict[str, object]:
        """Refuse its requests; `undo` admits them again."""

    async def expire(
        self, name: str, at: str | None, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Set its expiry to a time (ISO 8601); None for now."""

    async def delete(self, name: str, who: str, *, version: int | None = None) -> dict[str, object]:
        """Delete it. Returns what the answer has to say of it, as all changes do ("warning")."""

    async def add_key(
        self, name: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a second valid key."""

    async def revoke_key(
        self, name: str, fingerprint: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Revoke a key."""

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools; empty for models that are not managed."""

    def audit(self, count: int) -> list[dict[str, object]]:
        """The newest changes, newest first."""


class TenantService(Protocol):
    """Tenants and their keys at run time. All methods raise Refusal.

    A key is named by its name or its fingerprint; a new one is under "key", in one answer only.
    """

    async def page(self, *, after: str | None, limit: int) -> dict[str, object]:
        """One page by name: "data", and in "next" the `after` of the next page."""

    def get(self, name: str) -> dict[str, object]:
        """One tenant with its keys."""

    def search(self, begins: str, page: int, size: int, most_keys: int) -> dict[str, Any]:
        """A page of tenants whose names begin so: "rows", "found", "total", "page", "pages".

        A row has at most so many keys, each with "name" and "state".
        """

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create a tenant."""

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Change some fields; None removes one. `version` as of an entitlement."""

    async def delete(
        self, name: str, who: str, *, version: int | None = None, force: bool = False
    ) -> dict[str, object]:
        """Delete a tenant and its keys, with `force` its entitlements, too."""

    async def add_key(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a key."""

    async def change_key(
        self,
        name: str,
        key: str,
        fields: Mapping[str, object],
        who: str,
        *,
        version: int | None = None,
    ) -> dict[str, object]:
        """Change some fields of a key; None removes one."""

    async def rotate_key(
        self,
        name: str,
        key: str,
        fields: Mapping[str, object],
        who: str,
        *,
        version: int | None = None,
    ) -> dict[str, object]:
        """Give a key a new value; the old one opens a while longer."""

    async def revoke_key(
        self, name: str, key: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """End a key for good."""


class BudgetService(Protocol):
    """Budgets and limits of keys, as the routes use them. Methods raise Refusal."""

    async def page(self, after: str | None, limit: int) -> dict[str, object]:
        """Limits by id with their counters: "data", and in "next" the `after` of the next page."""

    async def add(self, limit_id: str, by: object, who: str) -> dict[str, object]:
        """Add to a budget until its window ends."""


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


class WorkerService(Protocol):
    """Workers at run time, as the admin routes use them. All methods raise Refusal."""

    def add(self, asked: NewWorker) -> str:
        """Add an engine; returns its id. Idempotent."""

    def remove(self, worker: str) -> int:
        """Have an engine drain and go; returns the number of its pools."""


class ReloadService(Protocol):
    """Reloads the configuration. Both methods raise Refusal; then nothing changed."""

    async def reload(self) -> Sequence[msgspec.Struct]:
        """Read the file and apply it; returns what changed, as `Change` of the settings."""

    async def compare(self, text: str) -> msgspec.Struct:
        """What a file with this text would change, as `Comparison` of the settings."""


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
    metrics: MetricsPage
    find_decision: Callable[[str], bytes | None]
    """The record of a request, as JSON."""
    latest_decisions: Callable[[int], list[msgspec.Raw]]
    drain: Callable[[str, bool], Awaitable[int]]
    """Take a worker out of the rotations of all replicas (True) or put it back.

    Returns the number of its pools; 0 if no replica has it.
    """
    workers: WorkerService | None = None
    """None: there are no admin routes that add or remove workers."""
    budgets: BudgetService | None = None
    """None: there are no admin routes of budgets."""
    reload: ReloadService | None = None
    """None: there is no admin route that reloads the configuration."""
    peers: Peers = NoPeers()
    """Other replicas that serve the same clients."""
    management_port: int = 0
    """Port that serves metrics and admin routes; 0: every port does."""
    answers: Answers | None = None
    """None if there are no other replicas."""
    registry: EntitlementService | None = None
    """None: there are no admin routes for entitlements."""
    tenants: TenantService | None = None
    """None: there are no admin routes for tenants."""
    attainment: Attainment = msgspec.field(default_factory=lambda: Attainment(Metrics()))
    """How often entitlements kept their targets."""
    draining: Callable[[], bool]
    unread: Callable[[], Collection[str]] = tuple
    """Directories to read before any key opens."""
    clock: Callable[[], float]
    keys: RoleKeys
    authenticate: Authenticate
    version: str
    created_unix_s: int
    openapi: Callable[[], dict[str, Any]]
    wrong_keys: WrongKeys = msgspec.field(default_factory=WrongKeys)
