"""What an operator and a client do at the terminal, against a scripted gateway."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.running import serving, sluice
from tests.unit.gateway.settings.test_config import BASE

UP = {
    "up": True, "not_ready": None, "remark": None, "draining": False, "ejected_for_s": 0.0,
    "active_sequences": 3,
}  # fmt: skip
WORKERS = [
    {**UP, "id": "a:8000"},
    {**UP, "id": "b:8000", "draining": True},
    {**UP, "id": "c:8000", "up": False, "not_ready": "name not found: c"},
]
POOLS = [{"model": "m", "pools": [{"name": "all", "workers": WORKERS}]}]
LONG = ", ".join(f"http://10.0.0.{n}:8000" for n in range(200))
CHANGES = [
    {"path": "models[m].mode", "before": "observe", "after": "enforce", "restart": False},
    {"path": "models[m].pools[all].workers", "before": "", "after": LONG, "restart": True},
]
ME = {
    "tenant": "acme",
    "key": "web",
    "entitlements": [
        {
            "entitlement": "chat",
            "model": "m",
            "refused": {"tokens_per_second": 4},
            "state": "bound",
            "terms": {"tokens_per_second": 5000.0, "max_concurrency": 8},
            "usage": {
                "in_flight": {"all": 2},
                "bucket_tokens": 900.0,
                "bucket_depth_tokens": 1000.0,
                "used_tokens": 13192,
            },
            "limits": [
                {
                    "id": "tenant:acme:tokens:day", "scope": "tenant", "name": "acme",
                    "unit": "tokens", "window": "day", "resets_at": "2030-01-01T00:00:00Z",
                    "used": 18592, "amount": 50000,
                }
            ],
        }
    ],
}  # fmt: skip


class Gateway(ThreadingHTTPServer):
    """Answers as it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def run(self, *arguments: str) -> Result:
        """One command, told of this gateway by the environment."""
        env = {"SLUICE_URL": self.url, "SLUICE_ADMIN_KEY": "k", "SLUICE_API_KEY": "mine"}
        return sluice(*arguments, **env)


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path} {self.headers['authorization']}")
        self.rfile.read(int(self.headers.get("content-length", 0)))
        answers = self.server.answers
        status, content = answers.get(self.path) or answers[self.path.partition("?")[0]]
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - by the standard library

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    found = Gateway()
    with serving(found):
        yield found


def test_workers_that_are_out_stand_first_with_their_cause(gateway: Gateway) -> None:
    gateway.answers["/admin/pools"] = (200, POOLS)
    said = gateway.run("workers")
    assert said.exit_code == 0, said.output
    lines = [line.split() for line in said.stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == ["c:8000", "b:8000", "a:8000"]
    assert lines[0] == ["c:8000", "m", "all", "down", "3", "name", "not", "found:", "c"]
    assert gateway.asked == ["GET /admin/pools Bearer k"]


def test_a_worker_is_drained_and_returned(gateway: Gateway) -> None:
    path = "/admin/workers/a%3A8000/drain"
    gateway.answers[path] = (200, {"worker": "a:8000", "draining": True, "pools": 1, "running": 2})
    said = gateway.run("drain", "a:8000", "--wait", "--timeout-s", "5")
    assert (said.exit_code, "2 requests still run" in said.stdout) == (1, True)
    assert "sluice undrain a:8000" in said.stdout
    assert gateway.run("undrain", "a:8000").exit_code == 0
    asked = [line.split()[1].partition("?")[2] for line in gateway.asked]
    assert asked == ["wait=true&timeout_s=5.0", "undo=true"]
    error = {"error": {"message": "No worker 'a:8000'. GET ...", "code": "worker_not_found"}}
    gateway.answers[path] = (404, error)
    said = gateway.run("drain", "a:8000")
    assert (said.exit_code, "`sluice workers` lists them" in said.stderr) == (2, True)


def test_changes_fit_a_terminal(gateway: Gateway, tmp_path: Path) -> None:
    gateway.answers["/admin/reload"] = (200, {"changes": CHANGES, "not_compared": []})
    file = tmp_path / "sluice.yaml"
    file.write_text(BASE)
    env = {"LONG_KEY": "k", "SLUICE_ADMIN_KEY": "sk-admin-secret"}
    diff = sluice("check", "-c", file, "--diff", gateway.url, **env)
    for said in (gateway.run("reload"), diff):
        assert said.exit_code == 0, said.output
        lines = said.stdout.splitlines()
        assert lines[0] == "models[m].mode: observe -> enforce"
        assert lines[1] == "models[m].pools[all].workers: (after a restart)"
        assert max(map(len, lines)) <= 100
        assert lines[-1].endswith("(all of it: --json)")


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (["--diff", "new.yaml"], "sluice check -c new.yaml --diff URL"),
        (["new.yaml", "--diff", "http://g:1"], "sluice check -c new.yaml --diff http://g:1"),
        (["new.yaml"], "sluice check -c new.yaml"),
        (["-c", "a.yaml", "--diff", "g:1"], "sluice check -c a.yaml --diff URL"),
    ],
)
def test_a_file_in_the_wrong_place_is_told_the_right_form(given: list[str], form: str) -> None:
    said = sluice("check", *given, SLUICE_URL="URL")
    assert said.exit_code == 2
    assert said.stderr.strip().endswith(f"write: {form}")


def test_a_client_sees_its_own_limits_and_use(gateway: Gateway) -> None:
    gateway.answers["/v1/sluice/me"] = (200, ME)
    said = gateway.run("me")
    assert said.exit_code == 0, said.output
    rows = [" ".join(line.split()) for line in said.stdout.splitlines()]
    assert "requests running 2 8" in rows
    assert "tokens charged 13,192 of no window" in rows
    assert "tokens at hand 900 1,000 left of the burst" in rows
    assert "tenant acme tokens per day 18,592 50,000 anew at 2030-01-01T00:00:00Z" in rows
    assert "refused 4 tokens_per_second" in rows
    assert json.loads(gateway.run("me", "--json").stdout) == ME
    assert gateway.asked[0] == "GET /v1/sluice/me?limit=1000 Bearer mine"


def test_a_client_with_many_entitlements_sees_all_pages(gateway: Gateway) -> None:
    own: dict[str, Any] = json.loads(json.dumps(ME["entitlements"]))[0]
    first, last = ({**own, "entitlement": name} for name in ("chat", "code"))
    pages = ({**ME, "entitlements": [one], "next": then} for one, then in
             ((first, "chat"), (last, None)))  # fmt: skip
    query = "/v1/sluice/me?limit=1000"
    gateway.answers[query], gateway.answers[f"{query}&after=chat"] = ((200, page) for page in pages)
    assert json.loads(gateway.run("me", "--json").stdout)["entitlements"] == [first, last]


def test_a_wrong_key_is_told_which_one_is_meant(gateway: Gateway) -> None:
    gateway.answers["/v1/sluice/me"] = (401, {"error": {"message": "no"}})
    said = gateway.run("me")
    assert (said.exit_code, "the key that your requests are sent with" in said.stderr) == (2, True)
    gateway.answers["/dashboard/events"] = (401, {"error": {"message": "no"}})
    said = gateway.run("top", "--once")
    assert (said.exit_code, "refuses this key" in said.stderr) == (2, True)
