"""u: each client's recent service, in kilotokens of uncached prompt, decaying exponentially.

QUARTZ, sections 3.4 and 4.3: the decay keeps a permanently active client from being penalised
for ever, and idle clients are forgotten. A prefill counts when it is done, by its uncached tokens.
"""

from collections.abc import Callable, Mapping
from math import exp, inf
from typing import Any, Final

from gateway.scheduling.scheduler import Job

MAX_CLIENTS: Final = 16_384
IDLE_KILOTOKENS: Final = 1e-3
"""A client below this is forgotten."""


class ServedShares:
    """The clients' counters; beyond `most`, the least recently updated is dropped."""

    __slots__ = ("_most", "_reported", "_tau_s", "_totals", "_used")

    def __init__(self, tau_s: float, most: int = MAX_CLIENTS) -> None:
        self._tau_s = tau_s
        self._most = most
        self._used: dict[str, tuple[float, float]] = {}  # (kilotokens, time), latest last
        self._totals: dict[str, float] = {}  # served here since the client was added
        self._reported: dict[str, Mapping[str, Any]] = {}  # replicas' totals at the last merge

    def __len__(self) -> int:
        return len(self._used)

    def kilotokens(self, client: str, now_s: float) -> float:
        """The client's recent service (u), >= 0."""
        held = self._used.get(client)
        if held is None:
            return 0.0
        value, at_s = held
        return value * exp((at_s - now_s) / self._tau_s) if now_s > at_s else value

    def served(self, client: str, tokens: int, now_s: float) -> None:
        """Count an uncached prefill, in tokens."""
        self._add(client, tokens / 1000.0, now_s)
        self._totals[client] = self._totals.get(client, 0.0) + tokens / 1000.0

    def state(self) -> dict[str, float]:
        """Kilotokens served here by client, since each was added: for the other replicas."""
        return dict(self._totals)

    def merge(self, states: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        """Add the service of the other replicas, by name, since the last merge.

        A replica's first state is only the baseline for later differences.
        """
        received: dict[str, Mapping[str, Any]] = {}
        for name, totals in states.items():
            received[name] = totals
            before = self._reported.get(name)
            if before is None:
                continue
            for client, total in totals.items():
                last = before.get(client, 0.0)
                if total == last or not isinstance(total, int | float):
                    continue  # the usual case: nothing new
                last = last if isinstance(last, int | float) else 0.0
                # A smaller total: the replica forgot the client in between.
                more = total - last if total >= last else total
                if 0.0 < more < inf:
                    self._add(client, more, now_s)
        self._reported = received

    def sweep(self, now_s: float) -> None:
        """Forget idle clients, beginning with the least recently updated."""
        used = self._used
        while used and self.kilotokens(client := next(iter(used)), now_s) < IDLE_KILOTOKENS:
            self._forget(client)

    def _add(self, client: str, kilotokens: float, now_s: float) -> None:
        value = self.kilotokens(client, now_s) + kilotokens
        self._used.pop(client, None)
        self._used[client] = (value, now_s)
        if len(self._used) > self._most:
            self._forget(next(iter(self._used)))

    def _forget(self, client: str) -> None:
        del self._used[client]
        self._totals.pop(client, None)


def newest_of_largest(jobs: list[Job]) -> Job:
    """The newest request of whoever holds most for its share, in the lowest class.

    `jobs` in order of arrival.
    """
    priority_class = max(job.priority_class for job in jobs)
    lowest = [job for job in jobs if job.priority_class == priority_class]
    largest = _largest(lowest, lambda job: job.tenant)
    return _largest(largest, lambda job: job.client)[-1]


def _largest(jobs: list[Job], holder: Callable[[Job], str]) -> list[Job]:
    """The jobs of those who hold most for their share."""
    held: dict[str, float] = {}
    for job in jobs:
        held[holder(job)] = held.get(holder(job), 0.0) + 1.0 / job.share
    most = max(held.values())
    return [job for job in jobs if held[holder(job)] >= most]
