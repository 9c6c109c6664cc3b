"""What holds for an engine at any moment, whatever is asked of it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simulator.engine.engine import Engine, EngineProfile, Iteration
from tests.unit.simulator.drive import profiles, request


class AnyCalls(RuleBasedStateMachine):
    """Submits, aborts and steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.open: Iteration | None = None
        self.live: dict[str, int] = {}  # tokens seen
        self.holds: set[str] = set()
        self.held: set[str] = set()
        self.submitted = 0

    @initialize(p=profiles())
    def start(self, p: EngineProfile) -> None:
        self.p = p
        self.engine = Engine(p)

    @rule(
        data=st.data(),
        output=st.integers(1, 30),
        shared=st.integers(0, 3),
        remote=st.booleans(),
        hold=st.booleans(),
    )
    def submit(
        self, data: st.DataObject, output: int, shared: int, remote: bool, hold: bool
    ) -> None:
        prompt = data.draw(st.integers(1, self.p.max_model_len - 1))
        name = f"r{self.submitted}"
        self.submitted += 1
        hashes = tuple(shared * 100 + b for b in range(prompt // 4))
        asked = request(name, prompt, output, hashes, output % 3, remote=remote, hold=hold)
        self.engine.submit(asked, self.clock)
        self.live[name] = 0
        if hold:
            self.holds.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        before = self.engine.kv_usage
        assert self.engine.abort(name)
        assert not self.engine.abort(name)
        assert self.engine.kv_usage <= before
        del self.live[name]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        assert not self.engine.abort(name)  # the client of an ended request can't free its blocks
        assert self.engine.release(name)
        assert not self.engine.release(name)
        self.held.remove(name)

    @precondition(lambda self: self.open is None)
    @rule()
    def begin(self) -> None:
        self.open = self.engine.begin(self.clock)
        if self.open is None:
            # Only what ended sequences hold can leave an engine with nothing but waiting ones.
            assert not self.live or (self.held and not self.engine.running)
            return
        assert self.live
        budget = {
            "packed": self.p.max_num_batched_tokens - self.open.decode_sequences,
            "shared": self.p.chunk_tokens,
            "independent": self.p.chunk_tokens * self.engine.running,
        }[self.p.prefill]
        assert 0 <= self.open.prefill_tokens <= budget
        assert self.open.prefill_tokens + self.open.decode_sequences > 0
        assert self.open.end_s - self.open.start_s >= self.p.w_s - 1e-9

    @precondition(lambda self: self.open is not None)
    @rule()
    def finish(self) -> None:
        assert self.open is not None
        self.clock, self.open = self.open.end_s, None
        for emission in self.engine.finish():
            assert emission.index == self.live[emission.id] + 1
            self.live[emission.id] += 1
            if emission.finished:
                del self.live[emission.id]
                if emission.id in self.holds:
                    self.held.add(emission.id)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "engine"):
            return
        sched = self.engine._sched
        pool = sched.pool
        held = [block for seq in sched.running.values() for block in seq.held]
        anonymous = 0
        resident = 0
        for seq in sched.running.values():
            tokens = seq.computed
            if seq.decoding:
                tokens = seq.token_offset + sched._scheduled
            if self.p.load == "reserved":
                tokens = seq.final_tokens
            resident += tokens
            anonymous += -(-tokens // self.p.block_tokens) - len(seq.held)
        assert set(sched.held) == self.held
        for blocks, hashes in sched.held.values():
            held += hashes
            anonymous += blocks - len(hashes)
        assert pool.used == anonymous + len(set(held))
        assert pool.prefix.used_blocks == len(set(held))
        assert 0 <= pool.used <= pool.total
        assert pool.prefix.idle_blocks <= pool.free
        if self.p.prefix_cache_tokens is not None:
            assert pool.prefix.idle_blocks * self.p.block_tokens <= self.p.prefix_cache_tokens
        assert self.engine.kv_tokens == resident

    @invariant()
    def slots_are_bounded_and_nobody_is_lost(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.running <= self.p.max_num_seqs
            assert self.engine.running + self.engine.waiting == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in self.live:
            self.engine.abort(name)
        for name in self.held:
            self.engine.release(name)
        assert (self.engine.running, self.engine.waiting) == (0, 0)
        assert (self.engine.kv_usage, self.engine.kv_tokens) == (0.0, 0)


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
