"""Every configuration that the project ships or writes has all systems on, and no remark."""

import pytest

from gateway.settings import Config, parse, remarks
from tests.shipped import ENVIRONMENT, NAMES, shipped


def config_of(name: str) -> Config:
    return parse(shipped(name), f"{name}.yaml", ENVIRONMENT)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_to_be_noted(name: str) -> None:
    assert remarks(config_of(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_routing_compression_scheduling_and_token_pools_are_on(name: str) -> None:
    config = config_of(name)
    model, *_ = config.models
    assert len(model.pools) == 2
    assert model.compression.enabled
    assert model.boundary.auto
    assert model.observes_boundary
    assert "quartz" in model.policies(config.server.workers)
    assert all(pool.kv_cache_gib for pool in model.pools.values())
    assert config.request_log.path is not None
    own = [entitlement for entitlement in config.entitlements if entitlement.model == model.name]
    keyed = {tenant.name for tenant in config.tenants if tenant.keys}
    assert all(e.api_keys or e.tenant in keyed for e in own)
    assert own


@pytest.mark.parametrize("name", [n for n in NAMES if n != "plan"])
def test_ranks_are_balanced_and_rates_are_limited(name: str) -> None:
    """The planner knows no ranks, and leaves rates to the operator."""
    config = config_of(name)
    model, *_ = config.models
    assert "bfio" in model.policies(config.server.workers)
    assert all(pool.tokens_per_second for pool in model.pools.values())
    assert any(e.tokens_per_second and e.kv_cache_gib for e in config.entitlements)


def test_compose_and_demo_describe_the_same_fleet_and_tenants() -> None:
    """Of the first model: the demo has another in phases, and keys that open both."""
    compose, demo = config_of("compose"), config_of("demo")

    def told(config: Config) -> object:
        model, *_ = config.models
        pools = {
            name: (
                pool.model_dump(exclude={"workers"}),
                [worker.ranks for worker in pool.workers],
            )
            for name, pool in model.pools.items()
        }
        own = [
            e.model_dump(exclude={"api_keys"}) for e in config.entitlements if e.model == model.name
        ]
        return model.model_dump(exclude={"pools"}), pools, own

    assert told(compose) == told(demo)
