"""The bus between gateways: each publishes notes, and reads the others'.

Rules:
- An exchange publishes this replica's notes and reads the others', in one round trip; no request
  waits for it. Listeners update their notes right before it and apply the others' right after it.
- While the store is away, the others' notes expire after SILENT_S and each replica continues with
  what it knows. A replica that ends withdraws its notes. An empty note counts as none.
- A lasting note (`LASTING`) is written when it changed or when the store lost it, and survives its
  replica. It is received once; it may come from this gateway's former process, too.
- A note is MAX_BYTES at most; notes of at most MAX_REPLICAS other replicas are read.
- Every model has a presence note (`Presence`), in which each replica gives its address and the seed
  of its prompt digests. All use the oldest seed, so that digests compare, and keep it when the
  replica that chose it ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.fleet.breaker import Breaker
from gateway.replicas.calls import Address

LIMIT_S: Final = 2.0
"""Time limit of one exchange."""
SILENT_S: Final = 5
"""A replica without an exchange for this long is gone."""
MAX_BYTES: Final = 1 << 20
MAX_REPLICAS: Final = 128
LASTING: Final = "learned "
"""Prefix of the names of lasting notes; a model's name, with which others begin, has no blank."""

_log = logging.getLogger("sluice.state")


class Received(NamedTuple):
    """The result of an exchange of one name."""

    held: bool
    """Whether the store has a note of this replica."""
    notes: list[tuple[float, bytes]]
    """(age in seconds, note) of each other replica that wrote since the last exchange."""


class NoteStore(Protocol):
    """Where replicas leave their notes: the newest of each name and replica."""

    every_s: float
    """Seconds between two exchanges."""
    away: str
    """What it means that the store does not answer, and that it does again."""
    back: str

    async def exchange(self, notes: Mapping[str, bytes]) -> dict[str, Received]:
        """Store this replica's notes (b"": only read) and return the others'.

        Names whose part of the store is away are left out. Raises StateFailure if all are.
        """
        ...

    async def close(self) -> None:
        """Close files and connections."""


Steps = Callable[[], Iterator[None]]
"""Work on notes; requests run wherever it yields."""


class _Signed(msgspec.Struct):
    replica: str
    payload: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Signed).decode


class Bus:
    """One replica's notes and its view of the others'."""

    def __init__(
        self,
        store: NoteStore,
        *,
        replica: str,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        """`replica`: a name unique to this process; `clock` monotonic, in seconds."""
        self.closing = False
        self._store = store
        self._replica = replica
        self._clock = clock
        self._chance = chance
        self._mine: dict[str, bytes] = {}
        self._written: set[str] = set()
        """Lasting notes that the store has as they are."""
        self._theirs: dict[str, dict[str, tuple[float, bytes]]] = {}
        """(time of writing by this clock, note), by name and replica."""
        self._news: dict[str, list[tuple[float, bytes]]] = {}
        """(age, lasting note) that the last exchange brought."""
        self._listeners: list[tuple[Steps, Steps]] = []
        self._too_large: set[str] = set()
        self._breaker = Breaker()
        self._away = False
        self._hurry = asyncio.Event()
        self._background = BackgroundTasks()

    @property
    def up(self) -> bool:
        """Whether the store answers."""
        return self._breaker.closed

    def listen(self, send: Steps, receive: Steps) -> None:
        """Publish notes by `send` before each exchange, apply the others' by `receive` after it."""
        self._listeners.append((send, receive))

    def publish(self, name: str, payload: bytes) -> None:
        """Publish a note to the other replicas; a note that is too large is dropped."""
        if len(payload) > MAX_BYTES:
            if name not in self._too_large:
                _log.warning("the note %s is too large to tell: %d bytes", name, len(payload))
            self._too_large.add(name)
            payload = b""
        self._mine[name] = payload
        self._written.discard(name)

    def is_written(self, name: str) -> bool:
        """Whether the store has a lasting note as it was published."""
        return name in self._written

    def drop(self, gone: Callable[[str], bool]) -> None:
        """Forget the notes of these names, the other replicas' too."""
        for notes in (self._mine, self._theirs):
            for name in [name for name in notes if gone(name)]:
                del notes[name]

    def peers(self, name: str) -> dict[str, bytes]:
        """The other replicas' notes of that name, by replica; those without are gone."""
        since_s = self._clock() - SILENT_S
        held = self._theirs.get(name, {})
        return {replica: note for replica, (at_s, note) in held.items() if at_s >= since_s}

    def news(self, name: str) -> list[tuple[float, bytes]]:
        """Age and content of the lasting notes that the last exchange brought; once."""
        return self._news.pop(name, [])

    def hurry(self) -> None:
        """Exchange soon, to spread news."""
        self._hurry.set()

    async def start(self) -> None:
        """Exchange once, then periodically; waits LIMIT_S at most."""
        await self.exchange()
        self._background.start(self._run())

    async def close(self) -> None:
        """Publish once more, withdraw what does not last, and close the store."""
        await self._background.close()
        self.closing = True
        await self.exchange()
        await self._store.close()

    async def exchange(self) -> None:
        """Exchange once if the breaker allows it. Raises nothing except for cancellation."""
        if self._breaker.allows(self._clock()):
            await self._run_all(send for send, _ in self._listeners)
            await self._round_trip()
        await self._run_all(receive for _, receive in self._listeners)

    async def _run_all(self, parts: Iterable[Steps]) -> None:
        for part in parts:
            try:
                for _ in part():
                    await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("telling or hearing notes failed")

    async def _round_trip(self) -> None:
        notes = {}
        for name, payload in self._mine.items():
            if not name.startswith(LASTING):
                notes[name] = _encode(_Signed(replica=self._replica, payload=payload))
            else:
                notes[name] = b"" if name in self._written else payload
        try:
            async with asyncio.timeout(LIMIT_S):
                received = await self._store.exchange(notes)
        except (StateFailure, TimeoutError) as error:
            self._failed(str(error) or f"no answer within {LIMIT_S:g} s")
            return
        except Exception:  # noqa: BLE001 - a defect must not end the task
            _log.exception("exchanging notes failed")
            self._failed("a defect, see above")
            return
        self._breaker.succeeded()
        if self._away:
            self._away = False
            _log.warning("%s", self._store.back)
        for name, answer in received.items():
            if name not in self._mine:  # its model was removed meanwhile
                continue
            if name.startswith(LASTING):
                self._news[name] = answer.notes
                if not answer.held:
                    self._written.discard(name)
                elif notes[name] == self._mine[name]:
                    self._written.add(name)
                continue
            self._receive(name, answer.notes)

    def _receive(self, name: str, notes: Iterable[tuple[float, bytes]]) -> None:
        living, now_s = self.peers(name), self._clock()
        held = {r: note for r, note in self._theirs.get(name, {}).items() if r in living}
        for age_s, note in notes:
            with contextlib.suppress(msgspec.DecodeError):
                signed = _decode(note)
                if not signed.payload:
                    held.pop(signed.replica, None)
                elif signed.replica in held or len(held) < MAX_REPLICAS:
                    held[signed.replica] = (now_s - age_s, signed.payload)
        self._theirs[name] = held

    def _failed(self, why: str) -> None:
        self._breaker.failed(self._clock(), self._chance())
        if not self._away and not self._breaker.closed:
            self._away = True
            _log.warning("%s: %s", self._store.away, why)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._store.every_s * (0.9 + 0.2 * self._chance())):
                    await self._hurry.wait()
            self._hurry.clear()
            await self.exchange()


class Seed(msgspec.Struct, frozen=True, order=True):
    """A seed of prompt digests and the time of its first use. All replicas use the oldest."""

    since_unix_s: float
    value: int


class _Presence(msgspec.Struct, frozen=True):
    seed: Seed
    url: str
    token: str


_decode_presence: Final = msgspec.msgpack.Decoder(_Presence).decode


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
        bus.listen(self.send, self.receive)

    def serve(self, models: Iterable[str]) -> None:
        """Be present for these models from now on; the notes of others are dropped."""
        before, self._models = self._models, list(models)
        # Others' notes of a model that is named like these come with the next exchange.
        gone = set(before) - set(self._models)
        names = {f"{kind}:{model}" for kind in ("replicas", "fleet") for model in gone}
        pools = tuple(f"{model}/" for model in gone)
        self._bus.drop(lambda note: note in names or note.startswith(pools))

    def replicas(self, model: str) -> int:
        """Number of replicas that serve a model now, including this one."""
        return 1 + len(self._bus.peers(f"replicas:{model}"))

    def others(self) -> list[Address]:
        """Addresses of the other replicas that serve any of this replica's models."""
        return list({r: Address(note.url, note.token) for r, note in self._notes()}.values())

    def send(self) -> Iterator[None]:
        note = _encode(_Presence(self._seed, self._address.url, self._address.token))
        for model in self._models:
            self._bus.publish(f"replicas:{model}", b"" if self._bus.closing else note)
        yield

    def receive(self) -> Iterator[None]:
        oldest = min((note.seed for _, note in self._notes()), default=self._seed)
        if oldest < self._seed:
            self._seed = oldest
            self._on_seed(oldest.value)
        yield

    def _notes(self) -> Iterator[tuple[str, _Presence]]:
        for model in self._models:
            for replica, payload in self._bus.peers(f"replicas:{model}").items():
                with contextlib.suppress(msgspec.DecodeError):
                    yield replica, _decode_presence(payload)
