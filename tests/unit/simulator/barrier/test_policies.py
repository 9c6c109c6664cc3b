"""Each policy's rule, seen on a few requests."""

from collections.abc import Sequence

import numpy as np
import pytest

from simulator.barrier.group import Policy
from simulator.barrier.policies import BfIo, Fcfs, Jsq, LeastKv, PowerOfD, RoundRobinPolicy
from simulator.barrier.records import BarrierSpec
from simulator.barrier.state import BarrierGroup
from simulator.barrier.work import of_lengths

SPEC = BarrierSpec(workers=3, slots=4)


def group(*held: Sequence[int], waiting: Sequence[int] = (10, 20, 30)) -> BarrierGroup:
    """Workers that hold these prompts, and what waits; the waiting come last."""
    prompts = [*(p for worker in held for p in worker), *waiting]
    found = BarrierGroup(SPEC, of_lengths(np.array(prompts, float), np.full(len(prompts), 9)))
    request = 0
    for worker, own in enumerate(held):
        for _ in own:
            found.bind(request, worker)
            request += 1
    found.start()
    found.revealed[:] = 0
    return found


def chosen(policy: Policy, of: BarrierGroup, waiting: int = 3) -> list[int]:
    """The worker of each waiting request, in their order; -1 for none."""
    total = len(of.sizes)
    found = [-1] * waiting
    for place, worker in policy.choose(of, range(total - waiting, total)):
        found[place] = worker
    return found


def test_fcfs_takes_most_free_slots_ties_by_index() -> None:
    assert chosen(Fcfs(), group([1, 1], [1], [1, 1, 1])) == [1, 0, 1]


def test_jsq_takes_the_fewest_requests_ties_at_random() -> None:
    of = group([5, 5, 5], [5], [5, 5, 5])
    assert chosen(Jsq(), of, 2) == [1, 1]
    firsts = {chosen(Jsq(seed), group([], [], []))[0] for seed in range(30)}
    assert firsts == {0, 1, 2}


def test_least_kv_takes_the_fewest_tokens_and_counts_what_it_sent() -> None:
    assert chosen(LeastKv(), group([25], [12], [100, 1])) == [1, 1, 0]


def test_bf_io_fills_the_gap() -> None:
    of = group([1000] * 4, [970, 1, 1, 1], [1000] * 4, waiting=(4000, 3020, 2000))
    assert chosen(BfIo(), of) == [-1, -1, -1]
    of = group([1000] * 4, [970, 1, 1], [1000] * 4, waiting=(4000, 3020, 2000))
    assert chosen(BfIo(), of) == [-1, 1, -1]


@pytest.mark.parametrize(
    "policy", [Fcfs(), Jsq(), LeastKv(), RoundRobinPolicy(), PowerOfD(), BfIo()]
)
def test_nobody_is_sent_where_nothing_is_free(policy: Policy) -> None:
    full = group([1] * 4, [1] * 4, [1] * 4)
    assert list(policy.choose(full, range(12, 15))) == []
