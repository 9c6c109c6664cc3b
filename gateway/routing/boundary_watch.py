"""What boundary control of one model reads: rescues, overruns, lengths, and engines' counters.

The settlement reports each request once; boundary control reads the counts every minute. A rescue
counts only if the usage of the engine that then served the request confirms that it was too long,
because a client can provoke a refusal. An overrun is an answer without a client's limit that ended
at its pool's window, where a larger window would have let it continue, or a request for which an
engine ran out of memory. An answer that passes the
boundary within the window is no overrun: it costs memory, and the engines' preemptions show when
memory is short.
"""

from collections.abc import Sequence
from typing import Final

from gateway.estimate.length_drift import LengthDrift
from gateway.fleet.fleet import PoolState
from gateway.records.decision import DecisionRecord
from gateway.routing.boundary_control import BoundaryControl, Move, PoolSample
from gateway.routing.routing import PoolShape, Routing

_TOO_LONG: Final = frozenset({"overflow", "empty"})
"""Results of an attempt after which the next larger window is tried."""
_NO_PLACE: Final = frozenset({"priority", "queue_full", "queue_timeout"})
"""Refusals for want of room in a pool, whoever asks."""
_MAX_TENANTS: Final = 1024
"""Most tenants counted separately between two samples."""


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
        self.pools = [PoolSample() for _ in range(pools)]
        """What was settled since the last sample."""
        self.several = [False] * pools
        """Whether more than one tenant ever sent to the pool."""
        self._first: list[str | None] = [None] * pools
        self._engines: list[tuple[float, float] | None] = [None] * pools
        """Preemptions and finished requests that engines had counted at the last sample."""
        self.drift = LengthDrift(planned) if planned else None
        self.drifted = False
        """Whether the log told of drift."""
        self.moves: dict[str, tuple[float, Move]] = {}
        """By pool below the boundary: the newest move, made or only proposed, and when."""
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
        self._count_turned_away(index, record)
        attempts, tenant = record.attempts, record.tenant or ""
        usage, cap_tokens = record.usage, record.estimate.cap_tokens
        if len(attempts) > 1:  # the last one of each pool counts
            attempts = tuple({a.pool: a for a in attempts}.values())
        for attempt in attempts:
            place = index[attempt.pool]
            pool = self.pools[place]
            pool.requests += 1
            first = self._first[place]
            if first is None:
                self._first[place] = tenant
            elif first != tenant:
                self.several[place] = True
            if attempt.result == "out_of_memory":
                pool.overruns += 1
                _note(pool, tenant)
            elif attempt.result in _TOO_LONG and usage.source == "engine":
                needed = (usage.prompt_tokens or 0) + (cap_tokens or 1)
                if needed > routing.pools[place].window_tokens:
                    pool.rescues += 1
                    _note(pool, tenant)
        if record.outcome != "ok" or usage.source != "engine" or record.estimate.sequences != 1:
            return
        prompt, answer = usage.prompt_tokens or 0, usage.completion_tokens or 0
        limited = cap_tokens is not None or routing.default_max_tokens is not None
        place = index[record.pool or routing.pools[-1].name]
        if not limited and prompt + answer >= routing.pools[place].window_tokens:
            self.pools[place].overruns += 1
            _note(self.pools[place], tenant)
        if self.drift is not None and prompt:
            self.drift.add(record.compression.sent_tokens(prompt) + answer)

    def _count_turned_away(self, index: dict[str, int], record: DecisionRecord) -> None:
        """Count a request that found no room where it belongs; items of batches take leftovers."""
        place = index.get(record.admission.asked_pool or record.plan.pool or "")
        turned_away = record.reason in _NO_PLACE or record.admission.spilled
        if turned_away and record.batch is None and place is not None:
            self.pools[place].turned_away += 1

    def sample(self, pool: int, state: PoolState) -> PoolSample:
        """What happened in a pool since its last sample."""
        sample, view = self.pools[pool], state.view
        self.pools[pool] = PoolSample()
        if not self.several[pool]:
            sample.wrong = {}
        tell = [
            engine
            for engine in view.samples.values()
            if engine.preemptions_total is not None and engine.finished_total is not None
        ]
        # What engines counted before the first sample is nothing that happened since.
        before = self._engines[pool] or (view.preemptions, view.finished)
        now = (view.preemptions, view.finished) if tell else before
        self._engines[pool] = now
        sample.preemptions, sample.finished = now[0] - before[0], now[1] - before[1]
        sequences = sum(((e.running or 0.0) + (e.waiting or 0.0) for e in tell), 0.0)
        slots = max(1, len(state.alive) * state.slots_per_worker)
        prefilling = 0 if state.prefill is None else state.prefill.total_active
        queued = max(0, state.inflight - state.total_active - prefilling)
        sample.waiting = sum((engine.waiting or 0.0 for engine in tell), float(queued)) / slots
        sample.load = max(
            max(state.inflight + state.total_elsewhere, sequences) / slots,
            sum((engine.kv_usage or 0.0 for engine in tell), 0.0) / max(1, len(tell)),
        )
        return sample


def _note(pool: PoolSample, tenant: str) -> None:
    """Count a rescue or overrun for its tenant."""
    if tenant in pool.wrong or len(pool.wrong) < _MAX_TENANTS:
        pool.wrong[tenant] = pool.wrong.get(tenant, 0) + 1
