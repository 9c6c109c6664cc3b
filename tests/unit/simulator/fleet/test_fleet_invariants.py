"""Whatever the fleet, the traffic and the failures: nothing is lost, nothing is overfilled."""

from math import inf

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.engine.engine import EngineProfile
from simulator.fleet.dispatch import DISPATCHERS
from simulator.fleet.fleet import FleetSpec, Outage, PoolSpec, simulate
from simulator.fleet.outcome import BROKEN, DONE, REFUSED_LENGTH, UNAVAILABLE, FleetOutcome
from simulator.fleet.traffic import Traffic
from tests.unit.simulator.fleets import closed_profiles, outage_lists, traffics

EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def specs(draw: st.DrawFn) -> FleetSpec:
    """One or two pools, of closed form or block-exact."""
    pools = []
    windows = sorted(draw(st.lists(st.integers(16, 64), min_size=1, max_size=2)))
    for number, window in enumerate(windows):
        last = number == len(windows) - 1
        pools.append(
            PoolSpec(
                name=str(number),
                instances=draw(st.integers(1, 4)),
                profile=draw(closed_profiles(window=window)),
                boundary_tokens=None if last else draw(st.integers(4, window)),
            )
        )
    return FleetSpec(
        pools=tuple(pools),
        gamma=draw(st.sampled_from([1.0, 1.5, 2.0])),
        compressible=draw(st.sampled_from([0.0, 0.5, 1.0])),
        dispatch=draw(st.sampled_from(sorted(DISPATCHERS))),
        spill_queue=draw(st.sampled_from([None, 0, 2])),
        block_exact=draw(st.booleans()),
    )


def most_held(outcome: FleetOutcome, mine: np.ndarray, weight: np.ndarray) -> int:
    """The largest sum of weights at any time; ends come before starts."""
    known = mine & ~np.isnan(outcome.start_s) & ~np.isnan(outcome.end_s)
    events = [
        *((t, 1, w) for t, w in zip(outcome.start_s[known], weight[known], strict=True)),
        *((t, 0, -w) for t, w in zip(outcome.end_s[known], weight[known], strict=True)),
    ]
    held = most = 0
    for _, _, change in sorted(events):
        held += change
        most = max(most, held)
    return most


def blocks(profile: EngineProfile, outcome: FleetOutcome) -> np.ndarray:
    tokens = outcome.prompt_tokens + outcome.output_tokens
    return np.asarray(-(-np.minimum(tokens, profile.max_model_len) // profile.block_tokens))


@EXAMPLES
@given(st.data())
def test_every_request_ends_once_in_order_of_its_times(data: st.DataObject) -> None:
    spec = data.draw(specs())
    traffic = data.draw(traffics())
    failures = data.draw(outage_lists([pool.instances for pool in spec.pools]))
    outcome = simulate(spec, traffic, seed=1, failures=failures)
    done = outcome.status == DONE
    assert set(outcome.status) <= {DONE, REFUSED_LENGTH, UNAVAILABLE, BROKEN}
    if not failures:
        assert done.sum() + (outcome.status == REFUSED_LENGTH).sum() == len(traffic)
    assert (outcome.arrival_s[done] <= outcome.start_s[done]).all()
    assert (outcome.start_s[done] < outcome.first_s[done]).all()
    assert (outcome.first_s[done] <= outcome.end_s[done]).all()
    assert (outcome.pool[done] >= 0).all()
    assert not np.isnan(outcome.end_s[outcome.status == BROKEN]).any()
    windows = np.array([pool.profile.max_model_len for pool in spec.pools])
    totals = outcome.prompt_tokens + outcome.output_tokens
    assert (totals[done] <= windows[outcome.pool[done]]).all()
    refused = outcome.status == REFUSED_LENGTH
    assert (totals[refused] > windows[-1]).all()


@EXAMPLES
@given(st.data())
def test_slots_and_blocks_are_never_exceeded_and_queues_are_in_order(data: st.DataObject) -> None:
    spec = data.draw(specs())
    traffic = data.draw(traffics())
    outcome = simulate(spec, traffic, seed=2)
    for p, pool in enumerate(spec.pools):
        profile = pool.profile
        for worker in range(pool.instances):
            mine = (outcome.pool == p) & (outcome.worker == worker)
            one = np.ones(len(traffic), dtype=np.int64)
            assert most_held(outcome, mine, one) <= profile.max_num_seqs
            assert most_held(outcome, mine, blocks(profile, outcome)) <= profile.kv_blocks
            assert (np.diff(outcome.start_s[mine]) >= 0).all()


@EXAMPLES
@given(st.data())
def test_the_closed_form_and_the_engine_make_the_same_fleet(data: st.DataObject) -> None:
    spec = data.draw(specs())
    traffic = data.draw(traffics())
    found = []
    for exact in (False, True):
        twin = FleetSpec(
            pools=spec.pools,
            gamma=spec.gamma,
            compressible=spec.compressible,
            dispatch=spec.dispatch,
            spill_queue=spec.spill_queue,
            block_exact=exact,
        )
        found.append(simulate(twin, traffic, seed=3))
    fast, exact_one = found
    assert np.array_equal(fast.end_s, exact_one.end_s, equal_nan=True)
    assert np.array_equal(fast.first_s, exact_one.first_s, equal_nan=True)
    assert np.array_equal(fast.worker, exact_one.worker)


@EXAMPLES
@given(traffics(), st.integers(1, 3))
def test_a_growing_fleet_loses_nothing_however_often_it_preempts(
    traffic: Traffic, instances: int
) -> None:
    profile = EngineProfile(
        name="tight",
        w_s=1.0,
        h_s=0.0,
        kv_blocks=20,
        block_tokens=4,
        max_model_len=80,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        prefix_cache_tokens=0,
    )
    pool = PoolSpec(name="only", instances=instances, profile=profile)
    outcome = simulate(FleetSpec(pools=(pool,)), traffic)
    assert (outcome.status == DONE).all()
    assert (outcome.start_s <= outcome.first_s).all()
    assert (outcome.first_s <= outcome.end_s).all()
    for worker in range(instances):
        assert (np.diff(outcome.start_s[outcome.worker == worker]) >= 0).all()


def test_what_was_begun_breaks_and_the_rest_moves() -> None:
    profile = EngineProfile(
        name="slow",
        w_s=1.0,
        h_s=0.0,
        max_num_seqs=1,
        prefill="independent",
        load="reserved",
        prefix_cache_tokens=0,
    )
    pool = PoolSpec(name="only", instances=2, profile=profile)
    traffic = Traffic(
        arrival_s=np.zeros(4),
        prompt_tokens=np.ones(4, dtype=np.int64),
        output_tokens=np.full(4, 10),
    )
    failure = Outage(pool=0, worker=0, down_s=5.0, up_s=inf)
    outcome = simulate(FleetSpec(pools=(pool,)), traffic, failures=[failure])
    # 0 had tokens on worker 0 and breaks; 2 waited behind it and queues behind 1 and 3.
    assert outcome.status.tolist() == [BROKEN, DONE, DONE, DONE]
    assert outcome.worker.tolist() == [0, 1, 1, 1]
    assert outcome.end_s.tolist() == [5.0, 10.0, 30.0, 20.0]
    assert outcome.retried == 1
