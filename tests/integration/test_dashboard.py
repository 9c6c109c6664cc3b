"""The dashboard's stream and the two commands beside it, against a gateway over real sockets."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, Fleet
from tests.asking import entitlement, post
from tests.running import sluice

VIEWER_KEY = "sk-test-viewer"
VIEWER = {"authorization": f"Bearer {VIEWER_KEY}"}
TENANTS = ("acme", "rival")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    entitlements = [
        entitlement(name, max_concurrency=8) | {"name": f"{name}-prod", "tenant": name}
        for name in TENANTS
    ]
    with Fleet(
        config={"entitlements": entitlements},
        server={"viewer_key": VIEWER_KEY, "open_dashboard": True},
    ) as fleet:
        yield fleet


def chat(fleet: Fleet, name: str, **headers: str) -> str:
    """The id of a served request."""
    answer = post(fleet.url, f"sk-{name}", **headers)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def get(fleet: Fleet, path: str, **headers: str) -> httpx.Response:
    return httpx.get(fleet.url + path, headers=headers, trust_env=False)


def frames(answer: httpx.Response, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in answer.iter_lines():
        if line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
        if len(found) == count:
            break
    return found


def test_figures_come_once_a_second_and_have_rates_from_the_second_on(fleet: Fleet) -> None:
    begin_s = time.monotonic()
    with httpx.stream(
        "GET", f"{fleet.url}/dashboard/events", headers=VIEWER, trust_env=False, timeout=10
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        request_id = chat(fleet, "acme")
        found = frames(answer, 4)
    assert 2.5 < time.monotonic() - begin_s < 6.0
    assert found[-1]["shared"]["traffic"]["requests_per_s"] > 0
    assert request_id in [row["id"] for row in found[-1]["decisions"]]
    assert {row["name"] for row in found[-1]["entitlements"]["rows"]} == {"acme-prod", "rival-prod"}


def test_too_many_viewers_are_refused_and_those_that_left_forgotten(fleet: Fleet) -> None:
    def status(client: httpx.Client) -> int:
        request = client.build_request("GET", f"{fleet.url}/dashboard/events", headers=VIEWER)
        answer = client.send(request, stream=True)
        if answer.status_code == 200:
            next(answer.iter_raw())
        else:
            assert answer.headers["x-sluice-reason"] == "too_many_viewers"
        return answer.status_code

    time.sleep(2.0)  # until the viewers of earlier tests are forgotten
    with httpx.Client(trust_env=False, timeout=10) as many:
        assert [status(many) for _ in range(33)] == [200] * 32 + [429]
    end_s = time.monotonic() + 10
    with httpx.Client(trust_env=False, timeout=10) as another:
        while status(another) != 200:
            assert time.monotonic() < end_s, "viewers that left are not forgotten"
            time.sleep(0.5)


def test_an_open_dashboard_opens_figures_and_nothing_else(fleet: Fleet) -> None:
    assert get(fleet, "/dashboard/snapshot").status_code == 200
    assert get(fleet, "/dashboard/snapshot", host="evil.example").status_code == 401
    assert get(fleet, "/admin/pools").status_code == 401


def test_the_viewer_key_reads_and_changes_nothing(fleet: Fleet) -> None:
    assert get(fleet, "/admin/pools", **VIEWER).status_code == 200
    assert get(fleet, "/admin/entitlements", **VIEWER).status_code == 200
    answer = httpx.post(
        f"{fleet.url}/admin/workers/{fleet.engines[0].id}/drain", headers=VIEWER, trust_env=False
    )
    assert (answer.status_code, answer.headers["x-sluice-reason"]) == (403, "viewer_cannot_change")
    assert fleet.admin("/admin/pools").json()[0]["pools"][0]["workers"][0]["draining"] is False


@pytest.mark.parametrize("given", ["", "r-own", "with/slashes/and?signs"])
def test_a_tenant_learns_why_and_nobody_else_does(fleet: Fleet, given: str) -> None:
    request_id = chat(fleet, "acme", **({"x-request-id": given} if given else {}))
    common = ("why", request_id, "--url", fleet.url)
    own = sluice(*common, "--key", "sk-acme")
    assert own.exit_code == 0, own.stderr
    assert "acme-prod asked bench-model" in own.stdout
    assert "acme-prod was charged" in own.stdout
    other = sluice(*common, "--key", "sk-rival")
    assert (other.exit_code, other.stdout) == (2, "")
    assert "No decision is kept" in other.stderr
    for found in (
        sluice(*common, SLUICE_ADMIN_KEY=VIEWER_KEY),
        sluice(*common, SLUICE_ADMIN_KEY=ADMIN_KEY),
        sluice(*common),  # the dashboard is open here
    ):
        assert "acme-prod was charged" in found.stdout, found.stderr


def test_top_prints_plain_tables_into_a_pipe(fleet: Fleet) -> None:
    request_id = chat(fleet, "acme")
    done = sluice("top", "--url", fleet.url)
    assert done.exit_code == 0, done.stderr
    assert "\x1b" not in done.stdout
    for part in ("req/s", "short", "acme-prod", fleet.engines[0].id, request_id):
        assert part in done.stdout
    found = json.loads(sluice("top", "--json", "--url", fleet.url).stdout)
    assert found["shared"]["traffic"]["requests_per_s"] is not None


def test_top_says_what_is_wrong_with_a_key(fleet: Fleet) -> None:
    done = sluice("top", "--once", "--url", fleet.url, "--key", "sk-wrong")
    assert (done.exit_code, done.stderr) == (2, f"{fleet.url} refuses this key\n")
    assert sluice("top", "--once", "--url", "http://127.0.0.1:9").exit_code == 1


class Terminal:
    """`sluice top` in a terminal of 80 columns and 24 lines."""

    def __init__(self, url: str) -> None:
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluice", "top", "--url", url],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(other)
        self.written = ""

    def see(self, text: str, limit_s: float = 15.0) -> None:
        """Wait until it has written a text since the last key."""
        end_s = time.monotonic() + limit_s
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written):
            assert time.monotonic() < end_s, f"{text!r} is not in {self.written[-3000:]!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.written += os.read(self._own, 65_536).decode(errors="replace")

    def press(self, keys: str) -> None:
        self.written = ""
        os.write(self._own, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._own)


def test_top_follows_keys_in_a_terminal_and_leaves_it_as_it_was(fleet: Fleet) -> None:
    chat(fleet, "acme")
    terminal = Terminal(fleet.url)
    try:
        terminal.see("last decisions")
        terminal.see("entitlements (2)")
        terminal.press("s")
        terminal.see("s entitlements by refused")
        terminal.press("/rival")
        terminal.see("/rival_")
        terminal.see("entitlements (1 of 2)")
        terminal.press("\r")
        terminal.see("/rival ")
        terminal.press(" ")
        terminal.see("paused")
        terminal.press("q")
        terminal.see("")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
