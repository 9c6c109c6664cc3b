"""Admissions that a log holds are decided again, whichever schema the log has."""

from typing import Any

import msgspec
import pytest

from gateway.policy.admission.replay import ReplayedDecision, replay
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import Terms

TERMS = Terms(slots=(4,), tokens_per_s=1e6, largest_tokens=8192)
OWNER = Entitlement(name="e", model="m", limit=1)
EVENTS: list[dict[str, Any]] = [
    {"event": "terms", "unix_s": 1.0, "pools": ["short"], "detail": msgspec.to_builtins(TERMS)},
    {"event": "entitlement", "unix_s": 1.0, "detail": msgspec.to_builtins(OWNER)},
]


def lease(name: str, admitted: float, settled: float, **more: Any) -> dict[str, Any]:
    return {
        "lease_id": name,
        "asked_pool": "short",
        "admitted_unix_s": admitted,
        "settled_unix_s": settled,
        "reserved_tokens": 100,
        "charge_tokens": 60,
        **more,
    }


LEASES = [
    lease("a", 2.0, 4.0),
    lease("b", 3.0, 5.0, would_deny="concurrency"),
    lease("c", 6.0, 7.0),
]


def request(schema: int, held: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"outcome": "ok", "entitlement": "e"}
    if schema == 1:
        return line | held | {"sequences": 1}
    return line | {"admission": held, "estimate": {"sequences": 1}}


@pytest.mark.parametrize("schema", [1, 2])
def test_the_same_admissions_are_decided_the_same_way(schema: int) -> None:
    lines = [*EVENTS, *(request(schema, held) for held in LEASES)]
    found = replay([{"schema": schema, "model": "m", **line} for line in lines], "m")
    assert found == [
        ReplayedDecision(lease_id="a", logged="", decided=""),
        ReplayedDecision(lease_id="b", logged="concurrency", decided="concurrency"),
        ReplayedDecision(lease_id="c", logged="", decided=""),
    ]


def test_requests_that_were_not_admitted_are_left_out() -> None:
    refused = {"schema": 2, "model": "m", "outcome": "refused", "admission": {"lease_id": "x"}}
    events = [{"schema": 2, "model": "m", **event} for event in EVENTS]
    assert replay([*events, refused], "m") == []
