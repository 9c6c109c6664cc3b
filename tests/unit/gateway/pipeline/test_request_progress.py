"""A request's one lease: every change is asked of the store and noted."""

import msgspec
import pytest

from gateway.errors import Unavailable
from gateway.pipeline.request_progress import RequestLease
from gateway.records.estimate import Plan
from gateway.records.lease import Lease
from tests.builders import ask
from tests.fakes import FakeStore

PLAN = Plan(pool=0, alternates=(1,), reason="fits")


class Full(FakeStore):
    """A store whose other pools have no room."""

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        raise Unavailable("full", reason="full", code="full")


async def taken() -> tuple[RequestLease, FakeStore, Lease]:
    store = FakeStore()
    lease = await store.admit(ask("l", cost_tokens=100))
    return RequestLease(store, lambda: 7.0, PLAN, lease), store, lease


async def test_a_transfer_moves_it_and_keeps_what_was_taken() -> None:
    lease, _, first = await taken()
    await lease.transfer(1)
    assert (lease.current.pool, lease.taken) == (1, first)
    assert lease.changes == [(7.0, "transfer", 1)]


async def test_another_prompt_changes_its_cost() -> None:
    lease, store, _ = await taken()
    lease.resize(40, 9)
    assert (lease.current.cost_tokens, lease.current.kv_bytes) == (40, 9)
    assert lease.reserved_tokens == 40
    assert lease.changes == [(7.0, "resize", 40)]
    assert store.sizes == [("l", 40, 9)]


async def test_an_extension_reserves_more_at_the_same_cost() -> None:
    lease, store, _ = await taken()
    lease.extend(356, 3)
    assert (lease.current.cost_tokens, lease.reserved_tokens) == (100, 356)
    assert store.sizes == [("l", 356, 3)]


async def test_what_stage_6_did_is_noted_by_what_changed() -> None:
    lease, _, first = await taken()
    lease.adjusted(msgspec.structs.replace(first, cost_tokens=40))
    lease.adjusted(msgspec.structs.replace(first, pool=1))
    assert [change[1:] for change in lease.changes] == [("resize", 40), ("transfer", 1)]
    assert lease.reserved_tokens == 40


async def test_a_transfer_that_is_refused_leaves_it_where_it_was() -> None:
    first = await Full().admit(ask("l"))
    lease = RequestLease(Full(), lambda: 7.0, PLAN, first)
    with pytest.raises(Unavailable):
        await lease.transfer(1)
    assert lease.current is first
