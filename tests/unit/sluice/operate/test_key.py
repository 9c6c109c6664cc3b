"""`sluice key`: how limits are written on the command line."""

from typing import Any

import pytest

from sluice.operate.admin_client import AdminClient
from sluice.operate.tables import key_table
from tests.running import sluice

ROW: dict[str, Any] = {
    "name": "web",
    "fingerprint": "abcd",
    "state": "live",
    "origin": "admin",
    "former": False,
    "models": None,
    "entitlements": None,
    "expires_at": None,
    "requests_per_minute": 60,
    "max_concurrency": None,
    "budgets": [{"tokens": 1000000, "window": "day", "timezone": "UTC", "on_exceed": "refuse"}],
}


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Any, Any]:
    """(result, body sent)."""
    sent: list[Any] = []

    def call(_self: AdminClient, *_path: str, body: object) -> object:
        sent.append(body)
        return ROW

    monkeypatch.setattr(AdminClient, "call", call)
    said = sluice("key", *args, SLUICE_ADMIN_KEY="k", COLUMNS="200")
    return said, sent[0] if sent else None


def test_limits_are_sent_as_the_file_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = ("tokens=1000000,window=day", "money=50.5, timezone=Europe/Berlin,warn_at=.8")
    options = [part for each in budgets for part in ("--budget", each)]
    limits = ("--requests-per-minute", "60", "--max-concurrency", "4", *options)
    result, body = run(monkeypatch, "add", "acme", "web", *limits)
    assert result.exit_code == 0, result.output
    assert body == {
        "name": "web",
        "requests_per_minute": 60,
        "max_concurrency": 4,
        "budgets": [
            {"tokens": 1_000_000, "window": "day"},
            {"money": 50.5, "timezone": "Europe/Berlin", "warn_at": 0.8},
        ],
    }
    assert "tokens=1000000, window=day" in result.output


def test_one_limit_is_changed_and_another_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--requests-per-minute", "9", "--unset", "max-concurrency")
    _, body = run(monkeypatch, "change", "acme", "web", *more)
    assert body == {"requests_per_minute": 9, "max_concurrency": None}


@pytest.mark.parametrize("budget", ["1000", "tokens=", "=5", "tokens=5,,window=day"])
def test_a_budget_that_is_no_list_of_values_is_not_sent(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, body = run(monkeypatch, "add", "acme", "web", "--budget", budget)
    assert (result.exit_code, body) == (2, None)
    assert "NAME=VALUE" in result.output


def test_the_table_of_keys_has_their_limits() -> None:
    (column,) = [each for each in key_table([ROW]).columns if each.header == "limits"]
    assert list(column.cells) == ["60 requests a minute, 1000000 tokens per day"]
