"""Polls of engines: health, sleep, models, KV capacity, metrics pages, and who is frozen."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.fleet import fleet, probes
from gateway.fleet.engine_metrics import STALE_S, kv_usage, read_kv_tokens
from gateway.fleet.fleet import Pending
from gateway.fleet.probes import JITTER, PROBE_BATCH, EnginePages, Prober
from gateway.fleet.rotation import RotationLog
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.upstream import HttpUpstream
from simulator.engine.profiles import PROFILES
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.driver import Driver
from simulator.mock_server.state import render_metrics, render_sglang
from tests.builders import address, changed, routing, served_model
from tests.fakes import HANG, FakeClock, FakeEngines, Script, broken, failure, whole
from tests.growth import assert_linear

MODELS = '{"data": [{"id": "m"}%s]}'
OTHER = '{"data": [{"id": "base", "max_model_len": 8192}, {"id": "base-2"}]}'
INFO = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="%d",'
    'num_gpu_blocks="%s",num_gpu_blocks_override="None"} 1.0'
)
LONG = (INFO % (0, "10")).replace('"16"', '"%s"' % ("9" * 5000))
PAGE = (
    "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    "vllm:kv_cache_usage_perc 0.5\nvllm:prompt_tokens_total %d\n"
)


class Polled:
    """A pool of engines at ports 1, 2 ... that answer /health, and their prober."""

    def __init__(
        self,
        workers: int = 1,
        engines: FakeEngines | None = None,
        *,
        interval_s: float = 2.0,
        timeout_s: float = 0.05,
        on_frozen: Any = None,
        **model: Any,
    ) -> None:
        addresses = [address(f"w{n}", port=n + 1, api_key=f"sk-{n}") for n in range(workers)]
        plain = served_model(table=routing(("only", 8192, None)), workers=(workers,))
        self.served = changed(plain, addresses=(addresses,), **model)
        self.pool = self.served.fleet.pools[0]
        self.engines = engines or FakeEngines()
        self.engines.answer("/health")
        self.clock = FakeClock(0.0)
        self.prober = Prober(
            [self.served],
            interval_s=interval_s,
            timeout_s=timeout_s,
            upstream=self.engines,
            clock=self.clock,
            on_frozen=on_frozen,
        )

    @property
    def up(self) -> list[bool]:
        return [engine.up for engine in self.pool.engine_of]

    @property
    def kv_tokens(self) -> int | None:
        return self.pool.kv_tokens.get(0)

    async def probe(self, worker: int = 0) -> bool:
        return await self.prober.probe(self.pool, worker)

    async def read(self, worker: int = 0) -> bool:
        return await self.prober.read(self.pool, worker)


@pytest.fixture
def polled() -> Polled:
    return Polled()


# --- health


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
    polled: Polled, health: Script, models: Script, *, ok: bool
) -> None:
    polled.engines.play("/health", health)
    polled.engines.play("/v1/models", models)
    assert await polled.probe() is ok
    assert polled.up == [ok]


@pytest.mark.parametrize("up", [True, False])
async def test_a_probe_that_could_not_be_sent_says_nothing_of_the_engine(
    polled: Polled, *, up: bool
) -> None:
    fleet.probed(polled.pool, 0, ok=up)
    polled.engines.play("/health", failure("local"))
    assert await polled.probe() is up
    assert polled.up == [up]


@pytest.mark.parametrize(
    ("health", "models", "why"),
    [
        (whole(503), whole(200), "/health answered 503"),
        (whole(404), whole(404), "/health and /v1/models answered 404: is the URL's path right?"),
        (whole(200), whole(403), "/v1/models answered 403, it refuses the key: set the worker's"),
        (whole(200), whole(200, OTHER.encode()), "it serves 'base', 'base-2', not 'm': set the"),
        (failure("connect"), whole(200), "a probe failed: scripted connect"),
        (HANG, whole(200), "no answer to a probe within 0.05 s"),
    ],
)
async def test_who_is_not_ready_is_named_with_the_reason(
    polled: Polled, health: Script, models: Script, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    polled.engines.play("/health", health)
    polled.engines.play("/v1/models", models)
    told = RotationLog()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not await polled.probe()
            told.look([polled.served], 0.0)
    assert polled.pool.engine_of[0].why_down.startswith(why)
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"worker only-0 of m/only is out of the rotation: {why}")


async def test_a_key_that_is_missing_is_told_from_one_that_is_refused(polled: Polled) -> None:
    polled.pool.addresses[0] = address("w0", port=1)
    polled.engines.answer("/v1/models", "{}", status=401)
    assert not await polled.probe()
    assert "it wants a key" in polled.pool.engine_of[0].why_down


async def test_a_worker_that_streams_stays_in_the_rotation_whatever_probes_miss(
    polled: Polled,
) -> None:
    assert await polled.probe()
    polled.engines.play("/health", HANG)
    tokens = iter(range(1, 100))
    polled.pool.engine_of[0].progress.begin(Pending(None, 0.0, 1.0, lambda: next(tokens)))
    for _ in range(5):
        assert not await polled.probe()
        assert fleet.available(polled.pool, 0.0) == [0]


async def test_a_worker_that_answers_nobody_leaves_with_the_third_miss(polled: Polled) -> None:
    assert await polled.probe()
    polled.engines.play("/health", HANG)
    polled.pool.engine_of[0].progress.begin(Pending(None, 0.0, 1.0, lambda: 7))
    up = []
    for _ in range(5):
        await polled.probe()
        up += polled.up
    # Its stream had grown before the first miss, and never again.
    assert up == [True, True, True, False, False]


async def test_a_refused_connection_needs_no_second_probe(polled: Polled) -> None:
    await polled.probe()
    gone = failure("connect")
    gone.__cause__ = ConnectionRefusedError()
    polled.engines.play("/health", gone)
    await polled.probe()
    assert polled.up == [False]
    assert polled.pool.engine_of[0].refused


async def test_a_time_out_while_this_process_stood_still_is_nobody_else_s() -> None:
    polled = Polled(interval_s=60.0, timeout_s=0.02)
    await polled.prober.start()
    polled.engines.play("/health", HANG)
    for _ in range(4):
        asyncio.get_running_loop().call_soon(time.sleep, 0.25)
        assert await polled.probe(), "the verdict before stands"
    assert polled.up == [True]
    for _ in range(3):
        await polled.probe()
    assert polled.up == [False], "the engine's own silence counts"
    await polled.prober.close()


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
    engines = Crowd()
    polled = Polled(1000, engines)
    await polled.prober.start()
    assert engines.asked("/health") == 1000
    assert engines.most <= PROBE_BATCH
    for _ in range(3):
        await asyncio.sleep(0)
    await polled.prober.close()
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
    polled = Polled(1, Broken(), interval_s=0.001, timeout_s=1.0)
    fleet.unreachable(polled.pool, 0)
    await polled.prober.start()
    async with asyncio.timeout(5):
        while polled.up == [False]:  # noqa: ASYNC110 - probes set no event
            await asyncio.sleep(0.001)
    await polled.prober.close()
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
    for line in (b"GET /health HTTP/1.1", b"authorization: Bearer sk-engine"):
        assert first.count(line + b"\r\n") >= 3
    assert first.count(b"accept-encoding: identity\r\n") >= 3


# --- frozen engines


class Frost(Polled):
    """An engine that is well and gives no token, and who was told of it."""

    def __init__(self) -> None:
        super().__init__(timeout_s=1.0, on_frozen=lambda *_: self.told.append(self.clock()))
        self.told: list[float] = []
        self.tokens = [0]
        pending = Pending(None, 0.0, 1.0, lambda: self.tokens[0])
        self.pool.engine_of[0].progress.begin(pending)

    async def live(self, seconds: int) -> None:
        for _ in range(0, seconds, 2):
            self.clock.advance(2.0)
            assert await self.probe()


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


# --- what an engine serves


async def test_another_window_is_told_once(
    polled: Polled, caplog: pytest.LogCaptureFixture
) -> None:
    polled.engines.answer("/v1/models", '{"data": [{"id": "m", "max_model_len": 4096}]}')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await polled.probe()
    (record,) = caplog.records
    assert "w0 reports max_model_len 4096, but pool only says 8192" in record.getMessage()
    assert polled.engines.asked("/v1/models") == 1


async def test_the_name_that_an_engine_is_sent_is_looked_for_until_it_is_there(
    polled: Polled,
) -> None:
    polled.engines.answer("/v1/models", OTHER)
    assert not await polled.probe()
    assert fleet.available(polled.pool, 0.0) == []
    polled.engines.answer("/v1/models", MODELS % "")
    assert await polled.probe()
    assert await polled.probe()
    assert fleet.available(polled.pool, 0.0) == [0]
    assert polled.pool.engine_of[0].why_down == ""
    assert polled.engines.asked("/v1/models") == 2, "not with every probe"
    named = Polled()
    named.pool.addresses[0] = address("w0", port=1, served_model="base-2")
    named.engines.answer("/v1/models", OTHER)
    assert await named.probe()


async def test_a_model_that_is_swapped_takes_the_engine_out_while_it_answers(
    polled: Polled,
) -> None:
    polled.engines.answer("/v1/models", MODELS % "")
    assert await polled.probe()
    polled.engines.answer("/v1/models", '{"data":[{"id":"other"}]}')
    polled.clock.advance(31.0)
    assert not await polled.probe()
    assert polled.up == [False]
    assert fleet.last_resort(polled.pool, refused=True) == []
    polled.engines.answer("/v1/models", MODELS % "")
    assert await polled.probe(), "a worker that is out is looked at with each probe"


async def test_an_alias_that_is_an_adapter_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    polled = Polled(2, aliases=frozenset({"sql", "m-latest"}))
    polled.engines.answer("/v1/models", MODELS % ',{"id":"sql","parent":"m"},{"id":"m-latest"}')
    with caplog.at_level(logging.WARNING):
        for worker in range(2):
            assert await polled.probe(worker)
    assert polled.served.adapters.names == ["sql"]
    (record,) = caplog.records
    assert "alias sql of m is a LoRA adapter at worker w0" in record.getMessage()


async def test_an_adapter_that_is_loaded_later_is_found(caplog: pytest.LogCaptureFixture) -> None:
    polled = Polled(aliases=frozenset({"sql"}))
    card = '{"data":[{"id":"m","max_model_len":4096}%s]}'
    polled.engines.answer("/v1/models", card % "")
    with caplog.at_level(logging.WARNING):
        assert await polled.probe()
    assert "max_model_len" in caplog.records[0].getMessage()
    polled.engines.answer("/v1/models", card % ',{"id":"sql","parent":"m"}')
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            polled.clock.advance(2.0)
            assert await polled.probe()
    assert polled.served.adapters.names == ["sql"]
    assert len(caplog.records) == 2, "of the window it is told once"
    assert polled.engines.asked("/v1/models") == 3


async def test_adapters_that_the_configuration_does_not_name_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    polled = Polled(2)
    polled.engines.answer("/v1/models", MODELS % ',{"id":"sql","parent":"m"}')
    with caplog.at_level(logging.INFO):
        for worker in range(2):
            assert await polled.probe(worker)
    assert not polled.served.adapters.any
    (told,) = [r.getMessage() for r in caplog.records if "LoRA" in r.getMessage()]
    assert "such as sql" in told
    assert "`loras` of m" in told


async def test_a_sleeping_engine_is_out_at_once_and_not_even_a_last_resort(
    polled: Polled,
) -> None:
    polled.engines.answer("/v1/models", MODELS % "")
    polled.engines.answer("/is_sleeping", '{"is_sleeping": false}')
    assert await polled.probe()
    polled.engines.answer("/is_sleeping", '{"is_sleeping": true}')
    assert not await polled.probe()
    assert polled.pool.engine_of[0].why_down == "it sleeps: wake it with POST /wake_up"
    assert fleet.last_resort(polled.pool, refused=True) == []
    polled.engines.answer("/is_sleeping", '{"is_sleeping": false}')
    assert await polled.probe()
    assert fleet.available(polled.pool, 0.0) == [0]


async def test_an_engine_without_sleep_mode_is_asked_once(polled: Polled) -> None:
    polled.engines.answer("/v1/models", MODELS % "")
    polled.engines.answer("/is_sleeping", "", status=404)
    for _ in range(5):
        assert await polled.probe()
    assert polled.engines.asked("/is_sleeping") == 1


# --- KV capacity, read once each time an engine comes up


@pytest.fixture
def sized() -> Polled:
    """Two engines of a model with 1,024 bytes a token."""
    return Polled(2, timeout_s=1.0, kv_bytes_per_token=1024)


def page(*infos: str) -> str:
    return "\n".join(["# HELP x y", "vllm:num_requests_running 0", *infos, "other 1"])


async def test_blocks_times_their_size_add_up_over_data_parallel_engines(sized: Polled) -> None:
    sized.engines.answer("/metrics", page(INFO % (0, "100")), port=1)
    sized.engines.answer("/metrics", page(INFO % (0, "10"), INFO % (1, "20")), port=2)
    for worker in range(2):
        assert await sized.probe(worker)
    assert sized.pool.kv_tokens == {0: 1600, 1: 30 * 16}
    keys = {worker.port: worker.api_key for worker, _ in sized.engines.calls}
    assert keys == {1: "sk-0", 2: "sk-1"}


async def test_a_worker_is_asked_once_until_it_was_away(sized: Polled) -> None:
    sized.engines.answer("/metrics", page(INFO % (0, "10")))
    for _ in range(3):
        await sized.probe()
    assert sized.engines.asked("/metrics") == 1
    for text, status, tokens in ((page(INFO % (0, "99")), 200, 99 * 16), ("", 404, 0)):
        sized.engines.answer("/health", status=503)
        before = sized.kv_tokens
        while sized.pool.engine_of[0].up:
            await sized.probe()
        assert sized.kv_tokens == before, "capacity counts workers in the rotation only"
        sized.engines.answer("/health")
        sized.engines.answer("/metrics", text, status)
        await sized.probe()
        assert sized.kv_tokens == tokens
    assert sized.engines.asked("/metrics") == 3


@pytest.mark.parametrize(
    "answer",
    [
        whole(404),
        whole(200),
        whole(200, b"<html>"),
        whole(200, b"\xff\xfe\x00"),
        whole(200, page(INFO % (0, "None")).encode()),
        whole(200, page(INFO % (0, "10"), INFO % (1, "None")).encode()),
        whole(200, page(INFO % (0, "0")).encode()),
        whole(200, page(INFO % (0, "9" * 400)).encode()),
        whole(200, page(INFO % (0, "10"), LONG).encode()),
        whole(200, b"vllm:cache_config_info 1.0"),
        whole(200, b'vllm:cache_config_info{block_size="16"'),
        whole(200, b"vllm:", broken("timeout")),
        failure("reset"),
    ],
)
async def test_what_is_not_told_is_unknown_and_harms_nobody(sized: Polled, answer: Script) -> None:
    sized.engines.play("/metrics", answer)
    assert await sized.probe(), "it stays in the rotation"
    assert not sized.kv_tokens


async def test_a_page_without_end_tells_nothing(
    sized: Polled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MAX_PAGE_BYTES", 300)
    sized.engines.answer("/metrics", page(INFO % (0, "10")) + "\n" + "x" * 301)
    assert await sized.probe()
    assert not sized.kv_tokens
    assert not await sized.read()


async def test_without_bytes_a_token_nobody_is_asked(polled: Polled) -> None:
    polled.engines.answer("/metrics", page(INFO % (0, "10")))
    await polled.probe()
    assert polled.engines.asked("/metrics") == 0


def test_escaped_labels_are_read_past() -> None:
    line = 'vllm:cache_config_info{a="\\"num_gpu_blocks=\\"5",block_size="2",num_gpu_blocks="3"} 1'
    assert read_kv_tokens(line.encode()) == 6
    assert read_kv_tokens(b"vllm:other{}") == 0


@pytest.mark.parametrize("unit", ["x", 'a="', 'a="\\"', "\\", ',a="b"'])
def test_twice_the_labels_take_twice_the_time(unit: str) -> None:
    head = "vllm:cache_config_info{"
    assert_linear(lambda n: (head + unit * (n // len(unit))).encode(), read_kv_tokens, most=2**20)


# --- metrics pages


@pytest.fixture
def metered() -> Polled:
    """Two engines whose pages are read."""
    return Polled(2, interval_s=60.0, timeout_s=0.05, reads_metrics=True)


async def test_a_page_fills_the_view(metered: Polled) -> None:
    metered.engines.answer("/metrics", PAGE % 5, port=2)
    assert await metered.read(1)
    assert kv_usage(metered.pool.view, 1, 0.0) == 0.5
    assert kv_usage(metered.pool.view, 0, 0.0) is None
    ((worker, call),) = metered.engines.calls
    assert (worker.api_key, call.method) == ("sk-1", "GET")


async def test_a_restart_empties_the_prefix_cache_once(
    metered: Polled, caplog: pytest.LogCaptureFixture
) -> None:
    metered.pool.prefixes = index = PrefixIndex(2)
    with caplog.at_level(logging.INFO, "sluice.telemetry"):
        for tokens in (50, 60, 5, 6):
            index.insert(((1, 7),), 0, 1.0)
            metered.engines.answer("/metrics", PAGE % tokens, port=1)
            await metered.read()
            assert bool(index.match(((1, 7),), 1.0)) == (tokens != 5)
    assert caplog.text.count("w0 restarted") == 1


@pytest.mark.parametrize(
    "answer", [whole(404), whole(500, b"vllm:num_requests_running 1\n"), failure("connect"), HANG]
)
async def test_without_a_page_nothing_is_recorded_and_raised(
    metered: Polled, answer: Script
) -> None:
    metered.engines.play("/metrics", answer)
    assert not await metered.read()
    assert kv_usage(metered.pool.view, 0, 0.0) is None


async def test_unknown_names_warn_once(metered: Polled, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sluice.telemetry"):
        metered.engines.answer("/metrics", "go_goroutines 8\n")
        for worker in range(2):
            assert not await metered.read(worker)
        metered.engines.answer("/metrics", "vllm:num_requests_running 1\n")
        for _ in range(2):
            assert await metered.read()
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 3
    assert "tells no metrics known here" in said[0]
    assert "does not tell waiting" in said[1]
    assert "does not tell kv_usage (none of vllm:kv_cache_usage_perc" in said[2]


async def test_workers_are_read_in_the_background_until_closed(
    metered: Polled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PAGES_EVERY_S", 0.0)
    monkeypatch.setattr(probes, "MAX_PAGES_PER_S", 1000.0)
    engines = metered.engines
    engines.answer("/metrics", PAGE % 5, port=1)
    await metered.prober.start()
    async with asyncio.timeout(5):
        while min(engines.asked("/metrics", n) for n in (1, 2)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await metered.prober.close()
    seen = len(engines.calls)
    await asyncio.sleep(0.01)
    assert len(engines.calls) == seen
    assert kv_usage(metered.pool.view, 0, 0.0) == 0.5
    assert kv_usage(metered.pool.view, 1, 0.0) is None


@pytest.mark.parametrize(("workers", "interval_s"), [(16, 1.0), (256, 2.0), (2000, 4.0)])
def test_many_workers_are_asked_less_often_but_before_what_they_said_is_stale(
    workers: int, interval_s: float
) -> None:
    metrics = Polled(workers, reads_metrics=True).prober
    assert metrics.page_interval_s == interval_s
    assert metrics.page_interval_s * (1 + JITTER) < STALE_S


@pytest.mark.parametrize("render", [render_metrics, render_sglang])
async def test_the_mock_engines_pages_are_understood(metered: Polled, render: Any) -> None:
    driver = Driver(MockConfig(model="m", profile=PROFILES["llama-3-70b-a100"]))
    metered.engines.answer("/metrics", render(driver))
    assert await metered.read()
    sample = metered.pool.view.samples[0]
    assert (sample.running, sample.waiting, sample.kv_usage) == (0, 0, 0)
    assert (sample.prompt_tokens_total, sample.generation_tokens_total) == (0, 0)
