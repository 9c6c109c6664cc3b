"""Decides whether one request kept its entitlement's target time to first token.

Rules:
- Only streams count: an answer that is sent whole has no first token that its client could see.
- A request counts as met or not once it was admitted. One that then failed, was evicted, or was
  refused for load (a full queue, no worker) did not keep the target, whatever came before.
- An admission that refused honestly, with the wait, is counted apart: it is a promise of capacity
  that was not broken, and the client was told at once.
- The client's own faults (4xx) count as nothing. A client that leaves before the first token
  counts as not met if it had waited beyond the target, else as nothing.
"""

from typing import Final, Literal

from gateway.records.decision import DecisionRecord

SloResult = Literal["true", "false", "refused"]
RESULTS: Final[tuple[SloResult, ...]] = ("true", "false", "refused")
_FAILED = frozenset({"evicted", "upstream_error", "internal_error"})


def slo_result(record: DecisionRecord, target_ms: int, *, admitted: bool) -> SloResult | None:
    """Whether a request kept its target; None if it counts as nothing.

    `target_ms` 0: no target. `admitted`: admission gave it a lease.
    """
    if not target_ms or not record.stream:
        return None
    outcome, timing = record.outcome, record.timing
    if outcome in _FAILED:
        return "false"
    if outcome == "refused":
        if record.status != 429 and record.status < 500:
            return None
        return "false" if admitted else "refused"
    if outcome == "error":
        return None
    late_s = timing.ttft_s
    if late_s is None:
        waited_s = timing.duration_s or 0.0
        left = outcome == "disconnected" and waited_s * 1000 > target_ms
        return "false" if left else None
    return "true" if late_s * 1000 <= target_ms else "false"
