"""The solver's working state: items by size, and workers while slots are filled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.rank_solver import Pool, WorkerLoads

sizes_ = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(sizes_, st.integers(0, 10))
def test_the_nearest_item_is_nearest_and_the_first_of_its_size(
    sizes: list[int], target: int
) -> None:
    pool = Pool([float(s) for s in sizes], range(len(sizes)))
    item, size = pool.take(pool.nearest(target))
    assert abs(size - target) == min(abs(s - target) for s in sizes)
    assert item == sizes.index(int(size))


@given(sizes_, st.data())
def test_an_item_put_back_stands_where_it_stood(sizes: list[int], data: st.DataObject) -> None:
    pool = Pool([float(s) for s in sizes], range(len(sizes)))
    before = list(pool.items)
    pool.give(*pool.take(data.draw(st.integers(0, len(sizes) - 1))))
    assert pool.items == before
    assert pool.sizes == sorted(pool.sizes)


def group() -> WorkerLoads:
    return WorkerLoads([[50.0, 90.0], [70.0, 20.0], [60.0, 60.0]], [1, 0, 2], None, 9)


def test_room_is_what_fits_below_the_fullest_of_the_others() -> None:
    found = group()
    assert found.most.tolist() == [70, 90]
    # The first worker is itself the fullest in a step: the next is 60.
    assert found.room(0).tolist() == [20, -30]
    assert found.room(2).tolist() == [10, 30]


def test_the_neediest_is_emptiest_for_each_free_slot_and_never_full() -> None:
    found = group()
    # 160 in all steps of the fullest: 20 below for one slot, 40 below for two.
    assert found.neediest() == 0
    found.place(0, 5.0)
    assert found.neediest() == 2
    assert found.load[0].tolist() == [55, 96]
    assert found.most.tolist() == [70, 96]
    assert (found.caps, found.slots) == ([0, 0, 2], 2)


def test_slots_beyond_the_items_are_counted_and_not_filled() -> None:
    found = WorkerLoads([1.0, 2.0, 3.0], [9, 0, 2], None, 3)
    assert (found.caps, found.free, found.slots) == ([3, 0, 2], [9, 0, 2], 5)
    found.place(0, 10.0)
    assert (found.caps, found.free, found.slots) == ([2, 0, 2], [8, 0, 2], 4)


@pytest.mark.parametrize("growth", [None, [0.0, 3.0]])
def test_an_item_grows_by_a_token_a_step_or_as_told(growth: list[float] | None) -> None:
    found = WorkerLoads(np.zeros((2, 2)), [1, 1], growth, 2)
    found.place(1, 10.0)
    assert found.load[1].tolist() == [10, 11 if growth is None else 13]
