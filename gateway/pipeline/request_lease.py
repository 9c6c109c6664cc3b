"""A request's one lease, from admission to settlement."""

from collections.abc import Callable

import msgspec

from gateway.ports import LeaseStore
from gateway.records.estimate import Plan
from gateway.records.lease import Lease


class RequestLease:
    """The lease as it is, as it was taken, and what changed in between.

    Only its own methods change it: whatever the store is asked for is noted at the same place.
    """

    __slots__ = ("_store", "_wall_clock", "asked", "changes", "current", "reserved_tokens", "taken")

    def __init__(
        self, store: LeaseStore, wall_clock: Callable[[], float], asked: Plan, taken: Lease
    ) -> None:
        self._store = store
        self._wall_clock = wall_clock
        self.asked = asked
        """What admission was asked for."""
        self.taken = taken
        """What it gave."""
        self.current = taken
        self.changes: list[tuple[float, str, int]] = []
        self.reserved_tokens = taken.cost_tokens
        """Extensions included."""

    async def transfer(self, pool: int) -> None:
        """Take it along to another pool."""
        self._note("transfer", pool)
        self.current = await self._store.transfer(self.current, pool)

    def adjusted(self, lease: Lease) -> None:
        """Take over what stage 6 made of it."""
        if lease.pool != self.current.pool:
            self._note("transfer", lease.pool)
        else:
            self._note("resize", lease.cost_tokens)
            self.reserved_tokens = lease.cost_tokens
        self.current = lease

    def resize(self, cost_tokens: int, kv_bytes: int) -> None:
        """Have it reserve what another prompt takes."""
        self._reserve(cost_tokens, kv_bytes)
        self.current = msgspec.structs.replace(
            self.current, cost_tokens=cost_tokens, kv_bytes=kv_bytes
        )

    def extend(self, tokens: int, kv_bytes: int) -> None:
        """Have it reserve more for a stream that ran past its reserve; its cost stays."""
        self._reserve(tokens, kv_bytes)

    def _reserve(self, tokens: int, kv_bytes: int) -> None:
        self._note("resize", tokens)
        self.reserved_tokens = tokens
        self._store.resize(self.current, tokens, kv_bytes)

    def _note(self, change: str, value: int) -> None:
        self.changes.append((self._wall_clock(), change, value))
