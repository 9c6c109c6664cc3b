"""Bytes held for clients who have not shown a key: bounded over all connections.

A connection that holds a part of a request says how much. Past the bound those that hold most
are dropped, so that few who send much cannot keep out many who send little.
"""

from collections.abc import Hashable
from heapq import nlargest
from typing import Final, Protocol

MOST_BYTES: Final = 256 * 1024 * 1024
"""Of one process."""


class Holder(Hashable, Protocol):
    """A connection that holds a part of a request."""

    def drop(self) -> None:
        """Refuse the request and let go of what was held of it."""


class Unproven:
    """What is held of requests that are still coming in, by connection."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._held: dict[Holder, int] = {}
        self.total = 0
        """In bytes."""

    def hold(self, holder: Holder, size: int) -> None:
        """`holder` now holds `size` bytes in all; 0 for none."""
        self.total += size - self._held.pop(holder, 0)
        if size:
            self._held[holder] = size
        if self.total > self._most:
            self._drop()

    def _drop(self) -> None:
        # A quarter at once: who fills it again and again pays for each search with as many bytes.
        for holder in nlargest(len(self._held), self._held, key=self._held.__getitem__):
            if self.total <= self._most * 3 // 4:
                return
            self.total -= self._held.pop(holder)
            holder.drop()
