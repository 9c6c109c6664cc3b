"""The verbs that need no engine: check, schema, hash-key, and serve's reading of its file."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from sluice.hash_key import hashed_key
from sluice.schema import rendered
from tests.running import sluice

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/sluice.yaml"
SECRETS = {"SLUICE_ADMIN_KEY": "sk-admin-secret", "LONG_KEY": "sk-long-secret"}
PROBLEM = "version: 1\nserver: {prot: 1, port: x}\nmodels: []\n"


def run(*args: str, stdin: str | None = None) -> Result:
    return sluice(*args, stdin=stdin, **SECRETS)


def test_check_shows_what_the_file_describes() -> None:
    result = run("check", "-c", str(EXAMPLE))
    assert result.exit_code == 0, result.output
    for words in ("llama-3-70b", "short", "10.0.0.2:8000", "prod-chat", "guaranteed", ": ok"):
        assert words in result.stdout
    assert "note: " not in result.stdout
    assert not any(secret in result.output for secret in SECRETS.values())


def test_check_notes_what_may_surprise(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        EXAMPLE.read_text(encoding="utf-8").replace(
            " concurrency: 32 #", " concurrency: {short: 32} #"
        ),
        encoding="utf-8",
    )
    result = run("check", "-c", str(path))
    assert "note: entitlement prod-chat: no baseline in long" in result.stdout
    found = json.loads(run("check", "-c", str(path), "--json").stdout)
    assert len(found["remarks"]) == 1


def test_check_names_the_workers_whose_url_ends_in_v1(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    workers = '["http://a:8000/v1", "http://b:8000", {url: http://c:8000/v1/}]'
    file.write_text(
        f"""version: 1
# http://d:8000/v1 is nobody's
models:
  - {{name: m, pools: {{all: {{max_model_len: 64, max_num_seqs: 1, workers: {workers}}}}}}}
"""
    )
    result = run("check", "-c", str(file))
    assert result.exit_code == 0, result.output
    noted = [line for line in result.output.splitlines() if line.endswith("remove /v1")]
    assert [line.split()[1] for line in noted] == ["http://a:8000/v1", "http://c:8000/v1"]


def test_check_for_machines() -> None:
    result = run("check", "-c", str(EXAMPLE), "--json")
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["ok"] is True
    short, long = found["models"][0]["pools"]
    assert (short["slots"], short["boundary"], long["boundary"]) == (256, 8192, None)
    assert found["models"][0]["managed"] is True
    assert found["entitlements"][0]["api_keys"] == 1
    assert found["remarks"] == []
    assert not any(secret in result.output for secret in SECRETS.values())


def test_a_bad_file_is_told_by_line_to_people_and_machines_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PROBLEM, encoding="utf-8")
    for verb in ("check", "serve"):
        result = run(verb, "-c", str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        told = f"{path}:2:10: server.prot: unknown key `prot`; did you mean `port`?"
        assert told in result.stderr
        assert "3 problems" in result.stderr
        assert "Traceback" not in result.output
    result = run("check", "-c", str(path), "--json")
    assert result.exit_code == 2
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["ok"] is False
    assert [problem["line"] for problem in found["problems"]] == [2, 2, 3]
    assert set(found["problems"][0]) == {"file", "line", "column", "path", "message", "fix"}


def test_the_shipped_schema_is_up_to_date() -> None:
    shipped = (ROOT / "docs/sluice.schema.json").read_text(encoding="utf-8")
    assert shipped == rendered(), "run `make schema`"
    assert run("schema").stdout == shipped


def test_hash_key_of_an_argument_and_of_stdin() -> None:
    expected = "sha256:" + hashlib.sha256(b"sk-demo").hexdigest() + "\n"
    assert run("hash-key", "sk-demo").stdout == expected
    assert run("hash-key", stdin="sk-demo\n").stdout == expected
    assert json.loads(run("hash-key", "sk-demo", "--json").stdout) == {"hash": expected.strip()}


def test_hash_key_makes_new_keys() -> None:
    key, hashed = run("hash-key", "--new").stdout.split()
    assert re.fullmatch(r"sk-[\w-]{43}", key)
    assert hashed == hashed_key(key)
    assert run("hash-key", "--new").stdout.split()[0] != key


@pytest.mark.parametrize("args", [["a b"], ["ключ"], ["x", "--new"], [""]])
def test_hash_key_refuses_what_is_no_key(args: list[str]) -> None:
    result = run("hash-key", *args)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize("args", [["--port", "9103"], ["--port", "9100", "--workers", "1"]])
def test_serve_refuses_a_port_from_its_options_that_the_management_ports_take(
    args: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    server = "server: {workers: 3, management_port: 9100}\nstate: {url: 'redis://h:1/0'}\n"
    pool = "{max_model_len: 10, max_num_seqs: 1, workers: ['http://h:1']}"
    path.write_text(
        f"version: 1\n{server}models: [{{name: m, pools: {{all: {pool}}}}}]\n", encoding="utf-8"
    )
    result = run("serve", "-c", str(path), *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("server.management_port: the clients' port")


def test_check_names_the_kv_cache_that_the_catalogue_knows(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text(
        "version: 1\nmodels:\n  - name: meta-llama/Llama-3-70B-Instruct\n    pools:\n"
        "      all: {max_model_len: 8192, max_num_seqs: 8, workers: ['http://127.0.0.1:1']}\n"
    )
    said = sluice("check", "-c", file).output
    assert "kv_bytes_per_token: 327680 (llama-3-70b)" in " ".join(said.split())


def test_version_help_and_unknown_verbs() -> None:
    assert re.match(r"sluice \d+\.", sluice("--version").stdout)
    listed = sluice("--help").stdout
    for verb in ("demo", "serve", "check", "schema", "mock", "hash-key"):
        assert verb in listed
    assert sluice("nonsense").exit_code == 2
