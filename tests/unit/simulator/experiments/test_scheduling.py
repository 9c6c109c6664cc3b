"""Schedulers before engines: nobody is lost, times are the engine's, runs repeat."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.fleet import PoolState
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor
from simulator.engine.engine import Engine, EngineRequest
from simulator.experiments.prefix_oracle import UnboundedPrefixes
from simulator.experiments.scheduling import (
    WORKER,
    Demand,
    ServedRequest,
    SimulatedGateway,
    Trouble,
    block_points,
    serve,
)

WORKERS = 3


def gateway_of(name: str = "quartz", workers: int = WORKERS) -> SimulatedGateway:
    pool = PoolState("pool", tuple(f"w{i}" for i in range(workers)), 256)
    predictor = PrefillPredictor(workers=workers)
    scheduler = make_scheduler(name, pool, predictor=predictor)
    return SimulatedGateway(pool, scheduler, UnboundedPrefixes(workers), predictor)


def demands_of(count: int, seed: int = 0, rate: float = 8.0) -> list[Demand]:
    random = np.random.default_rng(seed)
    now_s = 0.0
    demands = []
    for i in range(count):
        now_s += float(random.exponential(1 / rate))
        blocks = int(random.integers(2, 80))
        family = int(random.integers(10))
        demands.append(
            Demand(
                arrival_s=now_s,
                client=f"c{i % 5}",
                prompt_tokens=64 * blocks + 5,
                output_tokens=int(random.integers(1, 200)),
                cap_tokens=512,
                slo_s=2.0,
                kind="test",
                blocks=tuple(hash((family, b) if b < 20 else (i, b)) for b in range(blocks)),
            )
        )
    return demands


def run(demands: list[Demand], *names: str, troubles: tuple[Trouble, ...] = ()) -> ServedRequest:
    gateways = [gateway_of(name) for name in names or ("quartz",)]
    return serve(demands, gateways, profiles=[WORKER] * WORKERS, troubles=troubles)


def test_one_worker_without_a_queue_is_the_engine_itself() -> None:
    demands = demands_of(60, rate=3.0)
    served = serve(demands, [gateway_of("least-loaded", 1)], profiles=[WORKER])
    engine = Engine(WORKER)
    first_s = {}
    for i, demand in enumerate(demands):
        first_s.update({e.id: t for t, e in engine.run_until(demand.arrival_s) if e.index == 1})
        request = EngineRequest(
            id=str(i),
            prompt_tokens=demand.prompt_tokens,
            output_tokens=demand.output_tokens,
            block_hashes=demand.blocks,
        )
        engine.submit(request, demand.arrival_s)
    first_s.update({e.id: t for t, e in engine.run_until(1e6) if e.index == 1})
    expected = [first_s[str(i)] - d.arrival_s for i, d in enumerate(demands)]
    assert served.ttft_s == pytest.approx(expected)


@pytest.mark.parametrize("name", ["least-loaded", "sticky", "quartz"])
def test_every_request_is_answered_and_the_same_run_gives_the_same_times(name: str) -> None:
    demands = demands_of(300)
    served, again = run(demands, name), run(demands, name)
    assert served.lost == 0
    assert np.isfinite(served.ttft_s).all()
    assert np.isfinite(served.end_s).all()
    assert (served.wait_s >= -1e-6).all()
    assert (served.ttft_s > served.wait_s).all()
    assert served.ttft_s.tolist() == again.ttft_s.tolist()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 30.0),
            st.integers(0, WORKERS - 1),
            st.sampled_from(("stall", "restart", "cold")),
            st.floats(0.1, 6.0),
        ),
        max_size=3,
        unique_by=lambda t: t[1],
    ),
    st.sampled_from(("quartz", "sticky")),
)
def test_trouble_loses_no_request(drawn: list[tuple[float, int, str, float]], name: str) -> None:
    troubles = tuple(
        msgspec.convert({"at_s": at_s, "worker": w, "what": what, "lasts_s": s}, Trouble)
        for at_s, w, what, s in drawn
    )
    away = sum(t.what == "restart" for t in troubles)
    served = run(demands_of(200), name, troubles=troubles)
    if away < WORKERS:
        assert served.lost == 0
        assert np.isfinite(served.ttft_s).all()


def test_a_cold_cache_costs_its_hits() -> None:
    first = msgspec.structs.replace(demands_of(1)[0], arrival_s=0.0)
    demands = [first, msgspec.structs.replace(first, arrival_s=20.0)]
    warm = run(demands)
    cold = run(demands, troubles=(Trouble(at_s=10.0, worker=0, what="cold"),))
    assert warm.cached_tokens[1] > 0
    assert cold.cached_tokens[1] == 0


def test_a_gateway_that_notices_late_does_not_queue_without_bound() -> None:
    fast = msgspec.structs.replace(
        WORKER,
        w_s=WORKER.w_s / 4,
        h_s=WORKER.h_s / 4,
        prefill_s_per_token=WORKER.prefill_s_per_token / 4,
    )
    demands = demands_of(600, rate=14.0)
    served = serve(demands, [gateway_of(workers=1)], profiles=[fast], notice_s=0.2)
    assert served.lost == 0
    assert np.isfinite(served.end_s).all()
    assert served.queue_s[300:].mean() < 0.2
    assert served.queue_s.max() < 3.0


def test_blocks_have_points_at_the_same_places_and_where_asked() -> None:
    hashes = list(range(1, 2001))
    found = block_points(hashes, 16, ends_tokens=(4810,))
    assert (4800, 300) in found
    assert found[-1] == (32_000, 2000)
    longer = block_points([*hashes, 2001, 2002], 16, ends_tokens=(32_000,))
    assert set(found) - {(4800, 300)} <= set(longer)
    assert block_points([], 16) == ()
