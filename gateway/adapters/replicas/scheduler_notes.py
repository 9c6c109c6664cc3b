"""What the schedulers of several replicas tell one another, twice a second.

Each replica has schedulers of its own over the same workers: it takes its share of every gate,
and hears from the others what they learned of prefills, whom they served, what they have
assigned and which prompts they sent where. Notes go over a board
(`gateway.adapters.store.redis.board`); one that is malformed, or of a pool with other workers, is
ignored.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec

from gateway.policy.model_runtime import ServedModel
from gateway.policy.quartz.quartz import Quartz


class Board(Protocol):
    """Notes by name, the newest of each replica."""

    def publish(self, name: str, payload: bytes) -> None:
        """Put up a note for the others."""

    def peers(self, name: str) -> list[bytes]:
        """The others' notes of that name."""


class _Note(msgspec.Struct):
    replica: str
    scheduler: dict[str, Any]
    predictor: dict[str, Any]
    prefixes: dict[str, Any]
    workers: int
    """A digest of the pool's workers, in their order."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


class _Share(NamedTuple):
    """A scheduler that shares its workers with those of other replicas."""

    name: str
    served: ServedModel
    pool: int
    scheduler: Quartz


class SchedulerNotes:
    """Keeps one replica's schedulers in step with the others'."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        board: Board,
        replica: str,
        replicas: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        """`replica`: a name that stands for this replica from its start to its end.

        `replicas` tells how many replicas serve a model, this one included; `clock` is that of
        the schedulers.
        """
        self._models = [model for model in models if model.schedulers]
        self._board = board
        self._replica = replica
        self._replicas = replicas
        self._clock = clock
        self._told: set[str] = set()
        """Whose schedulers have heard of others."""

    def tell(self) -> Iterator[None]:
        """Put up notes, yielding where requests should go on meanwhile."""
        for share in self._shares():
            if self._count(share.served) > 1 or share.name in self._told:
                self._board.publish(share.name, _encode(self._note(share)))
                yield

    def hear(self) -> Iterator[None]:
        """Take over what the others told, likewise.

        Raises nothing that another replica can cause.
        """
        for served in self._models:
            for scheduler in filter(None, served.schedulers):
                scheduler.replicas = self._count(served)
        for share in self._shares():
            heard = self._count(share.served) > 1
            share.served.news[share.pool].listened(by_others=heard)
            if heard:
                self._told.add(share.name)
            elif share.name not in self._told:
                continue  # nobody is there, nor was lately
            else:
                self._told.discard(share.name)
            yield from self._hear(share)

    def _count(self, served: ServedModel) -> int:
        return max(1, self._replicas(served.name))

    def _shares(self) -> Iterator[_Share]:
        for served in self._models:
            if served.predictors and served.prefixes:
                for pool, scheduler in enumerate(served.schedulers):
                    if isinstance(scheduler, Quartz):
                        yield _Share(f"{served.name}/{pool}", served, pool, scheduler)

    def _note(self, share: _Share) -> _Note:
        return _Note(
            replica=self._replica,
            scheduler=share.scheduler.state(),
            predictor=share.served.predictors[share.pool].state(),
            prefixes=share.served.news[share.pool].tell(),
            workers=_digest(share.served, share.pool),
        )

    def _hear(self, share: _Share) -> Iterator[None]:
        served, pool = share.served, share.pool
        digest = _digest(served, pool)
        notes = {}
        for payload in self._board.peers(share.name):
            try:
                note = _decode(payload)
            except msgspec.DecodeError:
                continue
            if note.workers == digest:
                notes[note.replica] = note
        told = {replica: note.scheduler for replica, note in notes.items()}
        share.scheduler.merge(told, self._clock())
        served.predictors[pool].merge({name: note.predictor for name, note in notes.items()})
        prefixes = {replica: note.prefixes for replica, note in notes.items()}
        for _ in served.news[pool].hear(prefixes, served.prefixes[pool]):
            yield


def _digest(served: ServedModel, pool: int) -> int:
    return crc32("\n".join(served.pools[pool].workers).encode())
