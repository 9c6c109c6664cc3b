"""Limits of keys that administrators make: checked as the file's, kept, changed, removed."""

import json
from typing import Any

import pytest

from gateway.adapters.tenants.entries import keys_of
from gateway.errors import BadRequest, Conflict
from gateway.policy.budgets.stated import key_limits
from gateway.records.limit import Budget, KeyLimits
from gateway.settings import ConfigError, parse
from tests.tenant_fakes import WHO, TenantRig, file_key, file_of

FILE = """
version: 1
models:
  - {name: m, pools: {p: {max_model_len: 100, max_num_seqs: 4, workers: ["http://a"]}}}
entitlements: [{name: chat, tenant: acme, model: m}]
tenants: [{name: acme, keys: [{name: web, sha256: HEX, LIMITS}]}]
"""
FULL = {"tokens": 1000, "window": "day", "timezone": "UTC", "on_exceed": "refuse"}


async def rig(*files: Any) -> TenantRig:
    found = await TenantRig(None, *files).start()
    if not files:
        await found.registry.create({"name": "acme"}, WHO)
    return found


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("requests_per_minute", 0, "requests_per_minute"),
        ("requests_per_minute", "60", "requests_per_minute"),
        ("max_concurrency", True, "max_concurrency"),
        ("budgets", 5, "budgets"),
        ("budgets", [{}], "budgets[0]"),
        ("budgets", [{"tokens": 5, "window": "year"}], "budgets[0].window"),
        ("budgets", [{"tokens": 5}, {"tokens": 6, "timezone": "Mars"}], "budgets[1].timezone"),
        ("budgets", [{"tokens": 5}, {"tokens": 6}], "budgets"),
        ("budgets", [{"money": 5, "windw": "day"}], "budgets[0].windw"),
    ],
)
async def test_a_bad_limit_is_refused_in_the_words_of_the_file(
    field: str, value: object, param: str
) -> None:
    """YAML that reads like the JSON has the same problem and the same fix."""
    made = await rig()
    text = FILE.replace("HEX", f'"{"ab" * 32}"').replace(
        "LIMITS", f'"{field}": {json.dumps(value)}'
    )
    with pytest.raises(ConfigError) as of_file:
        parse(text, "f", {})
    problem = of_file.value.problems[0]
    for send in (
        made.registry.add_key("acme", {"name": "web", field: value}, WHO),
        _patch(made, {field: value}),
    ):
        with pytest.raises(BadRequest) as caught:
            await send
        assert (caught.value.code, caught.value.param) == ("invalid_tenant", param)
        assert caught.value.message == f"{param}: {problem.message}; {problem.fix}."
    assert problem.path.endswith(param)


async def _patch(made: TenantRig, fields: dict[str, Any]) -> object:
    await made.add("patched")
    return await made.registry.change_key("acme", "patched", fields, WHO)


async def test_a_key_s_row_and_the_audit_show_its_limits_and_null_removes_them() -> None:
    made = await rig()
    budget = {"tokens": 1000, "window": "day"}
    key = await made.add("web", requests_per_minute=60, max_concurrency=4, budgets=[budget])
    (row,) = made.rows()
    limits = ("requests_per_minute", "max_concurrency", "budgets")
    assert [row[name] for name in limits] == [60, 4, [FULL]]
    assert made.limits["acme"] == list(made.limited(key))

    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    await made.registry.change_key("acme", "web", {"max_concurrency": 5, "suspended": False}, WHO)
    assert [made.rows()[0][name] for name in limits] == [60, 5, [FULL]]
    after: Any = made.trail.latest(1)[0]["after"]
    assert after["key web"]["max_concurrency"] == 5

    await made.registry.change_key("acme", "web", dict.fromkeys(limits), WHO)
    assert [made.rows()[0][name] for name in limits] == [None, None, []]
    assert (made.limited(key), made.limits["acme"], made.sync.limited) == ({}, [], set())


async def test_money_is_in_the_currency_of_the_file() -> None:
    made = await rig()
    await made.add("web", budgets=[{"money": 7}])
    (key,) = keys_of("acme", made.sync.file, made.sync.entries["acme"])
    (limit,) = key.limits
    assert (limit.amount, limit.currency) == (7 * 10**9, "EUR")


async def test_limits_of_keys_are_asked_to_be_counted_only_where_there_are_any() -> None:
    made = await rig()
    await made.add("plain")
    assert (made.counted, made.sync.limited) == (0, set())
    await made.add("web", requests_per_minute=1)
    assert made.counted
    assert made.sync.limited == {"acme"}
    await made.registry.delete("acme", WHO)
    assert (made.limits["acme"], made.sync.limited) == ([], set())


async def test_limits_of_a_key_of_the_file_stay_the_file_s_also_once_it_is_rotated() -> None:
    stated = KeyLimits(max_concurrency=3)
    limits = key_limits("acme", "web", stated, "EUR")
    listed = file_key("web", stated=stated, limits=limits)
    made = await rig(file_of("acme", web=listed))
    assert made.rows()[0]["max_concurrency"] == 3
    with pytest.raises(Conflict, match="Change it there"):
        await made.registry.change_key("acme", "web", {"max_concurrency": 9}, WHO)
    fresh = str((await made.registry.rotate_key("acme", "web", {}, WHO))["key"])
    with pytest.raises(Conflict, match="limits of the key 'web' are in the configuration file"):
        await made.registry.change_key("acme", "web", {"max_concurrency": 9}, WHO)
    assert made.limited(fresh) == made.limited("sk-web") == {limits[0].id: 3}
    made.sync.adopt(file_of("acme"))  # the key that was rotated is removed from the file
    assert made.limited(fresh) == {limits[0].id: 3}
    await made.registry.change_key("acme", "web", {"max_concurrency": 9}, WHO)
    assert made.limited(fresh) == {limits[0].id: 9}


async def test_a_reload_keeps_limits_from_an_administrator() -> None:
    made = await rig(file_of("acme", old=file_key("old")))
    key = await made.add("web", budgets=[{"tokens": 5}])
    made.sync.adopt(file_of("acme", new=file_key("new")))
    assert made.limited(key) == {"key:acme/web:tokens:month": 5}
    (entry,) = made.sync.entries["acme"].keys
    assert entry.limits == KeyLimits(budgets=(Budget(tokens=5),))
