"""Samples each model's counts once a minute, moves its boundaries, and logs why.

`gateway.routing.boundary_control` decides. A move replaces the model's routing table at once;
requests in flight keep their plan.
"""

import logging
from collections.abc import Callable, Sequence

from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.routing.boundary_control import SAMPLE_S, Move
from gateway.routing.boundary_watch import BoundaryWatch

_log = logging.getLogger("sluice.boundary")


class BoundaryController:
    """Looks at the models that have a plan or adaptive boundaries."""

    def __init__(
        self, models: Sequence[ModelRuntime], metrics: Metrics, *, clock: Callable[[], float]
    ) -> None:
        """`models`: those that are served, at each look; `clock` monotonic, in seconds."""
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._due_s = clock() + SAMPLE_S

    def tick(self) -> None:
        """Look once a minute; called more often."""
        if self._clock() >= self._due_s:
            self._due_s = self._clock() + SAMPLE_S
            self.look()

    def look(self) -> list[Move]:
        """Sample every model, apply and log the moves, and return them."""
        moves = []
        for served in self._models:
            if served.watch is not None:
                self._look_at_lengths(served.name, served.watch)
                moves += self._move(served, served.watch)
        return moves

    def _move(self, served: ModelRuntime, watch: BoundaryWatch) -> list[Move]:
        control, pools = watch.control, served.fleet.pools[:-1]
        if control is None:
            return []
        samples = [watch.sample(pool, state) for pool, state in enumerate(pools)]
        moves = control.step(self._clock(), samples)
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
                self._metrics.would.add("boundary")
        if moves and not control.observe:
            served.move_boundaries(control.boundaries)
        return moves

    def _look_at_lengths(self, model: str, watch: BoundaryWatch) -> None:
        drift = watch.drift
        if drift is None or drift.alarm == watch.drifted:
            return
        watch.drifted = drift.alarm
        if drift.alarm:
            _log.warning(
                "lengths of %s are not those that were planned for: distance %.2f; plan again",
                model,
                drift.distance,
            )
        else:
            _log.warning("lengths of %s are as planned again", model)
