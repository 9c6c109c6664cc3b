"""Notes about engines that replicas exchange over the bus, twice a second.

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

Load in flight is not shared: half a second old, it would make replicas fill the same worker
(docs/adr/0008). Malformed notes are ignored. Replicas that discover workers list them in orders of
their own, so a note names its workers, and the receiver translates.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime, Pool, drain_worker
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


class Board(Protocol):
    """Exchanges notes by name, keeping the newest of each replica."""

    def publish(self, name: str, payload: bytes) -> None:
        """Publish a note to the other replicas."""

    def peers(self, name: str) -> list[bytes]:
        """The other replicas' notes of that name."""


class _Drain(msgspec.Struct, frozen=True, order=True):
    changed_unix_s: float
    on: bool


class _FleetNote(msgspec.Struct):
    replica: str
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


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_fleet: Final = msgspec.msgpack.Decoder(_FleetNote).decode


class FleetNotes:
    """Exchanges this replica's view of the engines with the other replicas."""

    def __init__(
        self,
        models: Sequence[ModelRuntime],
        board: Board,
        replica: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        retiring: Sequence[ModelRuntime] = (),
    ) -> None:
        """`replica`: a name unique to this process.

        `retiring`: models that a reload removed and whose requests still run; drains reach them.

        `clock` monotonic, the same as the pools'; `wall_clock` Unix time. Both in seconds.
        """
        self._models = models
        self._retiring = retiring
        self._board = board
        self._replica = replica
        self._clock = clock
        self._wall_clock = wall_clock
        self._drains: dict[str, _Drain] = {}
        self._locations: dict[str, _Locations] = {}
        self.follow()

    def follow(self) -> None:
        """Share the locations of the models as they are now."""
        known, self._locations = self._locations, {}
        for served in self._models:
            shared = self._locations[served.name] = known.get(served.name) or _Locations()
            served.fleet.response_affinity.on_remember = partial(self._remembered, shared)

    def drained(self, worker: str, *, on: bool) -> None:
        """Record that an admin drained an engine here (`on`) or returned it."""
        changed_unix_s = self._wall_clock()
        known = self._drains.get(worker)
        if known is not None:  # the other host's clock may be ahead
            changed_unix_s = max(changed_unix_s, known.changed_unix_s + _LATER_S)
        self._note_drain(worker, _Drain(changed_unix_s=changed_unix_s, on=on))

    def joined(self, worker: str) -> None:
        """Note that a new engine is at an address; a drain of the one before ends everywhere."""
        known = self._drains.get(worker)
        if known is not None and known.on:
            self.drained(worker, on=False)

    def send(self) -> Iterator[None]:
        """Publish notes; yields between steps so that requests can run."""
        for served in tuple(self._models):
            if (shared := self._locations.get(served.name)) is not None:
                self._board.publish(f"fleet:{served.name}", _encode(self._note(served, shared)))
                yield

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; yields likewise. No note makes it raise."""
        for served in tuple(self._models):
            shared = self._locations.get(served.name) or _Locations()
            heard: dict[str, int] = {}
            for payload in self._board.peers(f"fleet:{served.name}"):
                try:
                    note = _decode_fleet(payload)
                except msgspec.DecodeError:
                    continue
                heard[note.replica] = note.locations_told
                yield from self._receive(served, note, shared.heard.get(note.replica, 0))
            shared.heard = heard

    def _remembered(self, shared: _Locations, response_id: str, location: ResponseLocation) -> None:
        shared.told += 1
        shared.newest.append((self._clock(), response_id, location))

    def _note(self, served: ModelRuntime, shared: _Locations) -> _FleetNote:
        now_s = self._clock()
        locations = shared.newest
        while locations and locations[0][0] < now_s - LOCATIONS_SHARED_S:
            locations.popleft()
        return _FleetNote(
            replica=self._replica,
            ejected=[
                [i for i, engine in enumerate(pool.engine_of) if engine.ejected_until_s > now_s]
                if pool.last_ejection_end_s > now_s
                else []
                for pool in served.fleet.pools
            ],
            drains=self._drains,
            locations=[(response_id, location) for _, response_id, location in locations],
            locations_told=shared.told,
            names=[names_of(pool) for pool in served.fleet.pools],
        )

    def _receive(
        self, served: ModelRuntime, note: _FleetNote, locations_received: int
    ) -> Iterator[None]:
        for worker, drain in note.drains.items():
            known = self._drains.get(worker)
            if known is None or drain > known:
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
    replica: str
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
        board: Board,
        replica: str,
        replicas: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        """`replica`: a name unique to this process.

        `replicas` gives the number of replicas that serve a model, including this one; `clock`
        is the schedulers' clock.
        """
        self._models = models
        self._board = board
        self._replica = replica
        self._replicas = replicas
        self._clock = clock
        self._sent: set[str] = set()
        """Names of the shares whose schedulers got notes of other replicas."""

    def send(self) -> Iterator[None]:
        """Publish notes; yields between steps so that requests can run."""
        for share in self._shares():
            if self._count(share.served) > 1 or share.name in self._sent:
                self._board.publish(share.name, _encode(self._note(share)))
                yield

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; yields likewise. No note makes it raise."""
        for served in tuple(self._models):
            for pool in served.fleet.pools:
                pool.scheduler.replicas = self._count(served)
        for share in self._shares():
            received = self._count(share.served) > 1
            share.pool.gossip.listened(by_others=received)
            if received:
                self._sent.add(share.name)
            elif share.name not in self._sent:
                continue  # no other replica, now or at the last exchange
            else:
                self._sent.discard(share.name)
            yield from self._receive(share)

    def _count(self, served: ModelRuntime) -> int:
        return max(1, self._replicas(served.name))

    def _shares(self) -> Iterator[_Share]:
        for served in tuple(self._models):
            for place, pool in enumerate(served.fleet.pools):
                scheduler, predictor, index = pool.scheduler, pool.predictor, pool.prefixes
                if type(scheduler) is Quartz and predictor is not None and index is not None:
                    name = f"{served.name}/{place}"
                    yield _Share(name, served, pool, scheduler, predictor, index)

    def _note(self, share: _Share) -> _SchedulerNote:
        return _SchedulerNote(
            replica=self._replica,
            scheduler=share.scheduler.state(),
            predictor=share.predictor.state(),
            prefixes=share.pool.gossip.chapters(),
            names=names_of(share.pool),
        )

    def _receive(self, share: _Share) -> Iterator[None]:
        names = names_of(share.pool)
        notes: dict[str, tuple[_SchedulerNote, list[int] | None]] = {}
        for payload in self._board.peers(share.name):
            try:
                note = _decode_scheduler(payload)
            except msgspec.DecodeError:
                continue
            places = None if note.names == names else translation(names, note.names)
            notes[note.replica] = note, places
            if places is not None:
                note.scheduler["pending_s"] = _in_order(note.scheduler.get("pending_s"), places)
                if isinstance(speeds := note.predictor.get("speeds"), dict):
                    note.predictor["speeds"] = {
                        part: _in_order(values, places) for part, values in speeds.items()
                    }
        reported = {name: note.scheduler for name, (note, _) in notes.items()}
        share.scheduler.merge(reported, self._clock())
        share.predictor.merge(
            # What is learned is compared with the last note's, by worker: another order, another
            # beginning.
            {
                f"{name} {hash(tuple(note.names))}": note.predictor
                for name, (note, _) in notes.items()
            }
        )
        here = {
            name: {there: place for place, there in enumerate(places) if there >= 0}
            for name, (_, places) in notes.items()
            if places is not None
        }
        prefixes = {name: note.prefixes for name, (note, _) in notes.items()}
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
