"""The simulated fleet against closed forms of queueing theory."""

from math import factorial

import numpy as np
import pytest

from simulator.fleet import arrivals
from simulator.fleet.fleet import simulate
from simulator.fleet.statistics import batch_means
from simulator.fleet.summary import summarise
from simulator.fleet.traffic import CdfLengths, Traffic
from tests.unit.simulator.fleets import one_pool, second

STEP_S = 1e-4
MEAN_ITERATIONS = 10_000  # so that a mean service takes one second


def exponential_traffic(rate_per_s: float, count: int, seed: int) -> Traffic:
    """Poisson arrivals, memoryless services of mean 1 s for engines of STEP_S."""
    random = np.random.default_rng(seed)
    return Traffic(
        arrival_s=arrivals.poisson(rate_per_s, count, random),
        prompt_tokens=np.ones(count, dtype=np.int64),
        output_tokens=random.geometric(1 / MEAN_ITERATIONS, count),
    )


def erlang_c(servers: int, load: float) -> float:
    top = load**servers / factorial(servers) / (1 - load / servers)
    return top / (sum(load**k / factorial(k) for k in range(servers)) + top)


@pytest.mark.parametrize(
    ("servers", "utilisation", "seed"), [(1, 0.5, 1), (1, 0.8, 2), (4, 0.8, 3), (16, 0.85, 4)]
)
def test_waits_are_those_of_m_m_c(servers: int, utilisation: float, seed: int) -> None:
    rate = servers * utilisation
    spec = one_pool(second(w_s=STEP_S, max_num_seqs=servers))
    outcome = simulate(spec, exponential_traffic(rate, 150_000, seed))
    settled = outcome.arrival_s >= outcome.window_s()[0]
    wait = batch_means(outcome.wait_s[settled])
    expected_s = erlang_c(servers, rate) / (servers - rate)
    assert wait.holds(expected_s), (wait, expected_s)
    assert (wait.high - wait.low) < 0.4 * expected_s
    assert summarise(spec, outcome).whole.utilisation == pytest.approx(utilisation, rel=0.02)


@pytest.mark.parametrize("timing", ["slots", "kv"])
def test_saturated_throughput_is_the_analytic_capacity(timing: str) -> None:
    profile = second(
        w_s=0.008,
        h_s=0.00065,
        timing=timing,
        max_num_seqs=64,
        max_model_len=8192,
        kv_blocks=1 << 16,
    )
    spec = one_pool(profile, instances=8)
    random = np.random.default_rng(8)
    lengths = CdfLengths([(256, 0.3), (1024, 0.8), (4096, 1.0)])
    prompts, outputs = lengths.sample(60_000, random)
    tokens = prompts + outputs
    iterations = -(-prompts // 512) + outputs - 1
    mean = iterations.mean()
    if timing == "slots":
        step_s = profile.w_s + profile.h_s * 64
    else:
        held = 64 * (iterations * tokens).mean() / mean
        step_s = profile.w_s + profile.h_s_per_token * held
    capacity = 8 * 64 / (mean * step_s)
    at_s = arrivals.poisson(1.4 * capacity, len(prompts), random)
    outcome = simulate(spec, Traffic(arrival_s=at_s, prompt_tokens=prompts, output_tokens=outputs))
    found = summarise(spec, outcome).whole
    assert found.requests_per_s == pytest.approx(capacity, rel=0.01)
    assert found.utilisation == pytest.approx(1.0, abs=1e-6)
    assert found.drifting


def test_the_shortest_queue_beats_two_choices_and_those_beat_a_blind_choice() -> None:
    traffic = exponential_traffic(8 * 0.8, 40_000, 9)
    fleets = [
        one_pool(second(w_s=STEP_S), instances=8, dispatch=name)
        for name in ("jsq", "p2c", "random")
    ]
    waits = [summarise(spec, simulate(spec, traffic)).whole.wait.mean_s for spec in fleets]
    assert waits == sorted(waits)
    # M/M/1 each: rho / (mu - lambda) = 4 s.
    assert waits[2] == pytest.approx(4.0, rel=0.25)
    assert waits[0] < waits[2] / 3
