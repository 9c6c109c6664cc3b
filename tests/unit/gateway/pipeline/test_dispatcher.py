"""Stages 7 to 9 with a scheduler: who waits, who is woken, and that every job is given back."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Self, cast

import pytest

from gateway.errors import RateLimited
from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.payload.sse import DONE
from gateway.pipeline.bind import wake
from gateway.pipeline.pipeline import Pipeline
from gateway.records.lease import Lease
from gateway.records.request import Incoming, Principal
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import Job, Scheduler
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy.keyring import Keyring
from sluice.build import compiled
from tests.around import Around
from tests.builders import (
    LONG,
    SHORT,
    address,
    answer_body,
    changed,
    chat_body,
    chunk,
    incoming,
    keyring_of,
    served_model,
    usage_chunk,
)
from tests.fakes import (
    HANG,
    FakeClock,
    FakeReply,
    Script,
    broken,
    stream,
    whole,
)
from tests.pipeline_bench import PipelineBench

OK = whole(200, answer_body())
STREAM = stream(chunk("a"), chunk("b"), chunk(finish="stop"), usage_chunk(10, 3), DONE)
HANGING = stream(chunk("a"), HANG)
PREFILLING = stream(HANG)


class OneAtATime(Scheduler):
    """First come, first served to the first available worker, one prefill at a time."""

    gates = True

    def __init__(self, served: ModelRuntime, pool: int) -> None:
        super().__init__(served.fleet.pools[pool])
        self.pool = served.fleet.pools[pool]
        self.queue: list[Job] = []
        self.busy: Job | None = None
        self.told: list[str] = []
        self.answered: list[bool] = []

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        choice = [w for w in fleet.available(self.pool, now_s) if w not in job.excluded]
        if not choice:
            job.state = "nowhere"
            return ()
        job.worker = choice[0]
        job.state = "waiting"
        self.queue.append(job)
        self.waiting[1] += 1
        return self._next(now_s)

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        self.told.append("assumed" if assumed else "first")
        if job.state == "sent":
            job.state = "answering"
        return self._free(job, now_s)

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        if job.state == "gone":
            return ()
        job.state = "gone"
        self.told.append("finished")
        self.answered.append(answered)
        return self._free(job, now_s)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        if job in self.queue:
            self.queue.remove(job)
            self.waiting[1] -= 1
            job.state = "gone"
            self.told.append("cancelled")
        return ()

    def tick(self, now_s: float) -> Sequence[Job]:
        lost = [job for job in self.queue if not fleet.available(self.pool, now_s)]
        for job in lost:
            self.queue.remove(job)
            self.waiting[1] -= 1
            job.state = "nowhere"
        return lost

    def _free(self, job: Job, now_s: float) -> Sequence[Job]:
        if job is not self.busy:
            return ()
        self.busy = None
        return self._next(now_s)

    def _next(self, now_s: float) -> Sequence[Job]:
        if self.busy is not None or not self.queue:
            return ()
        self.busy = job = self.queue.pop(0)
        self.waiting[1] -= 1
        job.state = "sent"
        job.sent_s = now_s
        job.quantile_s = 0.001
        return (job,)


class Bench(PipelineBench):
    """A pipeline over fakes whose short pool has a scheduler."""

    def __init__(
        self,
        *script: Script,
        limit: int = 10,
        timeout_s: float = 5.0,
        keyring: Keyring | None = None,
    ) -> None:
        if compiled():
            pytest.skip("compiled code takes no scheduler of a test's own")
        plain = served_model(workers=(2, 1))
        self.scheduler = OneAtATime(plain, SHORT)
        self.prefixes = (PrefixIndex(2), PrefixIndex(1))
        served = changed(
            plain,
            scheduler=(self.scheduler, plain.fleet.pools[LONG].scheduler),
            prefixes=self.prefixes,
            queue_limit=limit,
            queue_timeout_s=timeout_s,
        )
        clock = FakeClock()
        store = MemoryLeases({"m": served}, clock)
        super().__init__(*script, served=served, store=store, clock=clock, keyring=keyring)

    def ask(
        self, name: str = "r1", request: Incoming | None = None
    ) -> tuple[asyncio.Task[None], FakeReply]:
        reply = FakeReply()
        asked = request or incoming(chat_body(stream=True), request_id=name)
        return asyncio.create_task(self.pipeline.serve(asked, reply)), reply

    @classmethod
    async def busy(cls, *script: Script, **more: Any) -> tuple[Self, asyncio.Task[None]]:
        """One whose first request has been sent, and its task."""
        bench = cls(*script, **more)
        first, _ = bench.ask("r1")
        await bench.upstream.hanging.wait()
        return bench, first

    async def asked(self, name: str = "r1", request: Incoming | None = None) -> FakeReply:
        """The reply to one that ends by itself."""
        task, reply = self.ask(name, request)
        await asyncio.wait_for(task, 5)
        return reply

    async def waiting(
        self, name: str, request: Incoming | None = None
    ) -> tuple[asyncio.Task[None], FakeReply]:
        """A further request, once it waits."""
        before = len(self.scheduler.queue)
        asked = self.ask(name, request)
        await self.until_waiting(before + 1)
        return asked

    async def end(self, *tasks: asyncio.Task[None]) -> None:
        """Their clients leave, and nothing stays."""
        for task in tasks:
            await self.leave(task)
        self.assert_nothing_leaks()

    async def until_waiting(self, count: int = 1) -> None:
        async with asyncio.timeout(5):
            while len(self.scheduler.queue) < count:  # noqa: ASYNC110 - a turn of the loop each
                await asyncio.sleep(0)

    def assert_nothing_leaks(self) -> None:
        assert self.store.active == 0
        assert self.scheduler.busy is None
        assert self.scheduler.queue == []
        for pool in self.served.fleet.pools:
            assert set(pool.active) == {0}
            assert pool.inflight == 0


async def test_a_request_waits_until_the_one_before_has_its_first_token() -> None:
    bench = Bench(HANGING, STREAM)
    first, _ = bench.ask("r1")
    reply = await bench.asked("r2")
    assert reply.status == 200
    assert bench.scheduler.told[0] == "first"
    await bench.upstream.hanging.wait()
    await bench.end(first)


async def test_an_answer_that_is_not_streamed_frees_the_gate_in_the_predicted_time() -> None:
    bench = Bench(HANG, STREAM)
    first, _ = bench.ask("r1", incoming(chat_body(), request_id="r1"))
    reply = await bench.asked("r2")
    assert reply.status == 200
    assert bench.scheduler.told[0] == "assumed"
    await bench.leave(first)
    assert bench.scheduler.answered == [True, False]
    bench.assert_nothing_leaks()


async def test_who_leaves_while_waiting_is_taken_out_of_the_queue() -> None:
    bench, first = await Bench.busy(HANG)
    second, _ = await bench.waiting("r2")
    await bench.leave(second)
    assert bench.scheduler.told == ["cancelled"]
    assert len(bench.upstream.calls) == 1
    assert bench.record_of("r2").outcome == "disconnected"
    await bench.end(first)


async def test_who_is_woken_and_cancelled_in_one_turn_gives_its_place_to_the_next() -> None:
    bench, first = await Bench.busy(HANG, STREAM)
    second, _ = await bench.waiting("r2")
    third, reply = await bench.waiting("r3")
    busy = bench.scheduler.busy
    assert busy is not None
    wake(bench.scheduler.finished(busy, 0.0))  # r2 is sent ...
    await bench.leave(second)  # ... and leaves before it runs
    await third
    assert reply.status == 200
    await bench.end(first)


async def test_a_full_queue_refuses_with_429_and_a_full_refund() -> None:
    bench, first = await Bench.busy(HANG, limit=1)
    second, _ = await bench.waiting("r2")
    reply = await bench.asked("r3")
    assert reply.reason == "queue_full"
    assert bench.record_of("r3").usage.prompt_tokens is None
    await bench.end(second, first)


async def test_a_tenant_that_fills_the_queue_by_many_entitlements_keeps_nobody_out() -> None:
    keys = {"a1": "a", "a2": "a", "a3": "a", "b": "b"}
    bench = Bench(
        HANG,
        limit=40,
        keyring=keyring_of(
            {
                hashlib.sha256(key.encode()).digest(): Principal(entitlement=key, tenant=tenant)
                for key, tenant in keys.items()
            }
        ),
    )

    def begin(key: str, number: int) -> tuple[asyncio.Task[None], FakeReply]:
        headers = [(b"authorization", b"Bearer " + key.encode())]
        name = f"{key}-{number}"
        return bench.ask(name, incoming(chat_body(stream=True), request_id=name, headers=headers))

    crowd = [begin(f"a{1 + number % 3}", number) for number in range(60)]
    await bench.until_waiting(40)
    others = [begin("b", number) for number in range(20)]
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert len(bench.scheduler.queue) == 40
    assert sum(job.tenant == "b" for job in bench.scheduler.queue) == 20
    assert all(reply.refusal is None for _, reply in others)
    for task, _ in [*crowd, *others]:
        task.cancel()
    await asyncio.gather(*(task for task, _ in [*crowd, *others]), return_exceptions=True)
    bench.assert_nothing_leaks()


async def test_a_wait_that_is_too_long_ends_in_429() -> None:
    bench, first = await Bench.busy(HANG, timeout_s=0.02)
    reply = await bench.asked("r2")
    assert reply.reason == "queue_timeout"
    assert bench.scheduler.told == ["cancelled"]
    await bench.end(first)


async def test_nobody_waits_longer_than_the_client_does() -> None:
    bench, first = await Bench.busy(HANG, timeout_s=60.0)
    asked = incoming(
        chat_body(stream=True),
        request_id="r2",
        headers=[(b"x-stainless-read-timeout", b"0.02")],
    )
    bench.clock.now_s = asked.received_s
    reply = await bench.asked("r2", asked)
    assert reply.reason == "queue_timeout"
    await bench.end(first)


async def test_a_job_whose_workers_died_while_it_waited_goes_to_another_pool() -> None:
    bench, first = await Bench.busy(HANG, STREAM)
    second, reply = await bench.waiting("r2")
    for worker in (0, 1):
        fleet.unreachable(bench.served.fleet.pools[SHORT], worker)
    bench.pipeline.tick()
    await second
    assert reply.status == 200
    assert bench.record_of("r2").pool == "long"
    await bench.end(first)


async def test_a_failed_attempt_gives_its_job_back_and_tries_another_worker() -> None:
    bench = Bench(broken("reset"), STREAM)
    reply = await bench.asked("r1")
    assert reply.status == 200
    assert [attempt.worker for attempt in bench.record_of("r1").attempts] == ["short-0", "short-1"]
    assert bench.scheduler.told.count("finished") == 2
    assert bench.scheduler.answered == [False, True]
    bench.assert_nothing_leaks()


async def test_a_job_that_another_pool_s_store_refuses_is_given_back() -> None:
    class Stubborn(Around):
        async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
            raise RateLimited("no", reason="concurrency")

    bench = Bench(STREAM)
    first = bench.served.fleet.pools[0].scheduler
    bench.served = changed(bench.served, scheduler=(first, OneAtATime(bench.served, 1)))
    bench.store = cast("MemoryLeases", Stubborn(MemoryLeases({"m": bench.served}, bench.clock)))
    scheduler = bench.served.fleet.pools[1].scheduler
    assert isinstance(scheduler, OneAtATime)
    bench.pipeline = Pipeline(
        models={"m": bench.served},
        keyring=Keyring(),
        store=bench.store,
        upstream=bench.upstream,
        metrics=Metrics(),
        records=bench.sink.append,
        clock=bench.clock,
        wall_clock=lambda: 0.0,
    )
    for worker in (0, 1):
        fleet.unreachable(bench.served.fleet.pools[SHORT], worker)
    reply = await bench.asked()
    assert isinstance(reply.refusal, RateLimited)
    assert scheduler.busy is None
    assert scheduler.told == ["finished"]


async def test_the_index_is_told_of_the_prefix_that_was_sent_and_of_what_was_cached() -> None:
    cached = stream(chunk("a"), chunk(finish="stop"), usage_chunk(500, 3, 496), DONE)
    bench = Bench(STREAM, cached, STREAM)
    text = "The quick brown fox jumps over the lazy dog. " * 40
    for name in ("r1", "r2"):
        task, _ = bench.ask(name, incoming(chat_body(text, stream=True), request_id=name))
        await task
    assert len(bench.prefixes[SHORT]) > 1
    assert bench.served.fleet.pools[SHORT].reports_cached == {0}
    assert bench.record_of("r2").scheduling.prefill_s is not None


LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def asked(name: str) -> Incoming:
    return incoming(chat_body(LONG_TEXT, stream=True), request_id=name)


async def test_a_prompt_that_waits_is_known_where_it_is_bound_and_forgotten_if_it_leaves() -> None:
    bench, first = await Bench.busy(HANG, HANG, STREAM)
    second, _ = await bench.waiting("r2", asked("r2"))
    third, _ = await bench.waiting("r3", asked("r3"))
    waiting, later = bench.scheduler.queue
    assert not waiting.match
    assert later.match[0][1] == 0b01  # the second's worker, though nothing was sent there yet
    await bench.leave(third)
    await bench.leave(second)
    fourth, _ = await bench.waiting("r4", asked("r4"))
    assert not bench.scheduler.queue[0].match
    await bench.end(fourth, first)


async def test_a_prompt_bound_anew_is_known_at_the_new_worker_alone() -> None:
    bench, first = await Bench.busy(HANG, HANG)
    second, _ = await bench.waiting("r2", asked("r2"))
    bench.scheduler.queue[0].worker = 1
    bench.upstream.hanging.clear()
    await bench.leave(first)
    await bench.upstream.hanging.wait()
    third, _ = await bench.waiting("r3", asked("r3"))
    assert {mask for _, mask in bench.scheduler.queue[0].match} == {0b10}
    await bench.end(third, second)


def empty_bench(
    *script: Script, limit: int = 10, timeout_s: float = 5.0, pools: Sequence[int] = (SHORT, LONG)
) -> Bench:
    """A bench some of whose pools may be empty, and are."""
    bench = Bench(*script, limit=limit, timeout_s=timeout_s)
    for pool in [bench.served.fleet.pools[index] for index in pools]:
        pool.may_be_empty = True
        for worker in [engine.ranks[0] for engine in pool.engines]:
            members.leave(pool, worker)
            members.vacate(pool, worker, 0.0)
    return bench


def too_long_for_the_short_pool() -> Incoming:
    return incoming(chat_body(LONG_TEXT * 60, stream=True), request_id="r1")


async def until_waiting_for_workers(bench: Bench, count: int) -> None:
    async with asyncio.timeout(5):
        while len(bench.served.scheduling.waiting_for_workers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_requests_wait_for_the_first_worker_of_an_empty_pool() -> None:
    bench = empty_bench(STREAM, STREAM)
    waiting = [bench.ask(f"r{n}") for n in range(2)]
    await until_waiting_for_workers(bench, 2)
    assert bench.served.fleet.pools[SHORT].inflight == 2  # which asks for a worker
    bench.served.fleet.pools[SHORT].join((address("new"),), bench.clock(), up=True)
    bench.pipeline.tick()
    for task, reply in waiting:
        await task
        assert reply.status == 200
    await asyncio.sleep(0)  # records are written together
    assert bench.record_of("r1").worker == "new"
    bench.assert_nothing_leaks()
    assert not bench.served.scheduling.waiting_for_workers


async def test_requests_wait_for_a_worker_no_longer_than_the_queue_allows() -> None:
    bench = empty_bench(timeout_s=0.01)
    reply = await bench.asked()
    assert reply.reason == "queue_timeout"
    bench.assert_nothing_leaks()


async def test_a_worker_of_another_pool_neither_wakes_a_request_nor_prolongs_its_wait() -> None:
    bench = empty_bench(timeout_s=0.02, pools=(LONG,))
    task, reply = bench.ask("r1", too_long_for_the_short_pool())
    await until_waiting_for_workers(bench, 1)
    (waiter,) = bench.served.scheduling.waiting_for_workers
    bench.pipeline.tick()
    assert not waiter.done()
    async with asyncio.timeout(5):
        while not task.done():
            bench.pipeline.tick()
            await asyncio.sleep(0)
    assert reply.reason == "queue_timeout"
    bench.assert_nothing_leaks()


async def test_a_pool_that_is_never_empty_is_not_waited_for() -> None:
    bench = empty_bench()
    bench.served.fleet.pools[LONG].may_be_empty = False
    reply = await bench.asked("r1", too_long_for_the_short_pool())
    assert reply.reason == "no_worker_ready"
    bench.assert_nothing_leaks()


async def test_a_request_that_waits_again_has_only_the_rest_of_its_time() -> None:
    bench = empty_bench(timeout_s=60.0)
    task, reply = bench.ask()
    await until_waiting_for_workers(bench, 1)
    bench.clock.advance(60.0)
    short = bench.served.fleet.pools[SHORT]
    (worker,) = bench.served.fleet.pools[SHORT].join((address("new"),), 0.0, up=True)
    bench.pipeline.tick()
    members.leave(short, worker)
    members.vacate(short, worker, 0.0)  # gone before the request could bind
    await asyncio.wait_for(task, 5)
    assert reply.reason == "queue_timeout"
    assert reply.refusal is not None
    assert "within 60 s" in reply.refusal.message
    bench.assert_nothing_leaks()


async def test_time_spent_waiting_for_a_worker_counts_in_its_queue() -> None:
    bench = empty_bench(HANG, timeout_s=60.0)
    waiting, reply = bench.ask()
    await until_waiting_for_workers(bench, 1)
    bench.clock.advance(60.0)
    bench.scheduler.busy = other = Job(None, 1, 1, 0.0, "other")
    bench.served.fleet.pools[SHORT].join((address("new"),), bench.clock(), up=True)
    bench.pipeline.tick()
    await asyncio.wait_for(waiting, 5)
    assert reply.reason == "queue_timeout"
    assert bench.scheduler.busy is other
    bench.scheduler.busy = None
    bench.assert_nothing_leaks()


async def test_no_more_requests_wait_for_a_worker_than_the_queue_holds() -> None:
    bench = empty_bench(limit=1)
    first, _ = bench.ask("r1")
    await until_waiting_for_workers(bench, 1)
    reply = await bench.asked("r2")
    assert reply.reason == "queue_full"
    await bench.end(first)
    assert not bench.served.scheduling.waiting_for_workers
