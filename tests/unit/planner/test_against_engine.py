"""The planner's closed forms against the engine model, iteration by iteration, on one node."""

import msgspec
import numpy as np
import pytest

from planner.goals import Goals
from planner.profile import PAPER_A100, NodeProfile
from planner.sizing import Sized, run_with
from planner.split import size_ranges
from planner.workload.moments import prepare
from planner.workload.workload import Workload, from_lengths
from simulator.engine.engine import PROFILES, Engine, EngineRequest
from sluice.simulated.fleet import engine_of
from tests.unit.planner.lengths import made_up_trace

RATE = 20.0
REQUESTS = 30_000
WINDOW = 65_536


def modelled(trace: Workload) -> tuple[Sized, float]:
    """One node at RATE, and the sequences it is said to run."""
    goals = Goals(rate_per_s=RATE, ttft_s=5.0)
    ranges = size_ranges(prepare(trace, boundaries=()), PAPER_A100, "paged", goals, WINDOW)
    sized = run_with(ranges.loads, PAPER_A100, np.ones(1))
    return sized, float(sized.utilisation[0] * ranges.loads.slots[0])


class Seen:
    """A long run of one engine that reserves final lengths and takes a chunk of every prompt."""

    def __init__(self, trace: Workload) -> None:
        engine = Engine(
            msgspec.structs.replace(
                PROFILES["llama-3-70b-a100-reserved"],
                max_model_len=WINDOW,
                max_num_seqs=256,
                timing="kv",
            )
        )
        assert trace.pairs is not None
        random = np.random.default_rng(5)
        picked = random.integers(0, trace.pairs.prompts.size, REQUESTS)
        arrivals = np.cumsum(random.exponential(1 / RATE, REQUESTS))
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        running = []
        for i, at in enumerate(arrivals):
            for time_s, token in engine.run_until(at):
                first.setdefault(token.id, time_s)
                last[token.id] = time_s
            running.append(engine.running)
            # The papers count one iteration more than the engine: one more token is asked for.
            answer = int(trace.pairs.answers[picked[i]]) + 1
            prompt = int(trace.pairs.prompts[picked[i]])
            engine.submit(EngineRequest(id=str(i), prompt_tokens=prompt, output_tokens=answer), at)
        steady = range(REQUESTS // 5, REQUESTS - REQUESTS // 20)
        done = [i for i in steady if str(i) in last]
        self.running = float(np.mean(running[REQUESTS // 5 :]))
        self.ttft_p99_s = float(np.percentile([first[str(i)] - arrivals[i] for i in done], 99))
        answers = trace.pairs.answers[picked]
        tpots = [(last[str(i)] - first[str(i)]) / answers[i] for i in done]
        self.step_s = float(np.average(tpots, weights=answers[done]))
        self.tpot_p99_s = float(np.percentile(tpots, 99))


def test_one_node_runs_as_the_closed_forms_say() -> None:
    trace = made_up_trace(requests=20_000)
    sized, running = modelled(trace)
    seen = Seen(trace)
    assert 0.3 < sized.utilisation[0] < 0.8
    assert seen.running == pytest.approx(running, rel=0.05)
    assert seen.step_s == pytest.approx(sized.step_s[0], rel=0.05)
    assert seen.ttft_p99_s == pytest.approx(sized.ttft_p99_s[0], rel=0.15)
    assert seen.tpot_p99_s == pytest.approx(sized.tpot_p99_s[0], rel=0.15)


SLOW = NodeProfile(
    name="slow",
    gpu="cpu",
    model="m",
    gpus=1,
    w_s=0.008,
    h_s_per_token=1e-6,
    prefill_s_per_token=9.5e-5,
    attention_s_per_pair=7.3e-8,
    chunk_tokens=2048,
    kv_tokens=2**17,
    max_num_seqs=8,
)
"""About what `bench real-engine` measures: a prompt of 4,000 tokens takes a second."""


@pytest.mark.parametrize("busy", [0.1, 0.2, 0.3, 0.4])
def test_prompts_that_take_time_wait_for_one_another(busy: float) -> None:
    random = np.random.default_rng(3)
    prompts, answers = random.integers(64, 3900, 4000), random.integers(8, 64, 4000)
    rate = busy / float(np.mean([SLOW.prompt_s(int(prompt)) for prompt in prompts]))
    prepared = prepare(
        from_lengths(prompts.astype(float), answers.astype(float)),
        boundaries=(),
        chunk_tokens=SLOW.chunk_tokens,
    )
    goals = Goals(rate_per_s=rate, ttft_s=60.0)
    ranges = size_ranges(prepared, SLOW, "paged", goals, 4096)
    planned_s = run_with(ranges.loads, SLOW, np.ones(1)).ttft_p99_s[0]
    engine = Engine(engine_of(SLOW, window_tokens=4096, counting="paged"))
    at_s = 0.0
    asked: dict[str, float] = {}
    first: dict[str, float] = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        at_s += random.exponential(1 / rate)
        for time_s, token in engine.run_until(at_s):
            first.setdefault(token.id, time_s)
        asked[str(number)] = at_s
        engine.submit(
            EngineRequest(id=str(number), prompt_tokens=int(prompt), output_tokens=int(answer)),
            at_s,
        )
    seen_s = float(np.percentile([first[i] - asked[i] for i in first], 99))
    assert seen_s == pytest.approx(planned_s, rel=0.2)
