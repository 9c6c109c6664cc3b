"""LiteLLM's files -> sluice.yaml: what clients need stays, and each setting is accounted for."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from gateway.settings import Config, parse
from sluice.imports.sections import references
from tests.running import sluice

FILES = Path(__file__).parent / "files"
KEY = "7f05b5f0cd4f8f5c93ae1c1dcf2a3bb1e4ac5ad1a4c3f5c43f1f2a6d5b0b9c"
ENVIRON = {"REDIS_HOST": "redis", "MISTRAL_URL": "http://mistral:8000/v1"}


def run(*arguments: str) -> Result:
    return sluice("import", "litellm", *arguments)


def imported(tmp_path: Path, name: str, *more: str) -> tuple[Config, dict[str, str]]:
    """The written file as the gateway reads it, and by path what the report says."""
    output = tmp_path / f"{name}.yaml"
    said = run(str(FILES / f"{name}.yaml"), *more, "-o", str(output), "--json")
    assert said.exit_code == 0, said.output
    report = json.loads(said.stdout)
    text = output.read_text()
    assert report["environment"] == references(text)
    unset = dict.fromkeys(references(text), "set")
    lines = {line["path"]: f"{line['fate']}: {line['note']}" for line in report["lines"]}
    return parse(text, str(output), unset | ENVIRON), lines


def with_keys(tmp_path: Path) -> tuple[Config, dict[str, str]]:
    return imported(tmp_path, "teams", "--keys", str(FILES / "teams-keys.json"))


def leaves(node: Any, path: str = "") -> list[str]:
    """Every setting that says something."""
    if isinstance(node, dict):
        return [p for k, v in node.items() for p in leaves(v, f"{path}.{k}" if path else k)]
    if isinstance(node, list) and any(isinstance(item, dict | list) for item in node):
        return [p for i, v in enumerate(node) for p in leaves(v, f"{path}[{i}]")]
    return [] if node in (None, "", [], False) else [path]


def test_equal_names_are_one_model_and_a_larger_window_is_its_second_pool(tmp_path: Path) -> None:
    config, report = with_keys(tmp_path)
    llama, coder = config.models
    assert [(p.max_model_len, p.max_num_seqs) for p in llama.pools.values()] == [
        *((8192, 128), (65536, 16))
    ]
    workers = [worker for pool in llama.pools.values() for worker in pool.workers]
    assert [worker.id for worker in workers] == [f"10.0.0.{n}:8000" for n in (1, 2, 9)]
    assert {worker.model for worker in workers} == {"meta-llama/Meta-Llama-3-70B-Instruct"}
    assert set(llama.aliases) == {"gpt-3.5-turbo", "llama-3-70b-long"}
    assert (llama.mode, coder.mode) == ("observe", "observe")
    assert coder.aliases == ("hidden-name",)
    assert coder.timeouts.first_byte_s == 120.0
    assert report["model_list[4]"].startswith("left out: provider `azure`")


def test_settings_around_the_models_are_carried_over(tmp_path: Path) -> None:
    config, report = with_keys(tmp_path)
    assert config.state.address == "redis://:set@redis:6379/0"
    assert config.retry.max_attempts == 3
    assert (config.health.eject_after, config.health.eject_s) == (4, 30.0)
    assert config.timeouts.first_byte_s == 300.0
    assert config.server.port == 4000
    assert report["general_settings.master_key"].startswith("approximated: server.admin_key")


def test_keys_stay_as_they_are_and_open_what_they_opened(tmp_path: Path) -> None:
    config, _ = with_keys(tmp_path)
    search, batch, jane = config.tenants
    assert (search.name, search.display_name) == ("Search-Ads", "Search & Ads")
    prod, ads = search.keys
    assert (prod.name, prod.sha256, prod.models) == ("search-prod", f"sha256:{KEY}01", None)
    assert (ads.models, str(ads.expires_at)) == (("llama-3-70b",), "2030-06-01 10:00:00+00:00")
    assert [key.sha256[-2:] for key in batch.keys] == ["03", "04"]
    (old,) = jane.keys
    assert old.sha256 == f"sha256:{hashlib.sha256(b'sk-an-old-key').hexdigest()}"
    assert old.suspended


def test_limits_of_a_key_are_those_of_entitlements_that_only_it_opens(tmp_path: Path) -> None:
    config, _ = with_keys(tmp_path)
    terms = {e.name: e for e in config.entitlements}
    shared = terms["Search-Ads-llama-3-70b"]
    assert (shared.tokens_per_second, shared.service_class) == (5_000.0, "elastic")
    assert shared.max_tokens_per_second == 5_000.0, "half of it: the team opens two models"
    batch = config.tenants[1]
    assert batch.entitlements == (), "no key without a list may use another key's"
    nightly, reports = batch.keys
    assert nightly.entitlements == ("Batch-nightly-llama-3-70b", "Batch-nightly-qwen-coder")
    limited = terms["Batch-nightly-llama-3-70b"]
    assert (limited.tokens_per_second, limited.max_concurrency, limited.concurrency) == (
        *(500.0, None, 68),
    )
    assert (nightly.requests_per_minute, nightly.max_concurrency) == (100, 8)
    (budget,) = nightly.budgets
    assert (budget.money, budget.window, budget.timezone) == (5.0, "day", "UTC")
    (budget,) = config.tenants[0].budgets
    assert (budget.money, budget.window) == (100.0, "month")
    assert reports.entitlements == ("Batch-reports-llama-3-70b",)
    assert terms["Batch-reports-llama-3-70b"].concurrency == 204, "three quarters of 272 slots"
    (unranked,) = config.tenants[2].keys[0].entitlements or ()
    assert terms[unranked].service_class == "spot"


def test_a_key_whose_models_are_gone_is_left_out_not_opened(tmp_path: Path) -> None:
    config, report = with_keys(tmp_path)
    assert f"sha256:{KEY}05" not in {key.sha256 for t in config.tenants for key in t.keys}
    assert report["keys[4]"] == "left out: none of its models was imported (gpt-4o)"
    assert report["keys[1]"].endswith("not imported: gpt-4o")
    assert report["keys[2].rpm_limit"] == "taken: requests_per_minute of the key"
    assert report["keys[2].max_budget"].startswith("approximated: budgets: money 5 a window of day")
    assert report["teams[2]"] == "left out: a team of which no key was imported"


def test_every_setting_is_accounted_for(tmp_path: Path) -> None:
    _, report = with_keys(tmp_path)
    data = yaml.safe_load((FILES / "teams.yaml").read_text())
    data |= json.loads((FILES / "teams-keys.json").read_text())
    # Of a row, one line says what it became; a limit that it has, and a setting, has its own.
    for path in leaves({k: v for k, v in data.items() if k not in {"keys", "teams", "model_list"}}):
        assert any(path.startswith(told) for told in report), path
    for path in leaves({k: data[k] for k in ("keys", "teams", "model_list")}):
        row, _, setting = path.partition("].")
        assert f"{row}]" in report, path
        if setting.endswith(("_limit", "rpm", "timeout", "max_budget", "priority", "_requests")):
            assert path in report or report[f"{row}]"].startswith("left out"), path


def test_no_secret_is_copied(tmp_path: Path) -> None:
    for name in ("teams", "plain"):
        keys = ("--keys", str(FILES / "teams-keys.json")) if name == "teams" else ()
        said = run(str(FILES / f"{name}.yaml"), *keys)
        for secret in ("sk-engine-secret", "sk-1234", "sk-an-old-key"):
            assert secret not in said.output


def test_a_lora_adapter_is_named_and_wildcards_are_left_out(tmp_path: Path) -> None:
    config, report = imported(tmp_path, "plain")
    (model,) = config.models
    assert (model.name, model.aliases, model.loras) == ("mistral", (), ("mistral-sql",))
    assert [worker.id for worker in model.pools["main"].workers] == ["mistral:8000"]
    assert report["model_list[1]"].startswith("approximated: taken for a LoRA adapter")
    assert report["model_list[3]"].startswith("left out")
    assert report["the file"].startswith("left out: no keys were given")
    assert "max_model_len 32768 is assumed" in report["model_list[0].model_info.max_input_tokens"]


def test_fallbacks_are_the_models_and_never_for_length(tmp_path: Path) -> None:
    config, report = imported(tmp_path, "fallbacks")
    assert {model.name: model.fallbacks for model in config.models} == {
        "big": ("middle", "little"),
        "middle": ("little",),
        "little": (),
    }
    assert report["router_settings.fallbacks[0]"].startswith("approximated")
    where = "router_settings.context_window_fallbacks[0]"
    assert report[where].startswith("left out: `big` is another model")
    assert report["model_list[2].litellm_params.tpm"].startswith("left out")


def test_nothing_usable_ends_with_1_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "azure.yaml"
    file.write_text(
        "model_list: [{model_name: x, litellm_params: {model: azure/x, api_base: 'https://x'}}]\n"
    )
    said = run(str(file), "-o", str(tmp_path / "out.yaml"))
    assert said.exit_code == 1
    assert "provider `azure`" in said.output
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("text", "problem"), [("a: [", "not valid YAML"), ("a: ${X}", "X is not set")]
)
def test_an_unreadable_file_ends_with_2(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    said = run(str(file))
    assert said.exit_code == 2
    assert problem in said.output


def test_a_file_that_exists_is_never_replaced(tmp_path: Path) -> None:
    output = tmp_path / "sluice.yaml"
    output.write_text("mine\n")
    assert run(str(FILES / "plain.yaml"), "-o", str(output)).exit_code == 2
    assert output.read_text() == "mine\n"


def from_rows(tmp_path: Path, *rows: object) -> dict[str, str]:
    """What the report says of these rows of keys."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": rows}))
    said = run(str(FILES / "fallbacks.yaml"), "--keys", str(keys), "--json")
    assert said.exit_code == 0, said.output
    lines = json.loads(said.stdout)["lines"]
    return {line["path"]: line["note"] for line in lines if line["file"] == str(keys)}


def test_rows_that_cannot_be_trusted_are_left_out(tmp_path: Path) -> None:
    good = {"token": f"{KEY}01", "models": []}
    said = from_rows(
        tmp_path,
        good,
        good,
        {"token": f"{KEY}02", "models": [], "expires": "soon"},
        {"token": f"{KEY}03", "models": ["no-default-models"]},
        {"models": []},
        f"{KEY}04",
    )
    assert said["keys[0]"].startswith("key `7f05b5f0` of tenant `7f05b5f0`, unchanged")
    assert said["keys[1]"] == "the same key as a row before"
    assert said["keys[2]"] == "no usable expiry"
    assert said["keys[3]"] == "none of its models was imported (no-default-models)"
    assert said["keys[4]"] == "no token"
    assert "return_full_object=true" in said["keys"]


# -- secrets


def written(tmp_path: Path, text: str, dump: object = None) -> tuple[str, dict[str, str]]:
    """The file that an import of these texts writes, and by path what the report says."""
    file, keys, output = (tmp_path / name for name in ("c.yaml", "k.json", "sluice.yaml"))
    file.write_text(text)
    keys.write_text(json.dumps(dump))
    given = () if dump is None else ("--keys", str(keys))
    said = run(str(file), *given, "-o", str(output), "--json")
    assert said.exit_code == 0, said.output
    lines = json.loads(said.stdout)["lines"]
    return output.read_text(), {each["path"]: f"{each['fate']}: {each['note']}" for each in lines}


ENGINE = """\
model_list:
  - model_name: base
    litellm_params: {model: hosted_vllm/base, api_base: "http://a:8000"}
    model_info: {access_groups: [all]}
  - model_name: sql
    litellm_params: {model: hosted_vllm/sql, api_base: "http://a:8000"}
    model_info: {access_groups: [adapters]}
"""


@pytest.mark.parametrize("url", ["redis://:hunter2@cache", "redis://cache:6379/0?password=hunter2"])
def test_a_redis_url_with_a_password_is_not_copied(tmp_path: Path, url: str) -> None:
    text, report = written(tmp_path, f"{ENGINE}router_settings: {{redis_url: '{url}'}}\n")
    assert "hunter2" not in text
    assert yaml.safe_load(text)["state"] == {"url": "${REDIS_URL}"}
    fate = report["router_settings.redis_url"]
    assert fate.startswith("approximated")
    assert "set REDIS_URL" in fate


@pytest.mark.parametrize(
    "base", ["http://u:hunter2@a:8000", "http://[a:8000", "http://a/?k=hunter2"]
)
def test_an_engine_whose_url_has_a_password_is_left_out(tmp_path: Path, base: str) -> None:
    more = f'  - {{model_name: b, litellm_params: {{model: openai/b, api_base: "{base}"}}}}\n'
    text, report = written(tmp_path, ENGINE + more)
    assert "hunter2" not in text
    assert report["model_list[2]"].startswith("left out: api_base")


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    written(tmp_path, ENGINE)
    assert (tmp_path / "sluice.yaml").stat().st_mode & 0o777 == 0o600


# -- what keys open


def keys_of(
    tmp_path: Path, keys: list[dict[str, Any]], teams: list[dict[str, Any]] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The imported keys by name, and by path what the report says."""
    rows = [{"token": f"{n:064x}", "key_alias": f"k{n}", **key} for n, key in enumerate(keys)]
    text, report = written(tmp_path, ENGINE, {"keys": rows, "teams": teams or []})
    found = yaml.safe_load(text).get("tenants", [])
    return {key["name"]: key for tenant in found for key in tenant["keys"]}, report


def test_a_key_of_a_team_that_is_not_in_the_dump_opens_what_it_lists_or_nothing(
    tmp_path: Path,
) -> None:
    keys, report = keys_of(
        tmp_path,
        [
            {"team_id": "gone", "models": []},
            {"team_id": "gone", "models": ["all-team-models"]},
            {"team_id": "gone", "models": ["base"]},
        ],
    )
    assert {name: (key["models"], key["suspended"]) for name, key in keys.items()} == {
        "k2": (["base"], True)
    }
    missing = "its team's models and limits are not in the dump"
    assert report["keys[0]"] == report["keys[1]"]
    assert report["keys[0]"].startswith(f"left out: {missing}")
    assert report["keys[2].team_id"].startswith(
        f"left out: suspended until you look at it: {missing}"
    )


@pytest.mark.parametrize("models", [{"models": "{base}"}, {"models": "base"}, {}])
def test_models_that_cannot_be_read_open_nothing(tmp_path: Path, models: dict[str, str]) -> None:
    keys, report = keys_of(
        tmp_path, [models, {"team_id": "t", "models": []}], [{"team_id": "t", **models}]
    )
    assert keys == {}
    assert report["keys[0]"] == "left out: its `models` are missing, or no list"
    assert report["keys[1]"].startswith("left out: its team's models and limits are not")


def test_a_key_for_an_adapter_opens_the_adapter_alone(tmp_path: Path) -> None:
    keys, _ = keys_of(
        tmp_path,
        [
            {"models": ["sql"]},
            {"models": ["adapters"]},
            {"models": ["base"], "tpm_limit": 60},
            {"models": []},
            {"team_id": "t", "models": []},
        ],
        [{"team_id": "t", "models": ["sql"]}],
    )
    opened = {name: key.get("models") for name, key in keys.items()}
    assert opened == {"k0": ["sql"], "k1": ["sql"], "k2": ["base"], "k3": None, "k4": ["sql"]}


def test_a_key_for_management_opens_no_model(tmp_path: Path) -> None:
    keys, report = keys_of(
        tmp_path,
        [
            {"models": [], "allowed_routes": ["management_routes"]},
            {"models": [], "allowed_routes": ["llm_api_routes"]},
        ],
    )
    assert list(keys) == ["k1"]
    assert report["keys[0]"] == "left out: its routes serve no model"


# -- limits


@pytest.mark.parametrize("name", ["rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget"])
@pytest.mark.parametrize("nothing", [0, "0", 0.0, -1])
def test_a_limit_of_nothing_suspends(tmp_path: Path, name: str, nothing: object) -> None:
    keys, report = keys_of(
        tmp_path,
        [{"models": [], name: nothing}, {"team_id": "t", "models": []}, {"models": []}],
        [{"team_id": "t", "models": [], name: nothing}],
    )
    assert {n: key.get("suspended") for n, key in keys.items()} == {
        "k0": True,
        "k1": True,
        "k2": None,
    }
    assert report[f"keys[0].{name}"] == "taken: suspended: a limit of nothing admits nothing"
    assert report[f"teams[0].{name}"].startswith("taken: suspended")


@pytest.mark.parametrize("many", [600, "600", 600.0, "600.0"])
def test_a_limit_is_read_as_a_dump_has_it(tmp_path: Path, many: object) -> None:
    names = ("rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget")
    row = {"models": [], "budget_duration": "1d", **dict.fromkeys(names, many)}
    keys, report = keys_of(tmp_path, [row])
    key = keys["k0"]
    assert (key["requests_per_minute"], key["max_concurrency"]) == (600, 600)
    assert key["budgets"] == [{"money": 600.0, "window": "day"}]
    assert report["keys[0].rpm_limit"].startswith("taken")
    assert report["keys[0].tpm_limit"].startswith("approximated")
    assert "counts sequences" in report["keys[0].max_parallel_requests"]
    assert report["keys[0].max_parallel_requests"].startswith("approximated")
    text = (tmp_path / "sluice.yaml").read_text()
    assert yaml.safe_load(text)["entitlements"][0]["tokens_per_second"] == 10.0


@pytest.mark.parametrize("name", ["rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget"])
@pytest.mark.parametrize("nonsense", ["many", [5], {"a": 1}, True, 1e300, "nan"])
def test_a_limit_that_is_no_number_is_told(tmp_path: Path, name: str, nonsense: object) -> None:
    row = {"models": [], name: nonsense}
    keys, report = keys_of(tmp_path, [{**row, "team_id": "t"}, row], [{**row, "team_id": "t"}])
    for path in ("keys[0]", "keys[1]", "teams[0]"):
        assert report[f"{path}.{name}"].endswith("look at it: not a number that can be used")
    assert all(key["suspended"] for key in keys.values())


def test_limits_of_a_team_are_divided_among_what_has_limits_of_its_own(tmp_path: Path) -> None:
    team = {"tpm_limit": 6_000, "max_parallel_requests": 4, "rpm_limit": 90}
    keys, report = keys_of(
        tmp_path,
        [
            {"team_id": "t", "models": [], "tpm_limit": 60},
            {"team_id": "t", "models": [], "tpm_limit": 60_000},
            {"team_id": "t", "models": []},
        ],
        [{"team_id": "t", "models": [], **team, "metadata": {"priority": "prod"}}],
    )
    rows = yaml.safe_load((tmp_path / "sluice.yaml").read_text())["entitlements"]
    limits = {row["name"]: (row["max_tokens_per_second"], row["max_concurrency"]) for row in rows}
    assert limits == {"t-k0-base": (1.0, 1), "t-k1-base": (33.333, 1), "t-base": (33.333, 1)}
    assert [key["requests_per_minute"] for key in keys.values()] == [30] * 3
    for where in ("tpm_limit", "rpm_limit", "max_parallel_requests", "metadata.priority"):
        assert report[f"teams[0].{where}"].startswith("approximated")


ROW: dict[str, Any] = {"models": []}


@pytest.mark.parametrize(
    ("lost", "where"),
    [
        ({"budget_id": "gold"}, "budget_id"),
        ({"budget_id": "b", "litellm_budget_table": {"tpm_limit": 5}}, "budget_id"),
        ({"organization_id": "o"}, "organization_id"),
        ({"budget_limits": [{"max_budget": 5}]}, "budget_limits"),
        ({"metadata": {"model_rpm_limit": {"base": 5}}}, "metadata.model_rpm_limit"),
        ({"model_max_budget": {"base": {"budget_limit": 1}}}, "model_max_budget"),
        ({"metadata": {"guardrails": ["pii"]}}, "metadata.guardrails"),
        ({"allowed_routes": ["/v1/embeddings"]}, "allowed_routes"),
        ({"max_budget": 5, "spend": 5, "budget_duration": "30d"}, "max_budget"),
        ({"max_budget": 5, "spend": 7.5}, "max_budget"),
        ({"max_budget": 5}, "max_budget"),
        ({"max_budget": 5, "budget_duration": "2w"}, "max_budget"),
        ({"max_budget": 5, "spend": 1, "budget_duration": "30d"}, "spend"),
    ],
)
def test_what_sluice_cannot_restrict_is_suspended_and_told_first(
    tmp_path: Path, lost: dict[str, Any], where: str
) -> None:
    keys, report = keys_of(tmp_path, [{**ROW, **lost}, ROW])
    assert [key.get("suspended", False) for key in keys.values()] == [True, False]
    assert report[f"keys[0].{where}"].startswith("left out: suspended until you look at it: ")
    assert report["keys[0]"].startswith("approximated: key `k0` of tenant `k0`, suspended")
    if where in ("allowed_routes", "spend"):
        return
    (tmp_path / "team").mkdir()
    of_team = [{"team_id": "t", **ROW, **lost}]
    keys, report = keys_of(tmp_path / "team", [{"team_id": "t", **ROW}], of_team)
    assert keys["k0"]["suspended"]
    assert report[f"teams[0].{where}"].startswith("left out: suspended")


def test_what_restricts_nothing_suspends_nothing(tmp_path: Path) -> None:
    keys, report = keys_of(
        tmp_path,
        [
            {**ROW, "allowed_routes": ["llm_api_routes", "info_routes"], "auto_rotate": True},
            {**ROW, "budget_id": "soft", "litellm_budget_table": {"soft_budget": 5}},
            {**ROW, "user_id": "default_user_id", "spend": 3.0},
        ],
    )
    assert not any(key.get("suspended") for key in keys.values())
    assert report["keys[0].auto_rotate"].startswith("left out")
    assert not any(path.startswith("keys[1].") for path in report)


def test_what_is_left_of_a_budget_is_taken(tmp_path: Path) -> None:
    priced = ENGINE.replace('"http://a:8000"}', '"http://a:8000", input_cost_per_token: 1e-6}')
    row = {"max_budget": 100, "spend": 12.5, "budget_duration": "30d", **ROW}
    text, report = written(tmp_path, priced, {"keys": [{"token": f"{1:064x}", **row}]})
    (key,) = yaml.safe_load(text)["tenants"][0]["keys"]
    assert (key["budgets"], key.get("suspended")) == ([{"money": 87.5, "window": "month"}], None)
    assert "100 less what was spent" in report["keys[0].max_budget"]
    assert report["the file"].startswith("left out: limits and budgets refuse nobody while")


def test_a_setting_of_a_model_that_sluice_lacks_is_told(tmp_path: Path) -> None:
    more = """\
  - model_name: base
    litellm_params: {model: hosted_vllm/base, api_base: "http://b:8000", temperature: 0}
  - model_name: base
    litellm_params:
      {model: hosted_vllm/base, api_base: "http://a:8000", api_key: os.environ/K,
       max_parallel_requests: 5}
"""
    _, report = written(tmp_path, ENGINE + more)
    assert report["model_list[2].litellm_params.temperature"].startswith("left out")
    for name in ("api_key", "max_parallel_requests"):
        first = report[f"model_list[3].litellm_params.{name}"]
        assert first == "left out: the worker has one, that of its first row"


def test_a_name_of_two_models_is_left_out(tmp_path: Path) -> None:
    more = '  - {model_name: sql, litellm_params: {model: openai/sql, api_base: "http://c:8000"}}\n'
    _, report = written(tmp_path, ENGINE + more)
    assert report["model_list[2]"].startswith("left out: a row before made this a further name")


# -- patterns of names


def rows(*given: str, base: str = "http://a:8000/v1") -> str:
    """A file of rows `name: model[, more]`, all of one engine."""
    lines = [row.partition(": ") for row in given]
    return "model_list:\n" + "".join(
        f'  - {{model_name: "{name}", litellm_params: {{model: {model}, api_base: "{base}"}}}}\n'
        for name, _, model in lines
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["*: hosted_vllm/qwen"], {"qwen": ("*",)}),
        (["anthropic/*: openai/qwen"], {"qwen": ("anthropic/*",)}),
        (["claude-*: hosted_vllm/Qwen/Q3"], {"Qwen/Q3": ("claude-*",)}),
        (["claude-*: hosted_vllm/qwen", "coder: hosted_vllm/qwen"], {"coder": ("claude-*",)}),
        (["default: openai/default", "anthropic/*: openai/default"], {"default": ("anthropic/*",)}),
        (["claude-*: qwen, custom_llm_provider: openai"], {"qwen": ("claude-*",)}),
        (
            ["claude-opus-*: openai/q", "claude-*: openai/q", "claude-opus-*: openai/q"],
            {"q": ("claude-opus-*", "claude-*")},
        ),
    ],
)
def test_a_row_for_many_names_becomes_an_alias(
    tmp_path: Path, given: list[str], named: dict[str, tuple[str, ...]]
) -> None:
    text, _ = written(tmp_path, rows(*given))
    assert {model.name: model.aliases for model in parse(text, "s", {}).models} == named


def test_what_a_pattern_catches_of_rows_that_were_left_out_is_told(tmp_path: Path) -> None:
    hosted = "  - {model_name: gpt-4o, litellm_params: {model: azure/gpt-4o}}\n"
    names = {"o": ["gpt-4o"], "c": ["claude-x"], "p": ["*"]}
    keys = [{"token": f"{ord(n):064x}", "key_alias": n, "models": m} for n, m in names.items()]
    text, report = written(
        tmp_path, rows("*: openai/q", "engines: hosted_vllm/*") + hosted, {"keys": keys}
    )
    assert report["model_list[2].model_name"].endswith("requests go to `q`")
    assert report["model_list[1]"] == "left out: any model of an engine: list each one by its name"
    opened = {
        key["name"]: key.get("models") for t in yaml.safe_load(text)["tenants"] for key in t["keys"]
    }
    assert opened == {"c": ["q"], "p": None}, "a key for gpt-4o opens no other model"


@pytest.mark.parametrize("nothing", ['""', "' '", "empty", "not-needed"])
def test_an_empty_value_sets_nothing(tmp_path: Path, nothing: str) -> None:
    given = rows(f"q: openai/q, api_key: {nothing}") + 'general_settings: {master_key: ""}\n'
    text, _ = written(tmp_path, given + 'router_settings: {redis_url: "", redis_host: ""}\n')
    assert "${" not in text
    assert parse(text, "s", {}).state.address == "memory://"


def test_fallbacks_of_every_model_are_read_under_their_star(tmp_path: Path) -> None:
    other = rows("b: openai/b", base="http://b").removeprefix("model_list:\n")
    fallbacks = 'litellm_settings: {fallbacks: [{"*": [b]}]}\n'
    text, _ = written(tmp_path, rows("a: openai/a") + other + fallbacks)
    assert {m.name: m.fallbacks for m in parse(text, "s", {}).models} == {"a": ("b",), "b": ()}


def test_the_report_groups_losses_first_in_few_short_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    many = "".join(
        rows(f"m{n}: openai/m{n}, rpm: 5", base=f"http://h{n}").removeprefix("model_list:\n")
        for n in range(20)
    )
    file.write_text(f"model_list:\n{many}litellm_settings: {{cache: true}}\n")
    lines = run(str(file), "-o", str(tmp_path / "s.yaml")).stderr.splitlines()
    assert lines[0] == "Left out (22): Sluice does nothing of it."
    assert "Set or check (40): Sluice does nearly the same." in lines
    assert "The same as before: 20. Every setting, with its line: --json" in lines
    assert sum("and 17 more" in line for line in lines) == 3
    assert len(lines) < 20
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "embeds", ["e: openai/x", "text-embedding-3: openai/x", "e: openai/bge-m3"]
)
def test_a_model_of_embeddings_falls_back_on_no_chat(tmp_path: Path, embeds: str) -> None:
    other = rows("chat: openai/chat", base="http://b").removeprefix("model_list:\n")
    more = "litellm_settings: {default_fallbacks: [chat, e]}\n"
    given = rows(embeds)
    if embeds == "e: openai/x":
        given = given.replace("}}\n", "}, model_info: {mode: embedding}}\n")
    text, report = written(tmp_path, given + other + more)
    assert [model.fallbacks for model in parse(text, "s", {}).models] == [(), ()]
    assert "model_list[0].model_info.mode" not in report
