"""The KV cache as blocks: how many are used, and how fast decoding uses more.

Invariant: 0 <= used <= total, and idle cached blocks <= free. A block shared by several
sequences counts once. Only prompt blocks have a hash; all others are anonymous.
"""

from collections.abc import Sequence

from simulator.engine.prefix_cache import PrefixCache


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
