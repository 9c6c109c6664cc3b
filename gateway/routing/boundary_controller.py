"""Samples each model's counts once a minute, moves its boundaries, and logs why.

`gateway.routing.boundary_control` decides. A move replaces the model's routing table at once;
requests in flight keep their plan.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from gateway.background_task import BackgroundTasks
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.records.record import Record
from gateway.routing.boundary_control import SAMPLE_S, BoundaryControl, Move, PoolSample
from gateway.routing.boundary_watch import BoundaryWatch, Rising

_log = logging.getLogger("sluice.boundary")


class EngineTotals(Record, frozen=True, kw_only=True):
    """Counters of one engine since it started, and its current load."""

    preemptions: float
    finished: float
    """Requests that it answered, from any client."""
    sequences: float = 0.0
    """Sequences in the engine now, running or queued, from any client."""
    kv_usage: float = 0.0
    """Share of its KV cache in use, 0 to 1."""


AskTotals = Callable[[ModelRuntime, int], Mapping[int, EngineTotals]]
"""Gives totals for a model's pool, by worker; workers without figures are absent. No I/O."""


def reported_totals(served: ModelRuntime, pool: int) -> Mapping[int, EngineTotals]:
    """Totals from the engines' metrics pages (`gateway.fleet.metrics_scraper`)."""
    if not served.fleet.telemetry:
        return {}
    return {
        worker: EngineTotals(
            preemptions=sample.preemptions_total,
            finished=sample.finished_total,
            sequences=(sample.running or 0.0) + (sample.waiting or 0.0),
            kv_usage=sample.kv_usage or 0.0,
        )
        for worker, sample in enumerate(served.fleet.telemetry[pool].samples)
        if sample.preemptions_total is not None and sample.finished_total is not None
    }


class BoundaryController:
    """Watches the models that have a plan or adaptive boundaries."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        controls: Mapping[str, BoundaryControl],
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        ask: AskTotals = reported_totals,
    ) -> None:
        """`controls` by model, where boundaries move; `clock` monotonic, in seconds."""
        self._metrics = metrics
        self._clock = clock
        self._ask = ask
        self._watched: dict[str, _Watched] = {}
        for served in models:
            self.watch(served, controls.get(served.name))
        self._background = BackgroundTasks()

    def watch(self, served: ModelRuntime, control: BoundaryControl | None) -> None:
        """Watch a model from now on, in place of the one of that name before it."""
        self.forget(served.name)
        if served.watch is not None:
            self._watched[served.name] = _Watched(served, control)

    def forget(self, model: str) -> None:
        """Watch a model no more."""
        self._watched.pop(model, None)

    async def start(self) -> None:
        """Sample once a minute from now on."""
        self._background.start(self._run())

    async def close(self) -> None:
        await self._background.close()

    def look(self) -> list[Move]:
        """Sample every model, apply the moves, and return them."""
        moves = []
        for one in self._watched.values():
            moves += one.look(self._clock(), self._ask, self._metrics)
        return moves

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a defect here must not end the watch
                _log.exception("looking at the boundaries failed")


class _Watched:
    """One model and its counts at the last sample."""

    def __init__(self, served: ModelRuntime, control: BoundaryControl | None) -> None:
        self._served = served
        self._control = control
        pools = max(0, len(served.fleet.pools) - 1)
        self._counts = [(0, 0, 0)] * pools
        self._preemptions = [Rising() for _ in range(pools)]
        self._finished = [Rising() for _ in range(pools)]
        self._drifted = False

    def look(self, now_s: float, ask: AskTotals, metrics: Metrics) -> list[Move]:
        """Sample, decide, apply, log, and count what is only observed."""
        self._look_at_lengths()
        control, served, watch = self._control, self._served, self._served.watch
        if control is None or watch is None:
            return []
        pools = range(len(self._counts))
        moves = control.step(now_s, [self._sample(watch, pool, ask) for pool in pools])
        watch.shares = control.shares
        for move in moves:
            _log.warning(
                "boundary of %s/%s: %s%d -> %d tokens (%s)",
                served.name,
                move.pool,
                "would move " if control.observe else "",
                move.before,
                move.after,
                move.reason,
            )
            if control.observe:
                metrics.would.add("boundary")
        if moves and not control.observe:
            served.move_boundaries(control.boundaries)
        return moves

    def _sample(self, watch: BoundaryWatch, pool: int, ask: AskTotals) -> PoolSample:
        state = self._served.fleet.pools[pool]
        now = (watch.requests[pool], watch.rescues[pool], watch.overruns[pool])
        requests, rescues, overruns = (a - b for a, b in zip(now, self._counts[pool], strict=True))
        self._counts[pool] = now
        wrong = watch.wrong(pool)
        totals = ask(self._served, pool)
        slots = max(1, len(state.alive) * state.slots_per_worker)
        return PoolSample(
            requests=requests,
            rescues=rescues,
            overruns=overruns,
            wrong=wrong if watch.several[pool] else None,
            preemptions=self._preemptions[pool].by({k: t.preemptions for k, t in totals.items()}),
            finished=self._finished[pool].by({k: t.finished for k, t in totals.items()}),
            load=max(
                max(state.inflight, sum(t.sequences for t in totals.values())) / slots,
                sum(t.kv_usage for t in totals.values()) / max(1, len(totals)),
            ),
        )

    def _look_at_lengths(self) -> None:
        drift = None if self._served.watch is None else self._served.watch.drift
        if drift is None or drift.alarm == self._drifted:
            return
        self._drifted = not self._drifted
        if self._drifted:
            _log.warning(
                "lengths of %s are not those that were planned for: distance %.2f; plan again",
                self._served.name,
                drift.distance,
            )
        else:
            _log.warning("lengths of %s are as planned again", self._served.name)
