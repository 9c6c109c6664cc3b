"""The engine's rules written out iteration by iteration, block by block, with no shortcut.

Follows vLLM's own loop (allocate in running order, preempt on failure, then admit), so that
the closed forms of the real model have something to be wrong against.
"""

from dataclasses import dataclass, field

from simulator.engine.engine import EngineProfile, EngineRequest


@dataclass(eq=False)
class NaiveSequence:
    request: EngineRequest
    order: int
    final: int
    computed: int = 0
    emitted: int = 0
    prefilled: bool = False
    remote: bool = False
    hashed: int = 0  # leading blocks that were offered for sharing, or taken from there
    blocks: list[int | None] = field(default_factory=list)  # a hash, or None for anonymous

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.emitted


class NaiveEngine:
    def __init__(self, profile: EngineProfile) -> None:
        self.p = profile
        self.caching = profile.prefix_cache_tokens != 0
        self.waiting: list[NaiveSequence] = []
        self.running: list[NaiveSequence] = []
        self.held: list[NaiveSequence] = []
        self.idle: list[int] = []  # hashes of freed blocks, oldest first
        self.preemptions = 0
        self.submitted = 0
        self.plan: dict[NaiveSequence, int] = {}
        self.decoders: list[NaiveSequence] = []

    # blocks

    @property
    def users(self) -> list[NaiveSequence]:
        return self.running + self.held

    @property
    def used(self) -> int:
        blocks = [b for s in self.users for b in s.blocks]
        return len({b for b in blocks if b is not None}) + blocks.count(None)

    def trim(self) -> None:
        room = self.p.kv_blocks - self.used
        if self.p.prefix_cache_tokens is not None:
            room = min(room, self.p.prefix_cache_tokens // self.p.block_tokens)
        del self.idle[: max(0, len(self.idle) - room)]

    def hash_blocks(self, s: NaiveSequence, upto: int) -> None:
        """Make the computed full prompt blocks shareable, unless another copy is in use."""
        if not self.caching:
            return
        size = self.p.block_tokens
        hashes = s.request.block_hashes[: s.request.prompt_tokens // size]
        in_use = {b for o in self.users for b in o.blocks}
        for i in range(min(len(hashes), upto // size)):
            if s.blocks[i] is None and i >= s.hashed and hashes[i] not in in_use:
                s.blocks[i] = hashes[i]
                if hashes[i] in self.idle:
                    self.idle.remove(hashes[i])
        s.hashed = max(s.hashed, upto // size)

    def blocks_for(self, s: NaiveSequence, tokens: int) -> int:
        if self.p.load == "reserved":
            tokens = s.final
        return -(-tokens // self.p.block_tokens) - len(s.blocks)

    def free(self, s: NaiveSequence, *, trim: bool = True) -> None:
        (self.held if s in self.held else self.running).remove(s)
        in_use = {b for o in self.users for b in o.blocks}
        for b in reversed(s.blocks):
            if b is not None and b not in in_use:
                self.idle.append(b)
        s.blocks = []
        if trim:
            self.trim()

    # requests

    def submit(self, request: EngineRequest) -> None:
        final = min(request.prompt_tokens + request.output_tokens, self.p.max_model_len)
        waiting = NaiveSequence(request, self.submitted, final, remote=request.remote)
        self.waiting.append(waiting)
        self.submitted += 1

    def abort(self, request_id: str) -> None:
        for s in [s for s in self.waiting if s.request.id == request_id]:
            self.waiting.remove(s)
        for s in [s for s in self.running if s.request.id == request_id]:
            self.free(s)
            self.plan.pop(s, None)

    def release(self, request_id: str) -> None:
        for s in [s for s in self.held if s.request.id == request_id]:
            self.free(s)

    def rank(self, s: NaiveSequence) -> tuple[int, int]:
        return (s.request.priority if self.p.scheduling == "priority" else 0, s.order)

    # one iteration

    def chunk(self, s: NaiveSequence, budget: float) -> int:
        if s.prefilled:
            return 1
        each = self.p.chunk_tokens if self.p.prefill == "independent" else budget
        return int(min(s.known - s.computed, each, budget))

    def begin(self) -> float | None:
        """Schedule one iteration; its length in seconds."""
        if not self.running and not self.waiting:
            return None
        packed = self.p.prefill == "packed"
        budget = {
            "packed": float(self.p.max_num_batched_tokens),
            "shared": float(self.p.chunk_tokens),
            "independent": float("inf"),
        }[self.p.prefill]
        self.plan = {}
        preempted = False
        for s in list(self.running):
            if s not in self.running:
                continue
            while True:
                n = self.chunk(s, budget)
                if n <= 0:
                    break
                need = self.blocks_for(s, s.computed + n)
                if need <= self.p.kv_blocks - self.used:
                    s.blocks += [None] * need
                    self.plan[s] = n
                    budget -= n if packed or not s.prefilled else 0
                    break
                victim = max(self.running, key=self.rank)
                refund = self.plan.pop(victim, 0)
                budget += refund if packed or not victim.prefilled else 0
                self.free(victim, trim=False)
                victim.computed, victim.prefilled, victim.remote = 0, False, False
                self.waiting.append(victim)
                self.preemptions += 1
                preempted = True
                if victim is s:
                    break
        # Only now: what was allocated before a preemption evicts nothing and shares nothing.
        for s, n in self.plan.items():
            self.hash_blocks(s, s.computed + n)
        self.trim()
        if not preempted or not self.running:
            self.admit(budget)
        if not self.running:
            return None
        resident = sum(
            s.final if self.p.load == "reserved" else s.computed + self.plan.get(s, 0)
            for s in self.running
        )
        prefill = sum(n for s, n in self.plan.items() if not s.prefilled)
        pairs = sum(n * (s.computed + n / 2) for s, n in self.plan.items() if not s.prefilled)
        length = self.p.w_s + self.p.prefill_s_per_token * prefill
        length += self.p.attention_s_per_pair * pairs
        if self.p.timing == "slots":
            return length + self.p.h_s * len(self.running)
        return length + self.p.h_s_per_token * resident

    def admit(self, budget: float) -> None:
        size = self.p.block_tokens
        self.waiting.sort(key=self.rank)
        while self.waiting and len(self.running) < self.p.max_num_seqs and budget > 0:
            s = self.waiting[0]
            in_use = {b for o in self.users for b in o.blocks}
            hashes = s.request.block_hashes[: s.request.prompt_tokens // size]
            hits = 0
            while self.caching and hits < min(len(hashes), (s.known - 1) // size):
                if hashes[hits] not in in_use and hashes[hits] not in self.idle:
                    break
                hits += 1
            s.computed = s.request.prompt_tokens - 1 if s.remote else hits * size
            s.blocks = list(hashes[:hits])
            s.hashed = hits
            n = self.chunk(s, budget)
            need = self.blocks_for(s, s.computed + n)
            woken = len([h for h in hashes[:hits] if h in self.idle])
            if need + woken > self.p.kv_blocks - self.used:
                s.blocks = []
                s.computed = 0
                return
            self.idle = [h for h in self.idle if h not in hashes[:hits]]
            s.blocks += [None] * need
            self.waiting.pop(0)
            self.running.append(s)
            self.hash_blocks(s, s.computed + n)
            self.trim()
            self.plan[s] = n
            budget -= n

    def finish(self) -> list[tuple[str, int, bool]]:
        out = []
        for s in list(self.running):
            n = self.plan.get(s, 0)
            s.computed += n
            if n == 0 or s.computed < s.known:
                continue
            s.prefilled = True
            s.emitted += 1
            finished = s.request.prompt_tokens + s.emitted == s.final
            out.append((s.request.id, s.emitted, finished))
            if finished and s.request.hold:
                self.running.remove(s)
                self.held.append(s)
            elif finished:
                self.free(s)
        return out
