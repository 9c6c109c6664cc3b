"""Tenants and their keys in the file: what is read, and what is refused with which fix."""

import pytest

from gateway.records.request import TenantKey
from gateway.settings import Config, ConfigError, parse, remarks
from gateway.settings.token_pools import tenant_keys

HEX = "ab" * 32
FILE = f"""\
version: 1
server: {{admin_key: sk-admin}}
models:
  - {{name: m, pools: {{only: {{max_model_len: 1024, max_num_seqs: 8, workers: ["http://a:1"]}}}}}}
  - {{name: n, pools: {{only: {{max_model_len: 1024, max_num_seqs: 8, workers: ["http://b:1"]}}}}}}
entitlements:
  - {{name: chat, tenant: t, model: m}}
  - {{name: code, tenant: t, model: n}}
  - {{name: other, tenant: u, model: n}}
tenants:
  - name: t
    display_name: The Tenant
    labels: {{cost_centre: "4711"}}
    keys:
      - {{name: web, sha256: "{HEX}"}}
"""


def read(text: str) -> Config:
    return parse(text, "sluice.yaml", {})


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return [f"{p.line}: {p.message}; {p.fix}" for p in caught.value.problems]


def key_of(more: str = "", tenant: str = "") -> TenantKey:
    text = FILE.replace(f'sha256: "{HEX}"', f'sha256: "{HEX}"{more}')
    (found,) = tenant_keys(read(text.replace("    keys:", f"{tenant}    keys:")))
    return found


def test_a_key_opens_all_of_its_tenants_entitlements_in_the_files_order() -> None:
    assert key_of() == TenantKey(
        tenant="t", name="web", sha256=bytes.fromhex(HEX), entitlements=("chat", "code")
    )


def test_a_keys_own_list_comes_before_the_tenants() -> None:
    listed = "    entitlements: [code]\n"
    assert key_of(tenant=listed).entitlements == ("code",)
    assert key_of(", entitlements: [chat]", listed).entitlements == ("chat",)
    assert key_of(", entitlements: [chat]").only_listed


def test_models_expiry_and_suspension_are_read() -> None:
    found = key_of(", models: [n], expires_at: 1971-01-01T01:00:00+01:00, suspended: true")
    assert found.models == frozenset({"n"})
    assert (found.expires_unix_s, found.suspended) == (365 * 86_400.0, True)


def test_digests_are_taken_with_and_without_their_prefix() -> None:
    (found,) = tenant_keys(read(FILE.replace(HEX, f"sha256:{HEX.upper()}")))
    assert found.sha256.hex() == HEX
    (problem,) = problems(FILE.replace(HEX, "sk-secret"))
    assert "not the hash of a key; make one with `sluice hash-key`" in problem
    assert "sk-secret" not in problem


def test_an_entitlement_that_a_tenants_key_opens_is_not_called_unused() -> None:
    unused = [line for line in remarks(read(FILE)) if "nobody can use it" in line]
    assert [line.partition(":")[0] for line in unused] == ["entitlement other"]


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        ("tenant: t,", "tenant: x,", "15: no entitlement names the tenant `t`, so its keys open"),
        ("{name: web,", "{name: web, models: [o],", "no entitlement that this key uses is for `o`"),
        ("{name: web,", "{name: web, entitlements: [other],", "this tenant has no entitlement `ot"),
        ("    keys:", "    entitlements: [cha]\n    keys:", "did you mean `chat`?"),
    ],
)
def test_a_list_names_only_what_the_tenant_has(was: str, now: str, problem: str) -> None:
    stated = FILE.replace(was, now)
    assert any(problem in found for found in problems(stated))
    cluster = "state: {url: 'redis://h:1/0', controller: {}}\n"
    assert read(stated + cluster).tenants  # what a cluster may grant is not known here


def test_names_and_keys_are_given_once() -> None:
    twice = FILE + f'      - {{name: web, sha256: "{HEX}"}}\n'
    assert problems(twice) == [
        "16: `web` is taken on line 15; give every key a name of its own",
        "16: the same key as on line 15; list a key once: under `tenants` it opens several models",
    ]
    short = FILE.replace("model: m}", f'model: m, api_keys: ["sha256:{HEX}"]}}')
    assert problems(short)[0].startswith("15: the same key as on line 7")
    tenants = FILE + "  - {name: t}\n"
    assert problems(tenants) == ["16: `t` is taken on line 11; give every tenant a name of its own"]


@pytest.mark.parametrize(
    ("was", "now", "fix"),
    [
        ("model: m}", "model: m, models: [m, n]}", "stands under `tenants`"),
        ("model: m}", "model: m, max_budget: 10}", "`budgets: [{money: 100, window: month}]`"),
        ("{name: web,", "{name: web, tpm_limit: 10,", "`tokens_per_second`"),
        ("{name: web,", "{name: web, blocked: true,", "`suspended: true`"),
        ("tenants:", "model_list: []\ntenants:", "`sluice import litellm FILE -o sluice.yaml`"),
        ("tenants:", "servingEngineSpec: {}\ntenants:", "`sluice import production-stack FILE"),
    ],
)
def test_settings_of_other_gateways_are_answered_with_ours(was: str, now: str, fix: str) -> None:
    assert any(fix in found for found in problems(FILE.replace(was, now, 1)))
