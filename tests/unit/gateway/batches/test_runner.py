"""Batches run to their end whatever fails: each item answered once, the ledger equal to it."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.admission.terms import AdmissionRequest
from gateway.batches.items import Item, Output
from gateway.batches.runner import MOST_RUNNING
from gateway.errors import Forbidden, RateLimited
from gateway.fleet import fleet
from gateway.records.batch import Batch, Part, Promise, Status, StoredFile
from gateway.records.lease import Lease, Limits
from gateway.records.request import Principal, TenantKey
from tests.builders import error_answer, keyring_of
from tests.fakes import FakeStore, failure, whole
from tests.unit.gateway.batches.bench import Faults, Process, World
from tests.virtual_time import run

ITEMS = 12


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def test_in_it(*arguments: Any, **more: Any) -> None:
        run(test(*arguments, **more))

    return test_in_it


def completed(world: World) -> Callable[[], bool]:
    return lambda: world.batch().status == "completed" and not world.batch().is_open


def assert_once(world: World, items: int = ITEMS) -> None:
    """Each item has one line, and the ledger has the tokens of exactly these."""
    lines = world.lines("out")
    assert sorted(line["custom_id"] for line in lines) == sorted(f"item {n}" for n in range(items))
    batch, usage = world.batch(), [line for part in world.ledger.values() for line in part]
    assert batch.completed == items == len(usage)
    told = [line["response"]["body"]["usage"] for line in lines]
    assert sum(each["prompt_tokens"] for each in told) == sum(line.input_tokens for line in usage)
    assert sum(p.output_tokens for p in batch.parts) == sum(line.output_tokens for line in usage)


@in_virtual_time
async def test_a_batch_runs_to_its_end() -> None:
    world = World()
    await world.create(ITEMS)
    process = Process(world)
    await process.run_until(completed(world))
    assert_once(world)
    assert world.batch().message == ""
    assert not [name for name in world.contents if name.endswith(".use")]
    assert {line["id"] for line in world.lines("out")} == {f"batch_req_1_{n}" for n in range(ITEMS)}
    assert world.file("out").bytes == world.batch().output_bytes("out")
    assert process.metrics.batch_items.values == {("m", "completed"): ITEMS}
    assert all(part.slot_s > 0 for part in world.batch().parts)


@pytest.mark.parametrize("dies_at", range(1, 60))
def test_a_kill_at_any_call_loses_and_doubles_nothing(dies_at: int) -> None:
    async def scene() -> int:
        world = World()
        await world.create(ITEMS)
        first = Process(world, name="a", faults=Faults(dies_at=dies_at))
        await first.run_until(completed(world))
        await asyncio.sleep(1)
        second = Process(world, name="b")
        await second.run_until(completed(world))
        assert_once(world)
        return first.faults.calls

    calls = run(scene())
    assert calls <= 60 or dies_at < 59, "more calls than are tested"


async def _ends(world: World, *processes: Process) -> None:
    await asyncio.gather(*(process.run_until(completed(world)) for process in processes))


@in_virtual_time
async def test_replicas_share_batches_and_none_runs_one_that_another_runs() -> None:
    world = World()
    for name in ("batch_1", "batch_2", "batch_3"):
        await world.create(ITEMS, name=name)
    both = [Process(world, name=name) for name in ("a", "b")]

    def ended() -> bool:
        return all(world.batch(f"batch_{n}").status == "completed" for n in (1, 2, 3))

    await asyncio.gather(*(process.run_until(ended) for process in both))
    assert sum(len(process.upstream.calls) for process in both) == 3 * ITEMS
    assert [len(world.lines("out", f"batch_{n}")) for n in (1, 2, 3)] == [ITEMS] * 3


@in_virtual_time
async def test_a_batch_of_a_killed_replica_moves_within_30_s() -> None:
    world, loop = World(), asyncio.get_running_loop()
    await world.create(200)
    first, second = Process(world, name="a", faults=Faults(dies_at=20)), Process(world, name="b")
    loop.call_at(1, second.runner.start)
    await first.run_until(completed(world))
    died_s = loop.time()
    while world.batch().owner != "b":  # noqa: ASYNC110 - as others see it
        await asyncio.sleep(0.25)
    assert 10 < loop.time() - died_s < 30
    while not completed(world)():  # noqa: ASYNC110 - as others see it
        await asyncio.sleep(1)
    await second.runner.close()
    assert_once(world, 200)


@in_virtual_time
async def test_who_was_taken_over_from_stops_its_items_and_writes_nothing_more() -> None:
    """It could not reach the state for a while, and did not die."""
    world, loop = World(), asyncio.get_running_loop()
    await world.create(200)
    first = Process(world, name="a", faults=Faults(away=lambda _: 8 < loop.time() < 60))
    second = Process(world, name="b")
    loop.call_at(1, second.runner.start)
    await _ends(world, first)
    await second.runner.close()
    assert_once(world, 200)
    assert first.upstream.cancelled or first.upstream.now == 0
    assert {part.epoch for part in world.batch().parts} == {1, 2}


@in_virtual_time
async def test_state_and_storage_may_be_away_and_nothing_is_lost() -> None:
    world, loop = World(), asyncio.get_running_loop()
    await world.create(100)
    process = Process(world, faults=Faults(away=lambda _: 5 < loop.time() % 40 < 30))
    await _ends(world, process)
    assert_once(world, 100)
    assert len(process.upstream.calls) == 100


@in_virtual_time
async def test_shutting_down_commits_what_is_done_and_another_goes_on_at_once() -> None:
    world, loop = World(), asyncio.get_running_loop()
    await world.create(100)
    first = Process(world, name="a")
    await first.run_until(lambda: loop.time() > 6.5)
    done = len(first.upstream.responses)
    assert 0 < world.batch().completed == done < 100
    assert first.upstream.now == 0 < first.upstream.cancelled
    assert world.batch().owner == ""
    second = Process(world, name="b")
    await _ends(world, second)
    assert len(second.upstream.calls) == 100 - done
    assert_once(world, 100)


@in_virtual_time
async def test_a_cancelled_batch_stops_at_the_engines_and_keeps_what_is_done() -> None:
    world = World()
    await world.create(100)
    process = Process(world)
    running = asyncio.create_task(process.run_until(lambda: world.batch().status == "cancelled"))
    await asyncio.sleep(5.5)
    done = len(process.upstream.responses)
    found = await process.get(Batch, "batch_1")
    assert found is not None
    batch, version = found
    await process.put(batch.moved("cancelling", 6), version)
    process.runner.poke()
    await asyncio.sleep(1)
    assert process.upstream.now == 0 < process.upstream.cancelled
    await running
    batch = world.batch()
    assert {"cancelling", "cancelled"} <= batch.reached_unix_s.keys()
    assert done <= batch.completed == len(world.lines("out")) < 100
    assert sum(map(len, world.ledger.values())) == batch.completed


@in_virtual_time
async def test_what_is_left_at_the_window_s_end_is_in_the_errors() -> None:
    world = World()
    await world.create(100, window_s=9)
    process = Process(world)
    await process.run_until(lambda: world.batch().status == "expired")
    done, left = world.lines("out"), world.lines("err")
    assert 0 < len(done) < 100
    assert {line["error"]["code"] for line in left} == {"batch_expired"}
    assert len({line["custom_id"] for line in done + left}) == len(done) + len(left) == 100
    assert world.batch().failed == len(left)


@in_virtual_time
async def test_engines_gone_for_a_quarter_of_an_hour_cost_no_item() -> None:
    world, loop = World(), asyncio.get_running_loop()
    await world.create(ITEMS, window_s=7200)
    process = Process(world)
    answer = process.upstream.script
    process.upstream.script = [failure("connect")]

    def back() -> None:
        process.upstream.script = answer
        for pool in process.served.fleet.pools:  # as a probe finds
            for engine in pool.engines:
                engine.up = True
            fleet.refresh(pool)

    loop.call_at(900, back)
    await _ends(world, process)
    assert_once(world)
    assert len(process.upstream.calls) < 4000, "it does not ask all the time"


@in_virtual_time
async def test_an_item_that_engines_fail_on_has_four_tries_and_an_error() -> None:
    world = World()
    await world.create(1)
    process = Process(world, whole(500, error_answer("CUDA error", code=500)))
    await process.run_until(lambda: world.batch().status == "completed")
    (line,) = world.lines("err")
    assert (line["custom_id"], line["response"]["status_code"]) == ("item 0", 502)
    assert line["response"]["body"]["error"]["code"]
    assert len(process.upstream.calls) == 4
    assert (world.batch().completed, world.batch().failed) == (0, 1)


@in_virtual_time
async def test_what_an_engine_refuses_is_not_tried_again() -> None:
    world = World()
    await world.create(1)
    process = Process(world, whole(400, error_answer("bad temperature")))
    await process.run_until(lambda: world.batch().status == "completed")
    (line,) = world.lines("err")
    assert line["response"]["status_code"] == 400
    assert len(process.upstream.calls) == 1


@in_virtual_time
async def test_refusals_for_want_of_capacity_are_no_tries_and_slow_it_down() -> None:
    class Busy(FakeStore):
        refused = 0

        async def admit(self, ask: AdmissionRequest) -> Lease:
            assert ask.demoted, "an item gets leftovers only"
            if asyncio.get_running_loop().time() < 60:
                self.refused += 1
                raise RateLimited("full", reason="priority", retry_after_s=1.0)
            return await super().admit(ask)

    world, leases = World(), Busy()
    await world.create(ITEMS)
    await _ends(world, Process(world, leases=leases))
    assert_once(world)
    assert 4 < leases.refused < 80


@in_virtual_time
async def test_a_creator_without_rights_waits_and_is_told_why() -> None:
    principal = Principal(entitlement="acme-prod", tenant="acme", model="m")
    keyring = keyring_of({b"o" * 32: principal})
    world = World()
    await world.create(ITEMS, tenant="acme", entitlement="acme-prod", key="ci", window_s=1000)
    process = Process(world, keyring=keyring)
    running = asyncio.create_task(process.run_until(completed(world)))
    await asyncio.sleep(10)
    assert "'ci'" in world.batch().message
    assert not process.upstream.calls
    keyring.put_tenant("acme", [TenantKey(tenant="acme", name="ci", sha256=b"a" * 32)])
    await running
    assert_once(world)
    assert {line.entitlement for p in world.ledger.values() for line in p} == {"acme-prod"}
    assert {line.key for p in world.ledger.values() for line in p} == {"ci"}


@in_virtual_time
async def test_live_requests_keep_their_slots() -> None:
    """Of 16 slots of two pools 9 are in use, and one stays free beyond."""
    world = World()
    await world.create(60)
    process = Process(world)
    process.served.fleet.pools[0].inflight = 9
    running = asyncio.create_task(process.run_until(completed(world)))
    await asyncio.sleep(10)
    assert process.upstream.most == 6
    process.served.fleet.pools[0].inflight = 0
    await running
    assert process.upstream.most == 15


@in_virtual_time
async def test_items_end_at_once_where_live_requests_fill_their_pool() -> None:
    class Managed(FakeStore):
        async def admit(self, ask: AdmissionRequest) -> Lease:
            limits = Limits(
                sequences=9,
                sequences_free=9,
                sequences_reset_s=0,
                tokens=0,
                tokens_free=0,
                tokens_reset_s=0,
            )
            return replace(await super().admit(ask), limits=limits)

    world = World()
    await world.create(60)
    process = Process(world, leases=Managed())
    process.served.fleet.pools[1].inflight = 8
    running = asyncio.create_task(process.run_until(completed(world)))
    await asyncio.sleep(9)
    assert process.upstream.now == 7
    process.served.fleet.pools[0].active[0] += 3  # live requests
    process.served.fleet.pools[0].inflight = process.upstream.now + 3
    await asyncio.sleep(0.02)
    assert process.upstream.cancelled >= 2
    process.served.fleet.pools[0].active[0] -= 3
    process.served.fleet.pools[0].inflight = 0
    await running
    assert_once(world, 60)


@in_virtual_time
async def test_the_batch_that_is_due_first_has_the_slots() -> None:
    world = World()
    await world.create(60, name="batch_1", window_s=3000)
    promise = Promise(finish_p50_unix_s=1, finish_p95_unix_s=1, promised_by_unix_s=500)
    await world.create(60, name="batch_2", window_s=3600, promise=promise)
    process = Process(world)
    await process.run_until(lambda: world.batch("batch_2").status == "completed")
    assert world.batch("batch_1").completed < 30
    assert process.metrics.batch_promises.values == {("true",): 1}


@in_virtual_time
async def test_items_of_one_prefix_go_together() -> None:
    world = World()
    await world.create(30)
    process = Process(world)
    await _ends(world, process)
    assert [text[0] for text in process.upstream.asked] == sorted("012" * 10)


@in_virtual_time
async def test_a_part_counts_in_the_ledger_of_the_host_that_made_it() -> None:
    """Its host was killed between the part and the ledger, and another one ended the batch."""
    for dies_at in range(14, 32, 2):
        world = World()
        await world.create(ITEMS)
        first = Process(world, name="a", ledger="a", faults=Faults(dies_at=dies_at))
        await first.run_until(completed(world))
        second = Process(world, name="b", ledger="b")
        await second.run_until(lambda: world.batch().status == "completed")  # noqa: B023
        again = Process(world, name="c", ledger="a")
        await again.run_until(completed(world))
        assert_once(world)


@in_virtual_time
async def test_batches_that_wait_for_rights_hold_no_place() -> None:
    """A tenant's suspended key must not keep out the batches of others."""
    principal = Principal(entitlement="acme-prod", tenant="acme", model="m")
    keyring = keyring_of({b"o" * 32: principal})
    keyring.put_tenant("acme", [TenantKey(tenant="acme", name="ci", sha256=b"a" * 32)])
    world = World()
    of: dict[str, Any] = {"tenant": "acme", "entitlement": "acme-prod"}
    for n in range(2 * MOST_RUNNING):
        await world.create(ITEMS, name=f"batch_w{n}", key="gone", **of)
    await world.create(ITEMS, key="ci", **of)
    await Process(world, keyring=keyring).run_until(completed(world), 300)
    assert_once(world)


@in_virtual_time
async def test_a_promise_takes_the_place_of_the_batch_that_is_due_last() -> None:
    world = World()
    for n in range(MOST_RUNNING):
        await world.create(2000, name=f"batch_w{n}", window_s=86_400, created_unix_s=n)
    process = Process(world)
    there = (Batch, "batch_1")
    running = asyncio.create_task(
        process.run_until(lambda: there in world.documents and completed(world)())
    )
    await asyncio.sleep(10)
    promise = Promise(finish_p50_unix_s=1, finish_p95_unix_s=1, promised_by_unix_s=500)
    await world.create(ITEMS, promise=promise, created_unix_s=10)
    await world.create(ITEMS, name="batch_c", status="cancelling", created_unix_s=11)
    await running
    assert asyncio.get_running_loop().time() < 120
    assert world.batch("batch_c").status == "cancelled"
    others = range(MOST_RUNNING - 1)
    assert {world.batch(f"batch_w{n}").epoch for n in others} == {1}, "the others stay"


@in_virtual_time
async def test_a_batch_whose_input_was_deleted_meanwhile_fails() -> None:
    world = World()
    await world.create(ITEMS)
    del world.documents[StoredFile, "file-batch_1"]
    await Process(world).run_until(lambda: world.batch().status == "failed", 9)
    assert [problem.code for problem in world.batch().problems] == ["file_not_found"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_batch_whose_input_cannot_be_read_ends_all_the_same(cancelled: bool) -> None:
    ends: Status = "cancelled" if cancelled else "failed"

    async def scene() -> None:
        world = World()
        await world.create(ITEMS, window_s=60)
        del world.contents["file-batch_1"]
        process = Process(world)
        running = asyncio.create_task(process.run_until(lambda: world.batch().status == ends, 90))
        await asyncio.sleep(20)
        assert "storage of batches fails" in world.batch().message
        assert "file-batch_1" not in world.batch().message, "what failed is for the log"
        if cancelled:
            found = await process.get(Batch, "batch_1")
            assert found is not None
            await process.put(replace(found[0], status="cancelling"), found[1])
        await running

    run(scene())


@in_virtual_time
async def test_a_defect_of_the_gateway_loses_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    take, broken = Output.take, [True]

    def takes(output: Output, batch: Batch, item: Item, *answer: Any) -> None:
        if item.index == 3 and broken.pop():
            broken.append(False)
            raise ZeroDivisionError
        take(output, batch, item, *answer)

    monkeypatch.setattr(Output, "take", takes)
    world = World()
    await world.create(ITEMS)
    broken.append(True)
    process = Process(world)
    await process.run_until(completed(world))
    assert len(world.lines("out")) == world.batch().completed == ITEMS


@in_virtual_time
async def test_an_item_that_asks_for_what_its_creator_may_not_stops_no_other() -> None:
    """Such as a LoRA adapter that the key does not open."""

    class Picky(FakeStore):
        async def admit(self, ask: AdmissionRequest) -> Lease:
            if ask.estimate_tokens > 2000:
                raise Forbidden("not this one", reason="model_not_entitled")
            return await super().admit(ask)

    world = World()
    await world.create(ITEMS)
    long = b"0 0" + 4000 * b" x"
    world.contents["file-batch_1"] = world.contents["file-batch_1"].replace(b"0 0", long)
    found = await Process(world).get(StoredFile, "file-batch_1")
    assert found is not None
    size = len(world.contents["file-batch_1"])
    await Process(world).put(replace(found[0], bytes=size), found[1])
    await Process(world, leases=Picky()).run_until(completed(world), 60)
    assert [line["custom_id"] for line in world.lines("err")] == ["item 0"]
    assert len(world.lines("out")) == ITEMS - 1


@in_virtual_time
async def test_usage_of_a_ledger_that_is_gone_keeps_no_batch_open_for_ever() -> None:
    world, loop = World(), asyncio.get_running_loop()
    await world.create()
    await asyncio.sleep(7 * 86_400 - 60)
    part = Part(epoch=1, number=0, lines=10, unposted="of a host that is gone")
    store = Process(world)
    found = await store.get(Batch, "batch_1")
    assert found is not None
    ended = replace(found[0], parts=(part,)).moved("completed", 0)
    await store.put(ended, found[1])
    await Process(world).run_until(completed(world), 8 * 86_400)
    assert loop.time() > 7 * 86_400
