"""The engine against closed forms, and its memory, over longer runs."""

import random

import msgspec
import pytest

from simulator.engine.engine import PROFILES, Engine
from tests.unit.simulator.drive import profile, request


def test_saturated_throughput_is_slots_over_mean_service_time() -> None:
    slots = 16
    p = msgspec.structs.replace(PROFILES["llama-3-70b-a100-reserved"], max_num_seqs=slots)
    engine, rng = Engine(p), random.Random(7)
    iterations = 0
    for i in range(4000):
        prompt, output = rng.randint(1, 3000), rng.randint(1, 200)
        iterations += -(-prompt // 512) + output - 1
        engine.submit(request(str(i), prompt, output), 0.0)
    service_s = iterations / 4000 * (p.w_s + p.h_s * slots)

    *_, (end_s, _) = engine.run_until(1e6)

    assert 4000 / end_s == pytest.approx(slots / service_s, rel=0.01)


def test_nothing_of_what_ended_is_kept() -> None:
    engine = Engine(profile(load="reserved", prefill="independent", prefix_cache_tokens=0))
    other = Engine(profile())
    for i in range(2000):
        for e in (engine, other):
            e.submit(request(str(i), 20, 30, tuple(range(i * 5, i * 5 + 5))), float(i))
            e.run_until(i + 0.5)
            e.abort(str(i))
    for e in (engine, other):
        assert (len(e._live), len(e._sched.running), len(e._sched.waiting)) == (0, 0, 0)
        assert len(e._sched._events) < 200
        assert e._sched.pool.prefix.idle_blocks <= 32
