"""Pools in phases: how their settings read, and each mistake with its line and fix."""

from typing import Any

import pytest

from gateway.settings import Config, ConfigError, parse
from gateway.settings.compare import changes, merged
from gateway.settings.token_pools import base_terms, shape_of
from gateway.wiring.models import served_model

FILE = """\
version: 1
models:
  - name: m
    kv_bytes_per_token: 1024
    pools:
      short: {max_model_len: 8192, max_num_seqs: 4, workers: ["http://s:1"]}
      long:
        max_model_len: 65536
        prefill: {max_num_seqs: 16, kv_cache_gib: 1, workers: ["http://a:1", "http://b:1"]}
        decode: {max_num_seqs: 8, kv_cache_gib: 2, workers: [{url: "http://c:1", ranks: 4}]}
        transfer: {kind: vllm}
"""
PREFILL, DECODE, TRANSFER = FILE.splitlines()[-3:]

ALONE = """\
        max_num_seqs: 8
        kv_cache_gib: 2
        workers: [{url: "http://c:1", ranks: 4}]
"""


def read(text: str = FILE) -> Config:
    return parse(text, "sluice.yaml", {})


def test_the_pool_is_its_decode_engines_and_prefill_is_a_pool_behind_the_routed_ones() -> None:
    config = read()
    model = config.models[0]
    assert list(model.all_pools) == ["short", "long", "long/prefill"]
    assert model.policies() == ("quartz", "bfio", "quartz")
    assert model.policies(replicas=2) == ("quartz", "least-loaded", "quartz")
    served = served_model(config, model)
    assert [pool.name for pool in served.fleet.pools] == list(model.all_pools)
    assert [shape.name for shape in served.routing.pools] == ["short", "long"]
    assert [pool.name for pool in served.fleet.routed] == ["short", "long"]
    assert served.fleet.pools[1].workers == ["c:1#0", "c:1#1", "c:1#2", "c:1#3"]
    assert (served.fleet.phases[1].prefill, served.fleet.phases[1].kind) == (2, "vllm")
    assert [served.fleet.phase_of(place) for place in range(3)] == [None, "decode", "prefill"]
    assert served.fleet.pools[1].prefixes is None  # its prompts are computed elsewhere
    assert served.fleet.pools[2].prefixes is not None


def test_capacity_has_the_slots_of_both_phases_and_the_kv_cache_of_decode() -> None:
    model = read(FILE.replace("max_num_seqs", "tokens_per_second: 100, max_num_seqs")).models[0]
    terms, shape = base_terms(model), shape_of(model)
    assert terms.slots == shape.max_slots == (4, 4 * 8 + 2 * 16)
    assert terms.kv_bytes == (0, 4 * 2 << 30)
    assert terms.tokens_per_s == shape.max_tokens_per_s == 700


MISTAKES: list[tuple[str, str, int, str, str, str]] = [
    (
        *(DECODE, "        workers: ['http://d:1']", 10, "models[0].pools.long.workers"),
        *("`workers` is no setting here", "under `prefill` and `decode`"),
    ),
    (DECODE, "", 7, "models[0].pools.long", "key `decode` is missing", "add `decode:`"),
    (PREFILL, "", 7, "models[0].pools.long", "key `prefill` is missing", "add `prefill:`"),
    (TRANSFER, "", 7, "models[0].pools.long", "key `transfer` is missing", "add `transfer:`"),
    (
        *(
            f"{PREFILL}\n{DECODE}",
            "        max_num_seqs: 8",
            9,
            "models[0].pools.long.max_num_seqs",
        ),
        *("`max_num_seqs` is no setting here", "under `prefill` and `decode`"),
    ),
    (
        *("vllm", "vllm, bootstrap_port: 1", 11, "models[0].pools.long.transfer.bootstrap_port"),
        *("no such port", "kind sglang"),
    ),
    (
        *("vllm", "sglang, skip_below_tokens: 9", 11),
        "models[0].pools.long.transfer.skip_below_tokens",
        *("compute no prompts", "pool of their own"),
    ),
    ("vllm", "nixl", 11, "models[0].pools.long.transfer.kind", "`nixl` is not", "vllm"),
    (
        *("http://b:1", "http://c:1", 9, "models[0].pools.long.prefill.workers[1]"),
        *("in pool `long` of `m` too, on line 10", "engines of its own"),
    ),
    (
        *("http://b:1", "http://s:1", 9, "models[0].pools.long.prefill.workers[1]"),
        *("in pool `short`", "engines of its own"),
    ),
    (
        *("{max_num_seqs: 16", "{scheduling: {policy: bfio}, max_num_seqs: 16", 9),
        "models[0].pools.long.prefill.scheduling.policy",
        *("ranks that decode", "choose quartz"),
    ),
    (
        *("{max_num_seqs: 8", "{tokens_per_second: 5, max_num_seqs: 8", 6, "models[0].pools.short"),
        *("in pool `long`", "for every pool"),
    ),
    (
        *("kv_bytes_per_token: 1024", "spill_queue: 0", 9, "models[0].pools.long.prefill"),
        *("what a token takes", "kv_bytes_per_token"),
    ),
    (
        *('["http://a:1", "http://b:1"]', "[]", 9, "models[0].pools.long.prefill.workers"),
        *("empty", "at least one"),
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "path", "message", "fix"), MISTAKES)
def test_each_mistake_has_its_line_and_fix(
    old: str, new: str, line: int, path: str, message: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(FILE.replace(old, new))
    problems = [p for p in refused.value.problems if p.path.startswith(path)]
    assert [p.line for p in problems] == [line], refused.value.problems
    assert message in problems[0].message
    assert fix in problems[0].fix


def test_a_change_is_told_once_and_prices_stay_until_a_restart() -> None:
    before = read()
    more = DECODE.replace("max_num_seqs: 8", "max_num_seqs: 9")
    (change,) = changes(before, read(FILE.replace(DECODE, more)))
    assert (change.path, change.restart) == ("models[m].pools[long].decode.max_num_seqs", False)
    alone = FILE.replace(f"{PREFILL}\n{DECODE}\n{TRANSFER}\n", ALONE)
    assert [c.path for c in changes(read(alone), before)] == [
        "models[m].pools[long].prefill",
        "models[m].pools[long].transfer",
    ]
    priced = FILE.replace("max_num_seqs", "gpu_hour: 2.0, max_num_seqs")
    assert [(c.path, c.restart) for c in changes(before, read(priced))] == [
        ("models[m].pools[short].gpu_hour", True),
        ("models[m].pools[long].prefill.gpu_hour", True),
        ("models[m].pools[long].decode.gpu_hour", True),
    ]
    pools: Any = merged(before, read(priced)).models[0].all_pools
    assert [pool.gpu_hour for pool in pools.values()] == [None, None, None]
    assert changes(before, merged(before, read(priced))) == []
