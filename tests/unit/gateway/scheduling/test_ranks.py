"""Data-parallel ranks from the file to the wire: workers of one address, told apart by rank."""

from typing import Any, Literal

import msgspec
import pytest

from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.fleet.probes import Prober
from gateway.payload.body import read_body
from gateway.payload.head import pairs_of
from gateway.pipeline.dispatcher import upstream_call
from gateway.ports import UpstreamCall
from gateway.records.attempt import Binding
from gateway.records.endpoint import CHAT, TRANSCRIPTIONS
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.rank_group import RankGroup
from gateway.settings import Config, ConfigError, parse
from gateway.wiring.models import served_model as model_of
from tests.builders import (
    address,
    attempts_of,
    changed,
    incoming,
    routing,
    served_model,
)
from tests.fakes import FakeEngines

FILE = """\
version: 1
models:
  - name: m
    scheduling: {policy: POLICY}
    kv_bytes_per_token: 1024
    pools:
      only:
        max_model_len: 8192
        max_num_seqs: 4
        kv_cache_gib: 1
        tokens_per_second: 10
        workers:
          - WORKER
"""


def config(worker: str, policy: str = "bfio") -> Config:
    return parse(FILE.replace("WORKER", worker).replace("POLICY", policy), "sluice.yaml", {})


def test_ranks_are_workers_of_one_address() -> None:
    pool = config("{url: 'http://h:8000/x', ranks: 3}").models[0].pools["only"]
    assert [a.id for a in pool.addresses] == ["h:8000/x#0", "h:8000/x#1", "h:8000/x#2"]
    assert {a.url for a in pool.addresses} == {"http://h:8000/x"}
    assert [a.rank for a in pool.addresses] == [0, 1, 2]
    assert (pool.worker_count, pool.slots, pool.replica_bounds) == (3, 12, (3, 3))


TWO = """
server: {workers: 2, management_port: 9100}
state: {url: "redis://127.0.0.1:6379/0"}
"""


def test_an_engines_ranks_stand_together() -> None:
    loaded = config("{url: 'http://h:1', ranks: 2}\n          - {url: 'http://h:2', ranks: 3}")
    served = model_of(loaded, loaded.models[0])
    assert [e.ranks for e in served.fleet.pools[0].engines] == [(0, 1), (2, 3, 4)]
    assert served.fleet.pools[0].workers == ["h:1#0", "h:1#1", "h:2#0", "h:2#1", "h:2#2"]
    assert [a.port for a in served.fleet.pools[0].addresses] == [1, 1, 2, 2, 2]
    scheduler = served.fleet.pools[0].scheduler
    assert isinstance(scheduler, RankGroup)
    assert len(scheduler.ranks) == 5


def mixed(model: str = "", ranked: str = "", single: str = "", more: str = "") -> Config:
    """A pool of one engine, and one of an engine with two ranks; nothing in their shadow."""
    text = f"""\
version: 1
models:
  - name: m
    scheduling: {{shadow: false, {model}}}
    pools:
      short:
        {{max_model_len: 8192, max_num_seqs: 4, scheduling: {{{single}}}, workers: ["http://h:1"]}}
      ranked:
        max_model_len: 16384
        max_num_seqs: 4
        scheduling: {{{ranked}}}
        workers: [{{url: "http://h:2", ranks: 2}}]
"""
    return parse(text + more, "sluice.yaml", {})


def kinds(config: Config) -> list[str]:
    pools = model_of(config, config.models[0]).fleet.pools
    return [type(pool.scheduler).__name__ for pool in pools]


def test_each_pool_has_the_policy_that_suits_its_engines() -> None:
    served = model_of(mixed(), mixed().models[0])
    short, ranked = served.fleet.pools
    assert isinstance(short.scheduler, Quartz)
    assert isinstance(ranked.scheduler, RankGroup)
    assert [pool.predictor is None for pool in (short, ranked)] == [False, True]
    assert [pool.prefixes is None for pool in (short, ranked)] == [False, True]
    assert served.fleet.reads_metrics


@pytest.mark.parametrize(
    ("model", "ranked", "single", "expected"),
    [
        ("", "policy: sticky", "", ["Quartz", "Sticky"]),
        ("policy: sticky", "", "", ["Sticky", "Sticky"]),
        ("policy: round-robin", "policy: bfio", "", ["RoundRobin", "RankGroup"]),
        ("", "", "policy: least-loaded", ["LeastLoaded", "RankGroup"]),
        ("policy: least-loaded", "", "", ["LeastLoaded", "LeastLoaded"]),
    ],
)
def test_a_pools_own_policy_goes_before_the_models(
    model: str, ranked: str, single: str, expected: list[str]
) -> None:
    assert kinds(mixed(model, ranked, single)) == expected


def test_a_pool_with_and_without_ranks_is_bound_by_load() -> None:
    text = FILE.replace("    scheduling: {policy: POLICY}\n", "")
    both = text.replace("WORKER", "{url: 'http://h:1', ranks: 2}\n          - http://h:2")
    assert parse(both, "sluice.yaml", {}).models[0].policies() == ("least-loaded",)


def test_several_replicas_balance_no_ranks_unless_told_to_and_that_is_refused() -> None:
    fine = mixed(more=TWO)
    assert kinds(fine) == ["Quartz", "LeastLoaded"]
    with pytest.raises(ConfigError, match="the ranks of m are balanced by one replica"):
        mixed(ranked="policy: bfio", more=TWO)


def test_bfio_for_a_pool_without_ranks_is_refused_there() -> None:
    with pytest.raises(ConfigError) as raised:
        mixed(single="policy: bfio")
    assert "sluice.yaml:7:" in str(raised.value)
    assert "this worker has none" in str(raised.value)


def test_a_predictor_that_no_pool_would_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pool is predicted"):
        mixed("predictor: p.json", single="policy: sticky")


# --- what the engine receives


def call_of(
    rank_by: Literal["header", "body"], body: bytes, rank: int | None = 5, form: bool = False
) -> UpstreamCall:
    served = served_model(table=routing(("only", 8192, None)), workers=(1,))
    worker = address("w#5", rank=rank, rank_by=rank_by)
    served = changed(served, addresses=([worker],))
    endpoint = TRANSCRIPTIONS if form else CHAT
    asked = msgspec.structs.replace(incoming(body), endpoint=endpoint)
    attempts = attempts_of(served, asked, facts=read_body(CHAT, BODY if form else body))
    binding = Binding(pool=0, worker=0, score=0.0)
    return upstream_call(attempts, binding, usage=False, running=False)


BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
HEADER = b"x-data-parallel-rank"


def test_a_rank_travels_as_a_header_and_the_body_stays() -> None:
    call = call_of("header", BODY)
    assert dict(pairs_of(call.lines))[HEADER] == b"5"
    assert call.body == BODY


def test_a_rank_travels_as_a_field_where_the_engine_wants_that() -> None:
    call = call_of("body", BODY)
    assert HEADER not in dict(pairs_of(call.lines))
    assert msgspec.json.decode(call.body)["data_parallel_rank"] == 5
    assert call.body.endswith(BODY[1:])


def test_a_form_has_no_field_so_the_header_carries_it() -> None:
    assert dict(pairs_of(call_of("body", b"--x--", form=True).lines))[HEADER] == b"5"


def test_an_engine_without_ranks_is_told_none() -> None:
    for rank_by in ("header", "body"):
        call = call_of(rank_by, BODY, rank=None)
        assert HEADER not in dict(pairs_of(call.lines))
        assert call.body == BODY


@pytest.mark.parametrize(
    "field", ["data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"]
)
@pytest.mark.parametrize("rank_by", ["header", "body"])
def test_a_clients_own_rank_is_removed(field: str, rank_by: Literal["header", "body"]) -> None:
    body = BODY[:-1] + b', "%b": 2}' % field.encode()
    sent: dict[str, Any] = msgspec.json.decode(call_of(rank_by, body).body)
    sent.pop("data_parallel_rank", None) if rank_by == "body" else None
    assert field not in sent
    assert call_of("body", body).body.count(b"data_parallel_rank") == 1


def test_a_clients_header_does_not_travel() -> None:
    asked = incoming(BODY, headers=[(HEADER, b"1")])
    assert HEADER not in dict(pairs_of(asked.head.forwarded))


# --- health and KV of several workers behind one address

INFO = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1.0'


@pytest.fixture
def ranked() -> ModelRuntime:
    """Two ranks of one engine and one engine of its own."""
    model = served_model(table=routing(("only", 8192, None)), workers=(3,))
    engines = [
        address("h:1#0", port=1, rank=0),
        address("h:1#1", port=1, rank=1),
        address("h:2", port=2),
    ]
    pool = Pool("only", engines, 8, [(0, 1), (2,)])
    return changed(model, pools=(pool,), kv_bytes_per_token=1)


async def test_an_engine_is_probed_once_and_its_ranks_share_the_verdict(
    ranked: ModelRuntime,
) -> None:
    engines = FakeEngines()
    engines.answer("/health")
    engines.answer("/health", status=503, port=1)
    engines.answer("/v1/models", '{"data": []}')
    engines.answer("/metrics", INFO % (0, 10) + "\n" + INFO % (1, 20), port=1)
    engines.answer("/metrics", INFO % (0, 30) + "\n" + INFO % (1, 40), port=2)
    prober = Prober([ranked], interval_s=99.0, timeout_s=1.0, upstream=engines)
    await prober.start()
    await prober.close()
    assert engines.asked("/health", 1) == 1
    assert [e.up for e in ranked.fleet.pools[0].engine_of] == [False, False, True]
    assert ranked.fleet.pools[0].kv_tokens[2] == 70 * 16
    engines.answer("/health")
    assert await prober.probe(ranked.fleet.pools[0], 0)
    assert [e.up for e in ranked.fleet.pools[0].engine_of] == [True, True, True]
    assert [ranked.fleet.pools[0].kv_tokens[rank] for rank in (0, 1)] == [10 * 16, 20 * 16]
