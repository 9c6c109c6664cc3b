"""Notes about engines that replicas exchange twice a second.

- Engines that an admin drains. The newest change of each engine applies in all replicas, also in
  those that start later while another replica knows of it.
- Engines that a replica ejected. The other replicas then eject such an engine after one failure
  of their own, instead of `health.eject_after`.
- Response affinity: the engine that stores each response, so that any replica can route a
  `previous_response_id`.

Load in flight is not shared: half a second old, it would make replicas fill the same worker
(docs/adr/0008). Malformed notes are ignored. Replicas that discover workers list them in orders of
their own, so a note names its workers, and the receiver translates.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime, drain_worker
from gateway.replicas.scheduler_notes import Board, names_of, translation
from gateway.routing.conversations import ResponseLocation

LOCATIONS_SHARED_S: Final = 3.0
"""How long each affinity is repeated, so that a replica which misses an exchange gets it later."""
MAX_LOCATIONS_SHARED: Final = 2_000
MAX_DRAINS: Final = 1_000
_LOCATIONS_BATCH: Final = 200
_LATER_S: Final = 0.001


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


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_FleetNote).decode


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
        self._locations: dict[str, deque[tuple[float, str, ResponseLocation]]] = {}
        self._locations_sent: dict[str, int] = {}
        self._locations_received: dict[str, dict[str, int]] = {}
        """Last `locations_told`, by model and replica."""
        self.follow()

    def follow(self) -> None:
        """Share the locations of the models as they are now."""
        names = {served.name for served in self._models}
        for gone in self._locations.keys() - names:
            del self._locations[gone], self._locations_sent[gone], self._locations_received[gone]
        for served in self._models:
            if served.name not in self._locations:
                self._locations[served.name] = deque(maxlen=MAX_LOCATIONS_SHARED)
                self._locations_sent[served.name] = 0
                self._locations_received[served.name] = {}
            served.fleet.response_affinity.on_remember = partial(self._remembered, served.name)

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
            if served.name not in self._locations:
                continue
            self._board.publish(f"fleet:{served.name}", _encode(self._note(served)))
            yield

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; yields likewise. No note makes it raise."""
        for served in tuple(self._models):
            received = self._locations_received.get(served.name, {})
            reported: dict[str, int] = {}
            for payload in self._board.peers(f"fleet:{served.name}"):
                try:
                    note = _decode(payload)
                except msgspec.DecodeError:
                    continue
                reported[note.replica] = note.locations_told
                yield from self._receive(served, note, received.get(note.replica, 0))
            if served.name in self._locations:
                self._locations_received[served.name] = reported

    def _remembered(self, model: str, response_id: str, location: ResponseLocation) -> None:
        if model not in self._locations:
            return
        self._locations_sent[model] += 1
        self._locations[model].append((self._clock(), response_id, location))

    def _note(self, served: ModelRuntime) -> _FleetNote:
        now_s = self._clock()
        locations = self._locations[served.name]
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
            locations_told=self._locations_sent[served.name],
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
