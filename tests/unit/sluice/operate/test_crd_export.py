"""Entitlements as manifests, and manifests as a section of the file: the same terms both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import Config, parse
from gateway.settings.tenants import EntitlementConfig
from gateway.settings.token_pools import LIMITS
from sluice.imports.report import Report
from sluice.operate import crd_export
from tests.crds import misfits
from tests.running import sluice

DIGEST = "b0" * 32
FILE = f"""\
version: 1
models:
  - name: Qwen/Qwen3-8B
    kv_bytes_per_token: 100000
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 32, tokens_per_second: 5000, kv_cache_gib: 40,
        replicas: {{min: 1, max: 8}}, workers: ["http://a:8000", "http://b:8000"]}}
      long: {{max_model_len: 65536, max_num_seqs: 4, tokens_per_second: 2000, kv_cache_gib: 40,
        workers: ["http://c:8000"]}}
entitlements:
  - {{name: search, tenant: acme, model: Qwen/Qwen3-8B, api_keys: ["sha256:{DIGEST}"]}}
"""
MODELS = [
    {
        "model": "Qwen/Qwen3-8B",
        "pools": [
            {
                "name": name,
                "max_num_seqs": slots,
                "admission": None,
                "workers": [{"in_rotation": up} for up in ready],
            }
            for name, slots, ready in (("short", 32, (True, True)), ("long", 4, (True, False)))
        ],
    }
]


def row(name: str = "search", **fields: Any) -> dict[str, Any]:
    """An entitlement as the admin API shows it."""
    return {
        "name": name,
        "tenant": "acme",
        "model": "Qwen/Qwen3-8B",
        "service_class": "elastic",
        **dict.fromkeys(LIMITS),
        "expires_at": None,
        "mode": "enforce",
        "compression": "allow",
        "trusted_usage": False,
        "origin": "file",
        "suspended": False,
        "keys": [],
        **fields,
    }


def exported(
    *rows: dict[str, Any],
    pool: str | None = None,
    budgets: tuple[dict[str, str], ...] = (),
    config: Config | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The manifests, and what is said of each place."""
    report = Report("the gateway")
    objects = crd_export.manifests(rows, MODELS, budgets, report, pool=pool, config=config)
    assert [problem for o in objects if o["kind"] != "Secret" for problem in misfits(o)] == []
    return objects, {line.path: line.fate for line in report.lines}


FULL = row(
    service_class="guaranteed",
    slo_target_ms=200,
    tokens_per_second=100.0,
    kv_cache_gib=2.0,
    concurrency=4,
    expires_at="2035-01-01T00:00:00+00:00",
    keys=[DIGEST[:8]],
)
ELASTIC = row(
    "batch",
    tokens_per_second=1000.0,
    max_tokens_per_second=3000.0,
    kv_cache_gib=10.0,
    max_kv_cache_gib=20.5,
    concurrency=8,
    max_concurrency=64,
)


def imported(tmp_path: Path, *texts: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections that manifests become, and the report."""
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text, encoding="utf-8")
    result = sluice("import", "crd", *files, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code == 0) == report["ok"]
    return yaml.safe_load(report.get("text") or "{}"), report


def test_export_and_import_give_the_same_terms(tmp_path: Path) -> None:
    config = parse(FILE, "sluice.yaml", {})
    objects, _ = exported(FULL, ELASTIC, row("leftovers", service_class="spot"), config=config)
    sections, report = imported(tmp_path, crd_export.text_of(objects))
    terms = [EntitlementConfig.model_validate(e) for e in sections["entitlements"]]
    wanted = [
        {name: value for name, value in stated.items() if value is not None and name in fields}
        for stated in (FULL, ELASTIC, row("leftovers", service_class="spot"))
        for fields in [EntitlementConfig.model_fields]
    ]
    expected = [EntitlementConfig.model_validate(each) for each in wanted]
    expected[0] = expected[0].model_copy(update={"api_keys": (f"sha256:{DIGEST}",)})
    assert terms == expected
    assert {line["fate"] for line in report["lines"]} == {"taken", "approximated"}


def test_a_pool_of_its_own_has_the_terms_of_that_pool(tmp_path: Path) -> None:
    config = parse(FILE, "sluice.yaml", {})
    both = row("both", concurrency={"short": 28, "long": 4})
    objects, said = exported(both, pool="short", config=config)
    token_pool, entitlement = objects
    assert token_pool["spec"] == {
        "model": "Qwen/Qwen3-8B",
        "pool": "short",
        "perReplica": {"concurrency": 32, "tokensPerSecond": 5000, "kvCacheGiB": 40.0},
        "scaling": {"minReplicas": 1, "maxReplicas": 8},
        "replicas": 2,
    }
    assert token_pool["metadata"]["name"] == "qwen3-8b-short"
    assert entitlement["spec"]["resources"] == {"concurrency": 28}
    assert said["entitlements.both.concurrency"] == "left out"
    sections, _ = imported(tmp_path, crd_export.text_of(objects))
    assert sections["entitlements"][0]["concurrency"] == {"short": 28}
    assert exported(row(concurrency={"short": 1, "long": 0}), pool="long")[0] == []


def test_a_model_s_pools_together_are_one_replica_of_what_is_ready() -> None:
    (token_pool, _), said = exported(row(), config=parse(FILE, "sluice.yaml", {}))
    assert token_pool["spec"]["perReplica"] == {
        "concurrency": 2 * 32 + 4,
        "tokensPerSecond": 12_000,
        "kvCacheGiB": 120.0,
    }
    assert token_pool["spec"]["replicas"] == 1
    assert said["models.Qwen/Qwen3-8B.pools"] == "approximated"


@pytest.mark.parametrize(
    ("fields", "place", "fate"),
    [
        ({"mode": "observe"}, "mode", "left out"),
        ({"compression": "refuse"}, "compression", "left out"),
        ({"trusted_usage": True}, "trusted_usage", "left out"),
        ({"concurrency": {"short": 2, "long": 1}}, "concurrency", "left out"),
        ({"tokens_per_second": 0.5}, "tokens_per_second", "approximated"),
        ({"kv_cache_gib": 1 / 3}, "kv_cache_gib", "approximated"),
        ({"keys": ["0cdbed0f"]}, "keys.0cdbed0f", "approximated"),
    ],
)
def test_what_objects_cannot_say_is_said(fields: dict[str, Any], place: str, fate: str) -> None:
    _, said = exported(row(**fields))
    assert said[f"entitlements.search.{place}"] == fate


def test_budgets_and_names_and_objects_of_the_cluster_are_spoken_of() -> None:
    objects, said = exported(
        row("Prod_Chat"),
        row("prod-chat"),
        row("mine", origin="kubernetes"),
        budgets=({"scope": "entitlement", "name": "Prod_Chat", "id": "x"},),
    )
    names = [o["metadata"]["name"] for o in objects if o["kind"] == "TokenEntitlement"]
    assert names == ["prod-chat", "prod-chat-2"]
    assert said["entitlements.Prod_Chat.budgets"] == "left out"
    assert said["entitlements.mine"] == "left out"


def test_keys_are_references_and_only_hashes_are_written() -> None:
    config = parse(FILE, "sluice.yaml", {})
    objects, _ = exported(row(keys=[DIGEST[:8], "0cdbed0f"]), config=config)
    secrets = [o for o in objects if o["kind"] == "Secret"]
    assert [s["stringData"] for s in secrets] == [{"api-key": f"sha256:{DIGEST}"}]
    (entitlement,) = [o for o in objects if o["kind"] == "TokenEntitlement"]
    names = [key["secretRef"]["name"] for key in entitlement["spec"]["keys"]]
    assert names == ["search-key", "search-key-2"]
    assert secrets[0]["metadata"]["name"] == "search-key"


def test_an_import_hashes_keys_and_names_what_is_missing(tmp_path: Path) -> None:
    objects, _ = exported(row(keys=["0cdbed0f", "11111111"]))
    secret = """\
---
apiVersion: v1
kind: Secret
metadata: {name: search-key}
data: {api-key: c2stc2VjcmV0}
"""
    sections, report = imported(tmp_path, crd_export.text_of(objects), secret)
    hashed, variable = sections["entitlements"][0]["api_keys"]
    assert hashed == sluice("hash-key", stdin="sk-secret").stdout.split()[-1]
    assert report["environment"] == [variable[2:-1]] == ["SEARCH_KEY_2_API_KEY"]
    assert "sk-secret" not in json.dumps(report)


def test_an_import_says_what_it_leaves_out_and_on_which_line(tmp_path: Path) -> None:
    text = """\
apiVersion: sluice.dev/v1alpha1
kind: TokenEntitlement
metadata: {name: a}
spec: {tenantId: t, poolRef: {name: gone}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: b}
"""
    sections, report = imported(tmp_path, text)
    assert sections == {}
    lines = {line["path"]: (line["line"], line["fate"]) for line in report["lines"]}
    assert lines["spec.poolRef"] == (4, "left out")
    assert [line["note"] for line in report["lines"]][-1] == "no ConfigMap is read"
