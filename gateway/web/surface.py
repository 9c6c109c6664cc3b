"""What the control plane shows and may do, handed to it by the composition root."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.domain import Principal
from gateway.policy.served import ServedModel
from gateway.web.metrics import MetricsPage

Authenticate = Callable[[bytes | None], Principal]


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane shows and may do."""

    models: tuple[ServedModel, ...]
    names: Mapping[str, str]
    """Name or alias -> model, `*` excluded."""
    metrics: MetricsPage
    find_decision: Callable[[str], msgspec.Struct | None]
    latest_decisions: Callable[[int], list[msgspec.Struct]]
    entitlements: tuple[dict[str, Any], ...]
    draining: Callable[[], bool]
    clock: Callable[[], float]
    admin_key_sha256: bytes | None
    authenticate: Authenticate
    version: str
    created_unix_s: int
    openapi: Callable[[], dict[str, Any]]
