"""Bounds the bytes of requests held over all connections, and shares them between clients.

- Unfinished requests without a known key: past a bound, the connections that hold most are
  dropped. A few large senders therefore cannot keep out many small ones.
- Bodies with a known key, from announcement to answer: an entitlement may hold as much as is still
  free. One entitlement gets at most half of the whole, two get a third each, so there is always
  room for another. The first body of an entitlement only has to fit.
"""

from collections.abc import Hashable
from heapq import nlargest
from typing import Final, Protocol

from gateway.errors import RateLimited, Unavailable

MAX_UNPROVEN_BYTES: Final = 256 * 1024 * 1024
"""Bound per process for requests without a known key."""
MAX_BYTES: Final = 2 * 1024 * 1024 * 1024
"""Default bound per process for bodies with a known key."""
COUNTED_FROM_BYTES: Final = 16 * 1024
"""Smaller bodies are not counted, because all connections together hold little of them."""
_RETRY_AFTER_S: Final = 2.0


class Holder(Hashable, Protocol):
    """A connection that holds part of a request."""

    def drop(self) -> None:
        """Refuse the request and release its bytes."""


class BodyBytes:
    """Bytes held, by connection (without a known key) or by entitlement."""

    def __init__(
        self, most_bytes: int = MAX_BYTES, *, most_unproven_bytes: int = MAX_UNPROVEN_BYTES
    ) -> None:
        self._most = most_bytes
        self._most_unproven = most_unproven_bytes
        self._unproven: dict[Holder, int] = {}
        self._owned: dict[str, int] = {}
        self.unproven = 0
        """Bytes of requests without a known key."""
        self.total = 0
        """Bytes of bodies with a known key."""

    def hold(self, holder: Holder, size: int) -> None:
        """Set the bytes that `holder`, without a known key, holds in total; 0 releases them."""
        self.unproven += size - self._unproven.pop(holder, 0)
        if size:
            self._unproven[holder] = size
        if self.unproven > self._most_unproven:
            self._drop()

    def take(self, owner: str, size: int) -> None:
        """Add `size` bytes to the entitlement `owner`; a negative `size` gives bytes back.

        Raises Refusal, with nothing taken, if its share is exceeded.
        """
        mine = self._owned.get(owner, 0)
        free = self._most - self.total
        if size > 0 and mine + size > (free - size if mine else free):
            raise self._refusal(mine)
        self.total += size
        if mine + size > 0:
            self._owned[owner] = mine + size
        else:
            self._owned.pop(owner, None)

    def _refusal(self, mine: int) -> RateLimited | Unavailable:
        if mine:
            return RateLimited(
                f"This key's requests hold {_mib(mine)} of bodies in this gateway, as much as it "
                f"may have now. Send fewer large requests at once, or wait for their answers.",
                reason="too_many_body_bytes",
                code="too_many_body_bytes",
                retry_after_s=_RETRY_AFTER_S,
            )
        return Unavailable(
            f"All requests together hold {_mib(self.total)} of bodies in this gateway, and this "
            "one does not fit. Try again shortly, or send a smaller request.",
            reason="too_many_body_bytes",
            code="too_many_body_bytes",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _drop(self) -> None:
        # Freeing a quarter at once makes each costly search cost an attacker as many bytes.
        for holder in nlargest(len(self._unproven), self._unproven, key=self._unproven.__getitem__):
            if self.unproven <= self._most_unproven * 3 // 4:
                return
            self.unproven -= self._unproven.pop(holder)
            holder.drop()


class Share:
    """The part of an entitlement's bytes that one body takes."""

    __slots__ = ("_bodies", "_owner", "_size")

    def __init__(self, bodies: BodyBytes, owner: str) -> None:
        self._bodies = bodies
        self._owner = owner
        self._size = 0

    def cover(self, size: int) -> None:
        """Raise the share to `size`, the body's announced or received bytes.

        Raises Refusal, after giving back what was taken.
        """
        if size > max(self._size, COUNTED_FROM_BYTES):
            try:
                self._bodies.take(self._owner, size - self._size)
            except (RateLimited, Unavailable):
                self.give_back()
                raise
            self._size = size

    def give_back(self) -> None:
        """Release the body's bytes. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._bodies.take(self._owner, -size)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
