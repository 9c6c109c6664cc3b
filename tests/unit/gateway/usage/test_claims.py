"""A request keeps what is claimed of its entitlement, breaks it, or says nothing of it."""

from typing import Any

import pytest

from gateway.records.proof import Claim
from gateway.usage.claims import judged
from tests.builders import ITEM, decision

CLAIM = Claim(kind="entitlement", name="e", verdict="holds", reason="", slo_ms=500)
PACED = Claim(kind="entitlement", name="e", verdict="holds", reason="", slo_tpot_ms=20)
SPOT = Claim(kind="entitlement", name="e", verdict="holds", reason="", backfill=True)
REFUSED = {"outcome": "refused", "status": 429}


@pytest.mark.parametrize(
    ("record", "claim", "result"),
    [
        ({"ttft_s": 0.4}, CLAIM, "kept"),
        ({"ttft_s": 0.6}, CLAIM, "lost"),
        ({}, CLAIM, "kept"),  # sent whole
        ({"tpot_s": 0.03}, PACED, "lost"),
        ({"tpot_s": 0.03}, CLAIM, "kept"),
        ({"outcome": "disconnected", "status": 499, "duration_s": 0.6}, CLAIM, "lost"),
        ({"outcome": "disconnected", "status": 499, "duration_s": 0.1}, CLAIM, None),
        ({"outcome": "upstream_error", "status": 502}, CLAIM, "lost"),
        (REFUSED | {"reason": "priority"}, CLAIM, "lost"),
        (REFUSED | {"reason": "priority"}, SPOT, None),
        ({"outcome": "evicted", "status": 429}, SPOT, None),
        ({"outcome": "evicted", "status": 429}, CLAIM, "lost"),
        (REFUSED | {"reason": "concurrency"}, SPOT, "limited"),
        (REFUSED | {"reason": "budget"}, CLAIM, None),
        (REFUSED | {"status": 400, "reason": "invalid_json"}, CLAIM, None),
        ({"outcome": "error", "status": 400}, CLAIM, None),
        (REFUSED | {"reason": "priority", "batch": ITEM}, CLAIM, None),
    ],
)
def test_as_simulated_requests_are_judged(
    record: dict[str, Any], claim: Claim, result: str | None
) -> None:
    assert judged(decision(**record), claim) == result
