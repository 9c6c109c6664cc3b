"""Learns a factor for each worker: how slow it is relative to the common prediction.

    f_w *= 1 + g clip(actual / predicted - 1)

weighted by the predicted time, so that predicted and actual work agree in sum. The gain g is near
0.2 for a worker whose errors keep one sign while the others' do not, and near 0.005 otherwise: it
follows the squared ratio of the smoothed error to the smoothed absolute error (after Trigg and
Leach, "Exponential smoothing with an adaptive response rate", 1967). So a worker at half speed is
detected after some forty of its requests, and noise changes little. A shift common to all workers
is followed slowly here and left to calibration.

A worker that joined is on probation for its first requests, which tell of its start: connections
open, kernels compile. A factor from those would keep requests away, and with them all that could
correct it. So until then its factor returns to 1 as the pool serves requests.
"""

from collections.abc import Mapping
from math import exp, isfinite, log
from typing import Any, Final

from predictor.calibrate import numbers
from predictor.tenants import SPEED_PULL, Pulls, held

_LIMIT: Final = log(20.0)
_SMOOTH: Final = 0.03
_MIN_GAIN: Final = 0.005
_MAX_GAIN: Final = 0.2
_USUAL: Final = 0.02
_MAX_WEIGHT: Final = 3.0
_DOWN: Final = -0.75
_UP: Final = 2.0
_PULL: Final = 0.05
_PROBATION: Final = 64
"""First tokens of a worker that joined until it counts as known."""
_KEPT: Final = 0.9
"""What is left of its factor's logarithm after as many requests as the pool has workers."""
_ALIKE: Final = 1e-4
"""Smaller changes of a logarithm are skipped at a merge: most of them, in large pools."""


class Speeds:
    """Slowness factors of a pool's workers, > 0; 1 is as predicted, 2 is half as fast."""

    __slots__ = (
        "_heard",
        "_log",
        "_new",
        "_own",
        "_size",
        "_trend",
        "_trend_sum",
        "_usual_s",
        "factors",
        "seen",
    )

    def __init__(self, workers: int) -> None:
        self.factors = [1.0] * workers
        self.seen = [0] * workers
        self._log = [0.0] * workers
        self._trend = [0.0] * workers
        self._trend_sum = 0.0
        self._size = [0.3] * workers
        self._usual_s = 0.0
        self._own = [0.0] * workers
        self._heard: dict[str, list[float]] = {}
        self._new: set[int] = set()
        """Workers on probation."""

    def observe(
        self, worker: int, predicted_s: float, actual_s: float, pulls: Pulls | None = None
    ) -> None:
        """Learn from a prefill; `predicted_s`, > 0, includes the factor at that time.

        `pulls`: the tenant's total pull so far; None where the tenant is not bounded.
        """
        error = min(max(actual_s / predicted_s - 1.0, _DOWN), _UP)
        if not self._usual_s:
            self._usual_s = predicted_s
        self._usual_s += _USUAL * (predicted_s - self._usual_s)
        weight = min(predicted_s / self._usual_s, _MAX_WEIGHT)
        weighed = weight * error
        trends, workers = self._trend, len(self._trend)
        step = _SMOOTH * (weighed - trends[worker])
        trend = trends[worker] = trends[worker] + step
        self._trend_sum += step
        others = (self._trend_sum - trend) / (workers - 1) if workers > 1 else trend
        size = self._size[worker] = self._size[worker] + _SMOOTH * (
            abs(weighed) - self._size[worker]
        )
        # The part of the trend that is this worker's own and not shared by the others.
        apart = min(abs(trend), abs(trend - others)) if trend * (trend - others) > 0 else 0.0
        track = min(apart / size, 1.0) if size > 0.0 else 0.0
        gain = min(weight * (_MIN_GAIN + (_MAX_GAIN - _MIN_GAIN) * track * track), 0.5)
        self.seen[worker] += 1
        if worker in self._new and self.seen[worker] >= _PROBATION:
            self._new.discard(worker)
        before = self._log[worker]
        change = log(1.0 + gain * error)
        if pulls is not None:
            change = held(pulls, worker, change, SPEED_PULL / (1 + len(self._heard)))
        self._set(worker, before + change)
        moved = self._log[worker] - before
        self._own[worker] += moved
        if pulls is not None:
            pulls[worker] = pulls.get(worker, 0.0) + moved

    def on_probation(self, worker: int) -> bool:
        """Whether a worker's times tell of its start only, and others' tell of the pool."""
        return worker in self._new and len(self._new) < len(self._log)

    def recentre(self) -> float:
        """Divide all factors by their geometric mean; returns that mean.

        Workers on probation are left out, so that they follow the others.
        """
        logs = self._log
        known = [worker for worker in range(len(logs)) if worker not in self._new]
        if not known:
            return 1.0
        middle = sum([logs[worker] for worker in known]) / len(known)
        for worker in known:
            self._set(worker, logs[worker] - middle)
        return exp(middle)

    def relent(self, requests: int) -> None:
        """Let the factors of workers on probation return to 1, after so many of the pool."""
        remaining = _KEPT ** (requests / max(1, len(self._log)))
        for worker in self._new:
            self._set(worker, self._log[worker] * remaining)

    def join(self, worker: int) -> None:
        """A new engine took this place, which may be one more: it is as fast as the others."""
        if worker == len(self.factors):
            self.factors.append(1.0)
            self._size.append(0.3)
            self.seen.append(0)
            for values in (self._log, self._trend, self._own):
                values.append(0.0)
        self.forget(worker)
        self._new.add(worker)
        self._own[worker] = 0.0
        self._heard = {}  # of another length; the next merge is a new baseline

    def forget(self, worker: int) -> None:
        """Reset a worker's factor: another engine is there now."""
        self._set(worker, 0.0)
        self._trend_sum -= self._trend[worker]
        self._trend[worker], self._size[worker], self.seen[worker] = 0.0, 0.3, 0

    def state(self) -> dict[str, Any]:
        """Plain values for gossip: current factors, and the part learned here."""
        return {"log": list(self._log), "own": list(self._own), "seen": list(self.seen)}

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what other replicas have learned since the last merge, like `Bucketed.merge`."""
        workers = len(self.factors)
        heard: dict[str, list[float]] = {}
        values = self._log
        for name, state in others.items():
            own, logs = numbers(state.get("own"), workers), numbers(state.get("log"), workers)
            seen = numbers(state.get("seen"), workers)
            if own is None or logs is None or seen is None:
                continue
            heard[name] = own
            before = self._heard.get(name, own)
            values = [
                # A replica without observations of a worker adopts the other's factor.
                here + (_PULL if seen_here else 1.0) * (there - here) if seen_there else here
                for here, there, seen_there, seen_here in zip(
                    [v + more - less for v, more, less in zip(values, own, before, strict=True)],
                    logs,
                    seen,
                    self.seen,
                    strict=True,
                )
            ]
        for w, (value, was) in enumerate(zip(values, self._log, strict=True)):
            if abs(value - was) > _ALIKE:
                self._set(w, value)
        self._heard = heard

    def _set(self, worker: int, value: float) -> None:
        if not isfinite(value):
            return
        self._log[worker] = min(max(value, -_LIMIT), _LIMIT)
        self.factors[worker] = exp(self._log[worker])
