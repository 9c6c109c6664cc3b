"""Bytes of requests held over all connections: bounded, and shared between clients.

- Requests that are still being sent without a known key: past a bound those connections that hold
  most are dropped, so that few who send much cannot keep out many who send little.
- Bodies sent with a known key, from their announcement until they are answered: an entitlement
  may hold as much as is still free. One alone gets half of the whole, two get a third each, and
  there is always room for another one. Its first body needs no more than to fit.
"""

from collections.abc import Hashable
from heapq import nlargest
from typing import Final, Protocol

from gateway.errors import RateLimited, Unavailable

MOST_UNPROVEN_BYTES: Final = 256 * 1024 * 1024
"""Without a known key; of one process."""
MOST_BYTES: Final = 2 * 1024 * 1024 * 1024
"""With one; of one process, unless its configuration says otherwise."""
COUNTED_FROM_BYTES: Final = 16 * 1024
"""Smaller bodies are not counted: all connections together hold few of them."""
_RETRY_AFTER_S: Final = 2.0


class Holder(Hashable, Protocol):
    """A connection that holds a part of a request."""

    def drop(self) -> None:
        """Refuse the request and let go of what was held of it."""


class BodyBytes:
    """What is held of requests, by connection or by entitlement."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, *, most_unproven_bytes: int = MOST_UNPROVEN_BYTES
    ) -> None:
        self._most = most_bytes
        self._most_unproven = most_unproven_bytes
        self._unproven: dict[Holder, int] = {}
        self._owned: dict[str, int] = {}
        self.unproven = 0
        """In bytes."""
        self.total = 0
        """Of bodies sent with a known key, in bytes."""

    def hold(self, holder: Holder, size: int) -> None:
        """`holder`, without a known key, now holds `size` bytes in all; 0 for none."""
        self.unproven += size - self._unproven.pop(holder, 0)
        if size:
            self._unproven[holder] = size
        if self.unproven > self._most_unproven:
            self._drop()

    def take(self, owner: str, size: int) -> None:
        """The entitlement `owner` now holds `size` bytes more, or fewer where that is negative.

        Raises Refusal, with nothing taken, when that is more than its share.
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
        # A quarter at once: who fills it again and again pays for each search with as many bytes.
        for holder in nlargest(len(self._unproven), self._unproven, key=self._unproven.__getitem__):
            if self.unproven <= self._most_unproven * 3 // 4:
                return
            self.unproven -= self._unproven.pop(holder)
            holder.drop()


class Share:
    """What one body takes of an entitlement's bytes."""

    __slots__ = ("_bodies", "_owner", "_size")

    def __init__(self, bodies: BodyBytes, owner: str) -> None:
        self._bodies = bodies
        self._owner = owner
        self._size = 0

    def cover(self, size: int) -> None:
        """Take what a body of so many bytes needs, as announced or as it has come.

        Raises Refusal; what was taken is given back then.
        """
        if size > max(self._size, COUNTED_FROM_BYTES):
            try:
                self._bodies.take(self._owner, size - self._size)
            except (RateLimited, Unavailable):
                self.give_back()
                raise
            self._size = size

    def give_back(self) -> None:
        """The body is not held any more. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._bodies.take(self._owner, -size)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
