"""Pages of both engines, as they write them: metrics, and lists of models."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import engine_metrics as tv
from gateway.fleet.engine_metrics import (
    NEEDED,
    EngineModel,
    EngineSample,
    TelemetryView,
    not_served,
    read_adapters,
    read_models,
    read_page,
    record,
)
from gateway.fleet.fleet import PoolState, held_tokens
from tests.growth import assert_linear

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a/b"} 3.0
vllm:num_requests_running{engine="1",model_name="a/b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a/b"} 0.0
vllm:num_requests_waiting{engine="1",model_name="a/b"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="a/b"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="a/b"} 0.4
vllm:prefix_cache_queries_total{engine="0",model_name="a/b"} 1.2e+06
vllm:prefix_cache_hits_total{engine="0",model_name="a/b"} 600000.0
vllm:num_preemptions_total{engine="0",model_name="a/b"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="a/b"} 10.0
vllm:generation_tokens_total{engine="0",model_name="a/b"} 11.0
process_start_time_seconds 1.75e+09
"""
SGLANG = b"""sglang:num_running_reqs{model_name="a}b{c",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="a"} 6.0
sglang:token_usage{model_name="a"} 0.28
sglang:cache_hit_rate{model_name="a"} 0.5
sglang:prompt_tokens_total{model_name="a"} 8.128902e+06
sglang:generation_tokens_total{model_name="a"} 7"""


def test_vllms_ranks_are_summed_and_shares_averaged() -> None:
    found = read_page(VLLM)
    assert found == EngineSample(
        engine="vllm",
        running=7,
        waiting=2,
        kv_usage=found.kv_usage,
        prefix_queries_total=1.2e6,
        prefix_hits_total=6e5,
        preemptions_total=1,
        prompt_tokens_total=10,
        generation_tokens_total=11,
        started_unix_s=1.75e9,
    )
    assert round(found.kv_usage or 0, 9) == 0.3
    assert all(getattr(found, field) is not None for field in NEEDED)


def test_one_rank_has_its_own_samples_and_those_of_all() -> None:
    found = read_page(VLLM, rank=1)
    assert (found.running, found.waiting, found.kv_usage) == (4, 2, 0.4)
    assert found.started_unix_s == 1.75e9
    assert found.prompt_tokens_total is None


def test_sglangs_names_mean_the_same() -> None:
    assert read_page(SGLANG) == EngineSample(
        engine="sglang",
        running=5,
        waiting=6,
        kv_usage=0.28,
        hit_rate=0.5,
        prompt_tokens_total=8128902,
        generation_tokens_total=7,
    )


def test_older_names_are_read_and_newer_ones_win() -> None:
    old = b"vllm:gpu_cache_usage_perc 0.9\n"
    assert read_page(old).kv_usage == 0.9
    assert read_page(old + b"vllm:kv_cache_usage_perc 0.1\n").kv_usage == 0.1


def test_what_is_no_number_is_not_there() -> None:
    page = b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:prompt_tokens x\n"
    assert read_page(page) == EngineSample()


@given(st.binary(max_size=400))
def test_no_page_breaks_it(noise: bytes) -> None:
    found = read_page(b'vllm:num_requests_running{a="1"} 2\n' + noise)
    assert found.running is not None
    assert found.running >= 2


def test_of_lora_samples_the_latest_counts() -> None:
    page = (
        b"# TYPE vllm:lora_requests_info gauge\n"
        b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",'
        b'waiting_lora_adapters=""} 1.7e+09\n'
        b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,tone",'
        b'waiting_lora_adapters="law"} 1.7000001e+09\n'
    )
    found = read_adapters(page)
    assert found is not None
    assert found.names == {"sql", "tone", "law"}
    assert found.most == 2


@pytest.mark.parametrize("value", [b"nan", b"x", b"-5"])
def test_lora_samples_that_are_none_name_no_adapter(value: bytes) -> None:
    page = b'vllm:lora_requests_info{max_lora="x",running_lora_adapters="a"} ' + value + b"\n"
    assert read_adapters(page) == (frozenset(), 0)
    assert read_adapters(b"vllm:num_requests_running 1\n") is None


PAGES = {
    "words": (b"vllm:lora_requests_info{", b"x", b"} 1\n"),
    "labels": (b"vllm:lora_requests_info{", b',a="', b'"} 1\n'),
    "braces": (b"vllm:lora_requests_info{", b"} ", b"} 1\n"),
    "blanks": (b"vllm:lora_requests_info{}", b" ", b"\n"),
    "lines": (b"", b'vllm:lora_requests_info{a="b"} 1\n', b""),
    "numbers": (b"vllm:num_requests_running{", b"} 1", b"\n"),
}


@pytest.mark.parametrize("shape", PAGES)
def test_twice_the_page_takes_twice_the_time(shape: str) -> None:
    head, unit, tail = PAGES[shape]

    def run(page: bytes) -> None:
        read_adapters(page)
        read_page(page, rank=1)

    assert_linear(lambda n: head + unit * (n // len(unit)) + tail, run, most=2**20)


def test_adapters_beyond_a_bounded_line_are_not_read() -> None:
    page = b'vllm:lora_requests_info{running_lora_adapters="' + b"a," * 40_000 + b'"} 1\n'
    assert read_adapters(page) == (frozenset(), 0)


MODELS = {
    "object": "list",
    "data": [
        {"id": "base", "root": "org/base", "parent": None, "max_model_len": 8192},
        {"id": "sql", "root": "/loras/sql", "parent": "base", "max_model_len": None},
        {"id": "second-name", "root": "org/base", "parent": None, "max_model_len": 8192},
    ],
}


def test_models_and_adapters_are_told_apart() -> None:
    models = read_models(json.dumps(MODELS).encode())
    assert models[1] == EngineModel("sql", None, "base")
    assert [model.name for model in models if model.parent is not None] == ["sql"]
    assert not_served(models, "second-name") == ""


def test_what_is_served_instead_is_named() -> None:
    models = [EngineModel(f"m{n}", None, None) for n in range(9)]
    assert not_served(models, "m8") == ""
    assert not_served(models, "x") == (
        "it serves 'm0', 'm1', 'm2', 'm3', 'm4' and 4 more, not 'x': set the worker's `model`"
    )
    assert not_served([], "x") == "", "a list of nothing decides nothing"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"data": 5}', b'{"data": [3, {"id": 4}, {"max_model_len": 1}]}'],
)
def test_what_is_no_list_of_models_holds_none(body: bytes) -> None:
    assert read_models(body) == []


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(
    st.sampled_from(["data", "id", "parent", "max_model_len"]), s)))  # fmt: skip
def test_nothing_an_engine_lists_raises(told: object) -> None:
    read_models(json.dumps(told).encode())


def test_a_reading_is_told_while_it_is_fresh() -> None:
    view = TelemetryView()
    assert tv.kv_usage(view, 0, 100.0) is None
    record(view, 0, EngineSample(kv_usage=0.4, waiting=3), 100.0)
    assert tv.kv_usage(view, 0, 105.0) == 0.4
    assert tv.kv_usage(view, 0, 105.1) is None
    assert tv.kv_usage(view, 0, 109.0, stale_s=10) == 0.4
    assert tv.kv_usage(view, 1, 100.0) is None


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (EngineSample(prompt_tokens_total=10), EngineSample(prompt_tokens_total=9), True),
        (EngineSample(prompt_tokens_total=10), EngineSample(prompt_tokens_total=10), False),
        (EngineSample(started_unix_s=100), EngineSample(started_unix_s=200), True),
        (EngineSample(started_unix_s=100), EngineSample(started_unix_s=100.5), False),
        (EngineSample(running=5), EngineSample(running=0), False),
        (EngineSample(prompt_tokens_total=10), EngineSample(), False),
    ],
)
def test_a_restart_is_a_counter_that_fell_or_another_start(
    before: EngineSample, after: EngineSample, restarted: bool
) -> None:
    view = TelemetryView()
    assert not record(view, 0, before, 0.0)
    assert record(view, 0, after, 1.0) is restarted


def test_preemptions_are_counted_from_the_first_reading_and_over_restarts() -> None:
    view = TelemetryView()
    record(view, 0, EngineSample(preemptions_total=100), 0.0)
    assert view.preemptions == 0
    record(view, 0, EngineSample(preemptions_total=103), 1.0)
    record(view, 1, EngineSample(preemptions_total=7), 1.0)
    record(view, 1, EngineSample(preemptions_total=8), 2.0)
    assert view.preemptions == 4
    record(view, 0, EngineSample(preemptions_total=2), 3.0)
    assert view.preemptions == 6


def test_tokens_held_are_known_where_size_and_usage_are() -> None:
    pool = PoolState("p", ["w"], 8)
    assert held_tokens(pool, 0, 0.0) is None
    record(pool.view, 0, EngineSample(kv_usage=0.5), 0.0)
    assert held_tokens(pool, 0, 1.0) is None
    pool.kv_tokens[0] = 8000
    assert held_tokens(pool, 0, 1.0) == 4000
    assert held_tokens(pool, 0, 60.0) is None
