"""Keeps the keys of tenants the same as the file and the directory give them.

`gateway.adapters.entitlements.following` has the rules of the directory. Tenants of the file never
enter it: each gateway reads its own file, and fleets with other files may share the directory.
"""

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway.adapters.entitlements.following import Following
from gateway.adapters.tenants.entries import (
    TenantEntry,
    TenantFile,
    default_of,
    keys_of,
    reconciled,
)
from gateway.ports import Directory
from gateway.records.limit import UNLIMITED, Limit
from gateway.records.request import Principal, TenantKey


class TenantKeys(Protocol):
    """The keyring: keys by tenant."""

    tenanted: bool
    """Whether requests need a key because a tenant ever had one."""
    held: set[str]
    """Suspended tenants."""
    unread: set[str]
    """Directories to read before any key opens."""

    def put_tenant(self, tenant: str, keys: Sequence[TenantKey]) -> None:
        """Replace a tenant's keys."""

    def remove_tenant(self, tenant: str) -> None:
        """Forget a tenant's keys."""

    def default_to(self, tenant: str, key: TenantKey | None) -> None:
        """Have tokens of a tenant that list no entitlements open what this key does; None: all."""

    def entitlements_of(self, tenant: str) -> Mapping[str, Principal]:
        """A tenant's entitlements by name."""

    def find(self, digest: bytes) -> Principal | None:
        """The owner of a key."""


class LimitsObserver(Protocol):
    """Who has to know the limits of keys, beside the keyring."""

    def limits_changed(self, tenant: str, limits: Sequence[Limit]) -> None:
        """Note all limits of a tenant's keys."""

    async def count_limits(self) -> None:
        """Have requests for every model counted against the limits of their keys."""


class TenantSync(Following[TenantEntry]):
    """The tenants of one process, in step with the directory and the file."""

    def __init__(
        self,
        directory: Directory[TenantEntry],
        keyring: TenantKeys,
        file: TenantFile,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        observer: LimitsObserver | None = None,
    ) -> None:
        """The keys of `file` open at once."""
        super().__init__(directory, clock, chance, of="tenants")
        self.entries: dict[str, TenantEntry] = {}
        self.limited: set[str] = set()
        """Tenants whose keys have limits from an administrator."""
        self._observer = observer
        self._limits: dict[str, tuple[Limit, ...]] = {}
        self.file = TenantFile()
        self.keyring = keyring
        self._names: list[str] = []
        self.on_removal: Callable[[str], None] = lambda _: None
        self.adopt(file)

    async def start(self) -> None:
        """Read the directory, then poll it from now on."""
        await self.poll()
        self.follow()

    def adopt(self, file: TenantFile) -> None:
        """Apply another version of the file: a key that left it stops at once."""
        before, self.file = self.file, file
        names = [
            name
            for name in {**before.tenants, **file.tenants, **before.order, **file.order}
            if self._keys(name, before) != self._keys(name, file)
            or self._default(name, before) != self._default(name, file)
            or (name in before.tenants) != (name in file.tenants)
        ]
        for name in names:  # a key may move from one tenant to another
            self.keyring.remove_tenant(name)
        for name in names:
            self._apply(name)

    def exists(self, name: str) -> bool:
        """Whether there is a tenant of this name."""
        entry = self.entries.get(name)
        return name in self.file.tenants or (entry is not None and entry.made)

    def after(self, name: str, count: int) -> list[str]:
        """Up to `count` tenants after a name, by name."""
        start = bisect_right(self._names, name)
        return self._names[start : start + count]

    def beginning(self, text: str) -> tuple[int, int]:
        """Where the names that begin with a text start in the order, and their number."""
        first = bisect_left(self._names, text)
        return first, bisect_left(self._names, text + "\uffff", first) - first

    def slice(self, start: int, end: int) -> list[str]:
        """The names at these places of the order."""
        return self._names[start:end]

    def __len__(self) -> int:
        """Number of tenants."""
        return len(self._names)

    @property
    def _known(self) -> Mapping[str, TenantEntry]:
        return self.entries

    def _keys(self, name: str, file: TenantFile) -> tuple[TenantKey, ...]:
        return keys_of(name, file, self.entries.get(name))

    def _default(self, name: str, file: TenantFile) -> TenantKey | None:
        return default_of(name, file, self.entries.get(name))

    def _apply(self, name: str) -> None:
        entry, exists = self.entries.get(name), self.exists(name)
        keys = self._keys(name, self.file)
        self.keyring.put_tenant(name, keys)
        self.keyring.default_to(name, self._default(name, self.file))
        self._note_limits(name, keys)
        limited = exists and entry is not None and any(k.limits != UNLIMITED for k in entry.keys)
        (self.limited.add if limited else self.limited.discard)(name)
        # Also a tenant that has no section here: its entitlements' own keys and tokens.
        held = entry is not None and entry.suspended
        (self.keyring.held.add if held else self.keyring.held.discard)(name)
        at = bisect_left(self._names, name)
        listed = at < len(self._names) and self._names[at] == name
        if exists and not listed:
            insort(self._names, name)
        elif listed and not exists:
            del self._names[at]
            self.on_removal(name)

    def _note_limits(self, name: str, keys: Sequence[TenantKey]) -> None:
        limits = tuple({limit.id: limit for key in keys for limit in key.limits}.values())
        if limits == self._limits.get(name, ()):
            return
        self._limits[name] = limits
        if not limits:
            del self._limits[name]
        if self._observer is not None:
            self._observer.limits_changed(name, limits)

    def _enter(self, entry: TenantEntry) -> None:
        if self.entries.get(entry.name) != entry:
            self.entries[entry.name] = entry
            self._apply(entry.name)

    def _forget(self, name: str) -> None:
        if self.entries.pop(name, None) is not None:
            self._apply(name)

    def _reconciled(self, mine: TenantEntry, theirs: TenantEntry) -> TenantEntry:
        return reconciled(mine, theirs)

    async def _settle(self) -> None:
        if self.limited and self._observer is not None:
            await self._observer.count_limits()

    async def _merge(self) -> None:
        state = await self._directory.load()
        if state.revision:
            # Once a tenant existed, keys stay required, even if none is left.
            self.keyring.tenanted = True
        known = {entry.name for entry in state.entries}
        await self._take(state.entries, [name for name in self.entries if name not in known])
        self._directory.know(state)
        self._merged = True
        self.keyring.unread.discard(self._of)
