"""The KV cache as blocks: how many are used, and how fast decoding uses more.

Invariant: 0 <= used <= total, and idle cached blocks <= free. A block shared by several
sequences counts once. Only prompt blocks have a hash; all others are anonymous.

Rules of the prefix cache:
- A hash identifies a block's content and everything before it, so a prefix is a run of hashes.
- Blocks in use are never evicted; unused ones are evicted in least-recently-freed order.
- A sequence's last blocks are freed first, so that a prefix outlives its continuation.
"""

from collections.abc import Callable, Sequence


class PrefixCache:
    """Cached blocks by content hash; the block pool counts how many blocks exist."""

    __slots__ = ("_idle", "_users", "on_evict")

    def __init__(self) -> None:
        self.on_evict: Callable[[int], None] | None = None
        """Called with the hash of each evicted block."""
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # oldest first

    def __contains__(self, block: int) -> bool:
        return block in self._idle or block in self._users

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
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            if self.on_evict is not None:
                self.on_evict(oldest)


class BlockPool:
    """Counts the blocks of one engine and keeps its prefix cache within the free ones."""

    __slots__ = ("_cache_blocks", "caching", "prefix", "total", "used")

    def __init__(self, total: int, cache_blocks: int | None) -> None:
        self.total = total
        self.used = 0
        self.prefix = PrefixCache()
        self._cache_blocks = total if cache_blocks is None else cache_blocks
        self.caching = self._cache_blocks > 0

    @property
    def free(self) -> int:
        """Blocks that can be taken now, idle cached ones included."""
        return self.total - self.used

    def take(self, blocks: int) -> None:
        """Use so many anonymous blocks; the caller has checked `free`."""
        self.used += blocks
        if self.caching:
            self._trim()

    def share(self, hashes: Sequence[int]) -> None:
        """Use cached blocks that were just matched."""
        self.used += self.prefix.acquire(hashes)

    def give(self, blocks: int, hashes: Sequence[int]) -> None:
        """Free a sequence's `blocks`, of which `hashes` name the shareable ones."""
        self.used -= blocks - len(hashes)
        if hashes:
            self.used -= self.prefix.release(hashes)
            self._trim()

    def _trim(self) -> None:
        self.prefix.trim(min(self._cache_blocks, self.total - self.used))


class DecodeGrowth:
    """Blocks that decoding sequences will take, in closed form.

    Each decoding sequence gains one token an iteration, so it takes a block whenever its
    length was a multiple of the block. With lengths written as s + offset (s: iterations
    scheduled), only the offsets' residues matter.
    """

    __slots__ = ("_block_tokens", "_residues", "_sequences")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._residues = [0] * block_tokens
        self._sequences = 0

    def join(self, offset: int) -> None:
        """Add a sequence whose length is s + offset."""
        self._residues[offset % self._block_tokens] += 1
        self._sequences += 1

    def leave(self, offset: int) -> None:
        """Remove a sequence that joined with this offset."""
        self._residues[offset % self._block_tokens] -= 1
        self._sequences -= 1

    def blocks(self, scheduled: int, iterations: int) -> int:
        """Blocks that the next `iterations` take, after `scheduled` of them."""
        size = self._block_tokens
        cycles, rest = divmod(iterations, size)
        blocks = cycles * self._sequences
        for ahead in range(rest):
            blocks += self._residues[-(scheduled + ahead) % size]
        return blocks
