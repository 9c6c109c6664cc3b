"""Prompt blocks that can be shared, and freed blocks that are still cached.

Rules:
- A hash identifies a block's content and everything before it, so a prefix is a run of hashes.
- Blocks in use are never evicted; unused ones are evicted in least-recently-freed order.
- A sequence's last blocks are freed first, so that a prefix outlives its continuation.
"""

from collections.abc import Sequence


class PrefixCache:
    """Cached blocks by content hash; the block pool counts how many blocks exist."""

    __slots__ = ("_idle", "_users")

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # oldest first

    @property
    def idle_blocks(self) -> int:
        """Cached blocks without a user: they are free, but still hold their content."""
        return len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Cached blocks with at least one user."""
        return len(self._users)

    def match(self, hashes: Sequence[int], most: int) -> tuple[int, int]:
        """Length of the longest cached prefix, at most `most` blocks; how many of them are idle."""
        hits = idle = 0
        for block in hashes[:most]:
            if block in self._idle:
                idle += 1
            elif block not in self._users:
                break
            hits += 1
        return hits, idle

    def acquire(self, hashes: Sequence[int]) -> int:
        """Use blocks found by `match`; returns how many of them were idle."""
        woken = 0
        for block in hashes:
            if block in self._idle:
                del self._idle[block]
                woken += 1
            self._users[block] = self._users.get(block, 0) + 1
        return woken

    def register(self, block: int) -> bool:
        """Offer a newly filled block for sharing; False if its content is already shared."""
        if block in self._users:
            return False
        self._idle.pop(block, None)  # an evicted prefix can leave an older copy: the new one stays
        self._users[block] = 1
        return True

    def release(self, hashes: Sequence[int]) -> int:
        """Stop using blocks; returns how many became idle."""
        slept = 0
        for block in reversed(hashes):
            users = self._users[block] - 1
            if users:
                self._users[block] = users
            else:
                del self._users[block]
                self._idle[block] = None
                slept += 1
        return slept

    def trim(self, most: int) -> None:
        """Forget the oldest idle blocks until at most `most` are left."""
        while len(self._idle) > most:
            del self._idle[next(iter(self._idle))]
