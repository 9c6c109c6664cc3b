"""A simulated gateway with pools in phases: prompts and answers on engines of their own."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.fleet.failures import Outage
from simulator.pipeline.engine_fleet import RankedEngine, SoleEngine
from simulator.pipeline.records import Gateway
from simulator.pipeline.run import Run
from sluice.simulated.gateway import policies_of
from tests.unit.simulator.pipeline.test_run import gateway, requests, run

PHASES = """
      all:
        max_model_len: 16384
        prefill: {max_num_seqs: 8, %s workers: ["http://p:1", "http://p:2"]}
        decode: {max_num_seqs: 16, %s workers: %s}
        transfer: {kind: vllm, bytes_per_second: %s, skip_below_tokens: %d}
"""
ALONE = '["http://d:1", "http://d:2"]'
RANKS = '[{url: "http://d:1", ranks: 4}]'


def in_phases(
    *, decode: str = ALONE, more: str = "", link: str = "20e9", skip: int = 0, policy: str = ""
) -> Gateway:
    pools = PHASES % (policy, policy + more, decode, link, skip)
    return gateway(pools, more="    kv_bytes_per_token: 131072\n")


def test_prompts_and_answers_are_apart_and_answers_are_even() -> None:
    together = run(gateway(), sent := requests(gateway(), 10.0, prompts=(500, 6000)))
    served = in_phases()
    assert policies_of(served)[0] == "scheduling: all least-loaded, all/prefill quartz"
    apart = run(served, sent)
    assert Counter(apart.reasons) == {"": 3000}
    assert set(apart.fleet.pool) == {0}  # as the records say: the pool that answers
    # No prompt comes between two tokens of an answer.
    assert np.nanquantile(apart.fleet.tpot_s, 0.99) < 0.8 * np.nanquantile(
        together.fleet.tpot_s, 0.99
    )


def test_ranks_that_decode_are_balanced_by_bfio() -> None:
    served = in_phases(decode=RANKS)
    assert policies_of(served)[0] == "scheduling: all bfio, all/prefill quartz"
    found = run(served, requests(served, 10.0))
    assert Counter(found.reasons) == {"": 3000}
    assert set(found.fleet.worker) == {0, 1, 2, 3}


def test_the_first_token_waits_for_the_transfer() -> None:
    ttft_s = {}
    for link in ("20e9", "1e8"):
        served = in_phases(link=link)
        sent = requests(served, 2.0, count=300)
        ttft_s[link] = run(served, sent).fleet.ttft_s
        # As the gateway learns it: with the first iteration of decode.
        learned_s = served.served.fleet.pools[0].transfer.predict(1000, 0.0)
        assert learned_s == pytest.approx(1000 * 131072 / float(link), rel=0.2, abs=0.05)
    more_s = sent.traffic.prompt_tokens * 131072 * (1 / 1e8 - 1 / 20e9)
    assert np.nanmedian(ttft_s["1e8"] - ttft_s["20e9"] - more_s) == pytest.approx(0, abs=0.02)


def test_short_prompts_are_computed_where_they_are_answered() -> None:
    never, always = (
        run(served, requests(served, 2.0, count=300)).fleet
        for served in (in_phases(skip=100_000), in_phases(link="1e7"))
    )
    # A transfer takes 10 s and more over such a link.
    assert np.nanmax(never.ttft_s) < 1 < np.nanmedian(always.ttft_s)


def test_decode_engines_compute_prompts_while_no_prefill_engine_is_up() -> None:
    served = in_phases()
    down = [Outage(pool=1, worker=i, down_s=10, up_s=60) for i in range(2)]
    found = run(served, requests(served, 10.0, count=1000), failures=down)
    assert Counter(found.reasons) == {"": 1000}


OUTAGES = st.builds(
    lambda pool, worker, down, length: Outage(
        pool=pool, worker=worker, down_s=down, up_s=down + length
    ),
    st.integers(0, 1),
    st.integers(0, 1),
    st.floats(0, 20),
    st.floats(0.1, 20),
)


@settings(max_examples=25, deadline=None)
@given(
    outages=st.lists(OUTAGES, max_size=4, unique_by=lambda o: (o.pool, o.worker)),
    rate=st.sampled_from([5.0, 30.0, 60.0]),
    link=st.sampled_from(["20e9", "1e8", "1e7"]),
    ranked=st.booleans(),
)
def test_nothing_is_left_of_any_request_whatever_fails(
    outages: list[Outage], rate: float, link: str, ranked: bool
) -> None:
    served = in_phases(decode=RANKS if ranked else ALONE, link=link)
    sent = requests(served, rate, count=300, prompts=(50, 3000))
    simulated = Run(served, sent, 3)
    simulated.all(outages, None)
    found = simulated.outcome()

    ended = ~np.isnan(found.fleet.end_s)
    assert all(ended[i] or reason for i, reason in enumerate(found.reasons))
    for pool in served.served.fleet.pools:
        assert (pool.total_active, pool.total_tokens, pool.inflight) == (0, 0, 0)
    for unit in simulated.serving.engines._units:
        assert isinstance(unit, SoleEngine | RankedEngine)
        engines = [unit._engine] if isinstance(unit, SoleEngine) else unit._group.engines
        for engine in engines:
            assert (engine.held, engine.kv_usage, engine.running) == (0, 0.0, 0)
