"""`sluice why`: one request's story, from a gateway with whatever key, or from a log."""

import json
from pathlib import Path

import httpx
import pytest
import respx

from sluice.operate.admin_client import KEY_VARIABLE
from tests.running import sluice

URL = "http://127.0.0.1:8080"
RECORD = {
    "schema": 2,
    "time_unix_s": 1.0,
    "request_id": "r-1",
    "endpoint": "chat",
    "outcome": "refused",
    "status": 429,
    "model": "llama",
    "entitlement": "acme",
    "reason": "priority",
}
UNKNOWN = {"error": {"message": "No decision is kept for request id 'r-1'.", "code": "x"}}
CLOSED = {"error": {"message": "Send the admin key.", "code": "invalid_api_key"}}
SAID = "the pool is full of work of at least this priority"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def run(*arguments: str) -> tuple[int, str]:
    done = sluice("why", "r-1", *arguments)
    return done.exit_code, done.output


@respx.mock
def test_an_operator_s_key_opens_the_admin_route() -> None:
    route = respx.get(f"{URL}/admin/decisions/r-1").mock(httpx.Response(200, json=RECORD))
    code, said = run("--key", "sk-viewer")
    assert (code, SAID in said) == (0, True)
    assert route.calls.last.request.headers["authorization"] == "Bearer sk-viewer"


@respx.mock
def test_a_tenant_s_key_opens_its_own_route() -> None:
    respx.get(f"{URL}/admin/decisions/r-1").mock(httpx.Response(401, json=CLOSED))
    respx.get(f"{URL}/v1/sluice/decisions/r-1").mock(
        httpx.Response(200, json={**RECORD, "story": ["ignored"]})
    )
    code, said = run("--key", "sk-acme")
    assert (code, SAID in said) == (0, True)


@respx.mock
def test_without_a_key_the_open_dashboard_is_asked() -> None:
    respx.get(f"{URL}/dashboard/decisions/r-1").mock(
        httpx.Response(200, json={"steps": [], "record": RECORD})
    )
    code, said = run()
    assert (code, SAID in said) == (0, True)


@respx.mock
def test_what_the_accepted_key_was_told_is_said() -> None:
    respx.get(f"{URL}/admin/decisions/r-1").mock(httpx.Response(401, json=CLOSED))
    respx.get(f"{URL}/v1/sluice/decisions/r-1").mock(httpx.Response(404, json=UNKNOWN))
    assert run("--key", "sk-acme") == (2, "No decision is kept for request id 'r-1'.\n")


@respx.mock
def test_a_refused_or_missing_key_is_said() -> None:
    respx.get(url__startswith=URL).mock(httpx.Response(401, json=CLOSED))
    assert run("--key", "sk-x") == (2, f"{URL} refuses this key\n")
    code, said = run()
    assert (code, f"set ${KEY_VARIABLE}" in said) == (2, True)


@respx.mock
def test_a_gateway_that_is_away_is_exit_code_1() -> None:
    respx.get(url__startswith=URL).mock(side_effect=httpx.ConnectError("refused"))
    assert run() == (1, f"{URL}: refused\n")


def test_a_log_tells_the_last_request_of_that_id(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    lines = [
        {**RECORD, "reason": "kv"},
        RECORD,
        {**RECORD, "request_id": "r-12", "reason": "tokens"},
        {"schema": 2, "event": "tick", "model": "llama", "unix_s": 1.0},
    ]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    code, said = run("--log", str(log))
    assert (code, SAID in said) == (0, True)
    code, said = run("--log", str(log), "--json")
    assert json.loads(said)["record"]["reason"] == "priority"
    (tmp_path / "empty").write_text("", encoding="utf-8")
    assert run("--log", str(tmp_path / "empty"))[0] == 2
    assert run("--log", str(tmp_path / "none"))[0] == 2
