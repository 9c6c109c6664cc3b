"""What the schedulers of several replicas tell one another, about once a second.

Each replica has schedulers of its own over the same workers: it takes its share of every gate,
and hears from the others what they learned of prefills, whom they served, what they have
assigned and which prompts they sent where. Notes go over a board
(`gateway.adapters.store.redis_board`); one that is malformed, or of a pool with other workers, is
ignored.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from zlib import crc32

import msgspec

from gateway.policy.quartz import Quartz
from gateway.policy.served import ServedModel

EVERY_S = 1.0


class Board(Protocol):
    """Notes by name, the newest of each process."""

    def publish(self, name: str, payload: bytes) -> None:
        """Put up a note for the others."""

    def peers(self, name: str) -> list[bytes]:
        """The others' notes of that name."""


class _Note(msgspec.Struct):
    process: str
    scheduler: dict[str, Any]
    predictor: dict[str, Any]
    prefixes: dict[str, Any]
    workers: int
    """A digest of the pool's workers, in their order."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


class SchedulerNotes:
    """Keeps one process's schedulers in step with the others'."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        board: Board,
        process: str,
        replicas: Callable[[str], int],
    ) -> None:
        """`process`: a name that stands for this process from its start to its end.

        `replicas` tells how many processes serve a model, this one included.
        """
        self._models = [model for model in models if model.schedulers]
        self._board = board
        self._process = process
        self._replicas = replicas
        self._told: set[str] = set()
        """Whose schedulers have heard of others."""

    def exchange(self, now_s: float) -> Iterator[None]:
        """Tell and hear, yielding where requests should go on meanwhile.

        Raises nothing that another process can cause.
        """
        for served in self._models:
            replicas = max(1, self._replicas(served.name))
            for pool, scheduler in enumerate(served.schedulers):
                if scheduler is None:
                    continue
                scheduler.replicas = replicas
                if not (isinstance(scheduler, Quartz) and served.predictors and served.prefixes):
                    continue
                name = f"{served.name}/{pool}"
                served.news[pool].listened(by_others=replicas > 1)
                if replicas > 1:
                    self._told.add(name)
                elif name not in self._told:
                    continue  # nobody is there, nor was lately
                else:
                    self._told.discard(name)
                yield from self._exchange(name, served, pool, scheduler, now_s)

    def _exchange(
        self, name: str, served: ServedModel, pool: int, scheduler: Quartz, now_s: float
    ) -> Iterator[None]:
        predictor = served.predictors[pool]
        news = served.news[pool]
        own = _Note(
            process=self._process,
            scheduler=scheduler.state(),
            predictor=predictor.state(),
            prefixes=news.tell(),
            workers=_digest(served, pool),
        )
        self._board.publish(name, _encode(own))
        notes = {}
        for payload in self._board.peers(name):
            try:
                note = _decode(payload)
            except msgspec.DecodeError:
                continue
            if note.workers == own.workers:
                notes[note.process] = note
        scheduler.merge({process: note.scheduler for process, note in notes.items()}, now_s)
        predictor.merge({process: note.predictor for process, note in notes.items()})
        told = {process: note.prefixes for process, note in notes.items()}
        for _ in news.hear(told, served.prefixes[pool]):
            yield


def _digest(served: ServedModel, pool: int) -> int:
    return crc32("\n".join(served.pools[pool].workers).encode())
