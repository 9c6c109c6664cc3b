"""Which replicas serve a model, where they are asked, and the seed of their prompt digests.

Every model has a presence note, in which each replica gives its address and its seed. All replicas
use the oldest seed, so that digests compare, and keep it when the replica that chose it ends.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from gateway.replicas.bus import Bus
from gateway.replicas.calls import Address


class Seed(msgspec.Struct, frozen=True, order=True):
    """A seed of prompt digests and the time of its first use. All replicas use the oldest."""

    since_unix_s: float
    value: int


class _Note(msgspec.Struct, frozen=True):
    seed: Seed
    url: str
    token: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


class Presence:
    """Where the replicas are, this one included."""

    def __init__(
        self,
        bus: Bus,
        models: Iterable[str],
        *,
        address: Address,
        seed: Seed,
        on_seed: Callable[[int], None],
    ) -> None:
        """`address`: where other replicas call this one.

        `on_seed` is called with a new seed that all digests must use from then on.
        """
        self._bus = bus
        self._models: list[str] = []
        self._address = address
        self._seed = seed
        self._on_seed = on_seed
        self.serve(models)
        bus.listen(self)

    def serve(self, models: Iterable[str]) -> None:
        """Be present for these models from now on; the notes of others are dropped."""
        before, self._models = self._models, list(models)
        for gone in set(before) - set(self._models):
            self._bus.drop(partial(_is_of, gone))

    def replicas(self, model: str) -> int:
        """Number of replicas that serve a model now, including this one."""
        return 1 + len(self._bus.living(f"replicas:{model}"))

    def others(self) -> list[Address]:
        """Addresses of the other replicas that serve any of this replica's models."""
        return list({r: Address(note.url, note.token) for r, note in self._notes()}.values())

    def send(self) -> Iterator[None]:
        note = _encode(_Note(self._seed, self._address.url, self._address.token))
        for model in self._models:
            self._bus.publish(f"replicas:{model}", b"" if self._bus.closing else note)
        yield

    def receive(self) -> Iterator[None]:
        oldest = min((note.seed for _, note in self._notes()), default=self._seed)
        if oldest < self._seed:
            self._seed = oldest
            self._on_seed(oldest.value)
        yield

    def _notes(self) -> Iterator[tuple[str, _Note]]:
        for model in self._models:
            for replica, (_, payload) in self._bus.living(f"replicas:{model}").items():
                with contextlib.suppress(msgspec.DecodeError):
                    yield replica, _decode(payload)


def _is_of(model: str, note: str) -> bool:
    """Whether a note is a model's; the next exchange brings what another's is named like it."""
    return note in (f"replicas:{model}", f"fleet:{model}") or note.startswith(f"{model}/")
