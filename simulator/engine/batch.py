"""Plan the sequences of the next iteration, and how many iterations the plan holds for.

Rules, as in vLLM:
- Running sequences come first: each decodes one token or continues its prefill. If their blocks
  do not suffice, the worst one (by rank, then the latest) is preempted: it frees all its blocks,
  goes to the head of the queue, and computes prompt and output again.
- Then waiting sequences enter in order while slots, prefill tokens and blocks last; the first
  that does not fit blocks the rest. After a preemption none enters in that iteration.
- A prompt never comes wholly from the prefix cache or another engine: its last token is computed.
- What came from another engine is lost by a preemption, as all else.
- A held sequence gives back its slot with its last token, and its blocks on `release`. Until then
  it may be that waiting sequences fit nowhere and nothing runs.

A plan holds until `lapse_v` or until the caller changes the batch, so the caller can jump over
identical iterations. For a `fixed` scheduler neither blocks nor budgets change between
iterations: prefills end at a known iteration and need no plan either.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from simulator.engine.kv_blocks import BlockPool, DecodeGrowth
from simulator.engine.profiles import EngineProfile
from simulator.engine.sequence import NOT_RUNNING, Sequence

NEVER = 1 << 62
STALE_EVENTS = 64
"""Stale events are dropped when there are more than this and more than half of all."""
FEW_WAITING = 4
"""Waiting prompts that are examined to bound when the first of them can be ready."""


class EventQueue:
    """When sequences are known to end their prefill or their output.

    A heap by iteration, then by run number; events of removed sequences are skipped later.
    """

    __slots__ = ("_heap", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, v: int, seq: Sequence) -> None:
        """Expect the sequence's event at the end of iteration v."""
        heappush(self._heap, (v, seq.run, seq))

    def next_v(self) -> int:
        """The first iteration with an event; NEVER when there is none."""
        return self._heap[0][0] if self._heap else NEVER

    def take(self, v: int) -> list[Sequence]:
        """Remove the events up to iteration v; returns their sequences in order of admission."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= v:
            _, run, seq = heappop(heap)
            if seq.run == run:
                due.append(seq)
            else:
                self._stale -= 1
        return due

    def forget_one(self) -> None:
        """Note that a sequence with an event here stopped running."""
        self._stale += 1

    def tidy(self) -> None:
        """Make sure that the next event is a live one, and that few stale ones remain."""
        if not self._stale:
            return
        heap = self._heap
        if self._stale > STALE_EVENTS and self._stale * 2 > len(heap):
            heap[:] = [entry for entry in heap if entry[2].run == entry[1]]
            heapify(heap)
            self._stale = 0
        while heap and heap[0][2].run != heap[0][1]:
            heappop(heap)
            self._stale -= 1


class BatchScheduler:
    """Queue, running sequences and blocks of one engine; v counts finished iterations."""

    def __init__(self, profile: EngineProfile) -> None:
        size = profile.block_tokens
        cached = profile.prefix_cache_tokens
        self.profile = profile
        self.pool = BlockPool(profile.kv_blocks, None if cached is None else cached // size)
        self.growing = profile.load == "growing"
        self.fixed = (
            not self.growing
            and profile.prefill == "independent"
            and profile.prefill_s_per_token == 0
            and profile.attention_s_per_pair == 0
            and not self.pool.caching
        )
        self.waiting: list[tuple[int, int, Sequence]] = []  # heap by rank, then arrival
        self.running: dict[int, Sequence] = {}  # by run number, in order of admission
        self.prefilling: dict[int, Sequence] = {}
        self.chunks: list[tuple[Sequence, int]] = []  # prefill tokens of the current plan
        self.decoding = 0
        self.resident = 0
        self.lapse_v = 0
        self.preemptions_total = 0
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0
        self.remote_hits_total = 0
        self.held: dict[str, tuple[int, list[int]]] = {}
        """Blocks of ended sequences that wait for another engine: all, and the shareable ones."""
        self._scheduled = 0
        self._growth = DecodeGrowth(size)
        self._events = EventQueue()
        self._runs = count()

    # Joining and leaving

    def enqueue(self, seq: Sequence) -> None:
        """Put a sequence into the queue, at its place by rank and arrival."""
        heappush(self.waiting, (seq.rank, seq.order, seq))

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting or running sequence and free its blocks."""
        if seq.run != NOT_RUNNING:
            if seq.decoding or self.fixed:
                self._events.forget_one()
            self._stop(seq)
            return
        self.waiting.remove((seq.rank, seq.order, seq))
        heapify(self.waiting)

    def start_decoding(self, seq: Sequence, v: int) -> None:
        """Note that the sequence's prefill ends with iteration v, which emits a token."""
        seq.decoding = True
        seq.index_offset = seq.emitted + 1 - v
        self.decoding += 1
        if self.fixed:
            return
        del self.prefilling[seq.run]
        if self.growing:
            seq.token_offset = seq.target - v
            self._growth.join(seq.token_offset)

    def expect_finish(self, seq: Sequence) -> None:
        """Schedule the event of a decoding sequence's last token."""
        self._events.push(seq.limit - seq.index_offset, seq)

    def finish(self, seq: Sequence) -> None:
        """Free a sequence that has emitted its last token; a held one keeps its blocks."""
        self._stop(seq, hold=seq.hold)

    def _stop(self, seq: Sequence, *, hold: bool = False) -> None:
        del self.running[seq.run]
        if self.growing:
            tokens = self._scheduled + seq.token_offset if seq.decoding else seq.computed
            blocks = -(-tokens // self.profile.block_tokens)
            self.resident -= tokens
        else:
            blocks = seq.final_blocks
            self.resident -= seq.final_tokens
        if hold:
            self.held[seq.id] = (blocks, seq.held)
        else:
            self.pool.give(blocks, seq.held)
        if seq.decoding:
            self.decoding -= 1
            if self.growing:
                self._growth.leave(seq.token_offset)
        elif not self.fixed:
            del self.prefilling[seq.run]
            self.chunks = [entry for entry in self.chunks if entry[0] is not seq]
        seq.run = NOT_RUNNING

    # Events

    def next_change_v(self) -> int:
        """The first iteration that ends a prefill, an output or the plan."""
        return min(self._events.next_v(), self.lapse_v)

    def earliest_event_v(self, v: int) -> int:
        """Lower bound of the next event when the iteration after v is yet to be planned.

        Requires a `fixed` scheduler with something to run; an admitted sequence must prefill first.
        """
        event_v = self._events.next_v()
        if not self.waiting or len(self.running) >= self.profile.max_num_seqs:
            return event_v
        if len(self.waiting) > FEW_WAITING:
            return min(event_v, v + 1)
        shortest = min(seq.target - seq.remote for _, _, seq in self.waiting)
        return min(event_v, v - (-shortest // self.profile.chunk_tokens))

    def is_due(self, v: int) -> bool:
        """Whether iteration v, at most `lapse_v`, may end a prefill or an output."""
        ahead = v - self._scheduled
        return self._events.next_v() <= v or any(
            seq.computed + ahead * chunk == seq.target for seq, chunk in self.chunks
        )

    def due(self, v: int) -> list[Sequence]:
        """Take the sequences whose prefill or output ends with iteration v, in run order."""
        events = self._events.take(v)
        if not self.chunks:
            return events
        due = [seq for seq, _ in self.chunks if seq.computed == seq.target and not seq.decoding]
        return sorted(due + events, key=lambda seq: seq.run) if events else due

    # Planning

    def plan(self, v: int, now_s: float) -> bool:
        """Schedule the iteration after v, which starts now; False if there is nothing to run."""
        if not self.running and not self.waiting:
            return False
        self._events.tidy()
        self._scheduled = v
        if self.fixed:
            self._admit_fixed(v, now_s)
            self.lapse_v = NEVER
            return bool(self.running)
        preempted = self._make_room(v)
        self.extend(1)
        if not preempted or not self.running:
            self._admit(v, now_s)
        if not self.running:
            return False
        self.lapse_v = v + self._horizon(v, preempted=preempted)
        return True

    def extend(self, iterations: int) -> None:
        """Schedule more iterations of the current plan."""
        if self.fixed:
            return
        if self.growing:
            self.pool.take(self._blocks_ahead(iterations))
            tokens = self.decoding + sum(chunk for _, chunk in self.chunks)
            self.resident += iterations * tokens
        if len(self.chunks) > 1 and self.pool.caching:
            # If two prompts share a block, the first to fill it provides it.
            for _ in range(iterations):
                for seq, chunk in self.chunks:
                    self._fill(seq, chunk)
        else:
            for seq, chunk in self.chunks:
                self._fill(seq, iterations * chunk)
        self._scheduled += iterations

    def prefill_tokens(self, v: int) -> int:
        """Prompt tokens of the iteration after v, as planned."""
        if not self.fixed:
            return sum(chunk for _, chunk in self.chunks)
        chunk = self.profile.chunk_tokens
        return sum(
            min(chunk, seq.target - seq.remote - chunk * (v - seq.started_v))
            for seq in self.running.values()
            if not seq.decoding
        )

    def attention_pairs(self) -> tuple[float, int]:
        """Pairs of a prefill token and one before it, and how many more the next iteration has."""
        pairs, growth = 0.0, 0
        for seq, chunk in self.chunks:
            pairs += chunk * (seq.computed - chunk / 2)  # the chunk is in `computed` already
            growth += chunk * chunk
        return pairs, growth

    def _make_room(self, v: int) -> bool:
        """Give running prefills their chunks; preempt until the blocks suffice."""
        preempted = False
        self.chunks = self._running_chunks()
        while self.growing and self._blocks_ahead(1) > self.pool.free:
            self._preempt(v)
            preempted = True
            self.chunks = self._running_chunks()
        return preempted

    def _running_chunks(self) -> list[tuple[Sequence, int]]:
        each, left = self._prefill_limits()
        chunks: list[tuple[Sequence, int]] = []
        for seq in self.prefilling.values():
            chunk = min(seq.target - seq.computed, each, left)
            if chunk <= 0:
                break
            chunks.append((seq, chunk))
            left -= chunk
        return chunks

    def _prefill_limits(self) -> tuple[int, int]:
        """The most prefill tokens of one iteration, per sequence and in all."""
        profile = self.profile
        if profile.prefill == "packed":
            return NEVER, profile.max_num_batched_tokens - self.decoding
        if profile.prefill == "shared":
            return NEVER, profile.chunk_tokens
        return profile.chunk_tokens, NEVER

    def _preempt(self, v: int) -> None:
        victim = max(self.running.values(), key=lambda seq: (seq.rank, seq.order))
        if victim.decoding:
            victim.emitted = v + victim.index_offset
            self._events.forget_one()
        self._stop(victim)
        victim.decoding = False
        victim.target = victim.prompt_tokens + victim.emitted
        victim.remote = 0
        self.preemptions_total += 1
        self.enqueue(victim)

    def _admit(self, v: int, now_s: float) -> None:
        size = self.profile.block_tokens
        each, left = self._prefill_limits()
        left -= sum(chunk for _, chunk in self.chunks)
        pool = self.pool
        while self.waiting and left > 0 and len(self.running) < self.profile.max_num_seqs:
            seq = self.waiting[0][2]
            hits = idle = 0
            if seq.hashes and pool.caching:
                hits, idle = pool.prefix.match(seq.hashes, (seq.target - 1) // size)
            ready = max(hits * size, seq.remote)
            chunk = min(seq.target - ready, each, left)
            blocks = -(-(ready + chunk) // size) if self.growing else seq.final_blocks
            if blocks - hits + idle > pool.free:
                return
            heappop(self.waiting)
            pool.share(seq.hashes[:hits])
            pool.take(blocks - hits)
            seq.filled = hits
            seq.held = list(seq.hashes[:hits])
            seq.cached_tokens = seq.computed = ready
            if pool.caching and seq.first_scheduled_s is None:
                self.prefix_queries_total += seq.prompt_tokens
                self.prefix_hits_total += hits * size
            self._run(seq, v, now_s)
            self.prefilling[seq.run] = seq
            self._fill(seq, chunk)
            self.chunks.append((seq, chunk))
            self.resident += seq.computed if self.growing else seq.final_tokens
            left -= chunk

    def _admit_fixed(self, v: int, now_s: float) -> None:
        most, chunk, pool = self.profile.max_num_seqs, self.profile.chunk_tokens, self.pool
        while self.waiting and len(self.running) < most:
            seq = self.waiting[0][2]
            if seq.final_blocks > pool.total - pool.used:
                return
            heappop(self.waiting)
            pool.used += seq.final_blocks
            self.resident += seq.final_tokens
            self._run(seq, v, now_s)
            self._events.push(v - ((seq.remote - seq.target) // chunk), seq)

    def _run(self, seq: Sequence, v: int, now_s: float) -> None:
        seq.run = next(self._runs)
        seq.started_v = v
        self.running[seq.run] = seq
        if seq.first_scheduled_s is None:
            if seq.remote:
                in_cache = len(seq.held) * self.profile.block_tokens
                self.remote_hits_total += seq.prompt_tokens - in_cache
            seq.first_scheduled_s = now_s
            seq.queue_s = max(0.0, now_s - seq.arrival_s)

    def _fill(self, seq: Sequence, tokens: int) -> None:
        """Advance a prefill; its full prompt blocks can be shared from now on."""
        seq.computed += tokens
        if not self.pool.caching:
            return
        full = seq.computed // self.profile.block_tokens
        for block in seq.hashes[seq.filled : full]:
            if self.pool.prefix.register(block):
                seq.held.append(block)
        seq.filled = full

    def _horizon(self, v: int, *, preempted: bool) -> int:
        """Number of iterations, the scheduled one included, for which the plan stays the same."""
        if preempted or (self.waiting and self.chunks and self.pool.caching):
            return 1  # the next one may admit again, or share what this one computes
        most = self._events.next_v() - v
        for seq, chunk in self.chunks:
            most = min(most, 1 + (seq.target - seq.computed) // chunk)
        if not self.growing or self._blocks_ahead(most - 1) <= self.pool.free:
            return most
        low, high = 1, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._blocks_ahead(middle - 1) <= self.pool.free:
                low = middle
            else:
                high = middle
        return low

    def _blocks_ahead(self, iterations: int) -> int:
        """Blocks that the next iterations of this plan take."""
        size = self.profile.block_tokens
        blocks = self._growth.blocks(self._scheduled, iterations)
        for seq, chunk in self.chunks:
            blocks += -(-(seq.computed + iterations * chunk) // size) + (-seq.computed // size)
        return blocks
