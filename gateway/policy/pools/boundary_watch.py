"""What settled requests say of a model's boundaries: counts by pool, and lengths.

Told once a request, at settlement; read every minute by whoever moves boundaries. A rescue counts
if the usage of the engine that served it then says that it was too long: what an engine refuses
with may be of the client's making. An overrun is
an answer that its client did not limit and that ended at the window of its pool, where a larger
window would have let it go on. Passing the boundary within the window is none: that costs
memory, and the engines' preemptions tell when memory is short.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.policy.estimate.length_drift import LengthDrift
from gateway.policy.pools.routing_table import PoolShape, Routing
from gateway.records.decision import DecisionRecord

_TOO_LONG: Final = frozenset({"overflow", "empty"})
"""Results of an attempt that ask for the next larger window."""
_MOST_TENANTS: Final = 1024
"""Told apart between two looks at what went wrong."""


class BoundaryWatch:
    """Counts of one model since its start, by pool."""

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
        """`planned`: the lengths that the fleet was planned for, if that is known."""
        self.requests = [0] * pools
        """Sent to an engine of the pool."""
        self.rescues = [0] * pools
        """Refused by one as too long, and truly so."""
        self.overruns = [0] * pools
        self.several = [False] * pools
        """Whether more than one tenant ever sent to the pool."""
        self._first: list[str | None] = [None] * pools
        self._wrong: list[Counter[str]] = [Counter() for _ in range(pools)]
        """Rescues and overruns since the last look, by tenant."""
        self.drift = LengthDrift(planned) if planned else None
        self.shares: tuple[float, ...] = ()
        """What goes wrong by boundary, where one moves by itself; shares of requests."""
        self._pools: Sequence[PoolShape] = ()
        self._index: dict[str, int] = {}
        """Where each of them is, by name."""

    def settled(self, record: DecisionRecord, routing: Routing) -> None:
        """One request came to its end, however it ended."""
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
            if attempt.result in _TOO_LONG and usage.source == "engine":
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
            # A compressed prompt counts as it came.
            self.drift.add(round(prompt / (record.compression.kept_share or 1)) + answer)

    def wrong(self, pool: int) -> dict[str, int]:
        """Rescues and overruns by tenant since this was last asked."""
        found, self._wrong[pool] = self._wrong[pool], Counter()
        return dict(found)

    def _note(self, pool: int, tenant: str) -> None:
        wrong = self._wrong[pool]
        if tenant in wrong or len(wrong) < _MOST_TENANTS:
            wrong[tenant] += 1


class Rising:
    """What totals rose by since they were last looked at; one that fell began anew."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[object, float] = {}

    def by(self, totals: Mapping[object, float]) -> float:
        """The sum over all keys; a key's first total is its start. Keys are never forgotten."""
        risen = 0.0
        for key, total in totals.items():
            before = self._last.get(key, total)
            risen += total - before if total >= before else total
        self._last.update(totals)
        return risen
