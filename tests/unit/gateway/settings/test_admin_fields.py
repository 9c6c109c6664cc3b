"""What administrators send is checked as the file is: with its words, and its fixes."""

from typing import Any

import pytest
import yaml

from gateway.records.tenancy import RowKind
from gateway.settings import ConfigError, Problem, parse
from gateway.settings.loading import read_admin_fields
from tests.builders import OUT_OF_RANGE

HASH = "sha256:" + "ab" * 32
POOL = {"max_model_len": 100, "max_num_seqs": 4, "workers": ["http://a"]}
GIVEN: dict[RowKind, dict[str, Any]] = {
    "entitlement": {"name": "e", "tenant": "t", "model": "m"},
    "tenant": {"name": "t"},
    "key": {"name": "k", "sha256": HASH},
}
"""The least of each kind."""


def text_of(url: str = "memory://", **sections: Any) -> str:
    tree = {"version": 1, "state": {"url": url}, "models": [{"name": "m", "pools": {"p": POOL}}]}
    return yaml.safe_dump({**tree, **sections}, sort_keys=False)


ONE = parse(text_of(), "f", {})
CLUSTER = parse(text_of("redis+cluster://a:1"), "f", {})


def of_file(kind: RowKind, fields: dict[str, Any], url: str = "memory://") -> tuple[Problem, ...]:
    """The problems of a file with such a section."""
    sections: dict[RowKind, dict[str, Any]] = {
        "entitlement": {"entitlements": [fields]},
        "tenant": {"tenants": [fields]},
        "key": {"tenants": [{"name": "t", "keys": [fields]}]},
    }
    with pytest.raises(ConfigError) as caught:
        parse(text_of(url, **sections[kind]), "f", {})
    return caught.value.problems


def sent(kind: RowKind, fields: dict[str, Any], config: Any = ONE) -> Problem:
    """The problem of the same sent by an administrator."""
    with pytest.raises(ConfigError) as caught:
        read_admin_fields(config, kind, fields)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        *(("entitlement", name, [5, "", "-a", "a" * 65, "a\n"]) for name in ("name", "tenant")),
        ("entitlement", "service_class", ["gaurantee", ["spot"]]),
        ("entitlement", "trusted_usage", ["yes", 1]),
        ("entitlement", "mode", ["off"]),
        ("entitlement", "concurrency", [-1, 1.5, "4", {"short": True}]),
        ("entitlement", "max_concurrency", [0, True]),
        *(
            ("entitlement", name, [0, -1, 1e300, True, "5"])
            for name in ("slo_target_ms", "tokens_per_second", "kv_cache_gib", "max_kv_cache_gib")
        ),
        ("tenant", "display_name", [5, ""]),
        ("tenant", "labels", [5, {"a": 1}, {"a b": "c"}]),
        ("tenant", "entitlements", ["chat", ["a b"]]),
        ("tenant", "suspended", ["yes", 1]),
        ("key", "sha256", [5, "sha256:ab", "sk-abc"]),
        ("key", "models", [[""], "m"]),
        ("key", "requests_per_minute", [0, "5"]),
        ("key", "budgets", [5, [{}], [{"tokens": 0}], [{"tokns": 1}]]),
        *((kind, "expires_at", ["soon", 5, *OUT_OF_RANGE]) for kind in ("entitlement", "key")),
    ],
)
def test_a_bad_value_has_the_problem_and_the_fix_that_the_file_is_given(
    kind: RowKind, field: str, values: list[Any]
) -> None:
    for value in values:
        fields = {**GIVEN[kind], field: value}
        here, there = sent(kind, fields), of_file(kind, fields)
        assert here.path.startswith(field)
        assert (here.message, here.fix) in {(each.message, each.fix) for each in there}, value


@pytest.mark.parametrize(
    ("kind", "typo", "meant"),
    [
        ("entitlement", "tokens_per_secnd", "tokens_per_second"),
        ("tenant", "lables", "labels"),
        ("key", "modles", "models"),
    ],
)
def test_a_misspelt_field_is_told_the_nearest_and_a_missing_one_what_it_is_for(
    kind: RowKind, typo: str, meant: str
) -> None:
    problem = sent(kind, {**GIVEN[kind], typo: 1})
    assert (problem.path, problem.fix) == (typo, f"did you mean `{meant}`?")
    less = {name: value for name, value in GIVEN[kind].items() if name != "name"}
    problem = sent(kind, less)
    assert problem.message == "required key `name` is missing"
    assert problem.fix == of_file(kind, less)[0].fix


@pytest.mark.parametrize(
    ("kind", "field", "fix"),
    [
        ("entitlement", "api_keys", "add a key with POST /admin/entitlements/{name}/keys"),
        ("tenant", "keys", "add each with POST /admin/tenants/{name}/keys"),
        *((kind, "budgets", "set it in the configuration file") for kind in GIVEN if kind != "key"),
    ],
)
def test_keys_and_budgets_are_refused_with_the_way_to_set_them(
    kind: RowKind, field: str, fix: str
) -> None:
    problem = sent(kind, {**GIVEN[kind], field: []})
    assert (problem.path, problem.message, problem.fix) == (field, "cannot be sent here", fix)


def test_given_fields_become_json() -> None:
    for kind, given in GIVEN.items():
        assert read_admin_fields(ONE, kind, given) == given
    limited = {"requests_per_minute": 5, "budgets": [{"money": 1, "on_exceed": "spot"}]}
    found = read_admin_fields(ONE, "key", {**GIVEN["key"], **limited})
    assert found["budgets"] == [{"money": 1.0, "on_exceed": "spot"}]
    ends = {"expires_at": "2030-01-01", "concurrency": {"p": 2}}
    found = read_admin_fields(ONE, "entitlement", {**GIVEN["entitlement"], **ends})
    assert (found["expires_at"], found["concurrency"]) == ("2030-01-01T00:00:00Z", {"p": 2})


def test_on_a_cluster_a_key_has_no_limits_for_the_reason_that_the_file_is_given() -> None:
    assert read_admin_fields(CLUSTER, "key", GIVEN["key"])
    limited = {**GIVEN["key"], "max_concurrency": 4}
    here = sent("key", limited, CLUSTER)
    (there,) = [
        each for each in of_file("key", limited, "redis+cluster://a:1") if each.path == "state.url"
    ]
    assert (here.message, here.fix) == (there.message, there.fix)
    assert here.path == "max_concurrency"
