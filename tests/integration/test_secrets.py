"""Secrets of the file over real sockets: no role below an owner's gets one out of the gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from gateway.payload.head import digest_of
from tests.asking import until
from tests.running import serving

OPERATOR = "sk-operator"
ENGINES_KEY = "sk-engines-own"
ENTITLEMENT = {"name": "e", "tenant": "t", "model": "none"}


@contextmanager
def listening(seen: list[str]) -> Iterator[str]:
    """An engine that notes the authorization of what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization", ""))
            body = b'{"data": [{"id": "bench-model"}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server) as url:
        yield url


def operated(fleet: Fleet) -> httpx.Client:
    """A client with an operator's key."""
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return httpx.Client(base_url=fleet.url, headers=headers, trust_env=False, timeout=20)


@pytest.fixture
def fleet() -> Fleet:
    """Not started yet; its file may be changed until then."""
    fleet = Fleet(short=1, long=0)
    file = fleet.replicas[0].config
    key = {"name": "oncall", "sha256": f"sha256:{digest_of(OPERATOR.encode()).hex()}"}
    file["server"]["admin_keys"] = [{**key, "role": "operator"}]
    return fleet


def test_the_engines_key_goes_to_addresses_of_the_file_only(fleet: Fleet) -> None:
    seen: dict[str, list[str]] = {name: [] for name in ("own", "other", "keyed")}
    with (
        listening(seen["own"]) as own,
        listening(seen["other"]) as other,
        listening(seen["keyed"]) as keyed,
    ):
        workers = fleet.replicas[0].config["models"][0]["pools"]["short"]["workers"]
        workers[:] = [{"url": url, "api_key": ENGINES_KEY} for url in (*workers, own)]
        asked = {"model": MODEL, "pool": "short"}
        with fleet, operated(fleet) as client:
            for sent in ({"url": other}, {"url": keyed, "api_key": "sk-its-own"}):
                assert client.post("/admin/workers", json=asked | sent).status_code == 201
            until(lambda: len(seen["other"]) > 1 and len(seen["keyed"]) > 1)
            # By an address of the file, as after a removal: the file's key.
            client.delete(f"/admin/workers/{own.removeprefix('http://')}").raise_for_status()
            seen["own"].clear()
            assert client.post("/admin/workers", json={**asked, "url": own}).is_success
            until(lambda: seen["own"])
            shown = client.get("/admin/pools").text
    assert set(seen["other"]) == {""}
    assert set(seen["keyed"]) == {"Bearer sk-its-own"}
    assert set(seen["own"]) == {f"Bearer {ENGINES_KEY}"}
    assert ENGINES_KEY not in shown
    assert "sk-its-own" not in shown


def test_a_dry_run_tells_nothing_of_the_environment_or_the_file(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    config = fleet.replicas[0].config
    config["server"]["admin_key"] = "${SLUICE_ADMIN_KEY}"
    reference = "${SLUICE_ADMIN_KEY}"
    pools = config["models"][0]["pools"]
    changed: list[dict[str, Any]] = [
        {"models": [{"name": reference, "pools": pools}], "entitlements": [ENTITLEMENT]},
        {"models": [{"name": MODEL, "pools": pools, "aliases": [reference, reference]}]},
        {"models": [{"name": MODEL, "pools": pools, "fallbacks": [reference]}]},
        {"models": [{"name": f"{reference[:-1]}:-d}}", "pools": pools}]},
        {"aliases": [{"name": reference, "split": {"none": 1}}]},
        {"state": {"url": f"redis://:a-password{reference}@127.0.0.1:9/0"}},
        {"server": {"admin_key": "sk-guess", "viewer_key": reference, "host": reference}},
    ]
    with fleet, operated(fleet) as client:
        file = yaml.safe_load(fleet.replicas[0].file.read_text())
        for change in changed:
            answer = client.post(
                "/admin/reload", params={"dry_run": "1"}, content=yaml.safe_dump(file | change)
            )
            assert answer.status_code in (200, 400)
            assert ADMIN_KEY not in answer.text
            assert "a-password" not in answer.text
