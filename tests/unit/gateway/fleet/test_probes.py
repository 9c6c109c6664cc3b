"""Health probes: what counts as healthy, and that many engines are not probed all at once."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.fleet import fleet
from gateway.fleet.engine_pages import EnginePages
from gateway.fleet.fleet import Pending
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import PROBE_BATCH, Prober
from gateway.fleet.rotation import RotationLog
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from gateway.upstream import HttpUpstream
from tests.builders import address, changed, routing, served_model
from tests.fakes import HANG, FakeClock, FakeEngines, Script, failure, whole


def fleet_of(workers: int) -> ModelRuntime:
    model = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    addresses = tuple(address(f"w{n}", port=n + 1) for n in range(workers))
    return changed(model, addresses=(addresses,))


def prober(served: ModelRuntime, engines: FakeEngines) -> Prober:
    return Prober([served], interval_s=2.0, timeout_s=0.05, upstream=engines)


@pytest.mark.parametrize(
    ("health", "models", "ok"),
    [
        (whole(200), whole(200), True),
        (whole(307), whole(200), True),
        (whole(401), whole(200), True),
        (whole(200), whole(500), True),
        (whole(200), whole(401), False),
        (whole(404), whole(200), True),
        (whole(404), whole(404), False),
        (whole(500), whole(200), False),
        (failure("connect"), whole(200), False),
        (failure("timeout"), whole(200), False),
        (HANG, whole(200), False),
    ],
)
async def test_who_answers_health_is_in_the_rotation(
    health: Script, models: Script, *, ok: bool
) -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.play("/health", health)
    engines.play("/v1/models", models)
    probing = prober(served, engines)
    assert await probing.probe(served.fleet.pools[0], 0) is ok
    assert [e.up for e in served.fleet.pools[0].engine_of] == [ok]


@pytest.mark.parametrize("up", [True, False])
async def test_a_probe_that_could_not_be_sent_says_nothing_of_the_engine(*, up: bool) -> None:
    served, engines = fleet_of(1), FakeEngines()
    fleet.probed(served.fleet.pools[0], 0, ok=up)
    engines.play("/health", failure("local"))
    assert await prober(served, engines).probe(served.fleet.pools[0], 0) is up
    assert [e.up for e in served.fleet.pools[0].engine_of] == [up]


async def test_another_window_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    engines.answer("/v1/models", '{"data": [{"id": "m", "max_model_len": 4096}]}')
    probing = prober(served, engines)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await probing.probe(served.fleet.pools[0], 0)
    (record,) = caplog.records
    assert "w0 reports max_model_len 4096, but pool only says 8192" in record.getMessage()
    assert engines.asked("/v1/models") == 1


OTHER = '{"data": [{"id": "base", "max_model_len": 8192}, {"id": "base-2"}]}'


@pytest.mark.parametrize(
    ("health", "models", "why"),
    [
        (whole(503), whole(200), "/health answered 503"),
        (whole(404), whole(404), "/health and /v1/models answered 404: is the URL's path right?"),
        (whole(200), whole(401), "/v1/models answered 401, it wants a key: set the worker's"),
        (whole(200), whole(200, OTHER.encode()), "it serves 'base', 'base-2', not 'm': set the"),
        (failure("connect"), whole(200), "a probe failed: scripted connect"),
        (HANG, whole(200), "no answer to a probe within 0.05 s"),
    ],
)
async def test_who_is_not_ready_is_named_with_the_reason(
    health: Script, models: Script, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.play("/health", health)
    engines.play("/v1/models", models)
    probing = prober(served, engines)
    told = RotationLog()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not await probing.probe(served.fleet.pools[0], 0)
            told.look([served], 0.0)
    assert served.fleet.pools[0].engine_of[0].why_down.startswith(why)
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"worker only-0 of m/only is out of the rotation: {why}")


async def test_a_key_that_is_refused_is_told_from_one_that_is_missing() -> None:
    served, engines = fleet_of(1), FakeEngines()
    keyed = changed(served, addresses=((address("w0", port=1, api_key="sk"),),))
    engines.answer("/health")
    engines.answer("/v1/models", "{}", status=403)
    assert not await prober(keyed, engines).probe(keyed.fleet.pools[0], 0)
    assert "it refuses the key" in keyed.fleet.pools[0].engine_of[0].why_down


async def test_the_name_that_an_engine_is_sent_is_looked_for_until_it_is_there() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    engines.answer("/v1/models", OTHER)
    probing = prober(served, engines)
    assert not await probing.probe(served.fleet.pools[0], 0)
    assert fleet.available(served.fleet.pools[0], 0.0) == []
    engines.answer("/v1/models", '{"data": [{"id": "m"}]}')
    assert await probing.probe(served.fleet.pools[0], 0)
    assert await probing.probe(served.fleet.pools[0], 0)
    assert fleet.available(served.fleet.pools[0], 0.0) == [0]
    assert [e.why_down for e in served.fleet.pools[0].engine_of] == [""]
    assert engines.asked("/v1/models") == 2, "not with every probe"
    named = changed(served, addresses=((address("w0", port=1, served_model="base-2"),),))
    engines.answer("/v1/models", OTHER)
    assert await prober(named, engines).probe(named.fleet.pools[0], 0)


async def test_an_alias_that_is_an_adapter_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    served, engines = fleet_of(2), FakeEngines()
    served = replace(served, aliases=frozenset({"sql", "m-latest"}))
    engines.answer("/health")
    engines.answer(
        "/v1/models", '{"data":[{"id":"m"},{"id":"sql","parent":"m"},{"id":"m-latest"}]}'
    )
    probing = prober(served, engines)
    with caplog.at_level(logging.WARNING):
        for worker in range(2):
            assert await probing.probe(served.fleet.pools[0], worker)
    assert served.adapters.names == ["sql"]
    (record,) = caplog.records
    assert "alias sql of m is a LoRA adapter at worker w0" in record.getMessage()


async def test_an_adapter_that_is_loaded_later_is_found(caplog: pytest.LogCaptureFixture) -> None:
    served, engines, clock = fleet_of(1), FakeEngines(), FakeClock()
    served = replace(served, aliases=frozenset({"sql"}))
    engines.answer("/health")
    card = '{"data":[{"id":"m","max_model_len":4096}%s]}'
    engines.answer("/v1/models", card % "")
    probing = Prober([served], interval_s=2.0, timeout_s=0.05, upstream=engines, clock=clock)
    with caplog.at_level(logging.WARNING):
        assert await probing.probe(served.fleet.pools[0], 0)
    assert "max_model_len" in caplog.records[0].getMessage()
    engines.answer("/v1/models", card % ',{"id":"sql","parent":"m"}')
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            clock.advance(2.0)
            assert await probing.probe(served.fleet.pools[0], 0)
    assert served.adapters.names == ["sql"]
    assert len(caplog.records) == 2, "of the window it is told once"
    assert engines.asked("/v1/models") == 3


async def test_a_worker_that_streams_stays_in_the_rotation_whatever_probes_miss() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    probing = prober(served, engines)
    assert await probing.probe(served.fleet.pools[0], 0)
    engines.play("/health", HANG)
    tokens = iter(range(1, 100))
    served.fleet.pools[0].engine_of[0].progress.begin(Pending(None, 0.0, 1.0, lambda: next(tokens)))
    for _ in range(5):
        assert not await probing.probe(served.fleet.pools[0], 0)
        assert fleet.available(served.fleet.pools[0], 0.0) == [0]


async def test_a_worker_that_answers_nobody_leaves_with_the_third_miss() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    probing = prober(served, engines)
    assert await probing.probe(served.fleet.pools[0], 0)
    engines.play("/health", HANG)
    served.fleet.pools[0].engine_of[0].progress.begin(Pending(None, 0.0, 1.0, lambda: 7))
    up = []
    for _ in range(5):
        await probing.probe(served.fleet.pools[0], 0)
        up.append(served.fleet.pools[0].engine_of[0].up)
    # Its stream had grown before the first miss, and never again.
    assert up == [True, True, True, False, False]


async def test_a_refused_connection_needs_no_second_probe() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    probing = prober(served, engines)
    await probing.probe(served.fleet.pools[0], 0)
    gone = failure("connect")
    gone.__cause__ = ConnectionRefusedError()
    engines.play("/health", gone)
    await probing.probe(served.fleet.pools[0], 0)
    assert [e.up for e in served.fleet.pools[0].engine_of] == [False]
    assert [e.refused for e in served.fleet.pools[0].engine_of] == [True]


async def test_a_time_out_while_this_process_stood_still_is_nobody_else_s() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    probing = Prober([served], interval_s=60.0, timeout_s=0.02, upstream=engines)
    await probing.start()
    engines.play("/health", HANG)
    for _ in range(4):
        asyncio.get_running_loop().call_soon(time.sleep, 0.25)
        assert await probing.probe(served.fleet.pools[0], 0), "the verdict before stands"
    assert [e.up for e in served.fleet.pools[0].engine_of] == [True]
    for _ in range(3):
        await probing.probe(served.fleet.pools[0], 0)
    assert not served.fleet.pools[0].engine_of[0].up, "the engine's own silence counts"
    await probing.close()


class Frost:
    """An engine that is well and gives no token, and who was told of it."""

    def __init__(self) -> None:
        self.served, self.engines, self.clock = fleet_of(1), FakeEngines(), FakeClock(0.0)
        self.engines.answer("/health")
        self.told: list[float] = []
        self.probing = Prober(
            [self.served],
            interval_s=2.0,
            timeout_s=1.0,
            upstream=self.engines,
            clock=self.clock,
            on_frozen=lambda *_: self.told.append(self.clock()),
        )
        self.tokens = [0]
        self.served.fleet.pools[0].engine_of[0].progress.begin(
            Pending(None, 0.0, 1.0, lambda: self.tokens[0])
        )

    async def live(self, seconds: int) -> None:
        for _ in range(0, seconds, 2):
            self.clock.advance(2.0)
            assert await self.probing.probe(self.served.fleet.pools[0], 0)


@pytest.mark.parametrize("page", [None, "vllm:generation_tokens_total 7\n"])
async def test_a_well_engine_that_gives_no_token_is_told_as_frozen(page: str | None) -> None:
    frost = Frost()
    if page is not None:
        frost.engines.answer("/metrics", page)
    await frost.live(60)
    assert frost.told[0] == 34.0, "30 s, and what the request may take, once and again"
    assert frost.told[-1] == 60.0, "as long as it is"
    frost.tokens[0] = 1
    frost.told.clear()
    await frost.live(60)
    assert frost.told == []


async def test_an_engine_whose_own_count_moves_is_not_frozen() -> None:
    """It prefills or answers for other gateways: the queue is deep."""
    frost = Frost()
    for count in range(10):
        frost.engines.answer("/metrics", f"vllm:generation_tokens_total {count}\n")
        await frost.live(20)
    assert frost.told == []


async def test_pages_are_read_of_silent_engines_only() -> None:
    frost = Frost()
    frost.tokens[0] = 1
    await frost.live(20)
    assert frost.engines.asked("/metrics") == 0


class Crowd(FakeEngines):
    """Engines that answer a turn later, and how many were being asked at once."""

    now = most = 0

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            return await super().open(worker, call)
        finally:
            self.now -= 1


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each background probe waits for its turn; none comes."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def wait(delay_s: float) -> None:
        if delay_s <= 0:
            await sleep(0)
            return
        waits.append(delay_s)
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "sleep", wait)
    return waits


@pytest.mark.alone
async def test_engines_are_spread_over_the_interval(slept: list[float]) -> None:
    served, engines = fleet_of(1000), Crowd()
    engines.answer("/health")
    probing = prober(served, engines)
    await probing.start()
    assert engines.asked("/health") == 1000
    assert engines.most <= PROBE_BATCH
    for _ in range(3):
        await asyncio.sleep(0)
    await probing.close()
    assert len(slept) == 1000
    # From one interval after the start to two: a tenth of the engines in each tenth of it.
    tenths = Counter(int((wait_s - 2.0 + 0.01) / 0.2) for wait_s in slept)
    assert max(tenths.values()) < 150


class Broken(FakeEngines):
    """Engines whose first calls meet a defect."""

    defects = 2

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        self.defects -= 1
        if self.defects >= 0:
            raise ZeroDivisionError
        return await super().open(worker, call)


async def test_a_defect_ends_neither_the_start_nor_the_probes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served, engines = fleet_of(1), Broken()
    engines.answer("/health")
    fleet.unreachable(served.fleet.pools[0], 0)
    probing = Prober([served], interval_s=0.001, timeout_s=1.0, upstream=engines)
    await probing.start()
    async with asyncio.timeout(5):
        while not served.fleet.pools[0].engine_of[0].up:  # noqa: ASYNC110 - probes set no event
            await asyncio.sleep(0.001)
    await probing.close()
    assert caplog.text.count("probing worker w0 failed") == 2


@pytest.fixture
async def listening() -> AsyncIterator[tuple[WorkerAddress, list[bytes]]]:
    """A real engine's port, and what it was sent on each of its connections."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(b"")
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads[-1] += head
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield address("w", port=port, api_key="sk-engine"), heads
    server.close()


async def test_pages_come_over_one_kept_connection_with_the_engine_s_key(
    listening: tuple[WorkerAddress, list[bytes]],
) -> None:
    worker, heads = listening
    upstream = HttpUpstream()
    pages = EnginePages(upstream, 5.0)
    for _ in range(3):
        page = await pages.get(worker, "/health")
        assert page is not None
        assert (page.status, page.body) == (200, b"ok")
    assert await pages.get(worker, "/health", 1) is None, "longer than asked for"
    await upstream.close()
    (first, *_) = heads
    assert first.count(b"GET /health HTTP/1.1\r\n") >= 3
    assert first.count(b"authorization: Bearer sk-engine\r\n") >= 3
    assert first.count(b"accept-encoding: identity\r\n") >= 3


async def test_a_sleeping_engine_is_out_at_once_and_not_even_a_last_resort() -> None:
    served, engines = fleet_of(1), FakeEngines()
    state = served.fleet.pools[0]
    engines.answer("/health")
    engines.answer("/v1/models", '{"data":[{"id":"m"}]}')
    engines.answer("/is_sleeping", '{"is_sleeping": false}')
    probing = prober(served, engines)
    assert await probing.probe(served.fleet.pools[0], 0)
    engines.answer("/is_sleeping", '{"is_sleeping": true}')
    assert not await probing.probe(served.fleet.pools[0], 0)
    assert [e.why_down for e in state.engine_of] == ["it sleeps: wake it with POST /wake_up"]
    assert fleet.last_resort(state, refused=True) == []
    engines.answer("/is_sleeping", '{"is_sleeping": false}')
    assert await probing.probe(served.fleet.pools[0], 0)
    assert fleet.available(state, 0.0) == [0]


async def test_an_engine_without_sleep_mode_is_asked_once() -> None:
    served, engines = fleet_of(1), FakeEngines()
    engines.answer("/health")
    engines.answer("/v1/models", '{"data":[{"id":"m"}]}')
    engines.answer("/is_sleeping", "", status=404)
    probing = prober(served, engines)
    for _ in range(5):
        assert await probing.probe(served.fleet.pools[0], 0)
    assert engines.asked("/is_sleeping") == 1


async def test_a_model_that_is_swapped_takes_the_engine_out_while_it_answers() -> None:
    served, engines, clock = fleet_of(1), FakeEngines(), FakeClock()
    state = served.fleet.pools[0]
    engines.answer("/health")
    engines.answer("/v1/models", '{"data":[{"id":"m"}]}')
    probing = Prober([served], interval_s=2.0, timeout_s=0.05, upstream=engines, clock=clock)
    assert await probing.probe(served.fleet.pools[0], 0)
    engines.answer("/v1/models", '{"data":[{"id":"other"}]}')
    clock.advance(31.0)
    assert not await probing.probe(served.fleet.pools[0], 0)
    assert [e.up for e in state.engine_of] == [False]
    assert fleet.last_resort(state, refused=True) == []
    engines.answer("/v1/models", '{"data":[{"id":"m"}]}')
    assert await probing.probe(served.fleet.pools[0], 0), (
        "a worker that is out is looked at with each probe"
    )


async def test_adapters_that_the_configuration_does_not_name_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served, engines = fleet_of(2), FakeEngines()
    engines.answer("/health")
    engines.answer("/v1/models", '{"data":[{"id":"m"},{"id":"sql","parent":"m"}]}')
    probing = prober(served, engines)
    with caplog.at_level(logging.INFO):
        for worker in range(2):
            assert await probing.probe(served.fleet.pools[0], worker)
    assert not served.adapters.any
    told = [r.getMessage() for r in caplog.records if "LoRA" in r.getMessage()]
    assert len(told) == 1
    assert "such as sql" in told[0]
    assert "`loras` of m" in told[0]
