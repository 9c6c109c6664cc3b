"""The soak's books: compare clients' counts with the request log, and the log with /metrics.

Counts must match exactly: every request sent is one line and one count. A client that left may
have had the answer by then, so its line may say ok, disconnected or an engine's error.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from bench.common.gateway_books import Line
from bench.common.report import Row, equals
from bench.soak.gateway import TIGHT

BROKEN: Final = "upstream_error"
EXAMPLES: Final = 8


class LogTotals:
    """What the request log says, added up as it is read."""

    def __init__(self, failing: Iterable[str]) -> None:
        """`failing`: engines that fail now and then."""
        self._failing = frozenset(failing)
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[int | str] = Counter()
        """Of refusals."""
        self.compressed = 0
        self.waited = 0
        """Requests that waited in the gateway."""
        self.left_waiting = 0
        """Clients that left while their request waited, or before its first token."""
        self.caused = 0
        """Errors of engines that fail now and then."""
        self.uncaused: list[str] = []
        self.uncaused_count = 0

    def add(self, lines: Iterable[Line]) -> None:
        """Take over new lines."""
        for line in lines:
            self.outcomes[line.outcome] += 1
            if line.outcome in {"refused", "error"}:
                self.statuses[line.status] += 1
            self.compressed += line.compression.compressed != "none"
            self.waited += line.timing.queue_ms > 1.0
            if line.outcome == "disconnected" and line.model == TIGHT:
                self.left_waiting += 1
            if line.outcome in {BROKEN, "internal_error"} or str(line.status) >= "500":
                self._judge(line)

    @property
    def count(self) -> int:
        """Lines."""
        return self.outcomes.total()

    def _judge(self, line: Line) -> None:
        if line.outcome == BROKEN and any(try_.worker in self._failing for try_ in line.attempts):
            self.caused += 1
            return
        self.uncaused_count += 1
        if len(self.uncaused) < EXAMPLES:
            tries = ", ".join(f"{try_.worker} {try_.result}" for try_ in line.attempts)
            self.uncaused.append(f"{line.request_id} {line.status} {line.reason}: {tries}")


def book_rows(
    totals: LogTotals,
    counted: Mapping[str, int],
    ended: Mapping[tuple[str, str], int],
    bulk_ok: int,
    bulk_failed: int,
) -> list[Row]:
    """Requests by how they ended: clients, log, metrics. `counted`: /metrics by outcome."""
    by_end: Counter[str] = Counter()
    for (_, how), count in ended.items():
        by_end[how] += count
    sent = by_end.total() + bulk_ok + bulk_failed
    outcomes = set(counted) | set(totals.outcomes)
    differ = sum(abs(counted.get(o, 0) - totals.outcomes[o]) for o in outcomes)
    wrong, unseen = refusal_gaps(by_end, totals.statuses)
    whole = sum(by_end[how] for how in ("ok", "left", "broken", "lost")) + bulk_ok + bulk_failed
    whole += sum(count for how, count in by_end.items() if how.startswith("http 5"))
    served = sum(totals.outcomes[o] for o in ("ok", "disconnected", "evicted", BROKEN))
    told = ", ".join(f"{how} {count}" for how, count in sorted(by_end.items()))
    refused = {str(status): count for status, count in totals.statuses.items()}
    return [
        equals("sent - logged", sent - totals.count, 0, note=f"{sent} requests; visitors: {told}"),
        equals("logged and counted, by outcome: differences", differ, 0, note=_listed(counted)),
        equals(
            "refusals by status, clients and log: differences",
            wrong,
            0,
            note=f"{_listed(refused)}; {unseen} had left before they could see it",
        ),
        equals("served, clients - log", whole - unseen - served, 0),
        equals("bulk requests that failed", bulk_failed, 0),
    ]


def refusal_gaps(by_end: Mapping[str, int], logged: Mapping[int | str, int]) -> tuple[int, int]:
    """Refusals that differ, and those that nobody saw: whoever left may have been refused, too."""
    statuses = {str(status): count for status, count in logged.items()}
    seen = {
        how.removeprefix("http "): count
        for how, count in by_end.items()
        if how.startswith("http 4")
    }
    gaps = [statuses.get(s, 0) - seen.get(s, 0) for s in statuses.keys() | seen.keys()]
    unseen = sum(gap for gap in gaps if gap > 0)
    too_few = -sum(gap for gap in gaps if gap < 0)
    return too_few + max(0, unseen - by_end.get("left", 0)), unseen


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
