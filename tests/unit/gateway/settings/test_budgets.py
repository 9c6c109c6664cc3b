"""Budgets and limits of keys in the file become limits that admission counts."""

import pytest

from gateway.settings import ConfigError, parse
from gateway.settings.checks import remarks
from gateway.settings.compare import changes, merged
from gateway.settings.config import Config
from gateway.settings.token_pools import every_limit, limits_of, managed

FILE = """
version: 1
currency: EUR
models:
  - {name: m, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://a"]}}}
  - {name: n, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://b"]}}}
entitlements:
  - {name: chat, tenant: t, model: m}
  - {name: code, tenant: t, model: n}
tenants:
  - name: t
    keys:
      - {name: web, sha256: HEX}
"""
HEX = "ab" * 32
KEY = "- {name: web, sha256: HEX"


def read(was: str = "", now: str = "") -> Config:
    return parse(FILE.replace(was, now).replace("HEX", f'"{HEX}"'), "f", {})


def problem(was: str, now: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(was, now)
    (found,) = caught.value.problems
    return f"{found.message}; {found.fix}"


def test_limits_of_a_key_are_counted_by_its_full_name() -> None:
    config = read(
        KEY, f"{KEY}, requests_per_minute: 60, max_concurrency: 8, budgets: [{{money: 2.5}}]"
    )
    found = {limit.id: (limit.unit, limit.amount, limit.window) for limit in every_limit(config)}
    assert found == {
        "key:t/web:sequences": ("sequences", 8, ""),
        "key:t/web:requests:minute": ("requests", 60, "minute"),
        "key:t/web:money:month": ("money", 2_500_000_000, "month"),
    }
    assert all(managed(config, model) for model in config.models)


def test_a_budget_has_its_window_zone_warning_and_what_is_beyond() -> None:
    config = read(
        "  - name: t\n",
        "  - name: t\n    budgets: [{tokens: 1000, window: 30d, timezone: Asia/Tokyo, "
        "warn_at: 0.8, on_exceed: spot}]\n",
    )
    (limit,) = limits_of(config)["tenant", "t"]
    assert (limit.scope, limit.name, limit.unit, limit.amount) == ("tenant", "t", "tokens", 1000)
    assert (limit.window, limit.zone, limit.warn, limit.spot) == ("30d", "Asia/Tokyo", 800, True)


def test_a_budget_of_an_entitlement_makes_its_model_managed_and_no_other() -> None:
    config = read("name: chat,", "name: chat, budgets: [{tokens: 5}],")
    assert [managed(config, model) for model in config.models] == [True, False]
    assert not any(managed(read(), model) for model in config.models)
    assert every_limit(read()) == []


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("{}", "in tokens or in money; give one of"),
        ("{tokens: 5, money: 5.0}", "in tokens or in money; give one of"),
        ("{tokens: 5, window: year}", "not a window of time; write hour, day, week, month, or"),
        ("{tokens: 5, window: 91d}", "not a window of time"),
        ("{tokens: 5, timezone: Berlin}", "not a time zone that this host knows; write a name"),
        ("{tokens: 5, timezone: ../passwd}", "not a time zone that this host knows"),
        ("{tokens: 5}, {tokens: 6}", "two budgets of one kind in one window"),
        ("{tokens: 0}", "must be at least 1, found 0"),
    ],
)
def test_a_budget_that_means_nothing_is_refused_with_the_fix(budget: str, said: str) -> None:
    assert said in problem("name: chat,", f"name: chat, budgets: [{budget}],")


def test_on_a_cluster_only_entitlements_have_budgets() -> None:
    state = "version: 1\nstate: {url: redis+cluster://a:1}"
    with pytest.raises(ConfigError) as caught:
        parse(
            FILE.replace("version: 1", state)
            .replace(KEY, f"{KEY}, max_concurrency: 8")
            .replace("HEX", f'"{HEX}"'),
            "f",
            {},
        )
    assert "or give budgets to entitlements" in str(caught.value)


def test_a_budget_in_money_for_a_model_without_a_price_is_noticed() -> None:
    config = read("name: chat,", "name: chat, budgets: [{money: 5.0}],")
    (found,) = [line for line in remarks(config) if "has no price" in line]
    assert found.startswith("entitlement chat: a budget is in money, and the model m has no price")


def test_a_reload_changes_budgets_also_the_first_and_the_last() -> None:
    small = read("  - name: t\n", "  - name: t\n    budgets: [{tokens: 10}]\n")
    large = read("  - name: t\n", "  - name: t\n    budgets: [{tokens: 20}]\n")
    (change,) = changes(small, large)
    assert not change.restart
    assert limits_of(merged(small, large))["tenant", "t"][0].amount == 20
    assert not any(change.restart for change in changes(read(), large))
    assert limits_of(merged(read(), large)) == limits_of(large)
    assert limits_of(merged(large, read())) == {}
