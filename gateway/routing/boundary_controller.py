"""Samples each model's counts once a minute, moves its boundaries, and logs why.

`gateway.routing.boundary_control` decides. A move replaces the model's routing table at once;
requests in flight keep their plan.
"""

import logging
from collections.abc import Callable, Sequence

from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.routing.boundary_control import SAMPLE_S, Move

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
        moves: list[Move] = []
        for served in self._models:
            watch = served.watch
            if watch is None:
                continue
            drift, control = watch.drift, watch.control
            if drift is not None and drift.alarm != watch.drifted:
                watch.drifted = drift.alarm
                line = "lengths of %s are as planned again"
                if drift.alarm:
                    line = (
                        "lengths of %s are not those that were planned for: distance "
                        f"{drift.distance:.2f}; plan again"
                    )
                _log.warning(line, served.name)
            if control is None:
                continue
            pools = served.fleet.routed
            samples = [watch.sample(place, pool) for place, pool in enumerate(pools)]
            now_s = self._clock()
            moved = control.step(now_s, samples)
            watch.shares = control.shares
            for move in moved:
                watch.moves[move.pool] = now_s, move
                _log.warning(
                    "boundary of %s/%s: %s%d -> %d tokens (%s)",
                    *(served.name, move.pool, "would move " if control.observe else ""),
                    *(move.before, move.after, move.reason),
                )
                if control.observe:
                    self._metrics.would.add("boundary")
            if moved and not control.observe:
                served.move_boundaries(control.boundaries)
            moves += moved
        return moves
