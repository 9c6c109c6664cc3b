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


def test_saturated_throughput_of_paged_memory_beats_that_of_reserved_memory() -> None:
    done = {}
    for load in ("reserved", "growing"):
        p = profile(h_s=0.0, load=load, kv_blocks=16, max_num_seqs=4, prefix_cache_tokens=0)
        engine = Engine(p)
        for i in range(200):
            engine.submit(request(str(i), 4, 28), 0.0)
        done[load] = engine.run_until(1e6)[-1][0]
    # Two at a time when 8 of 16 blocks are reserved for each: 100 rounds of 28 iterations.
    assert done["reserved"] == 2800.0
    assert done["growing"] < 2800.0


def test_a_sequence_alone_takes_its_service_time_however_it_is_asked() -> None:
    p = PROFILES["demo"]
    ends = []
    for steps_s in (0.001, 0.0137, 10.0):
        engine = Engine(p)
        engine.submit(request("a", 3000, 400), 0.0)
        now_s = 0.0
        while engine.running or engine.waiting:
            now_s += steps_s
            ends += [t for t, e in engine.run_until(now_s) if e.finished]
    service_s = 401 * (p.w_s + p.h_s) + 3000 * p.prefill_s_per_token
    assert ends == [ends[0]] * 3
    assert ends[0] == pytest.approx(service_s)


def test_the_same_calls_give_the_same_bytes() -> None:
    def run() -> bytes:
        engine, rng, out = Engine(PROFILES["demo"]), random.Random(3), []
        now_s = 0.0
        for i in range(300):
            now_s += rng.expovariate(40)
            out += engine.run_until(now_s)
            hashes = tuple(rng.randint(0, 3) * 100 + b for b in range(40))
            engine.submit(
                request(str(i), rng.randint(640, 4000), rng.randint(1, 300), hashes), now_s
            )
        return msgspec.json.encode([*out, *engine.run_until(1e6)])

    assert run() == run()


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
