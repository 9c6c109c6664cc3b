"""`sluice import litellm --keys URL` against a proxy of LiteLLM's shape, over a real socket."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import Result

from gateway.settings import parse
from sluice.imports import litellm_api
from tests.running import serving, sluice

MASTER = "sk-master"
CONFIG = """model_list:
  - model_name: llama
    litellm_params: {model: hosted_vllm/llama, api_base: "http://10.0.0.1:8000/v1"}
"""


def row(number: int) -> dict[str, Any]:
    return {"token": f"{number:064x}", "key_alias": f"key-{number}", "team_id": "t1", "models": []}


class Proxy(ThreadingHTTPServer):
    """Answers as LiteLLM's management API does."""

    rows: list[dict[str, Any]]
    total_pages: int | None = None
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.server.asked.append(parts.path)
        if self.headers["authorization"] != f"Bearer {MASTER}":
            self._send(401, {"error": "no"})
        elif parts.path == "/team/list":
            team = {"team_id": "t1", "team_alias": "Search", "models": ["llama"], "blocked": False}
            self._send(200, [team])
        elif parts.path == "/user/list":
            user = {"user_id": "jane", "models": ["llama"]}
            self._send(200, {"users": [user], "page": int(query["page"]), "total_pages": 1})
        elif parts.path == "/key/list":
            assert query["return_full_object"] == "true"
            page, size, rows = int(query["page"]), int(query["size"]), self.server.rows
            found = rows[(page - 1) * size : page * size]
            pages = self.server.total_pages or -(-len(rows) // size)
            self._send(200, {"keys": found, "total_pages": pages, "current_page": page})
        else:
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

    def _send(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = Proxy(("127.0.0.1", 0), Handler)
    server.rows, server.asked = [row(number) for number in range(1, 251)], []
    with serving(server):
        yield server


def imported(url: str, folder: Path, key: str = MASTER) -> Result:
    (folder / "config.yaml").write_text(CONFIG)
    output = folder / "sluice.yaml"
    given = ("import", "litellm", folder / "config.yaml", "--keys", url, "-o", output)
    return sluice(*given, LITELLM_MASTER_KEY=key)


def test_every_key_of_every_page_is_taken_once(proxy: Proxy, tmp_path: Path) -> None:
    proxy.rows.insert(120, row(7))  # a page moved while it was read
    proxy.rows.append({"token": f"{999:064x}", "user_id": "jane", "models": []})
    result = imported(proxy.url, tmp_path)
    assert result.exit_code == 0, result.output
    config = parse((tmp_path / "sluice.yaml").read_text(), "sluice.yaml", {})
    search, jane = config.tenants
    assert (search.name, search.display_name) == ("Search", "Search")
    assert {key.sha256 for key in search.keys} == {f"sha256:{n:064x}" for n in range(1, 251)}
    assert (jane.name, [key.suspended for key in jane.keys]) == ("jane", [False])
    assert proxy.asked == ["/key/list"] * 3 + ["/team/list", "/user/list"]
    assert MASTER not in result.output


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [("", 2, "set $LITELLM_MASTER_KEY"), ("sk-wrong", 2, "refuses the key of $LITELLM_MASTER_KEY")],
)
def test_without_the_master_key_nothing_is_written(
    proxy: Proxy, tmp_path: Path, key: str, code: int, said: str
) -> None:
    result = imported(proxy.url, tmp_path, key)
    assert (result.exit_code, said in result.output) == (code, True)
    assert not (tmp_path / "sluice.yaml").exists()


def test_pages_and_answers_are_bounded(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.total_pages = 5_001
    result = imported(proxy.url, tmp_path)
    assert (result.exit_code, "over 5000" in result.output) == (2, True)
    assert proxy.asked == ["/key/list"]
    proxy.total_pages = None
    monkeypatch.setattr(litellm_api, "MAX_ANSWER_BYTES", 100)
    assert "the answer is over" in imported(proxy.url, tmp_path).output


def test_a_redirect_gets_no_key(proxy: Proxy, tmp_path: Path) -> None:
    result = imported(f"{proxy.url}/other", tmp_path)
    assert (result.exit_code, "302" in result.output) == (1, True)


def test_a_proxy_that_is_away_is_named(tmp_path: Path) -> None:
    result = imported("http://127.0.0.1:9", tmp_path)
    assert (result.exit_code, "http://127.0.0.1:9" in result.output) == (1, True)
