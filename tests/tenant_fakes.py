"""Tenants of one process over a directory; several over one are replicas."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from gateway.adapters.records.audit import Audit
from gateway.adapters.store.directory import MemoryDirectory
from gateway.adapters.tenants.entries import FileTenant, TenantEntry, TenantFile
from gateway.adapters.tenants.keys import TenantKeyRegistry
from gateway.adapters.tenants.sync import TenantSync
from gateway.ports import Directory
from gateway.records.limit import Limit
from gateway.records.request import Principal, TenantKey
from gateway.records.token import TokenIdentity
from gateway.settings import parse
from gateway.stages.authenticate import Keyring, authenticate, entitled
from gateway.wiring.tenants import checked_limits
from tests.fakes import FakeClock

WHO = "adm1n000"
CONFIG = parse(
    """
version: 1
models:
  - {name: m, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://a"]}}}
""",
    "f",
    {},
)
"""A file without tenants."""


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def file_of(*tenants: str, **keys: TenantKey) -> TenantFile:
    """A file with tenants, and with keys by name, each of the first tenant."""
    found = {name: FileTenant() for name in tenants}
    if keys:
        found[tenants[0]] = FileTenant(keys=tuple(keys.values()))
    return TenantFile(tenants=found, order={"acme": ("chat", "code")}, currency="EUR")


def file_key(name: str, tenant: str = "acme", **more: Any) -> TenantKey:
    fields: dict[str, Any] = {"entitlements": ("chat", "code"), **more}
    return TenantKey(tenant=tenant, name=name, sha256=digest(f"sk-{name}"), **fields)


class SaysTenant:
    """A verifier of tokens whose text is `token-` and the name of their tenant."""

    def verify(self, token: bytes) -> TokenIdentity:
        """See TokenVerifier."""
        tenant = token.removeprefix(b"token-").decode()
        return TokenIdentity(
            issuer="i", name="jwt:a", tenant=tenant, tenant_claim="tenant", until_unix_s=inf
        )

    async def keys_read(self) -> None:
        """See TokenVerifier."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """See TokenVerifier."""


class TenantRig:
    """A registry of tenants whose tenant `acme` is entitled to two models."""

    def __init__(
        self,
        directory: Directory[TenantEntry] | None = None,
        file: TenantFile | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock(1_900_000_000.0)
        self.limits: dict[str, list[str]] = {}
        """By tenant, ids of its keys' limits."""
        self.counted = 0
        """Calls that ask for limits to be counted."""
        self.directory = directory or MemoryDirectory()
        self.keyring = Keyring(verifier=SaysTenant())
        for name, model in (("chat", "m"), ("code", "n")):
            self.keyring.put(Principal(entitlement=name, tenant="acme", model=model), ())
        self.sync = TenantSync(
            self.directory,
            self.keyring,
            file or TenantFile(currency="EUR"),
            clock=self.clock,
            chance=lambda: 0.5,
            observer=self,
        )
        self.trail = Audit(self.clock)
        self.registry = TenantKeyRegistry(
            self.sync,
            self.trail,
            wall_clock=self.clock,
            read_limits=partial(checked_limits, CONFIG),
            adapters=lambda model: [f"{model}-lora"],
        )

    async def start(self) -> "TenantRig":
        """Read the directory; tests poll."""
        await self.sync.poll()
        return self

    async def add(self, name: str, tenant: str = "acme", **fields: Any) -> str:
        """A new key of a tenant that exists."""
        made = await self.registry.add_key(tenant, {"name": name, **fields}, WHO)
        return str(made["key"])

    def limits_changed(self, tenant: str, limits: Sequence[Limit]) -> None:
        """See LimitsObserver."""
        self.limits[tenant] = [limit.id for limit in limits]

    async def count_limits(self) -> None:
        """See LimitsObserver."""
        self.counted += 1

    def limited(self, key: str) -> dict[str, int]:
        """The limits of a request with this key, by id."""
        principal = authenticate(self.keyring, digest(key), self.clock())
        return {limit.id: limit.amount for limit in principal.choices["m"][0].limits}

    def asks(self, key: str, model: str = "m", adapter: str = "") -> str:
        """The entitlement of a request with this key. Raises Refusal."""
        now_s = self.clock()
        principal = authenticate(self.keyring, digest(key), now_s)
        return entitled(principal, model, now_s, adapter=adapter).entitlement

    def of_token(self, tenant: str = "acme", model: str = "m") -> list[str]:
        """The entitlements for a model that a token of the tenant opens. Raises Refusal."""
        token = f"token-{tenant}"
        found = authenticate(self.keyring, digest(token), self.clock(), token.encode())
        return [each.entitlement for each in found.choices.get(model, ())]

    def opens(self, key: str) -> bool:
        """Whether the keyring knows a key."""
        return self.keyring.find(digest(key)) is not None

    def rows(self, tenant: str = "acme") -> list[Mapping[str, Any]]:
        """The rows of a tenant's keys."""
        rows: Any = self.registry.get(tenant)["keys"]
        return list(rows)
