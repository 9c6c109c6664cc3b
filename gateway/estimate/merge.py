"""Learned figures as values that replicas can store, publish and merge.

A replica's estimator consists of parts (one tenant's ratio in a category, its template fit, an
output histogram), each a handful of decayed sums. Replicas publish their sums and read the others'.
Rules:

- `merged` is a weighted mean of sums; the weight of a record is how much its replica was taught
  lately (`rate`). It is a function of a set of records, so neither their order nor duplicates
  matter: a replica has one record, and a greater exchange number replaces the lesser.
- All sums of a part decay alike and a mean is their quotient, so the mean of sums is the mean
  of all replicas' observations. N replicas that each see 1/N of the traffic have the ratio a
  single one would have, with less noise: each remembers its own last observations.
- A replica without peers merges nothing: its figures are the same as without a store.
- Each reader merges a record at most once. An idle or dead replica is outvoted: its rate fades
  by e every RATE_MEMORY_S of the record's age, and figures taken over from it fade with
  every further observation, as all learned figures do.
- A replica that detects a change of the traffic starts a new epoch of that part, with rate 0.
  Among several epochs only the one with the most recent observations counts (on a tie the later
  one). A change thus wins once most observations come from it, and one replica that was fed
  nonsense does not override the others.
- A record counts for at least one observation. After a restart of all replicas, the new ones
  take over the old records.

The merged observation count `n` is the largest one, not the sum: a sum would count observations
twice that one replica took over from another.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.learners import Part
from gateway.records.estimate import PartState, PeerRecord

RATE_MEMORY_S: Final = 30.0
"""Time constant of a replica's rate, in seconds."""
MAX_SUMS: Final = 1024
"""Most sums in one part; a part with more is ignored."""
MAX_PARTS: Final = 512
"""Most parts in one record; a record with more is ignored."""
_MARKS: Final = 4096
"""Most parts whose observation counts a ledger remembers."""


def aged(rate: float, seconds: float) -> float:
    """A rate after `seconds` without observations."""
    return rate * math.exp(-max(seconds, 0.0) / RATE_MEMORY_S)


def plausible(part: PartState) -> bool:
    """Whether a part read from outside is well-formed: finite sums, bounded, counted."""
    return (
        part.n >= 1
        and part.epoch >= 0
        and 0.0 <= part.rate < math.inf
        and 0 < len(part.sums) <= MAX_SUMS
        and all(map(math.isfinite, part.sums.values()))
    )


def merged(parts: Iterable[PartState]) -> PartState:
    """The weighted mean of the most observed epoch's sums; at least one part must be given."""
    ordered = sorted(parts, key=lambda part: (part.epoch, part.n, part.rate))
    observed: dict[int, float] = {}
    for part in ordered:
        observed[part.epoch] = observed.get(part.epoch, 0.0) + max(part.rate, 1.0)
    epoch = max(observed, key=lambda epoch: (observed[epoch], epoch))
    ordered = [part for part in ordered if part.epoch == epoch]
    whole = math.fsum(max(part.rate, 1.0) for part in ordered)
    sums: dict[str, float] = {}
    for part in ordered:
        share = max(part.rate, 1.0) / whole
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + share * value
    return PartState(
        epoch=epoch,
        n=max(part.n for part in ordered),
        rate=max(part.rate for part in ordered),
        sums=sums,
    )


class EstimatorMerge:
    """Publishes one model's estimator and merges other replicas' records into it.

    It works on the live estimator between two steps of the event loop; requests never wait.
    """

    def __init__(self, estimator: LengthEstimator, now_s: float) -> None:
        """`now_s` on the clock of `learned`."""
        self._estimator = estimator
        self._at_s = now_s
        self._marks: dict[str, tuple[int, int, float, float]] = {}
        """Part -> (epoch, observations, rate, time) when last seen; the last seen is last."""

    def learned(self, now_s: float) -> dict[str, PartState]:
        """All parts that were taught, each with its rate; to be published as one record."""
        self._at_s = now_s
        parts = self._estimator.parts().items()
        states = ((name, self._own(name, part)) for name, part in parts)
        return {name: state for name, state in states if state is not None}

    def merge(self, peers: Iterable[PeerRecord]) -> Iterator[str]:
        """Take over other replicas' sums, one part a step; yields the names of changed parts.

        Each step is complete in itself, so the estimator may be taught between two steps.
        """
        reported: dict[str, list[tuple[float, PartState]]] = {}
        for peer in peers:
            if len(peer.parts) <= MAX_PARTS:
                for name, state in peer.parts.items():
                    reported.setdefault(name, []).append((peer.age_s, state))
        for name, given in reported.items():
            part = self._estimator.part(name)
            others = [
                PartState(epoch=s.epoch, n=s.n, rate=aged(s.rate, age_s), sums=s.sums)
                for age_s, s in given
                if part is not None and plausible(s) and part.accepts(s)
            ]
            if part is None or not others:
                continue
            mine = self._own(name, part)
            result = merged(others if mine is None else [*others, mine])
            if all(s.epoch != result.epoch for s in others) or not part.accepts(result):
                continue
            part.adopt(result)
            rate = mine.rate if mine is not None and mine.epoch == result.epoch else 0.0
            self._mark(name, result.epoch, result.n, rate)
            yield name

    def _own(self, name: str, part: Part) -> PartState | None:
        """A part's sums with new observations counted into its rate; None if it has none."""
        state = part.learned()
        if state.n < 1:
            return None
        epoch, n, rate, at_s = self._marks.get(name, (state.epoch, 0, 0.0, self._at_s))
        if epoch == state.epoch:
            rate = aged(rate, self._at_s - at_s) + max(state.n - n, 0)
        else:
            rate = float(state.n)
        self._mark(name, state.epoch, state.n, rate)
        return PartState(epoch=state.epoch, n=state.n, rate=rate, sums=state.sums)

    def _mark(self, name: str, epoch: int, n: int, rate: float) -> None:
        self._marks.pop(name, None)
        if len(self._marks) >= _MARKS:
            del self._marks[next(iter(self._marks))]
        self._marks[name] = (epoch, n, rate, self._at_s)
