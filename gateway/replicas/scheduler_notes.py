"""Notes that the schedulers of several replicas exchange twice a second.

Each replica runs its own schedulers over the same workers and takes its share of every gate.
The notes tell the other replicas its learned prefill rates, the service each tenant got, its
assigned work, and which prompts went to which worker. Notes go over a board
(`gateway.replicas.bus`). Replicas that discover workers list them in orders of
their own, so a note names its workers, and the receiver translates. Malformed notes are ignored.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec

from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.scheduling.prefix_gossip import Index, PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.scheduler import Points
from predictor.online import PrefillPredictor


class Board(Protocol):
    """Exchanges notes by name, keeping the newest of each replica."""

    def publish(self, name: str, payload: bytes) -> None:
        """Publish a note to the other replicas."""

    def peers(self, name: str) -> list[bytes]:
        """The other replicas' notes of that name."""


class _SchedulerNote(msgspec.Struct):
    replica: str
    scheduler: dict[str, Any]
    predictor: dict[str, Any]
    prefixes: dict[str, Any]
    names: list[int]
    """A digest of each worker's id by place; 0 for a vacant place."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_SchedulerNote).decode


class _Share(NamedTuple):
    """A scheduler that shares its workers with other replicas' schedulers."""

    name: str
    served: ModelRuntime
    pool: int
    scheduler: Quartz
    predictor: PrefillPredictor
    prefixes: PrefixIndex
    gossip: PrefixGossip


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
            for scheduler in served.scheduling.schedulers:
                scheduler.replicas = self._count(served)
        for share in self._shares():
            received = self._count(share.served) > 1
            share.gossip.listened(by_others=received)
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
            for pool, scheduler in enumerate(served.scheduling.schedulers):
                if isinstance(scheduler, Quartz) and (parts := _parts(served, pool)):
                    yield _Share(f"{served.name}/{pool}", served, pool, scheduler, *parts)

    def _note(self, share: _Share) -> _SchedulerNote:
        return _SchedulerNote(
            replica=self._replica,
            scheduler=share.scheduler.state(),
            predictor=share.predictor.state(),
            prefixes=share.gossip.chapters(),
            names=names_of(share.served.fleet.pools[share.pool]),
        )

    def _receive(self, share: _Share) -> Iterator[None]:
        names = names_of(share.served.fleet.pools[share.pool])
        notes: dict[str, tuple[_SchedulerNote, list[int] | None]] = {}
        for payload in self._board.peers(share.name):
            try:
                note = _decode(payload)
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
        translated: dict[str, Index] = {
            name: Translated(share.prefixes, places, len(note.names))
            for name, (note, places) in notes.items()
            if places is not None
        }
        prefixes = {name: note.prefixes for name, (note, _) in notes.items()}
        for _ in share.gossip.receive(prefixes, share.prefixes, translated):
            yield


def _parts(
    served: ModelRuntime, pool: int
) -> tuple[PrefillPredictor, PrefixIndex, PrefixGossip] | None:
    """What a pool's scheduler learns beside its own figures; None where it learns less."""
    scheduling = served.scheduling
    if not (scheduling.predictors and scheduling.prefixes):
        return None
    predictor, index = scheduling.predictors[pool], scheduling.prefixes[pool]
    gossip = scheduling.prefix_gossip[pool]
    if predictor is None or index is None or gossip is None:
        return None
    return predictor, index, gossip


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


class Translated:
    """A prefix index in the order of another replica's workers."""

    def __init__(self, index: PrefixIndex, places: Sequence[int], workers: int) -> None:
        """`places` as `translation` gives them; `workers`: the other's number of places."""
        self.workers = workers
        self._index = index
        self._here = {there: here for here, there in enumerate(places) if there >= 0}

    def insert(self, points: Points, worker: int, tokens_per_byte: float) -> object:
        """See PrefixIndex; prompts to workers that are unknown here are ignored."""
        here = self._here.get(worker)
        return None if here is None else self._index.insert(points, here, tokens_per_byte)


def _in_order(values: object, places: Sequence[int]) -> object:
    """Values by worker in this replica's order; 0 for workers that the other does not have."""
    if not isinstance(values, list):
        return values
    return [values[place] if 0 <= place < len(values) else 0.0 for place in places]
