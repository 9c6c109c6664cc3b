"""Tenancy of one process over fakes; several over one directory are gateways of a fleet."""

import hashlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import msgspec

from gateway.admission.entitlement_terms import ModelShape
from gateway.errors import BadRequest
from gateway.ports import AccountView, Directory, PoolView, TokenVerifier
from gateway.records.entitlement import Entitlement
from gateway.records.limit import Limit
from gateway.records.request import TenantKey
from gateway.records.tenancy import (
    NO_FILE,
    DirectoryChange,
    DirectoryState,
    FileEntitlement,
    FileTenant,
    RowKind,
    TenancyFile,
    TokenIdentity,
    Written,
)
from gateway.settings import ConfigError, parse
from gateway.settings.loading import read_admin_fields
from gateway.store.sqlite_directory import SqliteDirectory
from gateway.store.sqlite_file import SqliteFile, open_file
from gateway.tenancy.changes import Audit
from gateway.tenancy.entitlement_admin import EntitlementAdmin
from gateway.tenancy.keyring import Keyring, authenticate, entitled
from gateway.tenancy.tenancy import Tenancy
from gateway.tenancy.tenant_admin import TenantAdmin
from tests.fakes import FakeClock

_T = TypeVar("_T")
WHO = "adm1n000"
SHAPE = ModelShape(name="m", pools=("short", "long"), slots=(24, 8), max_slots=(48, 16))
SHAPES = {
    "m": SHAPE,
    "n": ModelShape(name="n", pools=("only",), slots=(8,)),
    "plain": ModelShape(name="plain", pools=("only",), slots=(8,)),
}
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


@dataclass
class FakePools:
    """TokenPools that keeps what it is told. `fail_with` is raised instead."""

    defined: dict[tuple[str, str], Entitlement] = field(default_factory=dict)
    inflight: dict[str, int] = field(default_factory=dict)
    fail_with: Exception | None = None
    calls: int = 0

    def _called(self) -> None:
        self.calls += 1
        if self.fail_with is not None:
            raise self.fail_with

    async def define(self, terms: Entitlement) -> None:
        """See TokenPools."""
        self._called()
        self.defined[terms.model, terms.name] = terms

    async def remove(self, model: str, name: str) -> bool:
        """See TokenPools."""
        self._called()
        if self.inflight.get(name):
            return False
        self.defined.pop((model, name), None)
        return True

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        """See TokenPools."""
        self._called()
        return [self._view(self.defined[model, n]) for n in names if (model, n) in self.defined]

    async def pools(self, model: str) -> list[PoolView]:
        """See TokenPools."""
        self._called()
        view = PoolView(
            slots=24,
            inflight=3,
            kv_capacity_bytes=0,
            kv_bytes=0,
            idle_dedicated=0,
            service_s=5.0,
            desired_replicas=2,
        )
        return [view, view]

    def _view(self, terms: Entitlement) -> AccountView:
        return AccountView(
            name=terms.name,
            state="suspended" if terms.suspended else "bound",
            inflight=(self.inflight.get(terms.name, 0), 0),
            kv_bytes=1 << 30,
            level_tokens=90.4,
            depth_tokens=100.0,
            debt=0.25,
            burst=0.5,
            weight=33.0,
            debited=10,
            refunded=4,
            used=6,
        )


class _AtOnce(SqliteFile):
    """A database in memory without a thread: histories are many."""

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return self._run(work)

    def copy(self) -> bytes:
        return b"" if self._connection is None else self._connection.serialize()

    def restore(self, older: bytes) -> None:
        self._close()
        if older:
            self._connection = open_file(None)
            self._connection.deserialize(older)


class FlakyDirectory(SqliteDirectory):
    """A directory in memory that can be away, and can be replaced by an older copy of itself."""

    def __init__(self) -> None:
        super().__init__(None)
        self._file: _AtOnce = _AtOnce(None)
        self.fail_with: Exception | None = None
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1
        if self.fail_with is not None:
            raise self.fail_with

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        """See Directory."""
        self._called()
        return await super().read(since, mark)

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        """See Directory."""
        self._called()
        return await super().write(change, floor=floor, after=after)

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        """See Directory."""
        self._called()
        return await super().give_back(state, floor=floor)

    async def close(self) -> None:
        """Others over it go on."""

    def copy(self) -> bytes:
        """What it holds; nothing may be running."""
        return self._file.copy()

    def restore(self, older: bytes) -> None:
        """Hold this instead; b"" for nothing, as a server restarted without its data."""
        self._file.restore(older)


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


def read_fields(kind: RowKind, fields: Mapping[str, object]) -> dict[str, Any]:
    """Checks fields as the gateway does."""
    try:
        return read_admin_fields(CONFIG, kind, fields)
    except ConfigError as error:
        found = error.problems[0]
        code = "invalid_entitlement" if kind == "entitlement" else "invalid_tenant"
        raise BadRequest(
            f"{found.path}: {found.message}; {found.fix}.", reason=code, code=code, param=found.path
        ) from None


class TenancyRig:
    """Tenants, entitlements and keys of one gateway, with their admin operations."""

    def __init__(
        self,
        directory: Directory | None = None,
        *,
        clock: FakeClock | None = None,
        store: Any = None,
        verifier: TokenVerifier | None = None,
    ) -> None:
        self.clock = clock or FakeClock(1_900_000_000.0)
        self.directory: Any = directory or FlakyDirectory()
        self.keyring = Keyring(verifier=verifier)
        self.store: FakePools = store or FakePools()
        self.changed: list[str] = []
        self.limits: dict[str, list[str]] = {}
        """By tenant, ids of its keys' limits."""
        self.counted = 0
        """Calls that ask for limits to be counted."""
        self.shapes = dict(SHAPES)
        self.tenancy = Tenancy(
            directory=self.directory,
            keyring=self.keyring,
            store=self.store,
            shapes=self.shapes,
            managed={"m"},
            changed=self.changed.append,
            clock=self.clock,
            chance=lambda: 0.5,
            limits_changed=self.limits_changed,
            count_limits=self.count_limits,
        )
        self.sync = self.tenancy
        self.trail = Audit(self.clock)
        self.entitlements = EntitlementAdmin(
            self.tenancy,
            self.trail,
            self.store,
            self.shapes,
            managed={"m"},
            wall_clock=self.clock,
            read_fields=read_fields,
        )
        self.tenants = TenantAdmin(
            self.tenancy,
            self.trail,
            wall_clock=self.clock,
            read_fields=read_fields,
            removal=self.entitlements.removal,
            adapters=lambda model: [f"{model}-lora"],
        )

    async def start(self, file: TenancyFile = NO_FILE) -> "TenancyRig":
        """Start without the task that polls: tests poll."""
        await self.tenancy.begin(file)
        return self

    def limits_changed(self, tenant: str, limits: Sequence[Limit]) -> None:
        """See Tenancy."""
        self.limits[tenant] = [limit.id for limit in limits]

    async def count_limits(self) -> None:
        """See Tenancy."""
        self.counted += 1

    def names(self) -> list[str]:
        """Entitlements that the store knows."""
        return sorted(name for _, name in self.store.defined)

    async def entitle(self, name: str, **fields: Any) -> str:
        """A new entitlement's key."""
        asked = {"name": name, "tenant": "acme", "model": "m", **fields}
        return str((await self.entitlements.create(asked, WHO))["key"])

    async def add(self, name: str, tenant: str = "acme", **fields: Any) -> str:
        """A new key of a tenant that exists."""
        made = await self.tenants.add_key(tenant, {"name": name, **fields}, WHO)
        return str(made["key"])

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
        rows: Any = self.tenants.get(tenant)["keys"]
        return list(rows)


def file_of(
    *tenants: str, entitlements: Any = None, unix_s: float = 0.0, **keys: TenantKey
) -> TenancyFile:
    """A file with tenants, and with keys by name, each of the first tenant.

    The tenant `acme` is entitled to the models `m` and `n`, unless `entitlements` are given.
    """
    listed = {name: FileTenant() for name in tenants}
    if keys:
        listed[tenants[0]] = FileTenant(keys=tuple(keys.values()))
    if entitlements is None:
        entitlements = [section("chat"), section("code", model="n")]
    order: dict[str, list[str]] = {}
    for each in entitlements:
        order.setdefault(each.fields["tenant"], []).append(each.fields["name"])
    return TenancyFile(
        tenants=listed,
        entitlements={
            each.fields["name"]: msgspec.structs.replace(each, place=each.place or place)
            for place, each in enumerate(entitlements, start=1)
        },
        order={tenant: tuple(names) for tenant, names in order.items()},
        currency="EUR",
        unix_s=unix_s,
    )


async def acme(*files: TenancyFile) -> TenancyRig:
    """A tenant `acme` that is entitled to two models by the file; made here unless in `files`."""
    found = await TenancyRig().start(*files or [file_of()])
    if not files:
        await found.tenants.create({"name": "acme"}, WHO)
    return found


def entitling(*entitlements: FileEntitlement, unix_s: float = 0.0) -> TenancyFile:
    """A file with entitlements alone."""
    return file_of(entitlements=entitlements, unix_s=unix_s)


def section(
    name: str, *keys: str, digest: str = "1", place: int = 0, **fields: Any
) -> FileEntitlement:
    """An entitlement as the configuration file gives it; `keys` are digests."""
    given = {"name": name, "tenant": "acme", "model": "m", **fields}
    return FileEntitlement(fields=given, digests=keys, section=digest, place=place)


def file_key(name: str, tenant: str = "acme", **more: Any) -> TenantKey:
    fields: dict[str, Any] = {"entitlements": ("chat", "code"), **more}
    return TenantKey(tenant=tenant, name=name, sha256=digest(f"sk-{name}"), **fields)
