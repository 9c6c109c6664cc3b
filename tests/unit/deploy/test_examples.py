"""The example of many tenants: it is short, and Sluice accepts it without a remark."""

from pathlib import Path

from gateway.settings import parse, remarks
from gateway.settings.token_pools import every_limit, tenant_keys

FILE = Path(__file__).parents[3] / "deploy/examples/twelve-tenants.yaml"


def test_three_models_twenty_engines_and_twelve_tenants_fit_into_120_lines() -> None:
    text = FILE.read_text(encoding="utf-8")
    config = parse(text, FILE.name, {"SLUICE_ADMIN_KEY": "sk-admin"})
    assert len(text.splitlines()) <= 120
    assert len(config.models) == 3
    engines = [w for model in config.models for p in model.pools.values() for w in p.workers]
    assert len(engines) == 20
    assert len(config.tenants) == 12
    keys = tenant_keys(config)
    assert len(keys) == len({key.sha256 for key in keys}) == 24
    assert len({limit.name for limit in every_limit(config) if limit.unit != "requests"}) == 3
    assert remarks(config) == []
