"""The control plane's dependencies for tests: whatever a test does not state is empty."""

import hashlib
from collections.abc import Callable
from typing import Any

from gateway.control.metrics_page import MetricsPage
from gateway.control.roles import RoleKeys
from gateway.control.surface import Control
from gateway.metrics import Metrics
from gateway.replicas.calls import ReplicaCalls
from gateway.tenancy.keyring import authenticate_head
from gateway.usage.claims import Claims
from gateway.usage.request_log import DecisionRing
from tests.builders import served_model, short_and_long
from tests.fakes import nothing_drained
from tests.tenancy_fakes import SHAPES, TenancyRig

ADMIN_KEY = "sk-admin"
VIEWER_KEY = "sk-viewer"
KEYS = RoleKeys(
    admin_sha256=hashlib.sha256(ADMIN_KEY.encode()).digest(),
    viewer_sha256=hashlib.sha256(VIEWER_KEY.encode()).digest(),
)


class Replies(ReplicaCalls):
    """Other replicas: what they answer to a question, and what was asked."""

    def __init__(self, answers: Callable[[str, bytes], list[bytes]] = lambda *_: []) -> None:
        super().__init__()
        self.answers = answers
        self.asked: list[tuple[str, bytes]] = []

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        """The answers."""
        self.asked.append((topic, payload))
        return self.answers(topic, payload)

    async def search(self, topic: str, payload: bytes) -> list[bytes]:
        """The same, of a search."""
        return await self.ask(topic, payload)


def bearer(key: str) -> dict[str, str]:
    """The headers that present a key."""
    return {"authorization": f"Bearer {key}"}


def control_of(rig: TenancyRig | None = None, **fields: Any) -> Control:
    """Over a rig's tenants, and one model, `m`."""
    rig = rig or TenancyRig()
    stated: dict[str, Any] = {
        "models": (served_model(table=short_and_long()),),
        "names": {"m": "m"},
        "metrics": Metrics(),
        "page": MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0),
        "ring": DecisionRing(1_000),
        "registry": rig.entitlements,
        "tenants": rig.tenants,
        "budgets": None,
        "add_worker": None,
        "remove_worker": None,
        "reload": None,
        "claims": Claims("", Metrics(), None),
        "compare": None,
        "view": rig.store.view,
        "managed": lambda model: model == "m",
        "shapes": SHAPES,
        "drain": nothing_drained,
        "peers": ReplicaCalls(),
        "replicas": lambda: 1,
        "store_up": lambda: True,
        "draining": lambda: False,
        "clock": rig.clock,
        "keys": KEYS,
        "authenticate": lambda head: authenticate_head(rig.keyring, head, rig.clock()),
        "version": "0",
        "created_unix_s": 0,
    }
    return Control(**{**stated, **fields})
