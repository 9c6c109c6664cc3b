"""Predicts a pool's prefill times and learns from each first token.

A prediction comes from the trained tree, or from the prior without one, times the worker's
slowness; the quantile is then calibrated. `predict_request` runs for every candidate worker of
every request, so it is one flat function: a tree walk, two look-ups, a few products.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from predictor.artifact import PoolSection
from predictor.calibrate import (
    BACKLOG_EDGES,
    PROMPT_EDGES,
    AdaptiveConformal,
    Bucketed,
    Misses,
    bucket_of,
    numbers,
)
from predictor.features import HIGH, HIGH_SHARE, NO_CAP, NONE, PARTIAL, PARTIAL_SHARE, UNCACHED
from predictor.prior import FLOOR_S, NO_SLOTS, QUANTILE_OVER_MEAN, SIZE, Prior, PriorRates
from predictor.speeds import Speeds
from predictor.tenants import Pulls, Tenants

CALIBRATIONS: Final = ("bucketed", "adaptive")
_MAX_S: Final = 1e6
"""Longer times are ignored: the clock was changed."""
_RECENTRE: Final = 16
_WORKERS_AN_OBSERVATION: Final = 4
"""Workers processed per observation by recentring, on average: large pools recentre rarely."""
_PRIOR_SETTLES: Final = 32
"""Observations of the prior before workers' speeds are learned."""
_MIDDLE, _LONG = PROMPT_EDGES
_SOME, _MUCH = BACKLOG_EDGES


class PrefillPredictor:
    """The predictor of one pool; `workers` is their number, and methods take their indexes.

    `slots`: the sequences that a worker runs at a time; further ones wait in it.

    ValueError when an argument is out of range, or alpha is not the section's.
    """

    def __init__(
        self,
        section: PoolSection | None = None,
        *,
        workers: int,
        alpha: float = 0.95,
        prior: PriorRates | None = None,
        calibration: Literal["bucketed", "adaptive"] = "bucketed",
        slots: int = NO_SLOTS,
    ) -> None:
        if workers < 0:
            raise ValueError("a predictor has no workers, or some")
        if not 0.5 <= alpha < 1:
            raise ValueError("alpha must be at least 0.5 and below 1")
        if section is not None and abs(section.alpha - alpha) > 1e-9:
            raise ValueError(f"the section holds quantiles at {section.alpha:g}, not {alpha:g}")
        if calibration not in CALIBRATIONS:
            raise ValueError(f"calibration must be one of {', '.join(CALIBRATIONS)}")
        self.alpha = alpha
        self.trained = section is not None
        self.observed = 0
        """Number of first tokens learned from."""
        self._root = section.root if section else None
        self._ensemble = section.ensemble if section else None
        self._longest = section.longest_uncached_tokens if section else 0
        self._prior = Prior(prior or (section.rates if section else PriorRates()), slots)
        self.slots = slots
        self._speeds = Speeds(workers)
        self._factors = self._speeds.factors
        self._recentre_every = max(_RECENTRE, workers // _WORKERS_AN_OBSERVATION)
        self._calibration: Bucketed | AdaptiveConformal = (
            Bucketed(alpha) if calibration == "bucketed" else AdaptiveConformal(alpha)
        )
        self._misses = Misses()
        self._tenants = Tenants()

    def predict(self, worker: int, x: tuple[float, ...]) -> tuple[float, float, int]:
        """(mean_s, quantile_s, bucket) of the prefill, from dispatch to first token.

        Both are finite and above 0; the quantile is calibrated. The bucket is for `observe`.
        """
        if self._root is None:
            mean_s = self._prior.mean_s(x) * self._factors[worker]
            quantile_s = mean_s * QUANTILE_OVER_MEAN
        else:
            mean_s, quantile_s = self.raw(x)
            speed = self._factors[worker]
            mean_s *= speed
            quantile_s *= speed
        bucket = bucket_of(x)
        return mean_s, quantile_s * self._calibration.factor(bucket), bucket

    def predict_request(
        self,
        worker: int,
        prompt_tokens: int,
        hit_tokens: int,
        cap_tokens: int | None,
        output_tokens: int,
        active: int,
        backlog_tokens: int,
        kv_usage: float,
        stream: bool,  # noqa: FBT001 - as `features` has it
    ) -> tuple[tuple[float, ...], float, float, int]:
        """(x, mean_s, quantile_s, bucket): `features` and `predict` in one call.

        Inlined, because separate calls take twice as long; a test keeps both equal.
        """
        if hit_tokens >= prompt_tokens:
            hit_tokens = prompt_tokens - 1 if prompt_tokens > 1 else 0
        uncached = prompt_tokens - hit_tokens
        if hit_tokens > 0:
            share = hit_tokens / prompt_tokens
            locality = NONE if share < PARTIAL_SHARE else PARTIAL if share < HIGH_SHARE else HIGH
        else:
            share, locality = 0.0, NONE
        x = (
            prompt_tokens,
            uncached,
            backlog_tokens,
            active,
            kv_usage,
            hit_tokens,
            share,
            locality,
            NO_CAP if cap_tokens is None else cap_tokens,
            output_tokens,
            1.0 if stream else 0.0,
        )
        if self._root is not None:
            mean_s, quantile_s = self.raw(x)
        else:
            if backlog_tokens or active >= self.slots:
                mean_s = self._prior.mean_s(x)
            else:
                s = self._prior.s
                t = s[0] + s[1] * active + s[2] * uncached
                mean_s = t if t > FLOOR_S else FLOOR_S  # noqa: FURB136 - max() would be a call
            quantile_s = mean_s * QUANTILE_OVER_MEAN
        speed = self._factors[worker]
        bucket = 3 * locality
        if prompt_tokens >= _MIDDLE:
            bucket += 9 if prompt_tokens < _LONG else 18
        if backlog_tokens >= _SOME:
            bucket += 1 if backlog_tokens < _MUCH else 2
        return x, mean_s * speed, quantile_s * speed * self._calibration.factor(bucket), bucket

    def raw(self, x: tuple[float, ...]) -> tuple[float, float]:
        """(mean_s, quantile_s) for a worker of slowness 1, uncalibrated."""
        root = self._root
        if root is None:
            mean_s = self._prior.mean_s(x)
            return mean_s, mean_s * QUANTILE_OVER_MEAN
        feature, mean_s, quantile_s, right = root
        while feature >= 0:
            feature, mean_s, quantile_s, right = quantile_s if x[feature] <= mean_s else right
        if self._ensemble is not None:
            quantile_s = self._ensemble.quantile_s(x)
        if x[UNCACHED] > self._longest:
            beyond = x[UNCACHED] / self._longest
            return mean_s * beyond, quantile_s * beyond
        return mean_s, quantile_s

    def observe(
        self,
        worker: int,
        x: tuple[float, ...],
        mean_s: float,
        quantile_s: float,
        bucket: int,
        actual_s: float,
        client: str = "",
    ) -> None:
        """Learn from a first token: the output of `predict`, the actual time, the tenant.

        Impossible times are ignored.
        """
        if not (0.0 <= actual_s < _MAX_S and 0.0 < mean_s < _MAX_S):  # NaN fails too
            return
        actual_s = max(actual_s, FLOOR_S)
        self.observed += 1
        self._misses.add(missed=actual_s > quantile_s)
        pulls = self._tenants.of(client)
        if not self._speeds.on_probation(worker):
            self._learn_of_all(worker, x, quantile_s, bucket, actual_s, pulls[0] if pulls else None)
        if self._root is None and self._prior.seen < _PRIOR_SETTLES:
            return
        self._speeds.observe(worker, mean_s, actual_s, pulls[1] if pulls else None)
        if not self.observed % self._recentre_every:
            self._speeds.relent(self._recentre_every)
            if self._root is None:
                # A slowness common to all workers belongs to the prior.
                self._prior.stretch(self._speeds.recentre())

    def _learn_of_all(
        self,
        worker: int,
        x: tuple[float, ...],
        quantile_s: float,
        bucket: int,
        actual_s: float,
        pulls: Pulls | None,
    ) -> None:
        """Learn what all workers share: the prior and the calibration."""
        speed, calibration = self._factors[worker], self._calibration
        if self._root is None:
            # What the prior has corrected by itself, calibration must not correct again.
            quantile_s *= self._prior.observe(x, actual_s / speed)
        if isinstance(calibration, Bucketed):
            calibration.observe(bucket, quantile_s, actual_s, pulls)
        else:
            calibration.observe(bucket, quantile_s, actual_s, self.raw(x)[1] * speed)

    def join(self, worker: int) -> None:
        """A new engine took this place, which may be one more than there were."""
        self._speeds.join(worker)
        self._tenants.forget(worker)
        workers = len(self._factors)
        self._recentre_every = max(_RECENTRE, workers // _WORKERS_AN_OBSERVATION)

    def forget(self, worker: int) -> None:
        """Reset a worker's speed: another engine answers at its address."""
        self._speeds.forget(worker)
        self._tenants.forget(worker)

    @property
    def coverage(self) -> float | None:
        """Share of the last 400 prefills within their quantile; None before the first."""
        return self._misses.coverage

    def prefill_tokens_per_s(self, worker: int) -> float:
        """The learned prefill rate of a worker; > 0."""
        return self._prior.prefill_tokens_per_s / self._factors[worker]

    def slowness(self, worker: int) -> float:
        """A worker's time relative to the common prediction: 1 as predicted, 2 half as fast."""
        return self._factors[worker]

    def state(self) -> dict[str, Any]:
        """The learned state as plain values, for gossip to the other replicas."""
        return {
            "calibration": self._calibration.state(),
            "speeds": self._speeds.state(),
            "prior": {"s": list(self._prior.s), "seen": self._prior.seen},
            "tenants": self._tenants.state(),
        }

    def merge(self, states: Mapping[str, Any]) -> None:
        """Merge the states of the other replicas by name, without this one's own.

        A name identifies one run of a replica. Malformed values are ignored.
        """
        self._calibration.merge(_parts(states, "calibration"))
        self._speeds.merge(_parts(states, "speeds"))
        self._tenants.merge(_parts(states, "tenants"))
        if self._root is None:
            self._merge_prior(_parts(states, "prior"))

    def _merge_prior(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for state in states.values():
            s, seen = numbers(state.get("s"), SIZE), state.get("seen")
            if s is not None and isinstance(seen, int) and seen > 0:
                own = self._prior.seen
                # A new replica adopts the other's constants; equals converge slowly.
                self._prior.adopt(s, 1.0 if not own else min(0.5, 0.05 * seen / own))


def _parts(states: Mapping[str, Any], part: str) -> dict[str, Mapping[str, Any]]:
    parts: dict[str, Mapping[str, Any]] = {}
    for name, state in states.items():
        value = state.get(part) if isinstance(state, Mapping) else None
        if isinstance(value, Mapping):
            parts[name] = value
    return parts
