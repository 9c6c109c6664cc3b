"""What a file would change: named by path, secrets not shown, restarts told apart."""

import pytest

from gateway.settings import Config, parse
from gateway.settings.compare import changes, merged

TEXT = """
version: 1
server: {port: 8080, admin_key: key-one}
models:
  - name: m
    scheduling: {queue_limit: 10}
    pools:
      short: {max_model_len: 8192, max_num_seqs: 8, workers: ["http://a:1"]}
      long: {max_model_len: 65536, max_num_seqs: 4, workers: [{url: "http://b:1", api_key: sk-one}]}
"""


def config(*edits: tuple[str, str]) -> Config:
    text = TEXT
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return parse(text, "sluice.yaml", {})


@pytest.mark.parametrize(
    ("edit", "path", "restart"),
    [
        (("http://a:1", "http://c:1"), "models[m].pools[short].workers", False),
        (("max_num_seqs: 8", "max_num_seqs: 9"), "models[m].pools[short].max_num_seqs", False),
        (("8192", "4096"), "models[m].pools[short].max_model_len", False),
        (("queue_limit: 10", "queue_limit: 20"), "models[m].scheduling.queue_limit", False),
        (("port: 8080", "port: 8081"), "server.port", True),
        (("queue_limit: 10", "policy: sticky"), "models[m].scheduling.policy", False),
        (("- name: m", "- name: m\n    mode: observe"), "models[m].mode", False),
        (("version: 1", "version: 1\nhealth: {eject_after: 9}"), "health.eject_after", False),
        (("- name: m", "- name: m\n    price: {input: 1, output: 2}"), "models[m].price", False),
        (("version: 1", "version: 1\nstate: {url: 'sqlite:///x'}"), "state.url", True),
    ],
)
def test_each_change_is_named_with_whether_it_needs_a_restart(
    edit: tuple[str, str], path: str, *, restart: bool
) -> None:
    found = {change.path: change.restart for change in changes(config(), config(edit))}
    assert found[path] == restart


def test_no_secret_is_shown() -> None:
    found = changes(config(), config(("key-one", "key-two"), ("sk-one", "sk-two")))
    assert {change.path for change in found} == {
        "server.admin_key",
        "models[m].pools[long].workers",
    }
    assert "key-" not in str(found)
    assert "sk-" not in str(found)


def test_what_is_merged_has_the_live_changes_and_keeps_the_others() -> None:
    after = config(
        ("port: 8080", "port: 9999"),
        ("max_num_seqs: 8", "max_num_seqs: 9"),
        ("queue_limit: 10", "queue_limit: 20"),
        ("version: 1", "version: 1\nretry: {max_attempts: 2}"),
        ("- name: m", "- name: m\n    price: {input: 1, output: 2}"),
    )
    found = merged(config(), after)
    assert found.server.port == 8080
    assert found.models[0].pools["short"].max_num_seqs == 9
    assert found.models[0].scheduling.queue_limit == 20
    assert found.retry.max_attempts == 2
    assert found.models[0].price == after.models[0].price
    assert [change.path for change in changes(found, after)] == ["server.port"]


def test_a_price_by_the_hour_stays_until_a_restart() -> None:
    after = config(
        ("max_num_seqs: 8", "max_num_seqs: 8, gpu_hour: 2"),
        ("max_num_seqs: 4", "max_num_seqs: 4, gpu_hour: 2"),
    )
    found = changes(merged(config(), after), after)
    assert [(change.path, change.restart) for change in found] == [
        ("models[m].pools[short].gpu_hour", True),
        ("models[m].pools[long].gpu_hour", True),
    ]


MORE = """  - name: n
    compression: {enabled: true}
    pools:
      all: {max_model_len: 8192, max_num_seqs: 8, workers: ["http://d:1"]}
      more: {max_model_len: 16384, max_num_seqs: 8, workers: ["http://e:1"]}
"""


def test_models_come_and_go_without_a_restart_and_compression_waits_for_its_processes() -> None:
    after = parse(TEXT + MORE, "sluice.yaml", {})
    late = [change.path for change in changes(config(), after) if change.restart]
    assert late == ["models[n].compression.enabled"]
    both = merged(config(), after).models
    assert [(model.name, model.compression.enabled) for model in both] == [
        ("m", False),
        ("n", False),
    ]
    assert [(c.path, c.restart) for c in changes(after, config())] == [("models[n]", False)]


def test_a_tokenizer_needs_a_restart_and_the_other_rules_of_compression_do_not() -> None:
    rules = "compression: {max_cut: 0.3, tokenizer: t.json}"
    after = config(("- name: m", f"- name: m\n    {rules}"))
    assert {c.path.rpartition(".")[2]: c.restart for c in changes(config(), after)} == {
        "max_cut": False,
        "tokenizer": True,
    }
    assert merged(config(), after).models[0].compression.max_cut == 0.3
    assert merged(config(), after).models[0].compression.tokenizer is None


def test_options_of_the_command_line_stay_through_a_reload() -> None:
    running = config().listening(port=7000)
    later = running.as_started(config(("port: 8080", "port: 8081")))
    assert later.server.port == 7000
    assert changes(running, later) == []


def test_a_key_of_a_tenant_is_named_by_its_fingerprint_and_changes_at_once() -> None:
    old, new = "11" * 32, "abcdef01" * 8
    tenant = (
        "entitlements: [{name: e, tenant: acme, model: m}]\n"
        "tenants: [{name: acme, keys: [{name: web, sha256: 'KEY'}]}]\nversion: 1"
    )
    before = config(("version: 1", tenant.replace("KEY", old)))
    after = config(("version: 1", tenant.replace("KEY", new)))
    (change,) = changes(before, after)
    assert change.path == "tenants[acme].keys[web].sha256"
    assert (change.before, change.after) == ("sha256:11111111…", "sha256:abcdef01…")
    assert not change.restart
    assert merged(before, after).tenants == after.tenants
    (gone,) = changes(
        before, config(("version: 1", tenant.partition("tenants:")[0] + "version: 1"))
    )
    assert (gone.path, gone.restart) == ("tenants[acme]", False)
    assert old not in gone.before
