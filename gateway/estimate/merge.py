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
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from gateway.records.record import Record

RATE_MEMORY_S: Final = 30.0
"""Time constant of a replica's rate, in seconds."""
MAX_SUMS: Final = 1024
"""Most sums in one part; a part with more is ignored."""
MAX_PARTS: Final = 512
"""Most parts in one record; a record with more is ignored."""
_MARKS: Final = 4096
"""Most parts whose observation counts a ledger remembers."""


class PartState(Record, frozen=True, kw_only=True):
    """One part: decayed sums by name."""

    epoch: int
    """How often the part was restarted."""
    n: int
    """Observations of this epoch, at least 1."""
    rate: float = 0.0
    """Recent observations: each counts exp(-age / RATE_MEMORY_S)."""
    sums: dict[str, float]


Learned = Mapping[str, PartState]
"""Part -> its sums: all learned figures of one replica for one model."""


class PeerRecord(Record, frozen=True, kw_only=True):
    """A record of another replica, or one stored before a restart."""

    age_s: float
    """Since it was published."""
    parts: dict[str, PartState]


class EstimatorPart(Protocol):
    """A learned figure that can leave the process and return."""

    def learned(self) -> PartState:
        """Its sums now."""

    def accepts(self, state: PartState) -> bool:
        """Whether sums from outside are valid for this part."""

    def adopt(self, state: PartState) -> None:
        """Continue from these sums, which it must accept."""


class Learner(Protocol):
    """An estimator that consists of parts."""

    def parts(self) -> Mapping[str, EstimatorPart]:
        """Parts that have learned something, by name."""

    def part(self, name: str) -> EstimatorPart | None:
        """The part of that name, made if it does not exist; None for an unknown name."""


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
    found = sorted(parts, key=_order)
    observed: dict[int, float] = {}
    for part in found:
        observed[part.epoch] = observed.get(part.epoch, 0.0) + max(part.rate, 1.0)
    epoch = max(observed, key=lambda epoch: (observed[epoch], epoch))
    found = [part for part in found if part.epoch == epoch]
    weights = [max(part.rate, 1.0) for part in found]
    whole = math.fsum(weights)
    sums: dict[str, float] = {}
    for weight, part in zip(weights, found, strict=True):
        share = weight / whole
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + share * value
    return PartState(
        epoch=epoch,
        n=max(part.n for part in found),
        rate=max(part.rate for part in found),
        sums=sums,
    )


def _order(part: PartState) -> tuple[int, int, float]:
    return part.epoch, part.n, part.rate


class EstimatorMerge:
    """Publishes one model's learner and merges other replicas' records into it.

    It works on the live learner between two steps of the event loop; requests never wait.
    """

    __slots__ = ("_at_s", "_learner", "_marks")

    def __init__(self, learner: Learner, now_s: float) -> None:
        """`now_s` on the clock of `learned`."""
        self._learner = learner
        self._at_s = now_s
        self._marks: dict[str, tuple[int, int, float, float]] = {}
        """Part -> (epoch, observations, rate, time) when last seen; the last seen is last."""

    def learned(self, now_s: float) -> dict[str, PartState]:
        """All parts that were taught, each with its rate; to be published as one record."""
        self._at_s = now_s
        found = {}
        for name, part in self._learner.parts().items():
            state = self._own(name, part)
            if state is not None:
                found[name] = state
        return found

    def merge(self, peers: Iterable[PeerRecord]) -> Iterator[str]:
        """Take over other replicas' sums, one part a step; yields the names of changed parts.

        Each step is complete in itself, so the learner may be taught between two steps.
        """
        reported: dict[str, list[tuple[float, PartState]]] = {}
        for peer in peers:
            if len(peer.parts) <= MAX_PARTS:
                for name, part in peer.parts.items():
                    reported.setdefault(name, []).append((peer.age_s, part))
        for name, given in reported.items():
            target = self._learner.part(name)
            if target is not None and self._take_over(name, target, given):
                yield name

    def _take_over(
        self, name: str, part: EstimatorPart, given: Iterable[tuple[float, PartState]]
    ) -> bool:
        others = [
            PartState(epoch=state.epoch, n=state.n, rate=aged(state.rate, age_s), sums=state.sums)
            for age_s, state in given
            if plausible(state) and part.accepts(state)
        ]
        if not others:
            return False
        mine = self._own(name, part)
        if mine is not None:
            others.append(mine)
        result = merged(others)
        reported = any(state.epoch == result.epoch for state in others if state is not mine)
        if not reported or not part.accepts(result):
            return False
        part.adopt(result)
        rate = mine.rate if mine is not None and mine.epoch == result.epoch else 0.0
        self._mark(name, result.epoch, result.n, rate)
        return True

    def _own(self, name: str, part: EstimatorPart) -> PartState | None:
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
