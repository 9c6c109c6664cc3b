"""KV capacity as engines tell it: read once each time a worker comes up."""

import pytest

from gateway.fleet import engine_pages
from gateway.fleet.engine_metrics import read_kv_tokens
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import Prober
from tests.builders import address, changed, routing, served_model
from tests.fakes import FakeEngines, Script, broken, failure, whole
from tests.growth import assert_linear

INFO = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="%d",'
    'num_gpu_blocks="%s",num_gpu_blocks_override="None"} 1.0'
)


@pytest.fixture
def served() -> ModelRuntime:
    """One pool of two workers, 1,024 bytes a token."""
    model = served_model(table=routing(("only", 8192, None)), workers=(2,))
    return changed(
        model,
        addresses=((address("w0", port=1), address("w1", port=2, api_key="sk-engine")),),
        kv_bytes_per_token=1024,
    )


@pytest.fixture
def engines() -> FakeEngines:
    """Both engines, healthy; their /metrics is what a test says."""
    made = FakeEngines()
    made.answer("/health")
    made.answer("/v1/models", '{"data": []}')
    return made


def prober(served: ModelRuntime, engines: FakeEngines) -> Prober:
    return Prober([served], interval_s=1.0, timeout_s=1.0, upstream=engines)


def page(*infos: str) -> str:
    return "\n".join(["# HELP x y", "vllm:num_requests_running 0", *infos, "other 1"])


async def test_blocks_times_their_size_times_bytes_a_token(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", page(INFO % (0, "100")), port=1)
    engines.answer("/metrics", page(INFO % (0, "200")), port=2)
    probing = prober(served, engines)
    assert await probing.probe(served.fleet.pools[0], 0)
    assert await probing.probe(served.fleet.pools[0], 1)
    assert served.fleet.pools[0].kv_tokens == {0: 1600, 1: 3200}
    keys = {worker.port: worker.api_key for worker, _ in engines.calls}
    assert keys == {1: None, 2: "sk-engine"}


async def test_data_parallel_engines_of_a_worker_add_up(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", page(INFO % (0, "10"), INFO % (1, "20")))
    await prober(served, engines).probe(served.fleet.pools[0], 0)
    assert served.fleet.pools[0].kv_tokens[0] == 30 * 16


async def test_a_worker_is_asked_once_until_it_was_away(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", page(INFO % (0, "10")))
    probing = prober(served, engines)
    for _ in range(3):
        await probing.probe(served.fleet.pools[0], 0)
    assert engines.asked("/metrics") == 1
    engines.answer("/health", status=503)
    for _ in range(3):
        await probing.probe(served.fleet.pools[0], 0)
    known = served.fleet.pools[0].kv_tokens[0]
    assert known == 10 * 16, "capacity counts workers in the rotation only"
    engines.answer("/health")
    engines.answer("/metrics", page(INFO % (0, "99")))
    await probing.probe(served.fleet.pools[0], 0)
    assert (engines.asked("/metrics"), served.fleet.pools[0].kv_tokens[0]) == (2, 99 * 16)


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
        whole(200, b"vllm:cache_config_info 1.0"),
        whole(200, b'vllm:cache_config_info{block_size="16"'),
    ],
)
async def test_what_is_not_told_is_unknown(
    served: ModelRuntime,
    engines: FakeEngines,
    answer: Script,
) -> None:
    engines.play("/metrics", answer)
    assert await prober(served, engines).probe(served.fleet.pools[0], 0), "it stays in the rotation"
    assert not served.fleet.pools[0].kv_tokens[0]


async def test_an_engine_that_tells_no_longer_is_unknown_again(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", page(INFO % (0, "10")))
    probing = prober(served, engines)
    await probing.probe(served.fleet.pools[0], 0)
    assert served.fleet.pools[0].kv_tokens[0]
    engines.answer("/health", status=500)
    while served.fleet.pools[0].engine_of[0].up:
        await probing.probe(served.fleet.pools[0], 0)
    engines.answer("/health")
    engines.answer("/metrics", status=404)
    await probing.probe(served.fleet.pools[0], 0)
    assert served.fleet.pools[0].kv_tokens[0] == 0


@pytest.mark.parametrize("script", [failure("reset"), whole(200, b"vllm:", broken("timeout"))])
async def test_a_metrics_page_that_breaks_off_harms_nobody(
    served: ModelRuntime, engines: FakeEngines, script: Script
) -> None:
    engines.play("/metrics", script)
    assert await prober(served, engines).probe(served.fleet.pools[0], 0)
    assert not served.fleet.pools[0].kv_tokens[0]


async def test_a_page_without_end_tells_nothing(
    served: ModelRuntime,
    engines: FakeEngines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pages, "MAX_PAGE_BYTES", 300)
    engines.answer("/metrics", page(INFO % (0, "10")) + "\n" + "x" * 301)
    await prober(served, engines).probe(served.fleet.pools[0], 0)
    assert not served.fleet.pools[0].kv_tokens[0]


async def test_without_bytes_a_token_nobody_is_asked(
    served: ModelRuntime, engines: FakeEngines
) -> None:
    engines.answer("/metrics", page(INFO % (0, "10")))
    plain = changed(served, kv_bytes_per_token=0)
    await prober(plain, engines).probe(plain.fleet.pools[0], 0)
    assert engines.asked("/metrics") == 0


def test_escaped_labels_are_read_past() -> None:
    line = 'vllm:cache_config_info{a="\\"num_gpu_blocks=\\"5",block_size="2",num_gpu_blocks="3"} 1'
    assert read_kv_tokens(line.encode()) == 6
    assert read_kv_tokens(b"vllm:other{}") == 0


@pytest.mark.parametrize("unit", ["x", 'a="', 'a="\\"', "\\", ',a="b"'])
def test_twice_the_labels_take_twice_the_time(unit: str) -> None:
    head = "vllm:cache_config_info{"
    assert_linear(lambda n: (head + unit * (n // len(unit))).encode(), read_kv_tokens, most=2**20)


async def test_a_line_without_end_is_cut_off(served: ModelRuntime, engines: FakeEngines) -> None:
    line = INFO % (0, "10")
    engines.answer("/metrics", page(line, line.replace('"16"', f'"{"9" * 5000}"')))
    await prober(served, engines).probe(served.fleet.pools[0], 0)
    assert not served.fleet.pools[0].kv_tokens[0]
