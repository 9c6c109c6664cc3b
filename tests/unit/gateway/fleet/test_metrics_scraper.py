"""Reading engines' metrics pages: what arrives, what does not, and who is told of a restart."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from gateway.fleet import metrics_scraper
from gateway.fleet.engine_telemetry import STALE_S, kv_usage
from gateway.fleet.metrics_scraper import JITTER, EngineMetrics
from gateway.fleet.model_runtime import ModelRuntime
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
        model, workers=((address("w0", port=1), address("w1", port=2, api_key="sk-engine")),)
    )


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
async def metrics(served: ModelRuntime, engines: FakeEngines) -> AsyncIterator[EngineMetrics]:
    made = EngineMetrics([served], lambda: 10.0, upstream=engines)
    yield made
    await made.close()


async def test_a_page_fills_the_view(
    served: ModelRuntime, engines: FakeEngines, metrics: EngineMetrics
) -> None:
    engines.answer("/metrics", PAGE % 5, port=2)
    assert await metrics.read(served, 0, 1)
    (view,) = metrics.views[served.name]
    assert kv_usage(view, 1, 10.0) == 0.5
    assert kv_usage(view, 0, 10.0) is None
    ((worker, call),) = engines.calls
    assert (worker.api_key, call.method) == ("sk-engine", "GET")


async def test_a_restart_is_told_once(served: ModelRuntime, engines: FakeEngines) -> None:
    reported: list[tuple[str, int, int]] = []
    metrics = EngineMetrics(
        [served],
        lambda: 0.0,
        upstream=engines,
        on_restart=lambda model, pool, worker: reported.append((model.name, pool, worker)),
    )
    for tokens in (50, 60, 5, 6):
        engines.answer("/metrics", PAGE % tokens, port=1)
        await metrics.read(served, 0, 0)
    await metrics.close()
    assert reported == [(served.name, 0, 0)]


@pytest.mark.parametrize("status", [404, 500])
async def test_without_a_page_nothing_is_recorded(
    served: ModelRuntime, engines: FakeEngines, metrics: EngineMetrics, status: int
) -> None:
    engines.answer("/metrics", PAGE % 5, status)
    assert not await metrics.read(served, 0, 0)
    assert kv_usage(metrics.views[served.name][0], 0, 10.0) is None


async def test_an_engine_that_cannot_be_reached_raises_nothing(
    served: ModelRuntime, engines: FakeEngines, metrics: EngineMetrics
) -> None:
    engines.play("/metrics", failure("connect"))
    assert not await metrics.read(served, 0, 0)


async def test_a_page_that_never_ends_is_left(
    served: ModelRuntime,
    engines: FakeEngines,
    metrics: EngineMetrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_scraper, "MAX_PAGE_BYTES", 50)
    engines.answer("/metrics", PAGE % 5)
    assert not await metrics.read(served, 0, 0)


async def test_an_engine_that_hangs_is_left_after_the_time_out(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.play("/metrics", HANG)
    metrics = EngineMetrics([served], lambda: 0.0, timeout_s=0.01, upstream=engines)
    assert not await metrics.read(served, 0, 0)
    await metrics.close()


async def test_unknown_names_warn_once(
    served: ModelRuntime,
    engines: FakeEngines,
    metrics: EngineMetrics,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sluice.telemetry"):
        engines.answer("/metrics", "go_goroutines 8\n")
        assert not await metrics.read(served, 0, 0)
        assert not await metrics.read(served, 0, 1)
        engines.answer("/metrics", "vllm:num_requests_running 1\n")
        for _ in range(2):
            assert await metrics.read(served, 0, 0)
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 3
    assert "tells no metrics known here" in said[0]
    assert "does not tell waiting" in said[1]
    assert "does not tell kv_usage (none of vllm:kv_cache_usage_perc" in said[2]


async def test_workers_are_read_in_the_background_until_closed(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", PAGE % 5, port=1)
    metrics = EngineMetrics([served], lambda: 3.0, interval_s=0.05, upstream=engines)
    metrics.interval_s = 0.0  # no waiting between readings
    await metrics.start()
    for _ in range(1000):
        await asyncio.sleep(0)
        if min(engines.asked("/metrics", 1), engines.asked("/metrics", 2)) > 1:
            break
    else:
        pytest.fail("not both were read twice")
    await metrics.close()
    seen = len(engines.calls)
    await asyncio.sleep(0)
    assert len(engines.calls) == seen
    view = metrics.views[served.name][0]
    assert kv_usage(view, 0, 3.0) == 0.5
    assert kv_usage(view, 1, 3.0) is None


@pytest.mark.parametrize(("workers", "interval_s"), [(16, 1.0), (256, 2.0), (2000, 4.0)])
def test_many_workers_are_asked_less_often_but_before_what_they_said_is_stale(
    workers: int, interval_s: float
) -> None:
    model = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    metrics = EngineMetrics([model], lambda: 0.0, interval_s=1.0, upstream=FakeEngines())
    assert metrics.interval_s == interval_s
    assert metrics.interval_s * (1 + JITTER) < STALE_S


@pytest.mark.parametrize("render", [render_metrics, render_sglang])
async def test_the_mock_engines_pages_are_understood(
    served: ModelRuntime, engines: FakeEngines, metrics: EngineMetrics, render: object
) -> None:
    assert callable(render)
    driver = Driver(MockConfig(model="m", profile=PROFILES["llama-3-70b-a100"]))
    engines.answer("/metrics", render(driver))
    assert await metrics.read(served, 0, 0)
    sample = metrics.views[served.name][0].samples[0]
    assert (sample.running, sample.waiting, sample.kv_usage) == (0, 0, 0)
    assert sample.prompt_tokens_total == 0
    assert sample.generation_tokens_total == 0
