"""The load that the speed is stated at is what the statement says."""

import numpy as np

from planner.workload.library import SHIPPED
from simulator.experiments.speed import stated_load
from simulator.fleet.closed_form import applies
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import DONE


def test_the_stated_load() -> None:
    cdf = SHIPPED["azure"].workload.cdf
    assert cdf is not None
    spec, traffic = stated_load(cdf.points, requests=5000)
    (pool,) = spec.pools
    assert (pool.instances, pool.profile.max_num_seqs, spec.dispatch) == (44, 256, "jsq")
    assert applies(pool.profile)
    assert len(traffic) == 5000
    assert traffic.total_tokens.max() <= pool.profile.max_model_len
    outcome = simulate(spec, traffic)
    assert (outcome.status == DONE).all()
    assert len(np.unique(outcome.worker)) == 44
