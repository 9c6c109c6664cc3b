"""Nothing comes out of an import with more rights than it went in with.

Files and dumps are drawn. Beside the importers, this module says in a few lines what each key could
use before: whatever the written file gives a key must be part of it.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.settings import Config, parse
from sluice.imports.sections import references
from tests.running import sluice

ENGINES = """\
model_list:
  - model_name: base
    litellm_params: {model: hosted_vllm/base, api_base: "http://a:8000"}
    model_info: {access_groups: [some]}
  - model_name: sql
    litellm_params: {model: hosted_vllm/sql, api_base: "http://a:8000"}
  - model_name: code
    litellm_params:
      {model: openai/code, api_base: "http://b:8000", input_cost_per_token: 1e-6}
  - model_name: gpt-4o
    litellm_params: {model: azure/gpt-4o, api_base: "https://x"}
"""
NAMES = {"base", "sql", "code"}
GROUPS = {"some": {"base"}}
DIGESTS = [f"{n:064x}" for n in range(8)]


def sometimes(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A row's field, or nothing of it."""
    return st.one_of(st.just({}), st.just({}), values.map(lambda value: {name: value}))


def rows(**always: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Rows of keys, teams and users, which have the same limits."""
    lists = st.lists(
        st.sampled_from([*sorted(NAMES), "some", "gpt-4o", "all-proxy-models"]), max_size=3
    )
    limits = st.sampled_from([None, 0, 6, 600, "600", "many"])
    fields = [
        sometimes("models", lists | st.none() | st.just("base")),
        *(sometimes(n, limits) for n in ("rpm_limit", "tpm_limit", "max_parallel_requests")),
        sometimes("max_budget", st.sampled_from([None, 0, 5.0, 1e9])),
        sometimes("budget_duration", st.sampled_from([None, "1d", "30d", "2w"])),
        sometimes("spend", st.sampled_from([0.0, 1.0, 5.0, 9.0])),
        sometimes("blocked", st.booleans()),
        sometimes("organization_id", st.just("o")),
        sometimes("budget_id", st.just("b")),
        sometimes("litellm_budget_table", st.sampled_from([{}, {"rpm_limit": 5}])),
        sometimes("allowed_routes", st.sampled_from([[], ["llm_api_routes"], ["/embeddings"]])),
        sometimes("metadata", st.sampled_from([{}, {"priority": "p"}, {"guardrails": ["pii"]}])),
        sometimes("model_rpm_limit", st.just({"base": 1})),
    ]
    drawn = st.tuples(st.fixed_dictionaries(always), *fields)
    return drawn.map(lambda parts: {k: v for part in parts for k, v in part.items()})


KEYS = rows(token=st.sampled_from(DIGESTS)).flatmap(
    lambda row: st.tuples(
        sometimes("team_id", st.sampled_from(["t", "gone"])),
        sometimes("user_id", st.sampled_from(["u", "gone", "default_user_id"])),
    ).map(lambda owners: {**row, **owners[0], **owners[1]})
)
DUMPS = st.fixed_dictionaries(
    {
        "keys": st.lists(KEYS, max_size=5),
        "teams": st.lists(rows(team_id=st.just("t")), max_size=1),
        "users": st.lists(rows(user_id=st.just("u")), max_size=1),
    }
)


def imported(kind: str, file: str, dump: Any = None) -> Config:
    """The file that an import writes, as the gateway reads it, once `sluice check` took it."""
    with TemporaryDirectory() as folder:
        given, keys, output = (Path(folder) / name for name in ("in.yaml", "k.json", "out.yaml"))
        given.write_text(file)
        keys.write_text(json.dumps(dump))
        more = () if dump is None else ("--keys", str(keys))
        said = sluice("import", kind, given, *more, "-o", output)
        assert said.exit_code == 0, said.output
        text = output.read_text()
        environment = dict.fromkeys(references(text), "set")
        checked = sluice("check", "-c", output, **environment)
        assert checked.exit_code == 0, checked.output
        return parse(text, str(output), environment)


def opened(config: Config) -> dict[str, set[str]]:
    """By digest, the models and adapters that keys open."""
    adapters = {model.name: {model.name, *model.loras} for model in config.models}
    found = {}
    for tenant in config.tenants:
        of_tenant = [e for e in config.entitlements if e.tenant == tenant.name]
        for key in tenant.keys:
            listed = key.entitlements or tenant.entitlements
            usable = [e for e in of_tenant if listed is None or e.name in listed]
            names = {name for e in usable for name in adapters[e.model]}
            only = names if key.models is None else names & set(key.models)
            found[key.sha256.removeprefix("sha256:")] = set() if key.suspended else only
    return found


# -- LiteLLM, as far as it decides who may use what


def listed(row: dict[str, Any]) -> set[str]:
    models = row.get("models", "none")
    if not isinstance(models, list | None):
        return set()
    if not models or "all-proxy-models" in models:
        return set(NAMES)
    return {each for name in models for each in GROUPS.get(name, {name} & NAMES)}


def refuses(row: dict[str, Any]) -> bool:
    """Whether it refuses all requests, or some for a reason that Sluice cannot know."""
    limits = [row.get(n) for n in ("rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget")]
    budget = row.get("max_budget")
    return (
        bool(row.get("blocked"))
        or any(limit in (0, "many") for limit in limits)
        or (budget is not None and budget <= row.get("spend", 0.0))
        or (budget is not None and row.get("budget_duration") not in ("1d", "30d"))
        or "organization_id" in row
        or ("budget_id" in row and row.get("litellm_budget_table") != {})
        or row.get("allowed_routes") == ["/embeddings"]
        or "guardrails" in row.get("metadata", {})
        or "model_rpm_limit" in row
    )


def owners(key: dict[str, Any], dump: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The rows whose limits hold for a key; None for one that is not in the dump."""
    for kind in ("team", "user"):
        owner = key.get(f"{kind}_id")
        if owner is not None and owner != "default_user_id":
            yield next((row for row in dump[f"{kind}s"] if row[f"{kind}_id"] == owner), None)


def could(key: dict[str, Any], dump: dict[str, Any]) -> set[str]:
    """What a key could use for certain."""
    bound = list(owners(key, dump))
    if refuses(key) or any(row is None for row in bound):
        return set()
    names = listed(key)
    for row in filter(None, bound):
        if "team_id" in row or "team_id" not in key:
            names = set() if refuses(row) else names & listed(row)
    return names


@given(DUMPS)
@settings(max_examples=50)  # each reads whole files
def test_no_key_of_litellm_opens_more_or_sees_strangers(dump: dict[str, Any]) -> None:
    config = imported("litellm", ENGINES, dump)
    assert config.entitlements, "a gateway without entitlements is open"
    of_digest: dict[str, list[dict[str, Any]]] = {}  # a dump may have a key twice
    for key in dump["keys"]:
        of_digest.setdefault(key["token"], []).append(key)
    for digest, names in opened(config).items():
        assert names <= set().union(*(could(key, dump) for key in of_digest[digest]))
    for tenant in config.tenants:
        rows = [of_digest[key.sha256.removeprefix("sha256:")] for key in tenant.keys]
        if len(tenant.keys) > 1:
            teams = set.intersection(*({k.get("team_id") for k in same} for same in rows))
            users = set.intersection(*({k.get("user_id") for k in same} for same in rows))
            assert (teams - {None}) | (users - {None, "default_user_id"})
        for key, same in zip(tenant.keys, rows, strict=True):
            left = max((row.get("max_budget") or 0) - row.get("spend", 0.0) for row in same)
            assert all((budget.money or 0.0) <= left for budget in key.budgets)
    of_team = [e for e in config.entitlements if e.tenant == "t"]
    if of_team and any(row.get("tpm_limit") in (600, "600") for row in dump["teams"]):
        assert sum(e.max_tokens_per_second or 601 for e in of_team) <= 600 / 60


@given(st.sampled_from([None, "sk-engines", {"secretName": "s", "secretKey": "k"}]), st.booleans())
def test_production_stack_s_engines_are_opened_by_their_key_alone(key: Any, static: bool) -> None:
    values: dict[str, Any] = {
        "servingEngineSpec": {
            "modelSpec": [{"name": "m", "modelURL": "org/m", "vllmConfig": {"maxModelLen": 4096}}],
        },
        "routerSpec": {"serviceDiscovery": "k8s"},
    }
    if static:
        backends = {"staticBackends": "http://a:8000", "staticModels": "org/m"}
        values["routerSpec"] = {"serviceDiscovery": "static", **backends}
    if key is not None:
        values["servingEngineSpec"]["vllmApiKey"] = key
    config = imported("production-stack", yaml.safe_dump(values))
    assert bool(config.entitlements) == (key is not None)
    digest = hashlib.sha256(b"sk-engines").hexdigest()
    assert opened(config) == ({digest: {"org/m"}} if isinstance(key, str) else {})


def test_litellm_without_its_keys_opens_nothing() -> None:
    config = imported("litellm", ENGINES)
    assert (bool(config.entitlements), opened(config)) == (True, {})
