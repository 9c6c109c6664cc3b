"""What was asked of a model in the last week: requests by hour, and a sample with lengths.

`sluice plan --live` plans by it. Demand is what was served and what wanted capacity and got none;
a client that asks again with the same body within the wait it was told is one demand. The sample
is even: every `stride`-th demand, twice as many apart each time that a week's do not fit.
"""

from typing import Any, Final

import msgspec

from gateway.records.decision import NO_SCHEDULING, DecisionRecord

HOUR_S: Final = 3600
HOURS: Final = 168
SAMPLED: Final = 2048
RETRY_SLACK_S: Final = 10.0
"""Clients come back later than they were told: they round up, back off (8 s) and connect."""
_LOAD: Final = frozenset({429, 503})
_UNSERVED: Final = frozenset({"evicted", "upstream_error", "disconnected"})
"""Outcomes of requests that wanted capacity and did not get it, or not to their end."""
_REFUSED: Final = 4096
"""Most refused bodies remembered."""


def wants_capacity(outcome: str, status: object, batch: object) -> bool:
    """Whether a request is demand; bad requests, and those of no tenant, are none.

    An item of a batch is where it is served: one that finds nothing left over comes back.
    """
    wants = outcome in _UNSERVED or (outcome == "refused" and status in _LOAD)
    return outcome == "ok" or (wants and batch is None)


class LiveDemand:
    """The demand of one model. Memory does not grow."""

    def __init__(self) -> None:
        self.hours: dict[int, list[int]] = {}
        """Hours since 1970 -> requests, and those of them that were not served."""
        self.stride = 1
        self.first_unix_s = self.last_unix_s = 0.0
        self._seen = 0
        self._sample: list[DecisionRecord] = []
        self._refused: dict[tuple[str, int], float] = {}
        """Entitlement and body -> until when a retry may come."""

    def add(self, record: DecisionRecord) -> None:
        """Count one settled request."""
        if not wants_capacity(record.outcome, record.status, record.batch):
            return
        now_s, served = record.time_unix_s, record.outcome == "ok"
        hour = int(now_s // HOUR_S)
        counts = self.hours.get(hour)
        if counts is None:
            counts = self.hours[hour] = [0, 0]
            for old in [each for each in self.hours if each <= hour - HOURS]:
                del self.hours[old]
            self.first_unix_s = self.first_unix_s or now_s
        self.last_unix_s = max(self.last_unix_s, now_s)
        if (self._refused or not served) and self._again(record, served=served):
            counts[1] = max(0, counts[1] - served)
            return
        counts[0] += 1
        counts[1] += not served
        if self._seen % self.stride == 0:
            self._keep(record)
        self._seen += 1

    def _again(self, record: DecisionRecord, *, served: bool) -> bool:
        """Whether it is a retry of a request that counts already; refused bodies are noted."""
        digest = record.request.body_digest
        if digest is None:
            return False
        key = (record.entitlement or "", digest)
        again = record.time_unix_s <= self._refused.pop(key, 0.0)
        if not served:
            if len(self._refused) >= _REFUSED:
                del self._refused[next(iter(self._refused))]
            until_s = record.time_unix_s + (record.retry_after_s or 0.0) + RETRY_SLACK_S
            self._refused[key] = until_s
        return again

    def _keep(self, record: DecisionRecord) -> None:
        """Add to the sample what tells lengths and compression."""
        if len(self._sample) >= SAMPLED:
            self._sample = self._of_last_week()
            if len(self._sample) > SAMPLED // 2:
                self._sample = self._sample[::2]
                self.stride *= 2
        slim = {"scheduling": NO_SCHEDULING, "attempts": (), "prompt": None}
        self._sample.append(msgspec.structs.replace(record, **slim))

    def _of_last_week(self) -> list[DecisionRecord]:
        oldest_s = self.last_unix_s - HOURS * HOUR_S
        return [each for each in self._sample if each.time_unix_s > oldest_s]

    def shown(self) -> dict[str, Any]:
        """As `GET /admin/demand` shows it."""
        return {
            "first_unix_s": self.first_unix_s,
            "last_unix_s": self.last_unix_s,
            "hours": [[hour * HOUR_S, *counts] for hour, counts in sorted(self.hours.items())],
            "stride": self.stride,
            "records": self._of_last_week(),
        }
