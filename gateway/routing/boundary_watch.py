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


class PoolCounts:
    """What was settled in one pool since its last sample."""

    def __init__(self) -> None:
        self.requests = 0
        """Requests sent to an engine of the pool."""
        self.rescues = 0
        """Requests that an engine of the pool refused as too long, confirmed by usage."""
        self.overruns = 0
        self.wrong: Counter[str] = Counter()
        """Rescues and overruns by tenant."""
        self.first: str | None = None
        """The first tenant that ever sent to the pool."""
        self.several = False
        """Whether more than one ever did."""
        self.engines: tuple[float, float] | None = None
        """Preemptions and finished requests that engines had counted at the last sample."""

    def note(self, tenant: str) -> None:
        """Count a rescue or overrun for its tenant."""
        if tenant in self.wrong or len(self.wrong) < _MAX_TENANTS:
            self.wrong[tenant] += 1


class BoundaryWatch:
    """Counts of one model, by pool."""

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
        self.pools = [PoolCounts() for _ in range(pools)]
        self.drift = LengthDrift(planned) if planned else None
        self.drifted = False
        """Whether the log told of drift."""
        self.shares: tuple[float, ...] = ()
        """Errors by boundary as shares of requests, where boundary control is on."""
        self._shapes: Sequence[PoolShape] = ()
        self._index: dict[str, int] = {}
        """Pool name -> index."""

    def settled(self, record: DecisionRecord, routing: Routing) -> None:
        """Count one settled request, with any outcome."""
        index = self._index
        if routing.pools is not self._shapes:  # a boundary moved
            self._shapes = routing.pools
            index = self._index = {shape.name: i for i, shape in enumerate(routing.pools)}
        attempts, tenant = record.attempts, record.tenant or ""
        usage, cap_tokens = record.usage, record.estimate.cap_tokens
        if len(attempts) > 1:  # the last one of each pool counts
            attempts = tuple({a.pool: a for a in attempts}.values())
        for attempt in attempts:
            place = index[attempt.pool]
            pool = self.pools[place]
            pool.requests += 1
            if pool.first is None:
                pool.first = tenant
            elif pool.first != tenant:
                pool.several = True
            if attempt.result == "out_of_memory":
                pool.overruns += 1
                pool.note(tenant)
            elif attempt.result in _TOO_LONG and usage.source == "engine":
                needed = (usage.prompt_tokens or 0) + (cap_tokens or 1)
                if needed > routing.pools[place].window_tokens:
                    pool.rescues += 1
                    pool.note(tenant)
        if record.outcome != "ok" or usage.source != "engine" or record.estimate.sequences != 1:
            return
        prompt, answer = usage.prompt_tokens or 0, usage.completion_tokens or 0
        limited = cap_tokens is not None or routing.default_max_tokens is not None
        place = index[record.pool or routing.pools[-1].name]
        if not limited and prompt + answer >= routing.pools[place].window_tokens:
            self.pools[place].overruns += 1
            self.pools[place].note(tenant)
        if self.drift is not None and prompt:
            self.drift.add(record.compression.sent_tokens(prompt) + answer)

    def sample(self, pool: int, state: PoolState) -> PoolSample:
        """What happened in a pool since its last sample."""
        counts, view = self.pools[pool], state.view
        tell = [
            engine
            for engine in view.samples
            if engine.preemptions_total is not None and engine.finished_total is not None
        ]
        now = (view.preemptions, view.finished)
        # What engines counted before the first sample is nothing that happened since.
        before = counts.engines or now
        now = now if tell else before
        counts.engines = now
        sequences = sum((engine.running or 0.0) + (engine.waiting or 0.0) for engine in tell)
        slots = max(1, len(state.alive) * state.slots_per_worker)
        sample = PoolSample(
            requests=counts.requests,
            rescues=counts.rescues,
            overruns=counts.overruns,
            wrong=dict(counts.wrong) if counts.several else None,
            preemptions=now[0] - before[0],
            finished=now[1] - before[1],
            load=max(
                max(state.inflight, sequences) / slots,
                sum(engine.kv_usage or 0.0 for engine in tell) / max(1, len(tell)),
            ),
        )
        counts.requests = counts.rescues = counts.overruns = 0
        counts.wrong.clear()
        return sample
