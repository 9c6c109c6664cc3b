"""The scene of `bench everything`: one trace, valid configurations, figures that say something."""

import numpy as np
import pytest
import yaml

from bench.everything.run import simulated, workers_needed
from bench.everything.scene import (
    ALL,
    BOUNDARY_TOKENS,
    OFF,
    SYSTEMS,
    TENANTS,
    TraceRequest,
    config_of,
    figures,
    trace,
)
from gateway.settings import parse


@pytest.fixture(scope="module", name="requests")
def made_requests() -> list[TraceRequest]:
    return trace(30.0)


def test_the_trace_is_the_same_for_a_seed_and_mixed(requests: list[TraceRequest]) -> None:
    again = trace(30.0)
    assert [r.body for r in requests] == [r.body for r in again]
    assert {r.tenant for r in requests} == set(range(len(TENANTS)))
    flood = [r.at_s for r in requests if TENANTS[r.tenant].floods]
    assert 10.0 <= min(flood) <= max(flood) <= 20.0
    retrieval = [r.prompt_tokens for r in requests if TENANTS[r.tenant].name == "retrieval"]
    beyond = [n for n in retrieval if BOUNDARY_TOKENS < n <= 1.5 * BOUNDARY_TOKENS]
    assert len(beyond) > len(retrieval) / 3  # what compression is for


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_a_valid_configuration(name: str) -> None:
    config = config_of(SYSTEMS[name], ["http://a:1", "http://b:1", "http://c:1"], ["http://d:1"], 4)
    model = parse(yaml.safe_dump(config), "bench", {}).models[0]
    switches = SYSTEMS[name]
    assert len(model.pools) == (2 if switches.pools else 1)
    assert ("quartz" in model.policies()) == switches.quartz
    assert ("bfio" in model.policies()) == switches.bfio
    assert model.compression.enabled == switches.compression


def test_all_systems_together_serve_the_promised_tenants_better_than_none(
    requests: list[TraceRequest],
) -> None:
    on, off = (simulated(SYSTEMS[name], requests) for name in (ALL, OFF))
    assert on.promised > off.promised + 0.1
    assert on.tenants[0].p99_ttft_s < off.tenants[0].p99_ttft_s / 2
    assert on.compressed > 0 == off.compressed
    assert sum(tenant.refused for tenant in off.tenants) == 0


def test_fewer_workers_are_needed_with_all_than_with_none(requests: list[TraceRequest]) -> None:
    on, off = (workers_needed(SYSTEMS[name], requests, 0.95) for name in (ALL, OFF))
    assert on is not None
    assert off is None or on < off


def test_refused_requests_count_as_not_attained(requests: list[TraceRequest]) -> None:
    ttft_s = np.full(len(requests), 0.1)
    chat = np.array([r.tenant == 0 for r in requests])
    ttft_s[np.flatnonzero(chat)[::2]] = np.nan
    found = figures(requests, ttft_s, busy_s=7.0, length_s=1.0, workers=7, compressed=0)
    assert found.tenants[0].attained == pytest.approx(0.5, abs=0.01)
    assert found.tenants[0].refused == pytest.approx(0.5, abs=0.01)
    assert found.tenants[1].attained == 1.0
    assert found.utilisation == pytest.approx(1 / 8)
