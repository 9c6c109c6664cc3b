"""Predicted loads of a group's workers over the next steps, as a matrix (G, H+1)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from simulator.barrier.records import Floats
from simulator.barrier.state import BarrierGroup
from simulator.barrier.survival_forecast import AGE_EDGES, still_alive, survival_of


class LookAhead(Protocol):
    """Predicts the load of active requests; new requests are not included."""

    def load(self, group: BarrierGroup, horizon: int, grown: Floats) -> Floats:
        """Tokens on each worker now and in `horizon` steps, shape (G, H+1).

        `grown`: growth of an active request's workload after h steps, shape (H+1,).
        """
        ...


class Oracle:
    """Knows when each active request ends: the paper's look-ahead."""

    def load(self, group: BarrierGroup, horizon: int, grown: Floats) -> Floats:
        workers, slots = np.nonzero(group.request >= 0)
        ends = np.minimum(group.end[workers, slots] - group.step, horizon + 1)
        cell = workers * (horizon + 2) + ends
        shape = (group.spec.workers, horizon + 2)
        cells = shape[0] * shape[1]
        weight = np.bincount(cell, group.weight[workers, slots], minlength=cells).reshape(shape)
        count = np.bincount(cell, minlength=cells).reshape(shape)
        # A request is active after h steps if it ends later than that.
        staying = weight[:, :0:-1].cumsum(axis=1)[:, ::-1]
        number = count[:, :0:-1].cumsum(axis=1)[:, ::-1]
        found: Floats = staying + number * grown
        return found


class BySurvival:
    """Knows the survival function of each class of requests, as a gateway can.

    `survivals` gives S(0), S(1), ... of each class and may learn during the run; it is called every
    `refresh_steps`. `kinds` is each request's class.
    """

    def __init__(
        self,
        survivals: Callable[[], Sequence[Floats]],
        kinds: Sequence[int] | None = None,
        *,
        refresh_steps: int = 200,
    ) -> None:
        self._survivals = survivals
        self._kinds = None if kinds is None else np.asarray(kinds)
        self._refresh_steps = refresh_steps
        self._next = 0
        self._alive: Floats | None = None
        self._edges = np.array(AGE_EDGES)

    def load(self, group: BarrierGroup, horizon: int, grown: Floats) -> Floats:
        if self._alive is None or group.step >= self._next:
            known = [survival_of(shares) for shares in self._survivals()]
            self._alive = still_alive(known, horizon)
            self._next = group.step + self._refresh_steps
        classes, buckets, steps = self._alive.shape
        workers, slots = np.nonzero(group.request >= 0)
        bucket = self._edges.searchsorted(group.age[workers, slots], side="right") - 1
        cell = workers * classes * buckets + bucket
        if self._kinds is not None:
            cell += self._kinds[group.request[workers, slots]] * buckets
        shape = (group.spec.workers, classes * buckets)
        cells = shape[0] * shape[1]
        weight = np.bincount(cell, group.weight[workers, slots], minlength=cells).reshape(shape)
        count = np.bincount(cell, minlength=cells).reshape(shape)
        alive = self._alive.reshape(classes * buckets, steps)
        found: Floats = weight @ alive + (count @ alive) * grown
        return found
