"""Room that the parent pledges to a worker, so that it admits by itself while there is plenty.

Asking the parent for each request wakes two processes that have nothing else to do, which costs
more than the decision. So with a grant, a worker that asks often gets a pledge: so many sequences,
tokens and KV bytes of one entitlement in one pool, for PLEDGE_S. What it takes of it, it tells a
little later (`untold`), in order with all else it says.

Rules, which keep every limit and every refusal as exact as if all had asked:
- What is pledged is a small part of what is free of every limit at once, and counts as taken until
  the parent knows better: an ask is decided at once only if it fits beside all that is pledged.
- An ask that does not fit waits until the workers have given their pledges of its model back and
  said what they took; then it is decided by the true figures, and nothing is pledged meanwhile.
- What was taken of a pledge is entered whatever has changed since: it was decided when the pledge
  was given. When terms change, pledges are called back before the change is answered.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

from msgspec import Struct

from gateway.adapters.shared.decisions import lease_of
from gateway.domain import Ask, Lease, Record
from gateway.policy.buckets import most_sequences
from gateway.policy.entitlements import BORROWING
from gateway.policy.ledger import Account, TokenPool
from gateway.policy.placement import occupied

PLEDGE_S: Final = 0.25
"""How long a pledge holds; the fleet's capacity is looked at as often."""
LATE_S: Final = 0.25
"""How much later what was taken may be told."""
SCARCE_S: Final = 1.0
"""How long after a call back everything that is given back is told at once."""
MOST_SEQUENCES: Final = 64
"""In one pledge."""
TIMES: Final = 8
"""Each of them may be used so many times before the tokens of a pledge are: requests come and go
while it holds, and for less a worker at 1,000 requests/s would ask thirty times a second."""
PART: Final = 8
"""A pledge is this part of what is free, divided among the workers."""
LEAST_SEQUENCES: Final = 2
"""A smaller pledge is not worth its message."""
KEYS_KEPT: Final = 4096
"""Of entitlements and pools that a worker lately asked for."""
RECALL: Final = "pledges"
"""The topic on which they are called back."""

Key = tuple[str, str, int]
"""Model, entitlement, pool."""


class Room(Record, frozen=True):
    """What is free, or asked for: of an entitlement's limits, and of a pool's."""

    sequences: float
    tokens: float
    kv_bytes: float
    pool_sequences: float
    pool_kv_bytes: float


def room_of(book: TokenPool, account: Account, pool: int) -> Room:
    """What an entitlement may still take in a pool before anybody is refused or spills over."""
    terms = account.terms
    sequences = float(most_sequences(book, account) - account.total)
    if terms.service_class == "guaranteed":
        sequences = min(sequences, terms.baseline_of(pool) - account.inflight[pool])
    tokens = account.level if terms.tokens_per_s > 0 else inf
    if terms.tokens_per_s <= 0 and terms.service_class in BORROWING and book.terms.tokens_per_s > 0:
        tokens = 0.0  # the surplus is everybody's
    kv_limit = terms.kv_bytes_limit or terms.kv_bytes
    kv_capacity = book.terms.kv_of(pool)
    return Room(
        sequences,
        tokens,
        kv_limit - account.kv_bytes if kv_limit else inf,
        book.terms.slots[pool] - book.terms.headroom - occupied(book, account, pool),
        kv_capacity - book.pools[pool].kv_bytes if kv_capacity else inf,
    )


class Pledge(Struct, gc=False):
    """What is left of one pledge, in the parent and in the worker."""

    number: int
    key: Key
    sequences: int
    tokens: int
    kv_bytes: int
    until_s: float
    """Monotonic, which all processes of a machine share."""
    low_sequences: int = 0
    low_tokens: int = 0
    """Below them the next one is due."""
    said: bool = False
    """Whether the next one has been given, or asked for."""
    granted: list[Any] = []
    """The grant that it came with. The worker's."""

    def is_low(self) -> bool:
        """Whether half of it is used up."""
        return self.sequences < self.low_sequences or self.tokens < self.low_tokens


# -- the worker's side


class Purse:
    """The pledges that a worker holds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._held: dict[Key, deque[Pledge]] = {}
        self._scarce_until_s: dict[str, float] = {}
        """By model, once its pledges were called back."""

    def put(self, message: list[Any]) -> None:
        """The parent pledges something."""
        _, _, number, key, sequences, tokens, kv_bytes, until_s, granted = message
        known: Key = (key[0], key[1], key[2])
        if len(self._held) >= KEYS_KEPT and known not in self._held:
            self._held.clear()  # as good as given back: they are void before long
        pledge = Pledge(
            number,
            known,
            sequences,
            tokens,
            kv_bytes,
            until_s,
            sequences // 2,
            tokens // 2,
            granted=granted,
        )
        self._held.setdefault(known, deque(maxlen=4)).append(pledge)

    def recalled(self, model: bytes) -> bytes:
        """Give back all of a model; what was taken of them was said before."""
        name = model.decode()
        self._scarce_until_s[name] = self._clock() + SCARCE_S
        for key in [key for key in self._held if key[0] == name]:
            del self._held[key]
        return b""

    def plenty(self, lease: Lease) -> bool:
        """Whether nobody can miss what a lease gives back: there is a pledge of the same."""
        held = self._held.get((lease.model, lease.entitlement, lease.pool))
        return held is not None and bool(held) and self._clock() < held[-1].until_s

    def scarce(self, model: str) -> bool:
        """Whether somebody lately wanted what was pledged."""
        until_s = self._scarce_until_s.get(model)
        return until_s is not None and self._clock() < until_s

    def admit(self, ask: Ask) -> tuple[Pledge, Lease] | None:
        """A lease out of a pledge; None: the parent has to be asked."""
        held = self._held.get((ask.model, ask.entitlement, ask.pool))
        if not held:
            return None
        now_s = self._clock()
        while held:
            pledge = held[0]
            if (
                now_s < pledge.until_s
                and pledge.sequences >= ask.sequences
                and pledge.tokens >= ask.cost_tokens
                and pledge.kv_bytes >= ask.kv_bytes
            ):
                pledge.sequences -= ask.sequences
                pledge.tokens -= ask.cost_tokens
                pledge.kv_bytes -= ask.kv_bytes
                return pledge, self._lease(ask, pledge)
            held.popleft()
        return None

    def _lease(self, ask: Ask, pledge: Pledge) -> Lease:
        granted = pledge.granted
        granted[6] = self._wall()
        limits = granted[7]
        if limits is not None:  # as they would be told: one more is taken
            limits[1] = max(0, limits[1] - ask.sequences)
            limits[4] = max(0, limits[4] - ask.cost_tokens)
        return lease_of(ask, granted)
