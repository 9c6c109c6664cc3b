"""The newest decisions in brief, read from the decision ring while somebody looks.

The ring keeps records as JSON. Each look decodes the records that are new since the last one, at
most MAX_NEW of a replica, so a busy gateway shows a sample of its requests.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from gateway.control.peers import understood
from gateway.records.decision import (
    NO_ADMISSION,
    NO_COMPRESSION,
    NO_ESTIMATE,
    NO_PLAN,
    NO_TIMING,
    NO_USAGE,
    AdmissionSection,
    CompressionSection,
    EstimateSection,
    PlanSection,
    TimingSection,
    UsageSection,
)
from gateway.replicas.calls import ReplicaCalls

KEPT: Final = 2000
FIRST: Final = 500
"""Records read when somebody begins to look; reading takes some 5 us each."""
MAX_NEW: Final = 200
MAX_PER_PEER: Final = 50


class Brief(msgspec.Struct):
    """The part of a decision record that the dashboard lists or counts."""

    time_unix_s: float
    request_id: str
    outcome: str
    status: int
    model: str | None = None
    tenant: str | None = None
    entitlement: str | None = None
    stream: bool = False
    reason: str | None = None
    pool: str | None = None
    worker: str | None = None
    estimate: EstimateSection = NO_ESTIMATE
    plan: PlanSection = NO_PLAN
    admission: AdmissionSection = NO_ADMISSION
    compression: CompressionSection = NO_COMPRESSION
    usage: UsageSection = NO_USAGE
    timing: TimingSection = NO_TIMING

    @property
    def total_tokens(self) -> int | None:
        """Prompt plus answer as served; a compressed prompt counts with its original length."""
        if self.usage.prompt_tokens is None or self.outcome != "ok":
            return None
        sent = self.compression.sent_tokens(self.usage.prompt_tokens)
        return sent + (self.usage.completion_tokens or 0)

    def matches(self, text: str) -> bool:
        """Whether a name or code of the request contains `text`, which is in lower case."""
        names = [
            *(self.request_id, self.model, self.tenant, self.entitlement, self.pool),
            *(self.worker, self.outcome, self.reason, str(self.status)),
        ]
        if self.compression.kept_share is not None:
            names.append("compressed")
        if self.admission.spilled:
            names.append("spilled")
        return any(text in name.casefold() for name in names if name)


_one: Final = msgspec.json.Decoder(Brief).decode
_several: Final = msgspec.json.Decoder(list[Brief]).decode


class RecentDecisions:
    """The newest decisions of all replicas in brief, newest first."""

    def __init__(self, latest: Callable[[int], list[msgspec.Raw]], peers: ReplicaCalls) -> None:
        """`latest` returns the newest records of this replica."""
        self._latest = latest
        self._peers = peers
        self._known: deque[Brief] = deque(maxlen=KEPT)
        self._ids: set[tuple[str, float]] = set()

    @property
    def briefs(self) -> Sequence[Brief]:
        """What is known, newest first."""
        return self._known

    async def look(self) -> None:
        """Read what is new."""
        count = MAX_NEW if self._known else FIRST
        answers = await self._peers.ask("decisions", b"%d" % MAX_PER_PEER)
        new = self._unknown(map(_one, self._latest(count)))
        for briefs in understood(_several, answers):
            new += self._unknown(briefs)
        new.sort(key=lambda brief: brief.time_unix_s)
        self._known.extendleft(new)
        if len(self._ids) > 2 * KEPT:
            self._ids = {(brief.request_id, brief.time_unix_s) for brief in self._known}

    def _unknown(self, newest_first: Iterable[Brief]) -> list[Brief]:
        found = []
        for brief in newest_first:
            key = (brief.request_id, brief.time_unix_s)
            if key in self._ids:
                break  # everything older was read before
            self._ids.add(key)
            found.append(brief)
        return found


def row(brief: Brief) -> dict[str, Any]:
    """A decision as a row of the list."""
    return {
        "id": brief.request_id,
        "time": brief.time_unix_s,
        "outcome": brief.outcome,
        "status": brief.status,
        "reason": brief.reason,
        "entitlement": brief.entitlement,
        "model": brief.model,
        "pool": brief.pool,
        "worker": brief.worker,
        "tokens": brief.estimate.total_tokens,
        "ttft": brief.timing.ttft_s,
        "queue_ms": brief.timing.queue_ms,
        "seconds": brief.timing.duration_s,
        "compressed": brief.compression.compressed,
        "spilled": brief.admission.spilled,
    }
