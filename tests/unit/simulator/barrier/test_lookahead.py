"""Look-ahead: the oracle knows who ends when, survival what a gateway can know."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.barrier.group import simulate_group
from simulator.barrier.lookahead import BySurvival, LookAhead, Oracle
from simulator.barrier.policies import BfIo, Fcfs
from simulator.barrier.records import BarrierSpec, Floats, Pairs
from simulator.barrier.state import BarrierGroup
from simulator.barrier.summary import summarise
from simulator.barrier.work import like_burst, of_lengths

GEOMETRIC = 0.9 ** np.arange(2000, dtype=np.float64)


class Watched:
    """FCFS that notes what a look-ahead says, and what it should say by definition."""

    def __init__(self, ahead: LookAhead, horizon: int, *, oracle: bool) -> None:
        self.ahead, self.horizon, self.oracle = ahead, horizon, oracle
        self.compared = 0

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        grown = group.grown(self.horizon)
        found = self.ahead.load(group, self.horizon, grown)
        assert np.allclose(found, self.naive(group, grown))
        assert np.allclose(found[:, 0], group.load)
        self.compared += 1
        return Fcfs().choose(group, pool)

    def naive(self, group: BarrierGroup, grown: Floats) -> Floats:
        wanted = np.zeros((group.spec.workers, self.horizon + 1))
        for worker, slot in zip(*np.nonzero(group.request >= 0), strict=True):
            for h in range(self.horizon + 1):
                alive = float(group.step + h < group.end[worker, slot])
                if not self.oracle:
                    alive = 0.9**h
                wanted[worker, h] += alive * (group.weight[worker, slot] + grown[h])
        return wanted


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), min_size=9, max_size=40),
    st.integers(0, 12),
    st.sampled_from(((1.0,), (0.0,), (1.0, 3.0))),
    st.booleans(),
)
def test_the_matrix_is_the_sum_over_the_active_requests(
    pairs: list[tuple[int, int]], horizon: int, drift: tuple[float, ...], oracle: bool
) -> None:
    prompts, outputs = zip(*pairs, strict=True)
    ahead = Oracle() if oracle else BySurvival(lambda: [GEOMETRIC])
    policy = Watched(ahead, horizon, oracle=oracle)
    spec = BarrierSpec(workers=3, slots=2, reveal=4, drift=drift)
    asked = of_lengths(np.array(prompts, float), np.array(outputs))
    simulate_group(spec, asked, policy, drain=True)
    assert policy.compared


def test_knowing_who_ends_soon_balances_better_than_not_knowing() -> None:
    asked = like_burst(4000, np.random.default_rng(0))
    spec = BarrierSpec(workers=8, slots=32)
    blind, knowing, too_far = (
        summarise(simulate_group(spec, asked, policy), 500).imbalance
        for policy in (BfIo(), BfIo(10, ahead=Oracle()), BfIo(160, ahead=Oracle()))
    )
    assert knowing < blind < too_far
