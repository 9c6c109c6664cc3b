"""Digest prompts where others may share their beginning; estimate what a worker holds of them.

An engine's prefix cache reuses the common beginning of two prompts. Hashing every block of a
prompt would take longer than the rest of the request, so a prompt is digested at 62 positions
at most:

- fixed positions, the same for every prompt, in steps of an octave up to 4 KiB and of a fifth
  of one up to 4 MiB: they find a shared beginning to within 13 % of its length;
- after tools and system prompt, after the first message, after each of the last few, and at
  the end: the next turn of a conversation begins with the same messages and finds the end
  exactly;
- a prompt over MAX_BYTES (only images make one so long) has the fixed positions and the end.

Rules of digests:
- Digests are of the client's own bytes, in the order in which chat templates render them:
  tools, system prompt, messages. Bytes that spell the same text differently do not match.
- A digest covers the salt and all bytes before its position. Over MAX_BYTES, the last digest
  covers the first MAX_BYTES, the length and the last _TAIL_BYTES.
- The hash is XXH3 with a secret seed that no client learns. It is not cryptographic: a client
  that finds collisions can only mislead the routing of prompts. Replicas that exchange digests
  share one seed (`use_seed`) and send digests to nobody else. The request log has them under a
  key (`keyed_digests`).

The index maps digest -> (bit mask of workers, stamp) in one dictionary with bounded entries.
The mask is above the stamp, so that more workers need no change of the entries.
Most engines do not say which prefixes they keep, so a model estimates it and their reports correct
it (what others say: `gateway.scheduling.prefix_notices`):

- Like an LRU cache, each worker keeps a prefix until as many tokens as its capacity were written
  after the last use. Stamps and capacities count tokens on the pool's one clock: the mean over
  its workers of the prompt tokens expected to miss the cache.
- Capacities are learned from the `cached_tokens` in engines' usage: a missing hit lowers the
  capacity, an unexpected one raises it. An early miss is ignored, because two prompts with the
  same beginning may be computed at the same time. The reports correct for what the clock leaves
  out, such as answers' tokens, uneven load, and old blocks that are used again.
- A worker whose hits are nearly all missing (its cache is off) is expected to keep nothing,
  until its reports show hits again.
- `forget` is for a worker that restarted: its earlier prefixes no longer count.
- `joined` and `left` are for workers that come and go. A new one holds nothing.

Rules:
- `insert` stamps all points of a prompt, so an earlier point is never older than a later one.
- The work of a call is bounded by its arguments: each insert evicts a few of the oldest entries.
- Each replica has its own index. It learns from the prompts that it sends and from gossip of
  replicas on the same Redis (`gateway.scheduling.prefix_gossip`). Without Redis, each of several
  replicas expects fewer hits than there are.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from sys import maxsize
from typing import Final, NamedTuple

from msgspec import Raw
from xxhash import xxh3_64_intdigest

from gateway.payload.members import Members
from gateway.scheduling.scheduler import Match, Points

DEFAULT_ENTRIES: Final = 262_144
MIN_ENTRIES: Final = 8_192
_STAMP_BITS: Final = 44
"""Stamps count tokens of the pool's clock: 17 trillion of them."""
_STAMP: Final = (1 << _STAMP_BITS) - 1
_CHUNKS: Final = 32
"""Closed chunks in which entries are kept by age, of about equal size."""

DEFAULT_CAPACITY_TOKENS: Final = 500_000
"""Assumed capacity of a worker's cache until it is learned."""

_STEP: Final = 0.1
"""Largest relative step of a capacity per report."""
_MIN_STEP_TOKENS: Final = 4_096
_EARLY: Final = 1 / 16
"""A miss does not lower the capacity before this share of it was written."""
_REBUILDS: Final = 64
"""Rebuilds of the estimate while one capacity of tokens is written."""
_TAUGHT_BY_TOKENS: Final = 64
"""Fewer expected tokens teach nothing, because engines count in blocks."""
_FAR_LESS: Final = 0.5
"""A hit below this share of the expected tokens counts as a miss."""
_HIT_SHARE_STEP: Final = 0.05
_OFF_BELOW: Final = 0.1
_ON_ABOVE: Final = 0.3
_NEVER: Final = 1 << 62


class ExpectedHit(NamedTuple):
    """Tokens of a prompt that its worker was expected to have cached when it was sent."""

    hit_tokens: int
    """Tokens expected in the cache; 0 if they are believed to be evicted."""
    known_tokens: int
    """Tokens sent to the worker since its start, evicted or not; >= `hit_tokens`."""
    age_tokens: int
    """Tokens written on the pool's clock since the known ones were last used."""


class WorkerCache:
    """The estimate of one worker's cache."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.since = 0
        """Prefixes used up to this stamp are forgotten."""
        self.hit_share = 1.0
        """Smoothed share of the expected tokens that were hits."""
        self.off = False
        self.noticed_from = _NEVER
        """Prefixes used after this stamp are kept until the engine says that it evicted them."""

    def learn(self, expected: ExpectedHit, cached_tokens: int) -> bool:
        """Correct it by the tokens that an engine reported; True if it turned on or off."""
        known, age, capacity = expected.known_tokens, expected.age_tokens, self.capacity_tokens
        if known < _TAUGHT_BY_TOKENS or self.noticed_from < _NEVER:
            return False
        if cached_tokens >= _FAR_LESS * known:
            if age > capacity:
                step = max(int(_STEP * capacity), _MIN_STEP_TOKENS)
                self.capacity_tokens = min(age, capacity + step)
        elif capacity * _EARLY < age < capacity:
            self.capacity_tokens = max(age, int(capacity * (1 - _STEP)))
        if age > capacity:
            return False
        share = min(1.0, max(0, cached_tokens) / known)
        self.hit_share = (1 - _HIT_SHARE_STEP) * self.hit_share + _HIT_SHARE_STEP * share
        was, self.off = self.off, self.hit_share < (_ON_ABOVE if self.off else _OFF_BELOW)
        return self.off != was


class PrefixIndex:
    """The prefixes of one pool. Lengths of points times `tokens_per_byte` are tokens."""

    def __init__(
        self,
        workers: int,
        *,
        max_entries: int = DEFAULT_ENTRIES,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
    ) -> None:
        """An index of `workers` (>= 0) with at most `max_entries` (>= 8,192) digests.

        `capacity_tokens` (>= 1) is each worker's initial capacity. Raises ValueError.
        """
        if workers < 0 or max_entries < MIN_ENTRIES or capacity_tokens < 1:
            raise ValueError(
                f"a prefix index has workers, capacity, and {MIN_ENTRIES:,} entries or more"
            )
        self.workers = workers
        """Places for workers, vacant ones included."""
        self._full = (1 << workers) - 1
        """Mask of the present workers."""
        self._present = workers
        self._capacity_tokens = capacity_tokens
        self._caches = [WorkerCache(capacity_tokens) for _ in range(workers)]
        self._entries: dict[int, int] = {}
        """Digest -> mask << _STAMP_BITS | stamp."""
        self._clock = 1.0
        # A chunk is closed after the prompt that fills it, so it may exceed its size by 62
        # digests. At most 34 chunks exist, including the open one.
        self._chunk_entries = max_entries // (_CHUNKS + 3) - 62
        self._chunk: list[int] = []
        self._chunk_stamp = 1
        self._chunks: deque[tuple[int, list[int]]] = deque()
        """(first stamp after it, digests touched in it), oldest first."""
        self._rebuild(0.0)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def capacity_tokens(self) -> Sequence[int]:
        """Each worker's estimated cache capacity, on the pool's clock."""
        return [cache.capacity_tokens for cache in self._caches]

    def _rebuild(self, clock: float) -> None:
        """Recompute which stamps each worker keeps; due when the clock reaches `_rebuild_at`."""
        floors = sorted(
            (_NEVER if cache.off else max(cache.since, min(aged, cache.noticed_from)), worker)
            for worker, cache in enumerate(self._caches)
            for aged in (int(clock) - cache.capacity_tokens,)
        )
        self._floors = [floor for floor, _ in floors]
        """The stamps up to which workers keep nothing, ascending."""
        self._holders = [0]
        """Masks of the workers with the 0, 1, 2 ... lowest floors."""
        for _, worker in floors:
            self._holders.append(self._holders[-1] | 1 << worker)
        self._newest_floor = self._floors[-1] if self._floors else 0
        """All workers keep prefixes used after this stamp."""
        least = min([cache.capacity_tokens for cache in self._caches], default=0)
        self._rebuild_at = clock + max(1, least // _REBUILDS)

    def match(self, points: Sequence[tuple[int, int]], tokens_per_byte: float = 1.0) -> Match:
        """(tokens, mask of workers that hold at least these), longest first.

        `tokens_per_byte` is the prompt's tokens divided by the last point's length; 1 if points
        are in tokens.
        """
        if not self._entries:
            return ()
        if self._clock >= self._rebuild_at:
            self._rebuild(self._clock)
        get, full = self._entries.get, self._full
        floor = self._newest_floor
        matches: list[tuple[int, int]] = []
        seen = 0
        for length, digest in reversed(points):
            value = get(digest)
            if value is None:
                continue
            mask = value >> _STAMP_BITS & full
            stamp = value & _STAMP
            if stamp <= floor:
                mask &= self._holders[bisect_left(self._floors, stamp)]
            if mask | seen != seen:
                seen |= mask
                matches.append((int(length * tokens_per_byte), seen))
                if seen == full:
                    break
        return matches

    def insert(
        self, points: Sequence[tuple[int, int]], worker: int, tokens_per_byte: float = 1.0
    ) -> ExpectedHit:
        """Note a prompt sent to a worker; returns what it was expected to hold before."""
        if not points:
            return ExpectedHit(0, 0, 0)
        if self._clock >= self._rebuild_at:
            self._rebuild(self._clock)
        entries, full, floor = self._entries, self._full, self._newest_floor
        get, add, chunk_stamp = entries.get, self._chunk.append, self._chunk_stamp
        bit, stamp, since = 1 << worker, int(self._clock), self._caches[worker].since
        fresh = bit << _STAMP_BITS | stamp  # one int object for all new entries
        hit = known = touched = 0  # length held, length once sent, stamp of the latter
        for length, digest in points:
            value = get(digest)
            if value is None:
                entries[digest] = fresh
                add(digest)
                continue
            before, mask = value & _STAMP, value >> _STAMP_BITS & full
            if mask & bit and before > since:
                known, touched = length, before
            if before <= floor:
                mask &= self._holders[bisect_left(self._floors, before)]
            if mask & bit:
                hit = length
            if before < chunk_stamp:
                add(digest)
            mask |= bit
            entries[digest] = fresh if mask == bit else mask << _STAMP_BITS | stamp
        age = int(self._clock) - touched if known else 0
        written = (points[-1][0] - hit) * tokens_per_byte
        self._clock += written / max(1, self._present)
        if len(self._chunk) >= self._chunk_entries:
            self._chunk_stamp = int(self._clock) + 1
            self._clock = float(self._chunk_stamp)
            self._chunks.append((self._chunk_stamp, self._chunk))
            self._chunk = []
        if len(self._chunks) > _CHUNKS:
            self._evict(2 * len(points) + 2)
        return ExpectedHit(int(hit * tokens_per_byte), int(known * tokens_per_byte), age)

    def withdraw(
        self,
        points: Sequence[tuple[int, int]],
        worker: int,
        expected: ExpectedHit,
        tokens_per_byte: float = 1.0,
    ) -> None:
        """Undo an `insert` after the prompt failed before its first token."""
        for length, digest in reversed(points):
            if length * tokens_per_byte <= expected.known_tokens + 1:
                break
            self.evict(worker, digest)

    def evict(self, worker: int, digest: int) -> None:
        """Note that a worker does not hold one prefix."""
        bit = 1 << worker + _STAMP_BITS
        value = self._entries.get(digest, 0)
        if value & bit:
            self._entries[digest] = value ^ bit

    def notice(self, worker: int, *, on: bool) -> None:
        """Note that a worker's engine says from now on what it evicts, or does so no more."""
        cache = self._caches[worker]
        cache.noticed_from, cache.off = int(self._clock) - 1 if on else _NEVER, False
        self._rebuild_at = 0.0

    def forget(self, worker: int) -> None:
        """Note that a worker's cache is empty; takes constant time for any number of entries."""
        cache = self._caches[worker]
        cache.since, cache.hit_share, cache.off = int(self._clock), 1.0, False
        self._rebuild_at = 0.0  # of many that are forgotten at once, only one rebuild is due
        self._clock = float(int(self._clock) + 1)

    def joined(self, worker: int) -> None:
        """Note that a new worker took a place, which may be one more than there were."""
        if worker == self.workers:
            sizes = self.capacity_tokens  # of which it gets the mean
            self.workers += 1
            self._caches.append(
                WorkerCache(sum(sizes) // len(sizes) if sizes else self._capacity_tokens)
            )
            self._rebuild_at = 0.0
        else:
            self.forget(worker)
        self._full |= 1 << worker
        self._present += 1

    def left(self, worker: int) -> None:
        """Note that a worker is gone: it matches nothing any more."""
        self._full &= ~(1 << worker)
        self._present -= 1

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """Learn from the `cached_tokens` that the engine reported for a prompt.

        Do not call this if it reported none. The prompt's own points stay, because the worker has
        now computed the missing part.
        """
        if self._caches[worker].learn(expected, cached_tokens):
            self._rebuild(self._clock)

    def _evict(self, most: int) -> None:
        """Remove up to `most` digests of the oldest chunk, except those stamped again later."""
        after, chunk = self._chunks[0]
        for _ in range(min(most, len(chunk))):
            digest = chunk.pop()
            if self._entries[digest] & _STAMP < after:
                del self._entries[digest]
        if not chunk:
            self._chunks.popleft()


MIN_BYTES: Final = 256
"""Shorter prompts and beginnings have no points: they are fewer than five KV blocks."""
MAX_POINTS: Final = 62

_OCTAVES: Final = (512, 1024, 2048)
_FIFTHS: Final = tuple(round(4096 * 2 ** (n / 5)) for n in range(51))
POSITIONS: Final = (*_OCTAVES, *_FIFTHS)
"""The fixed positions in bytes, the same for every prompt."""
_AHEAD: Final = (*POSITIONS, maxsize)

_LAST: Final = 5
"""The last messages, each of which has a point where it begins."""
MAX_BYTES: Final = POSITIONS[-1]
"""Longest prompt that is digested whole, which takes a millisecond per megabyte or more."""
_TAIL_BYTES: Final = 65_536
_BRACES: Final = 8
"""Closing braces tried as the end of the first message."""
_NEXT: Final = tuple(comma + mark for comma in (b",", b", ") for mark in (b'{"role":', b'{"type":'))
_NO_VALUE: Final = Raw(b"")
_MARKS: Final[dict[str, tuple[bytes, ...]]] = {
    "chat": (b'{"role":',),
    "messages": (b'{"role":',),
    "responses": (b'{"role":', b'{"type":'),
    "completions": (),
}
"""Endpoint -> the bytes with which clients begin a message."""


_seed: int = hash(b"sluice prefixes") & maxsize
"""The default seed comes from Python's random hash seed, unless PYTHONHASHSEED fixes that."""


def seed() -> int:
    """The seed of digests, below 2**63. Digests compare only under the same seed."""
    return _seed


def use_seed(value: int) -> None:
    """Use another seed from now on; digests made before no longer match."""
    global _seed  # noqa: PLW0603 - one for the process
    _seed = value & maxsize


def points_of(
    endpoint_name: str,
    members: Members,
    text_bytes: int,
    tenant: str = "",
    adapter: str = "",
    *,
    salted: bool = True,
) -> Points:
    """The points of a body, by its members; () if no prefix can be shared.

    Lengths are bytes of tools, system prompt and messages as sent. `text_bytes` is the
    measure's. `salted` if engines keep tenants' caches separate. They always keep those of LoRA
    adapters separate; "" is the model itself. Embeddings, rerank, score and audio bodies have no
    points.
    """
    marks = _MARKS.get(endpoint_name)
    if marks is None or text_bytes < MIN_BYTES:
        return ()
    salt = tenant if salted else ""
    if adapter:
        salt = f"{salt}\0{adapter}"
    member = members.get
    if endpoint_name == "completions":
        start = _start(endpoint_name, salt, b"")
        prompt = member("prompt", _NO_VALUE)
        if len(prompt) > MAX_BYTES:
            first = bytes(memoryview(prompt)[:1])
            return _long_points((), prompt, start) if first == b'"' else ()
        data = bytes(prompt)  # batches and token ids have no points
        return digests(data, (len(data) - 1,), start) if data.startswith(b'"') else ()
    responses = endpoint_name == "responses"
    sent = member("input" if responses else "messages", _NO_VALUE)
    system = "instructions" if responses else "system"
    before = [members[name] for name in ("tools", "functions", system) if name in members]
    kwargs = bytes(member("chat_template_kwargs", _NO_VALUE))
    start = _start(endpoint_name, salt, kwargs)
    if sum(map(len, before)) + len(sent) > MAX_BYTES:
        return _long_points(before, sent, start)
    listed = bytes(sent)
    data = b"".join((*before, listed)) if before else listed
    lead = len(data) - len(listed)
    return digests(data, _edges(data, lead, marks), start)


def _long_points(before: Sequence[Raw], listed: Raw, start: int) -> Points:
    """Points of a prompt over MAX_BYTES; its fixed ones match those of shorter prompts."""
    length = sum(map(len, before)) + len(listed)
    views = [memoryview(part)[:MAX_BYTES] for part in (*before, listed)]
    head = b"".join(views)[:MAX_BYTES]
    points = digests(head, (MAX_BYTES,), start)
    tail = bytes(memoryview(listed)[-_TAIL_BYTES:])
    return (*points, (length, xxh3_64_intdigest(tail, points[-1][1] ^ length) >> 1))


def _start(endpoint_name: str, salt: str, kwargs: bytes) -> int:
    """The start of a chain of digests. The lengths make the concatenation unambiguous."""
    name, tenant = endpoint_name.encode(), salt.encode()
    reported = b"%d %d %b%b%b" % (len(name), len(tenant), name, tenant, kwargs)
    return xxh3_64_intdigest(reported, _seed) >> 1


MAX_LOGGED: Final = 16
"""Most points of a prompt in the request log."""
_BETWEEN: Final = frozenset(POSITIONS) - {512 << n for n in range(14)}
"""The fixed positions that are no octaves."""


def keyed_digests(points: Points, key: bytes) -> tuple[tuple[int, int], ...]:
    """A prompt's points for the request log, under a key of at most 64 bytes.

    Of more than MAX_LOGGED those at edges and octaves, the longest. Digests have 40 bits, and
    without the key nobody can tell of a text whether it has one: XXH3 alone could be inverted.
    """
    if len(points) > MAX_LOGGED:
        points = tuple([point for point in points if point[0] not in _BETWEEN][-MAX_LOGGED:])
    keyed, hashed = blake2b(digest_size=5, key=key), []
    for length, digest in points:
        keyed_hash = keyed.copy()
        keyed_hash.update(digest.to_bytes(8, "big"))
        hashed.append((length, int.from_bytes(keyed_hash.digest(), "big")))
    return tuple(hashed)


def digests(data: bytes, edges: Iterable[int], start: int) -> Points:
    """Chained digests of `data` at the fixed positions and at `edges`, which ascend.

    The last edge is the end of the prompt. `start` is the chain's first value.
    """
    points: list[tuple[int, int]] = []
    add = points.append
    chain, at = start, 0
    fixed = 0
    ahead = _AHEAD[0]
    for edge in edges:
        while ahead <= edge:
            chain = xxh3_64_intdigest(data[at:ahead], chain) >> 1
            at = ahead
            add((at, chain))
            fixed += 1
            ahead = _AHEAD[fixed]
        if at < edge >= MIN_BYTES:
            add((edge, xxh3_64_intdigest(data[at:edge], chain) >> 1))
    return tuple(points)


def _edges(data: bytes, lead: int, marks: Sequence[bytes]) -> list[int]:
    """Ends of tools and system prompt (`lead`), first message, last messages and the list.

    `data` ends with the list of messages.
    """
    end = len(data)
    if data.endswith(b"]"):
        end = len(data[: end - 1].rstrip()) if data[end - 2 : end - 1].isspace() else end - 1
    edges = [end]
    at = end
    find = data.rfind
    for _ in range(_LAST):
        at = find(marks[0], lead, at) if len(marks) == 1 else max(find(m, lead, at) for m in marks)
        if at <= lead + 1:
            break
        # Encoders separate this message from the one before by a comma, with or without a space.
        if data[at - 2 : at] == b"},":
            edges.append(at - 1)
        elif data[at - 3 : at] == b"}, ":
            edges.append(at - 2)
    else:
        first = _first_end(data, lead, at)
        if 0 < first < edges[-1]:
            edges.append(first)
    if lead:
        edges.append(lead)
    edges.reverse()
    return edges


def _first_end(data: bytes, lead: int, most: int) -> int:
    """The end of the first message, before `most`; 0 if it contains too many braces.

    Searching for one byte is ten times faster than searching for a word.
    """
    at = lead
    for _ in range(_BRACES):
        at = data.find(b"}", at, most) + 1
        if not at:
            break
        if data.startswith(_NEXT, at):
            return at
    return 0
