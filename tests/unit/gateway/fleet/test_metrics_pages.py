"""Reading engines' metrics pages: what arrives, what does not, and who is told of a restart."""

import asyncio
import logging

import pytest

from gateway.fleet import engine_pages, probes
from gateway.fleet.engine_telemetry import STALE_S, kv_usage
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import JITTER, Prober
from gateway.scheduling.prefix_index import PrefixIndex
from simulator.engine.profiles import PROFILES
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.driver import Driver
from simulator.mock_server.state import render_metrics, render_sglang
from tests.builders import address, changed, routing, served_model
from tests.fakes import HANG, FakeEngines, failure

PAGE = (
    "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    "vllm:kv_cache_usage_perc 0.5\nvllm:prompt_tokens_total %d\n"
)


@pytest.fixture
def served() -> ModelRuntime:
    """One pool of two workers."""
    model = served_model(table=routing(("only", 8192, None)), workers=(2,))
    return changed(
        model,
        addresses=((address("w0", port=1), address("w1", port=2, api_key="sk-engine")),),
        reads_metrics=True,
    )


def prober(served: ModelRuntime, engines: FakeEngines, timeout_s: float = 2.0) -> Prober:
    return Prober(
        [served], interval_s=60.0, timeout_s=timeout_s, upstream=engines, clock=lambda: 10.0
    )


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def metrics(served: ModelRuntime, engines: FakeEngines) -> Prober:
    return prober(served, engines)


async def test_a_page_fills_the_view(
    served: ModelRuntime, engines: FakeEngines, metrics: Prober
) -> None:
    engines.answer("/metrics", PAGE % 5, port=2)
    assert await metrics.read(served.fleet.pools[0], 1)
    view = served.fleet.pools[0].view
    assert kv_usage(view, 1, 10.0) == 0.5
    assert kv_usage(view, 0, 10.0) is None
    ((worker, call),) = engines.calls
    assert (worker.api_key, call.method) == ("sk-engine", "GET")


async def test_a_restart_empties_the_prefix_cache_once(
    served: ModelRuntime, engines: FakeEngines, caplog: pytest.LogCaptureFixture
) -> None:
    index = PrefixIndex(2)
    served = changed(served, prefixes=(index,))
    with caplog.at_level(logging.INFO, "sluice.telemetry"):
        for tokens in (50, 60, 5, 6):
            index.insert(((1, 7),), 0, 1.0)
            engines.answer("/metrics", PAGE % tokens, port=1)
            await prober(served, engines).read(served.fleet.pools[0], 0)
            assert bool(index.match(((1, 7),), 1.0)) == (tokens != 5)
    assert caplog.text.count("w0 restarted") == 1


@pytest.mark.parametrize("status", [404, 500])
async def test_without_a_page_nothing_is_recorded(
    served: ModelRuntime, engines: FakeEngines, metrics: Prober, status: int
) -> None:
    engines.answer("/metrics", PAGE % 5, status)
    assert not await metrics.read(served.fleet.pools[0], 0)
    assert kv_usage(served.fleet.pools[0].view, 0, 10.0) is None


async def test_an_engine_that_cannot_be_reached_raises_nothing(
    served: ModelRuntime, engines: FakeEngines, metrics: Prober
) -> None:
    engines.play("/metrics", failure("connect"))
    assert not await metrics.read(served.fleet.pools[0], 0)


async def test_a_page_that_never_ends_is_left(
    served: ModelRuntime,
    engines: FakeEngines,
    metrics: Prober,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pages, "MAX_PAGE_BYTES", 50)
    engines.answer("/metrics", PAGE % 5)
    assert not await metrics.read(served.fleet.pools[0], 0)


async def test_an_engine_that_hangs_is_left_after_the_time_out(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.play("/metrics", HANG)
    assert not await prober(served, engines, timeout_s=0.01).read(served.fleet.pools[0], 0)


async def test_unknown_names_warn_once(
    served: ModelRuntime,
    engines: FakeEngines,
    metrics: Prober,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sluice.telemetry"):
        engines.answer("/metrics", "go_goroutines 8\n")
        assert not await metrics.read(served.fleet.pools[0], 0)
        assert not await metrics.read(served.fleet.pools[0], 1)
        engines.answer("/metrics", "vllm:num_requests_running 1\n")
        for _ in range(2):
            assert await metrics.read(served.fleet.pools[0], 0)
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 3
    assert "tells no metrics known here" in said[0]
    assert "does not tell waiting" in said[1]
    assert "does not tell kv_usage (none of vllm:kv_cache_usage_perc" in said[2]


async def test_workers_are_read_in_the_background_until_closed(
    served: ModelRuntime, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PAGES_EVERY_S", 0.0)
    monkeypatch.setattr(probes, "MAX_PAGES_PER_S", 1000.0)
    engines.answer("/health")
    engines.answer("/metrics", PAGE % 5, port=1)
    metrics = prober(served, engines)
    await metrics.start()
    async with asyncio.timeout(5):
        while min(engines.asked("/metrics", n) for n in (1, 2)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await metrics.close()
    seen = len(engines.calls)
    await asyncio.sleep(0.01)
    assert len(engines.calls) == seen
    view = served.fleet.pools[0].view
    assert kv_usage(view, 0, 10.0) == 0.5
    assert kv_usage(view, 1, 10.0) is None


@pytest.mark.parametrize(("workers", "interval_s"), [(16, 1.0), (256, 2.0), (2000, 4.0)])
def test_many_workers_are_asked_less_often_but_before_what_they_said_is_stale(
    workers: int, interval_s: float
) -> None:
    model = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    model = changed(model, reads_metrics=True)
    metrics = prober(model, FakeEngines())
    assert metrics.page_interval_s == interval_s
    assert metrics.page_interval_s * (1 + JITTER) < STALE_S


@pytest.mark.parametrize("render", [render_metrics, render_sglang])
async def test_the_mock_engines_pages_are_understood(
    served: ModelRuntime, engines: FakeEngines, metrics: Prober, render: object
) -> None:
    assert callable(render)
    driver = Driver(MockConfig(model="m", profile=PROFILES["llama-3-70b-a100"]))
    engines.answer("/metrics", render(driver))
    assert await metrics.read(served.fleet.pools[0], 0)
    sample = served.fleet.pools[0].view.samples[0]
    assert (sample.running, sample.waiting, sample.kv_usage) == (0, 0, 0)
    assert sample.prompt_tokens_total == 0
    assert sample.generation_tokens_total == 0
