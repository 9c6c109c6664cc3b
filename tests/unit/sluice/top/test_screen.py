"""The screen of `sluice top`: it fits the terminal, and a pipe gets every row."""

import io
from typing import Any

import pytest
from rich.console import Console

from sluice.top.screen import screen

POOL: dict[str, Any] = {
    "model": "llama-3-70b", "pool": "short", "b_short": 8192, "inflight": 30, "ready_slots": 128,
    "queue": [1, 2, 0], "coverage": 0.951, "workers": 2, "ready": 1,
    "admission": {"kv_bytes": 1 << 30, "kv_capacity_bytes": 4 << 30, "desired_replicas": 2},
}  # fmt: skip
WORKER: dict[str, Any] = {
    "id": "10.0.0.1:8000", "model": "llama-3-70b", "pool": "short", "state": "down",
    "not_ready": "name not found: 10.0.0.1", "active_sequences": 3, "slots": 64,
    "reserved_tokens": 9_000, "kv": 0.5, "hit_rate": None, "slowness": 2.0,
}  # fmt: skip
TENANT: dict[str, Any] = {
    "name": "acme-production", "service_class": "guaranteed", "inflight": 7, "limit": 32,
    "tokens_per_s": 5000.0, "account": {"state": "bound", "debt": 0.25, "weight": 501.0},
    "attainment": 0.97, "refused_by": {"kv": 2, "concurrency": 10},
}  # fmt: skip
DECISION: dict[str, Any] = {
    "time": 0.0, "id": "req-5bd94c58ba54-1f", "outcome": "ok", "reason": None,
    "entitlement": "acme-production", "pool": "short", "worker": "10.0.0.1:8000",
    "queue_ms": 120.0, "ttft": 1.25, "compressed": "12043->8110", "spilled": True,
}  # fmt: skip


WRONG = [{"level": "bad", "text": "The state store is away: have it answer again."}]


def figures(rows: int) -> dict[str, Any]:
    def page(row: dict[str, Any]) -> dict[str, Any]:
        return {"rows": [row] * rows, "found": rows, "total": 2 * rows}

    traffic = {
        "requests_per_s": 61.234, "refused_per_s": None, "output_tokens_per_s": 2_565.0,
        "ttft_p50_s": 0.0066, "ttft_p99_s": 0.55, "overhead_p50_s": 0.000277,
    }  # fmt: skip
    return {
        "shared": {"pools": [POOL, {**POOL, "pool": "long"}], "traffic": traffic, "wrong": WRONG},
        "workers": page(WORKER),
        "entitlements": page(TENANT),
        "decisions": [DECISION] * rows,
    }


def drawn(rows: int, width: int, height: int | None, note: str = "") -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    with out.capture() as captured:
        out.print(screen(figures(rows), width, height, note))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("height", [16, 24, 50])
def test_it_fits_the_terminal_and_breaks_no_word(width: int, height: int) -> None:
    lines = drawn(50, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "req-5bd94c58ba54-1f" in text
    assert "acme-production" in text
    assert "10.0.0.1:8000" in text


def test_a_pipe_gets_every_row_and_column() -> None:
    lines = drawn(50, 10_000, None)
    text = "\n".join(lines)
    assert sum("req-5bd94c58ba54-1f" in line for line in lines) == 50
    assert "61.2 req/s  - refused/s  2,565 tok/s  TTFT 6.6 ms / 550 ms  overhead 0.28 ms" in text
    assert "short  llama-3-70b  1/2    30/128  25%      3     8,192     2       95%" in text
    assert (
        "10.0.0.1:8000  short  down        3/64   9,000  50%     -  0.50x  name not found: 10.0.0.1"
        in text
    )
    assert "97%       12  concurrency" in text
    assert "compressed 12043->8110" in text
    assert "entitlements (50 of 100)" in text


def test_a_pool_in_phases_has_a_row_for_each_and_names_it_at_80_columns() -> None:
    found = figures(1)
    found["shared"]["pools"] = [
        {**POOL, "phase": "decode"},
        {**POOL, "pool": "short/prefill", "phase": "prefill", "admission": None},
    ]
    out = Console(file=io.StringIO(), width=80, highlight=False)
    with out.capture() as captured:
        out.print(screen(found, 80, 24))
    lines = captured.get().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("short (decode) "))
    assert lines[at + 1].startswith("short/prefill ")
    assert max(map(len, lines)) <= 80


def test_what_is_wrong_stands_above_all_tables() -> None:
    lines = drawn(3, 80, 24)
    assert lines[1].startswith("The state store is away")


def test_names_are_no_markup() -> None:
    found = figures(1)
    found["entitlements"]["rows"] = [{**TENANT, "name": "[red]x[/red]"}]
    out = Console(file=io.StringIO(), width=200)
    with out.capture() as captured:
        out.print(screen(found, 200, None))
    assert "[red]x[/red]" in captured.get()
