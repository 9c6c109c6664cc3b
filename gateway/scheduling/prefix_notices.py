"""Forget the prefixes that an engine evicts, as its own events tell.

Each request has a secret session id at its engine. Events that tell blocks of its prompt, in order,
name it: so each of the prompt's points gets the block that completes it, by the estimated tokens
before the point. When the engine removes that block, the index forgets the point at the worker.

Rules:
- From its first such event on, nothing of a worker is forgotten by its age.
- What a bound prompt is about to compute is not forgotten, though its old blocks go: its points
  have no block until events tell them anew.
- A prompt that no event told of is forgotten KEPT prompts later: it was never computed.
- After a gap in the events all of the worker is forgotten, and estimated until the next ones.
- All that is kept is bounded by KEPT prompts and MAX_PLACED points.
"""

import secrets
from typing import Final

from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import Points

MAX_PLACED: Final = 65_536
"""Points with a block at one worker; the oldest are forgotten first."""
KEPT: Final = 2_048
"""Prompts of one worker of which events may tell: more than wait for it and run there."""

Block = int | bytes
"""An engine's hash of a block and of all before it."""


class _Prompt:
    def __init__(self, points: Points, tokens_per_byte: float) -> None:
        self.points = points
        self.tokens_per_byte = tokens_per_byte
        self.placed = 0
        """Points whose block is known."""
        self.blocks = 0
        """Blocks that were told, from the first on."""
        self.last: Block | None = None


class PrefixNotices:
    """What one worker's engine tells of its prefix cache."""

    def __init__(self, index: PrefixIndex, gossip: PrefixGossip, worker: int) -> None:
        """`gossip`: tells the other replicas, which know of some prefixes from this one."""
        self.index = index
        self._gossip = gossip
        self._worker = worker
        self.heard_unix_s: float | None = None
        """When the last events came."""
        self._noticed = False
        self._prompts: dict[str, _Prompt] = {}
        """By session id, oldest first."""
        self._block_of: dict[int, Block] = {}
        """Digest of a point -> the block that completes it; oldest first."""
        self._digests: dict[Block, set[int]] = {}

    def __len__(self) -> int:
        return len(self._prompts) + len(self._block_of)

    def begin(self, points: Points, tokens_per_byte: float) -> str:
        """A prompt is bound to the worker; returns its session id, which nobody can predict."""
        for _, digest in points:
            self._free(digest)
        if len(self._prompts) >= KEPT:
            oldest = self._prompts.pop(next(iter(self._prompts)))
            for _, digest in oldest.points if oldest.last is None and self._noticed else ():
                if digest not in self._block_of:
                    self._evict(digest)
        session = secrets.token_hex(8)
        self._prompts[session] = _Prompt(points, tokens_per_byte)
        return session

    def stored(
        self, session: str, blocks: list[Block], parent: Block | None, block_tokens: int
    ) -> None:
        """The engine has these blocks of a prompt, after `parent`."""
        prompt = self._prompts.get(session)
        if prompt is None or not blocks:
            return
        if parent is None:  # from the first on, for the first time or again
            prompt.placed = prompt.blocks = 0
        elif parent != prompt.last:
            return
        if not self._noticed:
            self._noticed = True
            self.index.notice(self._worker, on=True)
        last = len(blocks) - 1
        for length, digest in prompt.points[prompt.placed :]:
            place = int(length * prompt.tokens_per_byte) // block_tokens - 1 - prompt.blocks
            # Those beyond go with the last one: the prompt may have fewer tokens than estimated.
            self._place(digest, blocks[max(0, min(place, last))])
            prompt.placed += place <= last
        prompt.blocks, prompt.last = prompt.blocks + len(blocks), blocks[-1]

    def removed(self, blocks: list[Block]) -> None:
        """The engine no longer has these blocks."""
        for block in blocks:
            for digest in self._digests.pop(block, ()):
                del self._block_of[digest]
                self._evict(digest)

    def forget(self) -> None:
        """The worker's cache is empty, or unknown."""
        self.stop()
        self.index.forget(self._worker)

    def stop(self) -> None:
        """No more is heard: its cache is estimated again."""
        for held in (self._prompts, self._block_of, self._digests):
            held.clear()
        self._noticed = False
        self.index.notice(self._worker, on=False)

    def _place(self, digest: int, block: Block) -> None:
        self._free(digest)
        self._block_of[digest] = block
        self._digests.setdefault(block, set()).add(digest)
        if len(self._block_of) > MAX_PLACED:
            oldest = next(iter(self._block_of))
            self._free(oldest)
            self._evict(oldest)

    def _free(self, digest: int) -> None:
        """A point has no block any more, if it had one."""
        block = self._block_of.pop(digest, None)
        if block is not None:
            digests = self._digests[block]
            digests.remove(digest)
            if not digests:
                del self._digests[block]

    def _evict(self, digest: int) -> None:
        self.index.evict(self._worker, digest)
        self._gossip.evicted(digest, self._worker)
