"""The gateway's reading of engines' metrics, from real mock engines over sockets."""

from contextlib import AbstractContextManager
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.fleet.engine_metrics import EngineSample
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import Prober
from gateway.upstream import HttpUpstream
from simulator.mock_server import parse_faults
from tests.builders import address, changed, routing, served_model
from tests.running import mock_engine

BODY = {"model": "m", "messages": [{"role": "user", "content": "one two three " * 200}]}


def engine(fail: str = "", ranks: int = 1) -> AbstractContextManager[str]:
    return mock_engine(
        max_model_len=8192,
        max_num_seqs=8,
        speed=500,
        model="m",
        dp_ranks=ranks,
        faults=parse_faults(fail),
    )


def served_at(url: str) -> ModelRuntime:
    model = served_model(table=routing(("only", 8192, None)), workers=(1,))
    return changed(
        model,
        addresses=([address("w0", port=urlsplit(url).port or 0)],),
        reads_metrics=True,
    )


def prober(served: ModelRuntime, upstream: HttpUpstream) -> Prober:
    return Prober([served], interval_s=60.0, timeout_s=2.0, upstream=upstream)


async def sampled(served: ModelRuntime) -> EngineSample | None:
    upstream = HttpUpstream()
    try:
        known = await prober(served, upstream).read(served.fleet.pools[0], 0)
        return served.fleet.pools[0].view.samples[0] if known else None
    finally:
        await upstream.close()


@pytest.mark.parametrize("fail", ["", "sglang-metrics"])
async def test_what_an_engine_served_is_read_from_its_page(fail: str) -> None:
    with engine(fail, ranks=2) as url:
        async with httpx.AsyncClient() as client:
            usage = [
                (await client.post(url + "/v1/chat/completions", json=BODY, timeout=10)).json()
                for _ in range(3)
            ]
        sample = await sampled(served_at(url))
    assert sample is not None
    assert sample.prompt_tokens_total == sum(u["usage"]["prompt_tokens"] for u in usage)
    assert sample.generation_tokens_total == sum(u["usage"]["completion_tokens"] for u in usage)
    assert sample.prefix_hits_total == sum(
        u["usage"]["prompt_tokens_details"]["cached_tokens"] for u in usage
    )
    assert sample.prefix_hits_total
    assert (sample.running, sample.waiting, sample.preemptions_total) == (0, 0, 0)


async def test_an_engine_that_came_back_has_restarted(caplog: pytest.LogCaptureFixture) -> None:
    upstream = HttpUpstream()
    with engine() as url:
        served = served_at(url)
        async with httpx.AsyncClient() as client:
            await client.post(url + "/v1/chat/completions", json=BODY, timeout=10)
        assert await prober(served, upstream).read(served.fleet.pools[0], 0)
    assert not await prober(served, upstream).read(served.fleet.pools[0], 0)
    with engine() as url:
        again = served_at(url)
        again.fleet.pools[0].view = served.fleet.pools[0].view
        with caplog.at_level("INFO", "sluice.telemetry"):
            assert await prober(again, upstream).read(again.fleet.pools[0], 0)
    await upstream.close()
    assert caplog.text.count("restarted: its prefix cache is taken to be empty") == 1
