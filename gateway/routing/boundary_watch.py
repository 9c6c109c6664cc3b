"""What boundary control of one model reads: rescues, overruns, lengths, and engines' counters.

The settlement reports each request once; boundary control reads the counts every minute. A rescue
counts only if the usage of the engine that then served the request confirms that it was too long,
because a client can provoke a refusal. An overrun is an answer without a client's limit that ended
at its pool's window, where a larger window would have let it continue, or a request for which an
engine ran out of memory. An answer that passes the
boundary within the window is no overrun: it costs memory, and the engines' preemptions show when
memory is short.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from gateway.estimate.length_drift import LengthDrift
from gateway.fleet.fleet import PoolState
from gateway.records.decision import DecisionRecord
from gateway.routing.boundary_control import BoundaryControl, PoolSample
from gateway.routing.routing import PoolShape, Routing

_TOO_LONG: Final = frozenset({"overflow", "empty"})
"""Results of an attempt after which the next larger window is tried."""
_MAX_TENANTS: Final = 1024
"""Most tenants counted separately between two samples."""


class BoundaryWatch:
    """Counts of one model since the start, by pool."""

    def __init__(
        self,
        pools: int,
        planned: Sequence[tuple[int, float]] = (),
        control: BoundaryControl | None = None,
    ) -> None:
        """`planned`: (tokens, share) points that the fleet was planned for; () if unknown.

        `control` moves the boundaries; None where they are fixed.
        """
        self.control = control
        self.requests = [0] * pools
        """Requests sent to an engine of the pool."""
        self.rescues = [0] * pools
        """Requests that an engine of the pool refused as too long, confirmed by usage."""
        self.overruns = [0] * pools
        self.several = [False] * pools
        """Whether more than one tenant ever sent to the pool."""
        self._first: list[str | None] = [None] * pools
        self._wrong: list[Counter[str]] = [Counter() for _ in range(pools)]
        """Rescues and overruns by tenant since the last sample."""
        self._sampled: list[tuple[float, ...]] = [()] * pools
        """The counts at the last sample."""
        self.drift = LengthDrift(planned) if planned else None
        self.drifted = False
        """Whether the log told of drift."""
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

    def sample(self, pool: int, state: PoolState) -> PoolSample:
        """What happened in a pool since its last sample."""
        view = state.view
        tell = [
            engine
            for engine in view.samples
            if engine.preemptions_total is not None and engine.finished_total is not None
        ]
        engines = (view.preemptions, view.finished)
        # What engines counted before the first sample is nothing that happened since.
        before = self._sampled[pool] or (0, 0, 0, *engines)
        if not tell:
            engines = before[3], before[4]
        now = (self.requests[pool], self.rescues[pool], self.overruns[pool], *engines)
        self._sampled[pool] = now
        wrong, self._wrong[pool] = self._wrong[pool], Counter()
        sequences = sum((engine.running or 0.0) + (engine.waiting or 0.0) for engine in tell)
        slots = max(1, len(state.alive) * state.slots_per_worker)
        return PoolSample(
            requests=now[0] - int(before[0]),
            rescues=now[1] - int(before[1]),
            overruns=now[2] - int(before[2]),
            wrong=dict(wrong) if self.several[pool] else None,
            preemptions=now[3] - before[3],
            finished=now[4] - before[4],
            load=max(
                max(state.inflight, sequences) / slots,
                sum(engine.kv_usage or 0.0 for engine in tell) / max(1, len(tell)),
            ),
        )

    def _note(self, pool: int, tenant: str) -> None:
        wrong = self._wrong[pool]
        if tenant in wrong or len(wrong) < _MAX_TENANTS:
            wrong[tenant] += 1
