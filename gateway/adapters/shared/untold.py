"""What a worker did with leases and the parent need not know at once: told in one message.

Telling wakes the parent, and what it is told it enters lease by lease. So what can wait is
gathered for LAZIER_S, or until anything else is said, which it precedes; and a lease that was
taken of a pledge and has ended by then is told as one entry, without a name: nobody but its worker
ever knew of it. What it had returns to its pledge, which the parent counts as taken all the while.
So a lease of the last YOUNG_S is kept back unless something is to be said of it, or about all.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from gateway.adapters.shared.decisions import ask_told, used_of
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.pledges import Key, Pledge
from gateway.adapters.shared.wire import LAZIER_S, Op
from gateway.domain import Ask, Lease
from gateway.policy.passing import Passing
from gateway.ports import Settlement

YOUNG_S: Final = 0.05
"""With LAZIER_S well below the time for which the parent keeps room for what it is not told."""
MOST_ENTRIES: Final = 512
"""Told at once: more of them would keep the parent from others."""


class Untold:
    """A worker's leases that wait to be told of."""

    def __init__(self, link: Link, wall: Callable[[], float]) -> None:
        """`wall`: Unix time in seconds."""
        self._link = link
        self._wall = wall
        self._taken: dict[str, tuple[Pledge, Ask, float]] = {}
        """By lease id, in force: the pledge, the ask, and when it was issued."""
        self._passed: dict[int, tuple[Key, list[Passing]]] = {}
        """By the number of the pledge: leases that have ended."""
        self._settled: list[tuple[object, ...]] = []
        self._count = 0
        self._all = False
        link.gathers(self._gathered)

    def speak_of(self, lease_id: str) -> None:
        """The next message is about this lease: the parent has to know it."""
        if lease_id in self._taken:
            self._all = True

    def tell_all(self) -> None:
        """Let the next message be preceded by all there is to tell."""
        self._all = bool(self._count)

    def take(self, pledge: Pledge, ask: Ask, issued_unix_s: float) -> None:
        """A lease was taken of a pledge."""
        self._taken[ask.lease_id] = (pledge, ask, issued_unix_s)
        self._wait()
        if pledge.is_low() and not pledge.said:
            pledge.said = True  # the parent gives the next one when it hears of it
            self._link.hasten()

    def end(self, lease: Lease, settlement: Settlement) -> bool:
        """A lease has ended; False when the parent has been told of it, and hears of its end."""
        known = self._taken.pop(lease.id, None)
        if known is None:
            return False
        pledge, ask, issued_unix_s = known
        pledge.sequences += ask.sequences
        pledge.kv_bytes += ask.kv_bytes
        ended_unix_s = settlement.unix_s or self._wall()
        told: Passing = (
            ask.cost_tokens,
            ask.sequences,
            ask.kv_bytes,
            max(0.0, ended_unix_s - issued_unix_s),
            used_of(settlement),
        )
        group = self._passed.get(pledge.number)
        if group is None:
            group = self._passed[pledge.number] = (pledge.key, [])
        group[1].append(told)
        self._wait()
        return True

    def settle(self, told: tuple[object, ...]) -> None:
        """The end of a lease that the parent knows."""
        self._settled.append(told)
        self._wait()

    def _wait(self) -> None:
        self._count += 1
        if self._count == 1:
            self._link.expect(LAZIER_S)
        elif self._count == MOST_ENTRIES:
            self._link.hasten()

    def _gathered(self) -> tuple[object, ...] | None:
        if not self._count:
            return None
        taken = self._due()
        if self._taken:
            self._link.expect(LAZIER_S)
        if not (taken or self._passed or self._settled):
            return None
        passed = [(number, *key, told) for number, (key, told) in self._passed.items()]
        message = (Op.LEASES, 0, taken, passed, self._settled)
        self._passed.clear()
        self._settled = []
        self._count = len(self._taken)
        return message

    def _due(self) -> list[tuple[object, ...]]:
        """Leases in force that are told now."""
        young_unix_s = inf if self._all else self._wall() - YOUNG_S
        self._all = False
        told = []
        for pledge, ask, issued_unix_s in self._taken.values():  # oldest first
            if issued_unix_s > young_unix_s:
                break
            told.append((pledge.number, issued_unix_s, *ask_told(ask)))
        for each in told:
            del self._taken[each[2]]
        return told
