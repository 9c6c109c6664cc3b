"""The forecaster: what it observes becomes promises, in every replica and after a restart."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.batches.forecaster import Forecaster
from gateway.batches.promise import HOUR_S, FreeSlots, Profile
from gateway.batches.rights import BatchModels
from gateway.errors import Refusal
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Documents
from gateway.records.batch import Batch, Part, Promise, StoredFile
from gateway.routing.split_alias import SplitAlias
from gateway.store.backends import open_documents
from tests.builders import decision, routing, served_model

SPLITS = {"several": SplitAlias("several", {"m": 1, "m-*": 1})}
NOW = float(500_000 * HOUR_S)


class Time:
    """Seconds that pass when a test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return NOW + self.now_s


class World:
    """A model with eight slots, and a forecaster before it."""

    def __init__(self, store: Documents, **more: Any) -> None:
        self.time, self.store, self.batches = Time(), store, 0
        self.served: ModelRuntime = served_model(
            table=routing(("all", 8192, None)), workers=(1,), slots=9
        )
        self.pool = self.served.fleet.pools[0]
        self.names = {"m": self.served, "alias": self.served}
        self.forecaster = Forecaster(
            models=BatchModels(self.names, SPLITS),
            store=store,
            running=lambda _: self.batches,
            clock=self.time.monotonic,
            wall_clock=self.time.unix,
            **more,
        )

    async def hours(self, *live: int, batches: int = 0) -> None:
        """Let hours pass with so many live sequences."""
        for each in live:
            self.pool.inflight, self.batches = each + batches, batches
            for _ in range(12):
                self.time.now_s += HOUR_S / 12
                await self.forecaster._observe()

    async def profile(self) -> Profile:
        stored = await self.store.get(Profile, "m")
        assert stored is not None
        return stored[0]

    def batch(self, window_s: int, items: int = 1000, **more: Any) -> Batch:
        now = int(self.time.unix())
        return Batch(
            id=more.pop("id", "batch_1"),
            tenant="t",
            entitlement="open",
            endpoint="/v1/chat/completions",
            model="alias",
            input_file="file-1",
            completion_window=f"{window_s // 60}m",
            created_unix_s=now,
            expires_unix_s=now + window_s,
            total=items,
            **more,
        )


def file(items: int = 1000, tokens: int = 100) -> StoredFile:
    return StoredFile(
        id="file-1",
        tenant="t",
        purpose="batch",
        filename="a.jsonl",
        bytes=items * 520,
        created_unix_s=0,
        expires_unix_s=0,
        lines=items,
        output_tokens=items * tokens,
    )


@pytest.fixture
async def store() -> AsyncIterator[Documents]:
    store = open_documents("memory://")
    yield store
    await store.close()


async def test_a_window_is_promised_or_the_earliest_is_named(store: Documents) -> None:
    world = World(store)
    await world.hours(*[2] * 30)
    with pytest.raises(Refusal) as refused:  # 1,000 answers of 100 tokens on six slots
        await world.forecaster.promise(world.batch(120), file())
    assert (refused.value.status, refused.value.reason) == (422, "cannot_promise")
    minutes = int(refused.value.message.partition("promise is ")[2].partition("m.")[0])
    assert 8 < minutes < 60
    taken = await world.forecaster.promise(world.batch(60 * minutes), file())
    assert taken.promise is not None
    assert taken.promise.promised_by_unix_s == taken.created_unix_s + 60 * minutes
    assert taken.created_unix_s < taken.promise.finish_p50_unix_s < taken.promise.finish_p95_unix_s
    assert taken.promise.finish_p95_unix_s <= taken.promise.promised_by_unix_s
    late = await world.forecaster.promise(world.batch(120, accept_late=True), file())
    assert late.promise is None
    assert late.forecast is not None
    assert late.forecast.promised_by_unix_s is None


async def test_batches_before_it_make_a_batch_later_until_they_are_done(store: Documents) -> None:
    world = World(store)
    await world.hours(*[2] * 30)
    first = await world.forecaster.promise(world.batch(3600, id="batch_0"), file())
    alone = await world.forecaster.promise(world.batch(7200), file())
    version = await store.put(first, 0)
    behind = await world.forecaster.promise(world.batch(7200), file())
    assert alone.promise is not None
    assert behind.promise is not None
    now = alone.created_unix_s
    assert behind.promise.finish_p50_unix_s - now > 1.5 * (alone.promise.finish_p50_unix_s - now)
    done = replace(first, parts=(Part(epoch=1, number=0, lines=990, slot_s=3000.0),))
    await store.put(done, version)
    nearly = await world.forecaster.forecast(behind)
    assert nearly is not None
    assert nearly.finish_p50_unix_s < now + 1.2 * (alone.promise.finish_p50_unix_s - now)
    assert nearly.promised_by_unix_s == behind.promise.promised_by_unix_s


async def test_no_leftovers_are_told_and_promise_nothing(store: Documents) -> None:
    world = World(store)
    await world.hours(*[20] * 60)
    with pytest.raises(Refusal, match="no capacity left"):
        await world.forecaster.promise(world.batch(86_400), file())
    late = await world.forecaster.promise(world.batch(86_400, accept_late=True), file())
    assert (late.promise, late.forecast) == (None, None)


async def test_a_pattern_is_promised_and_a_name_of_several_models_is_not(store: Documents) -> None:
    world = World(store)
    world.names["m-*"] = world.served
    await world.hours(2, 2)
    day = world.batch(86_400)
    assert (await world.forecaster.promise(replace(day, model="m-large"), file())).promise
    with pytest.raises(Refusal, match=r"'several' stands for several models.*accept_late"):
        await world.forecaster.promise(replace(day, model="several"), file())
    late = replace(day, model="several", accept_late=True)
    assert await world.forecaster.promise(late, file()) == late
    assert await world.forecaster.forecast(replace(day, model="gone")) is None


async def test_a_batch_teaches_what_its_work_was(store: Documents) -> None:
    world = World(store)
    await world.hours(2, 2)
    planned = await world.forecaster.promise(world.batch(86_400), file())
    took = (Part(epoch=1, number=0, slot_s=2.0 * planned.planned_slot_s),)
    for _ in range(30):
        await world.forecaster.learn(replace(planned, parts=took))
    again = await world.forecaster.promise(world.batch(86_400), file())
    assert planned.promise is not None
    assert again.promise is not None
    first, second = (
        each.promise.finish_p50_unix_s - each.created_unix_s  # type: ignore[union-attr]
        for each in (planned, again)
    )
    assert 1.7 < second / first < 2.3


async def test_served_requests_teach_what_tokens_take(store: Documents) -> None:
    world = World(store)
    await world.forecaster.begin()
    before = await world.forecaster.promise(world.batch(86_400), file())
    for _ in range(50):
        world.forecaster(
            decision(model="m", prompt_tokens=100, completion_tokens=100, duration_s=30.0)
        )
    after = await world.forecaster.promise(world.batch(86_400), file())
    assert after.planned_slot_s > 5 * before.planned_slot_s


async def test_replicas_share_a_profile_and_a_restart_keeps_it(store: Documents) -> None:
    one, two = World(store), World(store)
    for _ in range(3):
        await one.hours(2, batches=3)
        await two.hours(1)
    profile = await one.profile()
    assert profile.hours == (3.0, 3.0, 3.0)
    assert profile.used_slot_s == pytest.approx(3 * HOUR_S * (1 + 0.9 + 0.81))
    assert profile.left_slot_s > profile.used_slot_s
    third = World(store)
    await third.forecaster.begin()
    assert third.forecaster._seen["m"].profile == profile


async def test_a_request_log_seeds_the_profile_once(store: Documents, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    hour = int(NOW // HOUR_S)
    records = [
        decision(model="m", time_unix_s=(hour - back) * HOUR_S + 5.0, duration_s=HOUR_S / 2)
        for back in (1, 3, 3)
    ]
    lines = [msgspec.json.encode(record) for record in records]
    log.write_bytes(b"\n".join([*lines, b'{"torn', b""]))
    for _ in range(2):
        world = World(store, request_log=log)
        await world.forecaster.begin()
    profile = await world.profile()
    assert (profile.first_hour, profile.hours) == (hour - 3, (1.0, -1.0, 0.5))


async def test_a_promise_counts_what_the_estimates_cost(store: Documents) -> None:
    from gateway.records.usage import token_price

    world = World(store)
    world.served.price = token_price(1.0, 2.0, None)
    taken = await world.forecaster.promise(world.batch(86_400), file())
    assert isinstance(taken.promise, Promise)
    assert 0.2 < taken.promise.cost_nano / 1e9 < 0.4  # 100,000 tokens of answers, and the prompts


async def test_live_requests_go_on_while_a_promise_is_computed(
    store: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many open batches that takes a few hundred ms, and clients may ask again and again."""
    decide, loop_ran = FreeSlots.decide, threading.Event()

    def waits(*arguments: Any) -> Any:
        assert loop_ran.wait(10)
        return decide(*arguments)

    monkeypatch.setattr(FreeSlots, "decide", waits)
    world = World(store)
    await world.hours(2)
    asked = asyncio.create_task(world.forecaster.promise(world.batch(86_400), file(1)))
    await asyncio.sleep(0.1)
    loop_ran.set()
    assert (await asked).promise is not None
