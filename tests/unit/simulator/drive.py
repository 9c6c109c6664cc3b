"""Workloads, and three ways to run the same one: by steps, by jumps, and naively."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from hypothesis import strategies as st

from simulator.engine.engine import Emission, Engine, EngineProfile, EngineRequest, Iteration
from tests.unit.simulator.naive_engine import NaiveEngine

Token = tuple[float, str, int, bool]

PROFILE = EngineProfile(
    name="test",
    w_s=1.0,
    h_s=0.1,
    h_s_per_token=0.01,
    max_num_batched_tokens=32,
    chunk_tokens=16,
    kv_blocks=32,
    block_tokens=4,
    max_model_len=64,
    max_num_seqs=4,
)


def profile(**changes: object) -> EngineProfile:
    return msgspec.structs.replace(PROFILE, **changes)


def request(
    name: str,
    prompt: int,
    output: int,
    hashes: tuple[int, ...] = (),
    priority: int = 0,
    *,
    remote: bool = False,
    hold: bool = False,
) -> EngineRequest:
    return EngineRequest(
        id=name,
        prompt_tokens=prompt,
        output_tokens=output,
        block_hashes=hashes,
        priority=priority,
        remote=remote,
        hold=hold,
    )


@dataclass(frozen=True)
class Action:
    at_s: float
    submit: EngineRequest | None = None
    abort: str = ""
    release: str = ""


@st.composite
def profiles(draw: st.DrawFn, *, exact: bool = False) -> EngineProfile:
    """`exact`: sums of times are exact whatever their order (arrivals tie with boundaries)."""
    slots = draw(st.integers(1, 6))
    window = draw(st.integers(8, 64))
    # A quarter takes the fast path: the papers' counting.
    papers = draw(st.integers(0, 3)) == 0
    return EngineProfile(
        name="random",
        w_s=draw(st.sampled_from([1 / 128 if exact else 0.008, 1.0])),
        h_s=draw(st.sampled_from([0.0, 1 / 1024, 0.25] if exact else [0.0, 0.00065, 0.3])),
        h_s_per_token=draw(st.sampled_from([0.0, 1 / 64, 0.375] if exact else [0.0, 0.01, 0.37])),
        timing=draw(st.sampled_from(["slots", "kv"])),
        prefill="independent"
        if papers
        else draw(st.sampled_from(["packed", "shared", "independent"])),
        max_num_batched_tokens=draw(st.integers(slots, 24)),
        chunk_tokens=draw(st.integers(1, 16)),
        kv_blocks=-(-window // 4) + draw(st.integers(0, 16)),
        block_tokens=4,
        max_model_len=window,
        max_num_seqs=slots,
        prefix_cache_tokens=0 if papers else draw(st.sampled_from([None, 0, 12, 40])),
        load="reserved" if papers else draw(st.sampled_from(["reserved", "growing"])),
        scheduling=draw(st.sampled_from(["fcfs", "priority"])),
        prefill_s_per_token=0.0
        if papers
        else draw(st.sampled_from([0.0, 1 / 64 if exact else 0.013])),
        attention_s_per_pair=0.0
        if papers
        else draw(st.sampled_from([0.0, 1 / 256 if exact else 0.0031])),
    )


@st.composite
def workloads(draw: st.DrawFn, p: EngineProfile) -> list[Action]:
    """Up to 14 requests within 40 iterations, some sharing prefixes, some aborted."""
    actions: list[Action] = []
    window = p.max_model_len
    for i in range(draw(st.integers(1, 14))):
        at_s = draw(st.integers(0, 320)) / 8 * p.w_s
        prompt = draw(st.integers(1, window - 1))
        shared = draw(st.integers(0, 3))
        common = draw(st.integers(0, prompt // 4))
        hashes = tuple(
            shared * 1000 + b if b < common else (i + 9) * 1000 + b for b in range(prompt // 4)
        )
        output = draw(st.integers(1, 30))
        remote, hold = (draw(st.integers(0, 3)) == 0 for _ in range(2))
        asked = request(
            f"r{i}", prompt, output, hashes, draw(st.integers(0, 2)), remote=remote, hold=hold
        )
        actions.append(Action(at_s, asked))
        if draw(st.integers(0, 4)) == 0:
            actions.append(Action(at_s + draw(st.integers(0, 160)) / 8 * p.w_s, abort=f"r{i}"))
        if hold:
            # The last one comes after all else. Each at twice the time: what is held may have
            # another one evict itself in every iteration until then.
            actions += [Action(40 * p.w_s * 2**n, release=f"r{i}") for n in range(26)]
            actions.append(Action(at_s + draw(st.integers(0, 320)) / 8 * p.w_s, release=f"r{i}"))
    return sorted(actions, key=lambda action: action.at_s)


def token(at_s: float, e: Emission) -> Token:
    return (at_s, e.id, e.index, e.finished)


def apply(engine: Engine, action: Action) -> None:
    if action.submit is not None:
        engine.submit(action.submit, action.at_s)
    else:
        engine.abort(action.abort)
        engine.release(action.release)


class Stepper:
    """Steps an engine through virtual time with begin and finish."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clock = 0.0
        self.open: Iteration | None = None
        self.iterations: list[Iteration] = []

    def run_until(self, until_s: float) -> Iterator[tuple[float, Emission]]:
        while True:
            if self.open is None:
                if self.clock >= until_s:
                    return
                self.open = self.engine.begin(self.clock)
                if self.open is None:
                    self.clock = until_s
                    return
                self.iterations.append(self.open)
            if self.open.end_s > until_s:
                return
            self.clock = self.open.end_s
            self.open = None
            for emission in self.engine.finish():
                yield self.clock, emission


END_S = 1e10


def by_steps(engine: Engine, actions: list[Action]) -> list[Token]:
    out: list[Token] = []
    stepper = Stepper(engine)
    for action in [*actions, Action(END_S)]:
        out += [token(t, e) for t, e in stepper.run_until(action.at_s)]
        apply(engine, action)
    return out


def by_jumps(
    engine: Engine, actions: list[Action], *, every_token: bool, peeks: int = 0
) -> list[Token]:
    """`peeks`: how many events to ask for and run to between two actions."""
    out: list[Token] = []
    for action in [*actions, Action(END_S)]:
        for _ in range(peeks):
            next_s = engine.next_event_s()
            if next_s is None or next_s > action.at_s:
                break
            found = engine.run_until(next_s, every_token=every_token)
            out += [token(t, e) for t, e in found]
        found = engine.run_until(action.at_s, every_token=every_token)
        out += [token(t, e) for t, e in found]
        apply(engine, action)
    return out


def naively(engine: NaiveEngine, actions: list[Action]) -> list[Token]:
    out: list[Token] = []
    clock, end_s = 0.0, None
    for action in [*actions, Action(END_S)]:
        while True:
            if end_s is None:
                length = engine.begin() if clock < action.at_s else None
                if length is None:
                    break
                end_s = clock + length
            if end_s > action.at_s:
                break
            clock, end_s = end_s, None
            out += [(clock, *event) for event in engine.finish()]
        if end_s is None:
            clock = max(clock, action.at_s)
        if action.submit is not None:
            engine.submit(action.submit)
        else:
            engine.abort(action.abort)
            engine.release(action.release)
    return out
