"""Forget the prefixes that an engine evicts, as its own events tell.

Each request has a secret session id at its engine. Events that tell blocks of its prompt, in order,
name it: so each of the prompt's points gets the block that completes it, by the estimated tokens
before the point. When the engine removes that block, the index forgets the point at the worker.

Rules:
- From its first such event on, nothing of a worker is forgotten by its age. An engine whose events
  stop naming sessions is estimated as before.
- What a bound prompt is about to compute is not forgotten, though its old blocks go.
- A prompt that no event told of is forgotten some requests after its end: it was never computed.
- After a gap in the events all of the worker is forgotten.
- All that is kept is bounded by the prompts that run and by MAX_PLACED points.
"""

import secrets
from typing import Final

from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import Points

MAX_PLACED: Final = 65_536
"""Points with a block at one worker; the oldest are forgotten first."""
_ENDED: Final = 64
"""Requests that may end before the events of one that ended come."""
_SILENT: Final = 64
"""Untold prompts, with nothing told in between, after which the engine is taken to be silent."""

Block = int | bytes
"""An engine's hash of a block and of all before it."""


class _Prompt:
    def __init__(self, points: Points, tokens_per_byte: float) -> None:
        self.points = [(int(length * tokens_per_byte), digest) for length, digest in points]
        self.digests = frozenset([digest for _, digest in points])
        self.placed = 0
        """Points whose block is known."""
        self.blocks = 0
        """Blocks that were told, from the first on."""
        self.last: Block | None = None


class PrefixNotices:
    """What one worker's engine tells of its prefix cache."""

    def __init__(
        self,
        index: PrefixIndex,
        gossip: PrefixGossip,
        worker: int,
        *,
        max_placed: int = MAX_PLACED,
    ) -> None:
        """`gossip`: tells the other replicas, which know of some prefixes from this one."""
        self._max_placed = max_placed
        self.index = index
        self._gossip = gossip
        self._worker = worker
        self.heard_unix_s: float | None = None
        """When the last events came."""
        self._noticed = False
        self._silent = 0
        self._running: dict[str, _Prompt] = {}
        self._ended: dict[str, _Prompt] = {}
        self._block_of: dict[int, Block] = {}
        """Digest of a point -> the block that completes it; oldest first."""
        self._digests: dict[Block, list[int]] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._ended) + len(self._block_of)

    def begin(self, points: Points, tokens_per_byte: float) -> str:
        """A prompt is bound to the worker; returns its session id, which nobody can predict."""
        session = secrets.token_hex(8)
        self._running[session] = _Prompt(points, tokens_per_byte)
        return session

    def end(self, session: str) -> None:
        """The prompt's request has ended, served or not."""
        prompt = self._running.pop(session, None)
        if prompt is None:
            return
        self._place_rest(prompt)
        self._ended[session] = prompt
        if len(self._ended) > _ENDED:
            self._judge(self._ended.pop(next(iter(self._ended))))

    def stored(
        self, session: str, blocks: list[Block], parent: Block | None, block_tokens: int
    ) -> None:
        """The engine has these blocks of a prompt, after `parent`."""
        prompt = self._running.get(session) or self._ended.get(session)
        if prompt is None or not blocks:
            return
        if parent is None:  # from the first on, for the first time or again
            prompt.placed = prompt.blocks = 0
        elif parent != prompt.last:
            return
        if not self._noticed:
            self._noticed = True
            self.index.notice(self._worker, on=True)
        self._silent = 0
        end = prompt.blocks + len(blocks)
        for tokens, digest in prompt.points[prompt.placed :]:
            block = max(0, tokens // block_tokens - 1)
            if block >= end:
                break
            self._place(digest, blocks[block - prompt.blocks])
            prompt.placed += 1
        prompt.blocks, prompt.last = end, blocks[-1]
        if session in self._ended:
            self._place_rest(prompt)

    def removed(self, blocks: list[Block]) -> None:
        """The engine no longer has these blocks."""
        for block in blocks:
            for digest in self._digests.pop(block, ()):
                del self._block_of[digest]
                self._evict(digest)

    def forget(self) -> None:
        """The worker's cache is empty, or unknown."""
        self._drop()
        self.index.forget(self._worker)

    def stop(self) -> None:
        """No more is heard: its cache is estimated again."""
        self._drop()
        self._noticed = False
        self.index.notice(self._worker, on=False)

    def _drop(self) -> None:
        for held in (self._running, self._ended, self._block_of, self._digests):
            held.clear()

    def _judge(self, prompt: _Prompt) -> None:
        """Nothing more comes of a prompt."""
        if prompt.last is not None or not self._noticed:
            return
        for digest in prompt.digests:
            if digest not in self._block_of:
                self._evict(digest)
        self._silent += 1
        if self._silent > _SILENT:
            self.stop()

    def _place_rest(self, prompt: _Prompt) -> None:
        """The prompt has fewer tokens than estimated: its last points go with its last block."""
        if prompt.last is not None:
            for _, digest in prompt.points[prompt.placed :]:
                self._place(digest, prompt.last)

    def _place(self, digest: int, block: Block) -> None:
        before = self._block_of.pop(digest, None)
        if before is not None and before != block:
            self._take(before, digest)
        if before != block:
            self._digests.setdefault(block, []).append(digest)
        self._block_of[digest] = block
        if len(self._block_of) > self._max_placed:
            oldest = next(iter(self._block_of))
            self._take(self._block_of.pop(oldest), oldest)
            self._evict(oldest)

    def _take(self, block: Block, digest: int) -> None:
        digests = self._digests[block]
        digests.remove(digest)
        if not digests:
            del self._digests[block]

    def _evict(self, digest: int) -> None:
        if any(digest in prompt.digests for prompt in self._running.values()):
            return
        self.index.evict(self._worker, digest)
        self._gossip.evicted(digest, self._worker)
