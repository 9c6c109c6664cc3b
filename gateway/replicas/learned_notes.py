"""What estimators learned, as lasting notes: for other replicas and across restarts.

Requests read and update their own process's estimators and never wait for the store. A note has
one model's sums by part; `gateway.estimate.merge` explains how those of several replicas join. It
is published when something was learned, or the store lost it. While the store is away, the
estimators continue alone.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.merge import EstimatorMerge
from gateway.records.estimate import PartState, PeerRecord
from gateway.replicas.bus import LASTING, MAX_BYTES, Bus

EVERY_S: Final = 1.0
"""A note is written so often at most."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, PartState]).decode

_log = logging.getLogger("sluice.state")


class _Subject:
    """One model's estimator, and what was published of it."""

    def __init__(self, estimator: LengthEstimator, now_s: float) -> None:
        self.estimator = estimator
        self.merge = EstimatorMerge(estimator, now_s)
        self.published = 0
        """Observations in the note."""


class LearnedNotes:
    """Publishes and merges what the estimators of some models learned."""

    def __init__(
        self, bus: Bus, estimators: Mapping[str, LengthEstimator], clock: Callable[[], float]
    ) -> None:
        """`estimators` by the name they are stored under; `clock` monotonic, in seconds."""
        self._bus = bus
        self._clock = clock
        self._subjects: dict[str, _Subject] = {}
        self._due_s = 0.0
        self._warned = False
        self.replace(estimators)
        bus.listen(self)

    def replace(self, estimators: Mapping[str, LengthEstimator]) -> None:
        """Share these from now on; those that stay keep their state."""
        now_s, known = self._clock(), self._subjects
        self._subjects = {}
        for name, estimator in estimators.items():
            before = known.get(name)
            if before is not None and before.estimator is estimator:
                self._subjects[name] = before
            else:
                self._subjects[name] = _Subject(estimator, now_s)
                self._bus.publish(LASTING + name, b"")  # only read, until something is learned
        gone = {LASTING + name for name in known.keys() - estimators.keys()}
        self._bus.drop(gone.__contains__)

    def send(self) -> Iterator[None]:
        now_s = self._clock()
        due = now_s >= self._due_s or self._bus.closing
        if due:
            self._due_s = now_s + EVERY_S
        for name, subject in tuple(self._subjects.items()):
            if self._subjects.get(name) is not subject:  # a reload removed its model meanwhile
                continue
            taught = subject.estimator.observations
            # What the store does not have is told anew: its rates faded since it was published.
            lost = subject.published and not self._bus.kept(LASTING + name)
            news = lost or (due and taught != subject.published)
            if news and (learned := subject.merge.learned(now_s)):
                subject.published = taught
                self._bus.publish(LASTING + name, _encode(learned))
            yield

    def receive(self) -> Iterator[None]:
        for name, subject in tuple(self._subjects.items()):
            peers = [self._peer(*note) for note in self._bus.news(LASTING + name)]
            for _ in subject.merge.merge(filter(None, peers)):
                yield

    def _peer(self, age_s: float, note: bytes) -> PeerRecord | None:
        try:
            if len(note) <= MAX_BYTES:
                return PeerRecord(age_s=age_s, parts=_decode(note))
        except msgspec.MsgspecError:
            pass
        if not self._warned:
            self._warned = True
            _log.warning("ignoring learned figures that are not of this version")
        return None
