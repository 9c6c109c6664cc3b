"""What the control plane shows and may do, handed to it by the composition root."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from gateway.policy.model_runtime import ServedModel
from gateway.ports import PoolView
from gateway.records.request import Principal
from gateway.web.control.peers import Answers, NoPeers, Peers
from gateway.web.http.wrong_keys import WrongKeys
from gateway.web.metrics.page import MetricsPage

Authenticate = Callable[[bytes | None], Principal]
"""By the SHA-256 digest of the key as presented; None without one."""


class EntitlementDesk(Protocol):
    """Entitlements at run time, as the admin routes use them. All raise Refusal.

    `who` is the admin key's fingerprint, for the audit. An entitlement is a mapping of the
    file's fields and of what is counted; a new key stands under "key", once.
    """

    async def page(
        self, *, model: str | None, tenant: str | None, after: str | None, limit: int
    ) -> dict[str, object]:
        """Some of them, oldest first: "data", and "next" for the next page's `after`."""

    async def get(self, name: str) -> dict[str, object]:
        """One of them."""

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """A new one, with its first key."""

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Other values for some fields; None takes one away.

        `version`, here and below: the "revision" it must still be of; None for any.
        """

    async def suspend(
        self, name: str, who: str, *, undo: bool = False, version: int | None = None
    ) -> dict[str, object]:
        """Refuse its requests, or no longer."""

    async def expire(
        self, name: str, at: str | None, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Have it end at a time (ISO 8601), or now."""

    async def delete(self, name: str, who: str, *, version: int | None = None) -> None:
        """Forget it."""

    async def add_key(
        self, name: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """A second live key."""

    async def revoke_key(
        self, name: str, fingerprint: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """End a key."""

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools; none where nothing is counted."""

    def audit(self, count: int) -> list[dict[str, object]]:
        """The newest changes, newest first."""


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane shows and may do."""

    models: tuple[ServedModel, ...]
    names: Mapping[str, str]
    """Name or alias -> model, `*` excluded."""
    metrics: MetricsPage
    find_decision: Callable[[str], bytes | None]
    """The record of a request, as JSON."""
    latest_decisions: Callable[[int], list[msgspec.Raw]]
    drain: Callable[[str, bool], int]
    """Take a worker out of the rotation (True) or return it: of how many pools."""
    peers: Peers = NoPeers()
    """Other replicas that serve the same clients."""
    management_port: int = 0
    """Where metrics and admin routes are served; 0: on every port."""
    answers: Answers | None = None
    """None: no other replica asks."""
    registry: EntitlementDesk | None = None
    """None: no admin routes of entitlements."""
    draining: Callable[[], bool]
    clock: Callable[[], float]
    admin_key_sha256: bytes | None
    authenticate: Authenticate
    version: str
    created_unix_s: int
    openapi: Callable[[], dict[str, Any]]
    wrong_keys: WrongKeys = msgspec.field(default_factory=WrongKeys)
