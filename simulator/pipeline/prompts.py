"""What prompts of a log share, by digests of their beginnings: for the gateway, and in blocks.

A digest is of the bytes of a beginning; the first prompt that had it says how many tokens these
are. Text after the longest beginning that an earlier prompt had counts as new. So prompts that part
between two digested places share less than in truth.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.scheduling.scheduler import Points
from simulator.fleet.traffic import Ints

DIGEST_BITS: Final = 40
_DIGEST: Final = (1 << DIGEST_BITS) - 1
_MAX_BYTES: Final = (1 << 64 - DIGEST_BITS) - 1
_END_BITS: Final = 24
"""Of a block's hash: where in its prompt it ends, in tokens."""
_SPREAD: Final = 0x9E3779B97F4A7C15


def packed(digests: Iterable[tuple[int, int]]) -> bytes:
    """(bytes, digest) of beginnings, ascending, in 8 bytes each; raises what bad input does."""
    words = [min(int(n), _MAX_BYTES) << DIGEST_BITS | int(d) & _DIGEST for n, d in digests]
    return array("Q", words).tobytes()


class Digests(NamedTuple):
    """The beginnings of many prompts, in one piece, since a day's log has millions of them."""

    words: NDArray[np.uint64]
    """As `packed`, one prompt's after the other's."""
    sizes: Ints
    """How many each prompt has; 0 where they are not known."""

    def of(self, index: Ints) -> "Digests":
        """Those of some prompts, in ascending order."""
        chosen = np.zeros(len(self.sizes), dtype=np.bool_)
        chosen[index] = True
        return Digests(self.words[np.repeat(chosen, self.sizes)], self.sizes[chosen])


def joined(prompts: Iterable[bytes | memoryview]) -> Digests:
    """What is `packed` of each prompt; of one of them at least."""
    words, sizes = bytearray(), array("q")
    for prompt in prompts:
        words += prompt
        sizes.append(len(prompt) // 8)
    return Digests(np.frombuffer(words, dtype=np.uint64), np.frombuffer(sizes, dtype=np.int64))


class SharedPrompts:
    """Prompts in order of arrival; each begins as an earlier one did, or is new."""

    def __init__(self, digests: Digests, tokens: Ints, tenants: Ints | None = None) -> None:
        """`tenants` share nothing, if given."""
        words, sizes = digests
        if tenants is not None:
            apart = tenants.astype(np.uint64) * np.uint64(_SPREAD) & np.uint64(_DIGEST)
            words = words ^ np.repeat(apart, sizes)
        ordered = np.sort(words)
        kept = np.isin(words, ordered[1:][ordered[1:] == ordered[:-1]])  # others match nothing
        ends = np.cumsum(sizes)
        kept[ends[sizes > 0] - 1] = True  # the length of the whole prompt
        self._words = words[kept]
        self._ends: Ints = np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], ends])]
        """Where the words of each prompt end; the first entry is 0."""
        self._parents = array("q", [-1]) * len(sizes)
        """The prompt with which each begins; -1 for none."""
        self._shared = array("q", [0]) * len(sizes)
        """Tokens of that beginning."""
        self._follow(tokens)

    def _follow(self, tokens: Ints) -> None:
        first: dict[int, int] = {}
        """Digest -> the first prompt that had it."""
        per_byte = [0.0] * len(tokens)
        for index, total in enumerate(tokens.tolist()):
            points = self.points(index)
            if not points:
                continue
            per_byte[index] = total / points[-1][0]
            longest = next((point for point in reversed(points) if point[1] in first), None)
            if longest is not None:
                length, digest = longest
                self._parents[index] = parent = first[digest]
                self._shared[index] = min(total, int(length * per_byte[parent]))
            for _, digest in points:
                first.setdefault(digest, index)

    def points(self, index: int) -> Points:
        """(bytes, digest) of a prompt's beginnings, the last of them the whole; () if not known."""
        words: list[int] = self._words[self._ends[index] : self._ends[index + 1]].tolist()
        return tuple([(word >> DIGEST_BITS, word) for word in words])

    def blocks(self, index: int, tokens: int, block_tokens: int) -> tuple[int, ...]:
        """Hashes of the full blocks of a prompt that is sent whole, of so many tokens.

        A block's first prompt is the last in this line that does not share all of it.
        """
        parts: list[Sequence[int]] = []
        last = tokens - tokens % block_tokens
        while last > 0:
            begin = self._shared[index]
            ends = range(begin - begin % block_tokens + block_tokens, last + 1, block_tokens)
            parts.append([index << _END_BITS | end for end in ends])
            last = min(last, begin - begin % block_tokens)
            index = self._parents[index]
        return tuple(chain.from_iterable(reversed(parts)))

    @staticmethod
    def blocks_of_cut(index: int, tokens: int, block_tokens: int) -> tuple[int, ...]:
        """Hashes of the blocks of a prompt that was cut, which nobody shares."""
        ends = range(block_tokens, tokens + 1, block_tokens)
        return tuple([~(index << _END_BITS | end) for end in ends])
