"""A request keeps an entitlement's promise, breaks it, or says nothing of it."""

from typing import Any

import pytest

from gateway.records.proof import Promise
from gateway.usage.promises import judged
from tests.builders import decision

PROMISE = Promise(kind="entitlement", name="e", verdict="holds", reason="", slo_ms=500)
PACED = Promise(kind="entitlement", name="e", verdict="holds", reason="", slo_tpot_ms=20)
SPOT = Promise(kind="entitlement", name="e", verdict="holds", reason="", backfill=True)
REFUSED = {"outcome": "refused", "status": 429}


@pytest.mark.parametrize(
    ("record", "promise", "result"),
    [
        ({"ttft_s": 0.4}, PROMISE, "kept"),
        ({"ttft_s": 0.6}, PROMISE, "lost"),
        ({}, PROMISE, "kept"),  # sent whole
        ({"tpot_s": 0.03}, PACED, "lost"),
        ({"tpot_s": 0.03}, PROMISE, "kept"),
        ({"outcome": "disconnected", "status": 499, "duration_s": 0.6}, PROMISE, "lost"),
        ({"outcome": "disconnected", "status": 499, "duration_s": 0.1}, PROMISE, None),
        ({"outcome": "upstream_error", "status": 502}, PROMISE, "lost"),
        (REFUSED | {"reason": "priority"}, PROMISE, "lost"),
        (REFUSED | {"reason": "priority"}, SPOT, None),
        ({"outcome": "evicted", "status": 429}, SPOT, None),
        ({"outcome": "evicted", "status": 429}, PROMISE, "lost"),
        (REFUSED | {"reason": "concurrency"}, SPOT, "limited"),
        (REFUSED | {"reason": "budget"}, PROMISE, None),
        (REFUSED | {"status": 400, "reason": "invalid_json"}, PROMISE, None),
        ({"outcome": "error", "status": 400}, PROMISE, None),
    ],
)
def test_as_simulated_requests_are_judged(
    record: dict[str, Any], promise: Promise, result: str | None
) -> None:
    assert judged(decision(**record), promise) == result
