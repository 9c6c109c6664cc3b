"""Notes that replicas exchange over the bus, twice a second.

`FleetNotes`:
- Engines that an admin drains. The newest change of each engine applies in all replicas, also in
  those that start later while another replica knows of it.
- Engines that a replica ejected. The other replicas then eject such an engine after one failure
  of their own, instead of `health.eject_after`.
- Response affinity: the engine that stores each response, so that any replica can route a
  `previous_response_id`.

`SchedulerNotes`: each replica runs its own schedulers over the same workers and takes its share of
every gate. The notes tell the other replicas its learned prefill rates, the service each tenant
got, its assigned work, and which prompts went to which worker.

`LearnedNotes`: what estimators learned, as lasting notes, for other replicas and across restarts.
A note has one model's sums by part; `gateway.estimate.merge` explains how those of several
replicas join. While the store is away, the estimators continue alone.

Load in flight is not shared: half a second old, it would make replicas fill the same worker
(docs/adr/0008). Malformed notes are ignored. Replicas that discover workers list them in orders of
their own, so a note names its workers, and the receiver translates.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.merge import EstimatorMerge
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime, Pool, drain_worker
from gateway.records.estimate import PartState, PeerRecord
from gateway.replicas.bus import LASTING, MAX_BYTES, Bus
from gateway.routing.routing import ResponseLocation
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz import Quartz
from predictor.online import PrefillPredictor

LOCATIONS_SHARED_S: Final = 3.0
"""How long each affinity is repeated, so that a replica which misses an exchange gets it later."""
MAX_LOCATIONS_SHARED: Final = 2_000
MAX_DRAINS: Final = 1_000
_LOCATIONS_BATCH: Final = 200
_LATER_S: Final = 0.001
LEARNED_EVERY_S: Final = 1.0
"""A note of what was learned is written so often at most."""

Publish = Callable[[str, bytes], None]
Peers = Callable[[str], Mapping[str, bytes]]
"""`Bus.publish` and `Bus.peers`: the newest note of each name, of this replica and by replica."""

_log = logging.getLogger("sluice.state")
_encode: Final = msgspec.msgpack.Encoder().encode


class _Drain(msgspec.Struct, frozen=True, order=True):
    changed_unix_s: float
    on: bool


class _FleetNote(msgspec.Struct):
    ejected: list[list[int]]
    drains: dict[str, _Drain]
    locations: list[tuple[str, ResponseLocation]]
    """Response affinities by response id, newest last."""
    locations_told: int
    """Affinities published since the replica started, including these.

    Receivers compare it with the last value, to learn each affinity once.
    """
    names: list[list[int]]
    """By pool, a digest of each worker's id in the order of the places; 0 for a vacant one."""


class _Locations:
    """Response affinities of one model that are shared."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, str, ResponseLocation]] = deque(maxlen=MAX_LOCATIONS_SHARED)
        self.told = 0
        self.heard: dict[str, int] = {}
        """Last `locations_told` by replica."""


_decode_fleet: Final = msgspec.msgpack.Decoder(_FleetNote).decode


class FleetNotes:
    """Exchanges this replica's view of the engines with the other replicas."""

    def __init__(
        self,
        models: Sequence[ModelRuntime],
        publish: Publish,
        peers: Peers,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        retiring: Sequence[ModelRuntime] = (),
    ) -> None:
        """`retiring`: models that a reload removed and whose requests still run; drains reach them.

        `clock` monotonic, the same as the pools'; `wall_clock` Unix time. Both in seconds.
        """
        self._models = models
        self._retiring = retiring
        self._publish = publish
        self._peers = peers
        self._clock = clock
        self._wall_clock = wall_clock
        self._drains: dict[str, _Drain] = {}
        self._locations: dict[str, _Locations] = {}
        self.follow()

    def follow(self) -> None:
        """Share the locations of the models as they are now."""
        before, self._locations = self._locations, {}
        for served in self._models:
            shared = self._locations[served.name] = before.get(served.name) or _Locations()
            served.fleet.response_affinity.on_remember = partial(self._remember, shared)

    def drained(self, worker: str, *, on: bool) -> None:
        """Record that an admin drained an engine here (`on`) or returned it."""
        changed_unix_s = self._wall_clock()
        last = self._drains.get(worker)
        if last is not None:  # the other host's clock may be ahead
            changed_unix_s = max(changed_unix_s, last.changed_unix_s + _LATER_S)
        self._note_drain(worker, _Drain(changed_unix_s=changed_unix_s, on=on))

    def joined(self, worker: str) -> None:
        """Note that a new engine is at an address; a drain of the one before ends everywhere."""
        last = self._drains.get(worker)
        if last is not None and last.on:
            self.drained(worker, on=False)

    def send(self) -> Iterator[None]:
        """Publish notes; yields between steps so that requests can run."""
        for served in tuple(self._models):
            shared, now_s = self._locations.get(served.name), self._clock()
            if shared is None:
                continue
            while shared.newest and shared.newest[0][0] < now_s - LOCATIONS_SHARED_S:
                shared.newest.popleft()
            pools = served.fleet.pools
            note = _FleetNote(
                ejected=[
                    [i for i, engine in enumerate(pool.engine_of) if engine.ejected_until_s > now_s]
                    if pool.last_ejection_end_s > now_s
                    else []
                    for pool in pools
                ],
                drains=self._drains,
                locations=[(response_id, location) for _, response_id, location in shared.newest],
                locations_told=shared.told,
                names=[names_of(pool) for pool in pools],
            )
            self._publish(f"fleet:{served.name}", _encode(note))
            yield

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; yields likewise. No note makes it raise."""
        for served in tuple(self._models):
            shared = self._locations.get(served.name) or _Locations()
            heard: dict[str, int] = {}
            for replica, payload in self._peers(f"fleet:{served.name}").items():
                try:
                    note = _decode_fleet(payload)
                except msgspec.DecodeError:
                    continue
                heard[replica] = note.locations_told
                yield from self._receive(served, note, shared.heard.get(replica, 0))
            shared.heard = heard

    def _remember(self, shared: _Locations, response_id: str, location: ResponseLocation) -> None:
        shared.told += 1
        shared.newest.append((self._clock(), response_id, location))

    def _receive(
        self, served: ModelRuntime, note: _FleetNote, locations_received: int
    ) -> Iterator[None]:
        for worker, drain in note.drains.items():
            last = self._drains.get(worker)
            if last is None or drain > last:
                self._note_drain(worker, drain)
                drain_worker((*self._models, *self._retiring), worker, on=drain.on)
        yield
        pools = served.fleet.pools
        if len(note.names) != len(pools):
            return
        # By pool: the sender's place of a worker -> the place here.
        places = [
            {t: h for h, t in enumerate(translation(names_of(pool), names)) if t >= 0}
            for pool, names in zip(pools, note.names, strict=True)
        ]
        by_name = {pool.name: here for pool, here in zip(pools, places, strict=True)}
        for pool, ejected, here in zip(pools, note.ejected, places, strict=False):
            for place in ejected:
                if place in here:
                    fleet.doubt(pool, here[place], self._clock())
        new = min(
            max(0, note.locations_told - locations_received),
            MAX_LOCATIONS_SHARED,
            len(note.locations),
        )
        for count, (response_id, location) in enumerate(
            note.locations[len(note.locations) - new :]
        ):
            here = by_name.get(location.pool, {})
            if location.worker in here:
                located = location._replace(worker=here[location.worker])
                served.fleet.response_affinity.learn(response_id, located)
            if count % _LOCATIONS_BATCH == 0:
                yield

    def _note_drain(self, worker: str, drain: _Drain) -> None:
        self._drains.pop(worker, None)
        self._drains[worker] = drain
        if len(self._drains) > MAX_DRAINS:
            del self._drains[next(iter(self._drains))]


class _SchedulerNote(msgspec.Struct):
    scheduler: dict[str, Any]
    predictor: dict[str, Any]
    prefixes: dict[str, Any]
    names: list[int]
    """A digest of each worker's id by place; 0 for a vacant place."""


_decode_scheduler: Final = msgspec.msgpack.Decoder(_SchedulerNote).decode


class _Share(NamedTuple):
    """A scheduler that shares its workers with other replicas' schedulers."""

    name: str
    served: ModelRuntime
    pool: Pool
    scheduler: Quartz
    predictor: PrefillPredictor
    prefixes: PrefixIndex


class SchedulerNotes:
    """Exchanges notes between this replica's schedulers and the others'."""

    def __init__(
        self,
        models: Collection[ModelRuntime],
        publish: Publish,
        peers: Peers,
        replicas: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        """`replicas` gives the number of replicas that serve a model, including this one.

        `clock` is the schedulers' clock.
        """
        self._models = models
        self._publish = publish
        self._peers = peers
        self._replicas = replicas
        self._clock = clock
        self._sent: set[str] = set()
        """Names of the shares whose schedulers got notes of other replicas."""

    def send(self) -> Iterator[None]:
        """Publish notes; yields between steps so that requests can run."""
        for share in self._shares():
            if self._replicas(share.served.name) > 1 or share.name in self._sent:
                note = _SchedulerNote(
                    scheduler=share.scheduler.state(),
                    predictor=share.predictor.state(),
                    prefixes=share.pool.gossip.chapters(),
                    names=names_of(share.pool),
                )
                self._publish(share.name, _encode(note))
                yield

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; yields likewise. No note makes it raise."""
        for served in tuple(self._models):
            for pool in served.fleet.pools:
                pool.scheduler.replicas = max(1, self._replicas(served.name))
        for share in self._shares():
            received = self._replicas(share.served.name) > 1
            share.pool.gossip.listened(by_others=received)
            if received:
                self._sent.add(share.name)
            elif share.name not in self._sent:
                continue  # no other replica, now or at the last exchange
            else:
                self._sent.discard(share.name)
            yield from self._receive(share)

    def _shares(self) -> Iterator[_Share]:
        """Pools whose scheduler learns all that there is."""
        for served in tuple(self._models):
            for place, pool in enumerate(served.fleet.pools):
                scheduler, predictor, index = pool.scheduler, pool.predictor, pool.prefixes
                if type(scheduler) is Quartz and predictor is not None and index is not None:
                    name = f"{served.name}/{place}"
                    yield _Share(name, served, pool, scheduler, predictor, index)

    def _receive(self, share: _Share) -> Iterator[None]:
        names = names_of(share.pool)
        schedulers: dict[str, dict[str, Any]] = {}
        predictors: dict[str, dict[str, Any]] = {}
        prefixes: dict[str, dict[str, Any]] = {}
        here: dict[str, dict[int, int]] = {}
        """Places of workers there -> here, by replica that lists others or in another order."""
        for replica, payload in self._peers(share.name).items():
            try:
                note = _decode_scheduler(payload)
            except msgspec.DecodeError:
                continue
            if note.names != names:
                places = translation(names, note.names)
                here[replica] = {t: place for place, t in enumerate(places) if t >= 0}
                note.scheduler["pending_s"] = _in_order(note.scheduler.get("pending_s"), places)
                if isinstance(speeds := note.predictor.get("speeds"), dict):
                    note.predictor["speeds"] = {
                        part: _in_order(values, places) for part, values in speeds.items()
                    }
            schedulers[replica], prefixes[replica] = note.scheduler, note.prefixes
            # What is learned is compared with the last note's, by worker: another order, another
            # beginning.
            predictors[f"{replica} {hash(tuple(note.names))}"] = note.predictor
        share.scheduler.merge(schedulers, self._clock())
        share.predictor.merge(predictors)
        for _ in share.pool.gossip.receive(prefixes, share.prefixes, here):
            yield


def names_of(pool: PoolState) -> list[int]:
    """A digest of each worker's id by place; 0 for a vacant place."""
    return [
        crc32(name.encode()) or 1 if here else 0
        for name, here in zip(pool.workers, pool.present, strict=True)
    ]


def translation(here: Sequence[int], there: Sequence[int]) -> list[int]:
    """By place here, the worker's place there; -1 for one that the other does not have."""
    places = {name: place for place, name in enumerate(there) if name}
    return [places.get(name, -1) if name else -1 for name in here]


def _in_order(values: object, places: Sequence[int]) -> object:
    """Values by worker in this replica's order; 0 for workers that the other does not have."""
    if not isinstance(values, list):
        return values
    return [values[place] if 0 <= place < len(values) else 0.0 for place in places]


class _Subject:
    """One model's estimator, and what was published of it."""

    def __init__(self, estimator: LengthEstimator, now_s: float) -> None:
        self.estimator = estimator
        self.merge = EstimatorMerge(estimator, now_s)
        self.published = 0
        """Observations in the note."""


_decode_learned: Final = msgspec.msgpack.Decoder(dict[str, PartState]).decode


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
        bus.listen(self.send, self.receive)

    def replace(self, estimators: Mapping[str, LengthEstimator]) -> None:
        """Share these from now on; those that stay keep their state."""
        now_s, subjects = self._clock(), self._subjects
        self._subjects = {}
        for name, estimator in estimators.items():
            before = subjects.get(name)
            if before is not None and before.estimator is estimator:
                self._subjects[name] = before
            else:
                self._subjects[name] = _Subject(estimator, now_s)
                self._bus.publish(LASTING + name, b"")  # only read, until something is learned
        gone = {LASTING + name for name in subjects.keys() - estimators.keys()}
        self._bus.drop(gone.__contains__)

    def send(self) -> Iterator[None]:
        """Publish what was learned since, or what the store lost; yields likewise."""
        now_s = self._clock()
        due = now_s >= self._due_s or self._bus.closing
        if due:
            self._due_s = now_s + LEARNED_EVERY_S
        for name, subject in tuple(self._subjects.items()):
            if self._subjects.get(name) is not subject:  # a reload removed its model meanwhile
                continue
            taught = subject.estimator.observations
            # What the store does not have is told anew: its rates faded since it was published.
            lost = subject.published and not self._bus.is_written(LASTING + name)
            news = lost or (due and taught != subject.published)
            if news and (learned := subject.merge.learned(now_s)):
                subject.published = taught
                self._bus.publish(LASTING + name, _encode(learned))
            yield

    def receive(self) -> Iterator[None]:
        """Merge what the others learned; yields likewise."""
        for name, subject in tuple(self._subjects.items()):
            peers = []
            for age_s, note in self._bus.news(LASTING + name):
                try:
                    if len(note) <= MAX_BYTES:
                        peers.append(PeerRecord(age_s=age_s, parts=_decode_learned(note)))
                        continue
                except msgspec.MsgspecError:
                    pass
                if not self._warned:
                    self._warned = True
                    _log.warning("ignoring learned figures that are not of this version")
            for _ in subject.merge.merge(peers):
                yield
