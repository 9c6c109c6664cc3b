"""Fakes of what the registry of entitlements talks to, and a registry over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.adapters.entitlements.index import File
from gateway.adapters.entitlements.reconciler import EntitlementSync
from gateway.adapters.entitlements.registry import Registry
from gateway.adapters.store.directory import MemoryDirectory
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.entitlements.terms import ModelShape, terms_from
from gateway.ports import AccountView, DirectoryState, EntitlementEntry, PoolView, Written
from gateway.stages.authenticate import Keyring
from tests.fakes import FakeClock

SHAPE = ModelShape(name="m", pools=("short", "long"), slots=(24, 8), max_slots=(48, 16))
PLAIN = ModelShape(name="plain", pools=("only",), slots=(8,))
MODELS = {"m": SHAPE, "plain": PLAIN}


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


class FlakyDirectory(MemoryDirectory[EntitlementEntry]):
    """Directory that can be away, and can lose its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_with: Exception | None = None
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1
        if self.fail_with is not None:
            raise self.fail_with

    async def load(self) -> DirectoryState[EntitlementEntry]:
        """See Directory."""
        self._called()
        return await super().load()

    async def changes(self, since: int, mark: str) -> DirectoryState[EntitlementEntry] | None:
        """See Directory."""
        self._called()
        return await super().changes(since, mark)

    async def put(self, *entries: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """See Directory."""
        self._called()
        return await super().put(*entries, floor=floor, after=after)

    async def delete(self, entry: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """See Directory."""
        self._called()
        return await super().delete(entry, floor, after)

    def wipe(self) -> None:
        """Forget all, as a server restarted without its data."""
        MemoryDirectory.__init__(self)


class EntitlementRig:
    """A registry over fakes; several over one directory are replicas."""

    def __init__(
        self, directory: FlakyDirectory | None = None, *, clock: FakeClock | None = None
    ) -> None:
        self.clock = clock or FakeClock(1_900_000_000.0)
        self.directory = directory or FlakyDirectory()
        self.keyring = Keyring()
        self.store = FakePools()
        self.changed: list[str] = []
        self.models = dict(MODELS)
        self.sync = EntitlementSync(
            directory=self.directory,
            keyring=self.keyring,
            store=self.store,
            models=self.models,
            managed={"m"},
            changed=self.changed.append,
            clock=self.clock,
            chance=lambda: 0.5,
        )
        self.registry = Registry(
            self.sync, self.store, self.models, managed={"m"}, wall_clock=self.clock
        )

    async def start(
        self, *file: EntitlementEntry, guarded: bool = True, file_unix_s: float = 0.0
    ) -> "EntitlementRig":
        """Start without the task that polls: tests poll."""
        await self.sync.begin(File(file, file_unix_s), guarded=guarded)
        return self

    def names(self) -> list[str]:
        """Those that the store knows."""
        return sorted(name for _, name in self.store.defined)


def from_file(name: str, *keys: str, digest: str = "1", **fields: Any) -> EntitlementEntry:
    """An entry as the configuration file gives it."""
    written = {"name": name, "tenant": "acme", "model": "m", **fields}
    return EntitlementEntry(
        terms=terms_from(written, MODELS[written["model"]], 0),
        key_sha256=keys,
        origin="file",
        file_digest=digest,
    )
