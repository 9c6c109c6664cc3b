"""Count rescues, overruns and lengths of settled requests, by pool, for boundary control.

The settlement reports each request once; boundary control reads the counts every minute. A rescue
counts only if the usage of the engine that then served the request confirms that it was too long,
because a client can provoke a refusal. An overrun is an answer without a client's limit that ended
at its pool's window, where a larger window would have let it continue, or a request for which an
engine ran out of memory. An answer that passes the
boundary within the window is no overrun: it costs memory, and the engines' preemptions show when
memory is short.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.estimate.length_drift import LengthDrift
from gateway.records.decision import DecisionRecord
from gateway.routing.routing_table import PoolShape, Routing

_TOO_LONG: Final = frozenset({"overflow", "empty"})
"""Results of an attempt after which the next larger window is tried."""
_MAX_TENANTS: Final = 1024
"""Most tenants counted separately between two calls of `wrong`."""


class BoundaryWatch:
    """Counts of one model since the start, by pool."""

    __slots__ = (
        "_first",
        "_index",
        "_pools",
        "_wrong",
        "drift",
        "overruns",
        "requests",
        "rescues",
        "several",
        "shares",
    )

    def __init__(self, pools: int, planned: Sequence[tuple[int, float]] = ()) -> None:
        """`planned`: (tokens, share) points that the fleet was planned for; () if unknown."""
        self.requests = [0] * pools
        """Requests sent to an engine of the pool."""
        self.rescues = [0] * pools
        """Requests that an engine of the pool refused as too long, confirmed by usage."""
        self.overruns = [0] * pools
        self.several = [False] * pools
        """Whether more than one tenant ever sent to the pool."""
        self._first: list[str | None] = [None] * pools
        self._wrong: list[Counter[str]] = [Counter() for _ in range(pools)]
        """Rescues and overruns by tenant since the last call of `wrong`."""
        self.drift = LengthDrift(planned) if planned else None
        self.shares: tuple[float, ...] = ()
        """Errors by boundary as shares of requests, where boundary control is on."""
        self._pools: Sequence[PoolShape] = ()
        self._index: dict[str, int] = {}
        """Pool name -> index."""

    def settled(self, record: DecisionRecord, routing: Routing) -> None:
        """Count one settled request, with any outcome."""
        index = self._index
        if routing.pools is not self._pools:  # a boundary moved
            self._pools = routing.pools
            index = self._index = {shape.name: i for i, shape in enumerate(routing.pools)}
        attempts, tenant = record.attempts, record.tenant or ""
        usage, cap_tokens = record.usage, record.estimate.cap_tokens
        if len(attempts) > 1:  # the last one of each pool counts
            attempts = tuple({a.pool: a for a in attempts}.values())
        for attempt in attempts:
            pool = index[attempt.pool]
            self.requests[pool] += 1
            first = self._first[pool]
            if first is None:
                self._first[pool] = tenant
            elif first != tenant:
                self.several[pool] = True
            if attempt.result == "out_of_memory":
                self.overruns[pool] += 1
                self._note(pool, tenant)
            elif attempt.result in _TOO_LONG and usage.source == "engine":
                needed = (usage.prompt_tokens or 0) + (cap_tokens or 1)
                if needed > routing.pools[pool].window_tokens:
                    self.rescues[pool] += 1
                    self._note(pool, tenant)
        if record.outcome != "ok" or usage.source != "engine" or record.estimate.sequences != 1:
            return
        prompt, answer = usage.prompt_tokens or 0, usage.completion_tokens or 0
        limited = cap_tokens is not None or routing.default_max_tokens is not None
        pool = index[record.pool or routing.pools[-1].name]
        if not limited and prompt + answer >= routing.pools[pool].window_tokens:
            self.overruns[pool] += 1
            self._note(pool, tenant)
        if self.drift is not None and prompt:
            self.drift.add(record.compression.sent_tokens(prompt) + answer)

    def wrong(self, pool: int) -> dict[str, int]:
        """Rescues and overruns by tenant since the last call."""
        found, self._wrong[pool] = self._wrong[pool], Counter()
        return dict(found)

    def _note(self, pool: int, tenant: str) -> None:
        wrong = self._wrong[pool]
        if tenant in wrong or len(wrong) < _MAX_TENANTS:
            wrong[tenant] += 1


class Rising:
    """How much counters rose since the last call; a counter that fell has restarted from 0."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[object, float] = {}

    def by(self, totals: Mapping[object, float]) -> float:
        """Sum of all keys' rises; a key's first total counts as no rise. Keys are kept for ever."""
        risen = 0.0
        for key, total in totals.items():
            before = self._last.get(key, total)
            risen += total - before if total >= before else total
        self._last.update(totals)
        return risen
