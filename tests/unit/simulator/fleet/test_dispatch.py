"""Dispatchers: the fast ones choose as the gateway does, all keep their counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from simulator.fleet.dispatch import DISPATCHERS, LeastLoadedDispatch, ShortestQueue

COUNT = 200
NO_TOKENS = [0] * COUNT


def state(workers: int) -> PoolState:
    return PoolState("p", tuple(map(str, range(workers))), 4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_shortest_queue_chooses_as_the_gateway_does(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 7))
    mine, theirs = state(workers), state(workers)
    random = np.random.default_rng(0)
    fast, real = (
        ShortestQueue(mine, NO_TOKENS, random),
        LeastLoadedDispatch(theirs, NO_TOKENS, random),
    )
    placed: list[tuple[int, int]] = []
    for request in range(COUNT):
        step = data.draw(st.integers(0, 9))
        if step < 5:
            worker = fast.pick(request, 0.0)
            assert worker == real.pick(request, 0.0)
            placed += [(worker, request)] if worker >= 0 else []
        elif step < 8 and placed:
            worker, done = placed.pop(data.draw(st.integers(0, len(placed) - 1)))
            fast.finish(worker, done)
            real.finish(worker, done)
        elif step >= 8:
            worker, ok = data.draw(st.integers(0, workers - 1)), step == 9
            for pool, dispatcher in ((mine, fast), (theirs, real)):
                if ok:
                    fleet.probed(pool, worker, ok=True)
                else:
                    fleet.unreachable(pool, worker)
                dispatcher.refresh()


@pytest.mark.parametrize("name", sorted(DISPATCHERS))
def test_nobody_is_chosen_of_none_and_only_who_is_up(name: str) -> None:
    pool = state(4)
    dispatcher = DISPATCHERS[name](pool, NO_TOKENS, np.random.default_rng(0))
    fleet.unreachable(pool, 1)
    fleet.unreachable(pool, 2)
    dispatcher.refresh()
    assert {dispatcher.pick(i, 0.0) for i in range(50)} == {0, 3}
    for worker in (0, 3):
        fleet.unreachable(pool, worker)
    dispatcher.refresh()
    assert dispatcher.pick(50, 0.0) == -1


def test_two_choices_never_take_the_one_that_is_fuller_than_all_others() -> None:
    pool = state(5)
    pool.active[2] = 100
    dispatcher = DISPATCHERS["p2c"](pool, NO_TOKENS, np.random.default_rng(0))
    chosen = [dispatcher.pick(i, 0.0) for i in range(COUNT)]
    assert 2 not in chosen
    assert set(chosen) == {0, 1, 3, 4}
    for request, worker in enumerate(chosen):
        dispatcher.finish(worker, request)
    assert pool.active == [0, 0, 100, 0, 0]
