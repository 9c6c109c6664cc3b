"""`sluice entitlement` against a gateway's admin routes, over a real socket."""

import asyncio
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rich.console import Console
from typer.testing import Result

from gateway.errors import StateFailure
from gateway.payload.head import digest_of
from sluice.operate.tables import card, listing
from tests.control import ADMIN_KEY
from tests.running import sluice
from tests.tenancy_fakes import TenancyRig
from tests.unit.gateway.control.test_admin_entitlements import app_of

NEW = ("create", "a", "--tenant", "acme", "--model", "m")


class Gateway:
    """The admin routes, served in a thread."""

    def __init__(self) -> None:
        self.rig = TenancyRig()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(app_of(self.rig), log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=asyncio.run, args=(self._serve(),))

    async def _serve(self) -> None:
        await self.rig.start()
        await self.server.serve([self.socket])

    def run(self, *args: str, key: str = ADMIN_KEY) -> Result:
        """One command."""
        given = ("entitlement", *args, "--url", self.url)
        return sluice(*given, SLUICE_ADMIN_KEY=key, COLUMNS="200")

    def json(self, *args: str) -> Any:
        """One command that succeeds, for machines."""
        result = self.run(*args, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    gateway.thread.start()
    try:
        yield gateway
    finally:
        gateway.server.should_exit = True
        gateway.thread.join(10)
        gateway.socket.close()
    assert not gateway.thread.is_alive()


def test_a_tenant_s_life(gateway: Gateway) -> None:
    made = gateway.json(
        *NEW,
        *("--class", "guaranteed", "--concurrency", "short=5,long=1", "--slo-target-ms", "500"),
        *("--tokens-per-second", "5000", "--expires-at", "2035-01-01T00:00:00Z"),
    )
    assert made["concurrency"] == {"short": 5, "long": 1}
    assert gateway.rig.keyring.find(digest_of(made["key"].encode())) is not None
    changed = gateway.json(
        *("change", "a", "--concurrency", "8", "--unset", "slo-target-ms", "--unset", "expires_at")
    )
    assert (changed["concurrency"], changed["slo_target_ms"]) == (8, None)
    assert (changed["tokens_per_second"], changed["expires_at"]) == (5000, None)
    assert gateway.json("suspend", "a")["state"] == "suspended"
    assert gateway.json("resume", "a")["state"] == "bound"
    second = gateway.json("keys", "add", "a")
    assert second["key"] != made["key"]
    assert gateway.json("keys", "revoke", "a", made["keys"][0])["keys"] == second["keys"][1:]
    assert gateway.json("expire", "a", "--at", "2036-01-01")["expires_at"].startswith("2036-01-01")
    assert gateway.json("expire", "a")["expires_at"].startswith("2030-")
    assert gateway.json("show", "a")["name"] == "a"
    assert [e["name"] for e in gateway.json("list")] == ["a"]
    assert gateway.json("list", "--tenant", "other") == []
    deleted = gateway.run("delete", "a")
    assert (deleted.exit_code, deleted.stdout) == (0, "a: deleted\n")
    whats = [record["what"] for record in gateway.json("audit")]
    assert whats == [
        *("delete", "expire", "expire", "revoke_key", "add_key"),
        *("resume", "suspend", "change", "create"),
    ]
    assert len(gateway.json("audit", "--limit", "2")) == 2


def test_a_reason_from_elsewhere_leaves_the_terminal_as_it_is() -> None:
    shown = io.StringIO()
    Console(file=shown, width=100).print(card({"message": "no \x1b[31mplace\x9b2J\r[b]now"}))
    assert "no  [31mplace 2J [b]now" in shown.getvalue()


def test_tables_show_what_people_look_for(gateway: Gateway) -> None:
    assert gateway.run("audit").stdout == ""
    gateway.run(*NEW, "--tokens-per-second", "50")
    gateway.rig.store.inflight["a"] = 3
    listed = gateway.run("list").stdout.splitlines()
    assert listed[0].split() == [
        *("name", "tenant", "model", "class", "state", "in", "flight", "tokens/s", "debt", "keys"),
    ]
    assert listed[1].split() == ["a", "acme", "m", "elastic", "bound", "3", "50", "0.25", "1"]
    shown = gateway.run("show", "a").stdout
    assert "short=3, long=0" in shown
    gateway.run("change", "a", "--tokens-per-second", "60")
    assert "tokens_per_second: 50 -> 60" in gateway.run("audit").stdout


def test_on_a_narrow_terminal_columns_are_left_out_and_words_stay_whole() -> None:
    rows = [
        {
            "name": f"demo-{name}",
            "tenant": f"demo-{name}",
            "model": "demo-model",
            "service_class": name,
            "state": "bound",
            "suspended": False,
            "tokens_per_second": 5000,
            "usage": {"inflight": {"short": 1}, "debt": 0.0},
            "keys": ["0cdbed0f"],
        }
        for name in ("guaranteed", "elastic", "preemptible")
    ]
    for width in (300, 97, 80, 60):
        table, left_out = listing(rows, width)
        out = io.StringIO()
        Console(file=out, width=width).print(table)
        lines = out.getvalue().splitlines()
        assert len(lines) == 4
        assert [line.split()[0] for line in lines[1:]] == [row["name"] for row in rows]
        assert (width > 100) == (left_out == ())
    assert left_out[0] == "debt"


def test_a_change_says_what_changed_and_nothing_else(gateway: Gateway) -> None:
    made = gateway.run(*NEW, "--tokens-per-second", "50").stdout.splitlines()
    assert [line.split()[0] for line in made[:-1]] == [
        *("field", "name", "tenant", "model", "tokens_per_second", "service_class", "keys"),
    ]
    changed = gateway.run("change", "a", "--tokens-per-second", "60").stdout
    assert changed == "a: tokens_per_second: 50 -> 60\n"
    again = gateway.run("change", "a", "--tokens-per-second", "60")
    assert again.stdout == "a: nothing changed\n"
    assert gateway.run("suspend", "a").stdout.splitlines() == [
        "a: suspended: no -> yes",
        "a: state: bound -> suspended",
    ]
    *told, key = gateway.run("keys", "add", "a").stdout.splitlines()
    assert [line.split(":")[1] for line in told] == [" keys"]
    assert gateway.rig.keyring.find(digest_of(key.encode())) is not None


@pytest.mark.parametrize(
    ("args", "key", "reason", "said"),
    [
        (("show", "nobody"), ADMIN_KEY, "entitlement_not_found", "no entitlement 'nobody'"),
        (("delete", "nobody"), ADMIN_KEY, "entitlement_not_found", "no entitlement 'nobody'"),
        (("show", "a/../b"), ADMIN_KEY, "unknown_path", ""),
        ((*NEW, "--class", "gold"), ADMIN_KEY, "invalid_entitlement", "service_class"),
        ((*NEW, "--concurrency", "many"), ADMIN_KEY, None, "--concurrency"),
        ((*NEW, "--concurrency", "short=x"), ADMIN_KEY, None, "--concurrency"),
        (("change", "a"), ADMIN_KEY, None, "nothing to change"),
        (("change", "a", "--mode", "observe", "--unset", "mode"), ADMIN_KEY, None, "given a value"),
        (("list",), "", None, "no admin key"),
        (("list",), "sk-wrong", "invalid_api_key", "admin key"),
        (("list",), "sk wrong", None, "visible ASCII"),
        (("list", "--admin-key-file", "no-such-file"), ADMIN_KEY, None, "no-such-file"),
    ],
)
def test_bad_input_is_exit_code_2_for_people_and_machines(
    gateway: Gateway, args: tuple[str, ...], key: str, reason: str | None, said: str
) -> None:
    shown = gateway.run(*args, key=key)
    assert (shown.exit_code, said in shown.stderr) == (2, True), shown.output
    assert key in ("", ADMIN_KEY) or key not in shown.output
    result = gateway.run(*args, "--json", key=key)
    assert (result.exit_code, result.stderr) == (2, "")
    found = json.loads(result.stdout)
    assert (found["ok"], found.get("reason"), bool(found["problem"])) == (False, reason, True)


def test_messages_name_commands_and_no_routes(gateway: Gateway) -> None:
    gateway.run(*NEW)
    told = [
        gateway.run("show", "nobody").stderr,
        gateway.run(*NEW).stderr,
        gateway.run("list", key="sk-wrong").stderr,
    ]
    assert "sluice entitlement list" in told[0]
    assert "sluice entitlement change" in told[1]
    assert "SLUICE_ADMIN_KEY" in told[2]
    assert not re.search("GET|PATCH|POST|/admin|Bearer", "".join(told))


def test_a_list_goes_through_all_pages(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.operate.admin_client.PAGE", 2)
    for n in range(5):
        gateway.run("create", f"e{n}", "--tenant", "t", "--model", "m")
    assert [e["name"] for e in gateway.json("list")] == [f"e{n}" for n in range(5)]


def test_what_the_gateway_cannot_do_now_is_exit_code_1(gateway: Gateway) -> None:
    gateway.run(*NEW)
    assert gateway.run(*NEW).exit_code == 1
    gateway.rig.store.inflight["a"] = 1
    refused = gateway.run("delete", "a")
    assert (refused.exit_code, "in flight" in refused.stderr) == (1, True)
    gateway.rig.directory.fail_with = StateFailure("away")
    assert gateway.run("suspend", "a").exit_code == 1


def test_the_key_may_stand_in_a_file(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{ADMIN_KEY}\n", encoding="utf-8")
    assert gateway.run("list", "--admin-key-file", str(path), key="").exit_code == 0


@pytest.mark.parametrize(("url", "code"), [("http://127.0.0.1:{port}", 1), ("127.0.0.1:8080", 2)])
def test_a_gateway_that_is_not_there(url: str, code: int) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as unused:
        port = unused.getsockname()[1]
    given = ("entitlement", "list", "--url", url.format(port=port))
    result = sluice(*given, SLUICE_ADMIN_KEY=ADMIN_KEY)
    assert result.exit_code == code, result.output
    assert ADMIN_KEY not in result.output
