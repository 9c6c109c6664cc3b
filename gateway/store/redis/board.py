"""Gossip between replicas through Redis: each replica's presence, and its listeners' notes.

Rules:
- Twice a second one round trip publishes this replica's notes and reads the others' (`exchange`);
  no request waits for it. Listeners update their notes right before it and apply the others'
  right after it. While Redis is away, other replicas' notes expire after SILENT_S and each
  replica continues with what it knows.
- Every model has a presence note, in which each replica gives its address and the seed of its
  prompt digests. All replicas use the oldest seed, so that digests compare, and keep it when the
  replica that chose it ends. A replica that ends withdraws its notes.
- An empty note counts as none. A note is MAX_BYTES at most; notes of at most MAX_REPLICAS other
  replicas are read.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.fleet.breaker import Breaker
from gateway.replicas.calls import Address
from gateway.store.redis.exchange import RedisExchange

EVERY_S: Final = 0.5
LIMIT_S: Final = 2.0
"""Time limit of one exchange."""
SILENT_S: Final = 5
"""A replica without an exchange for this long is gone."""
TTL_S: Final = 60
MAX_BYTES: Final = 1 << 20
MAX_REPLICAS: Final = 128
KIND: Final = "notes3"
"""Changes with the notes' layout, so that different versions do not read each other's notes."""

_log = logging.getLogger("sluice.state")


class Listener(Protocol):
    """Publishes and applies notes; requests run wherever it yields."""

    def send(self) -> Iterator[None]:
        """Publish the current notes."""
        ...

    def receive(self) -> Iterator[None]:
        """Apply the other replicas' notes; replicas without notes are gone."""
        ...


class Seed(msgspec.Struct, frozen=True, order=True):
    """A seed of prompt digests and the time of its first use. All replicas use the oldest."""

    since_unix_s: float
    value: int


class _Presence(msgspec.Struct, frozen=True):
    """A replica's presence note."""

    seed: Seed
    url: str
    token: str


class _StoredNote(msgspec.Struct):
    replica: str
    payload: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_note: Final = msgspec.msgpack.Decoder(_StoredNote).decode
_decode_presence: Final = msgspec.msgpack.Decoder(_Presence).decode


class RedisBoard:
    """One replica's notes and its view of the others'."""

    def __init__(
        self,
        url: str,
        models: Iterable[str],
        *,
        replica: str,
        address: Address,
        seed: Seed,
        on_seed: Callable[[int], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        """`address`: where other replicas call this one.

        `on_seed` is called with a new seed that all digests must use from then on.
        """
        self._presence: list[str] = []
        self._replica = replica
        self._address = address
        self._seed = seed
        self._on_seed = on_seed
        self._clock = clock
        self._chance = chance
        self._exchange = RedisExchange(
            url, kind=KIND, replica=replica, silent_s=SILENT_S, ttl_s=TTL_S
        )
        self._mine: dict[str, bytes] = {}
        self._theirs: dict[str, dict[str, tuple[float, bytes]]] = {}
        """(time of writing by this clock, note), by name and replica."""
        self._listeners: list[Listener] = []
        self._too_large: set[str] = set()
        self._closing = False
        self._breaker = Breaker()
        self._away = False
        self._hurry = asyncio.Event()
        self._background = BackgroundTasks()
        self.serve(models)

    def serve(self, models: Iterable[str]) -> None:
        """Be present for these models from now on; the notes of others are dropped."""
        names = list(models)
        before, self._presence = self._presence, [f"replicas:{model}" for model in names]
        for gone in {name.removeprefix("replicas:") for name in before} - set(names):
            for notes in (self._mine, self._theirs):
                for name in [n for n in notes if _is_of(gone, n)]:
                    del notes[name]

    @property
    def up(self) -> bool:
        """Whether Redis answers."""
        return self._breaker.closed

    def listen(self, listener: Listener) -> None:
        """Call a listener's `send` before each exchange and its `receive` after it."""
        self._listeners.append(listener)

    def publish(self, name: str, payload: bytes) -> None:
        """Publish a note to the other replicas; a note that is too large is dropped."""
        if len(payload) > MAX_BYTES:
            if name not in self._too_large:
                _log.warning("the note %s is too large to tell: %d bytes", name, len(payload))
            self._too_large.add(name)
            payload = b""
        self._mine[name] = payload

    def peers(self, name: str) -> list[bytes]:
        """The other replicas' notes of that name."""
        return [payload for _, payload in self._living(name).values()]

    def replicas(self, model: str) -> int:
        """Number of replicas that serve a model now, including this one."""
        return 1 + len(self._living(f"replicas:{model}"))

    def others(self) -> list[Address]:
        """Addresses of the other replicas that serve any of this replica's models."""
        found = {}
        for name in self._presence:
            for replica, (_, payload) in self._living(name).items():
                with contextlib.suppress(msgspec.DecodeError):
                    reported = _decode_presence(payload)
                    found[replica] = Address(reported.url, reported.token)
        return list(found.values())

    def hurry(self) -> None:
        """Exchange soon, to spread news."""
        self._hurry.set()

    async def start(self) -> None:
        """Exchange once, then periodically; waits LIMIT_S at most."""
        await self.exchange()
        self._background.start(self._run())

    async def close(self) -> None:
        """Withdraw this replica's notes and close the connection."""
        await self._background.close()
        self._closing = True
        await self.exchange()
        await self._exchange.close()

    async def exchange(self) -> None:
        """Exchange once if the breaker allows it. Raises nothing except for cancellation."""
        if self._breaker.allows(self._clock()):
            await self._run_all(listener.send() for listener in self._listeners)
            await self._round_trip()
        await self._run_all(listener.receive() for listener in self._listeners)

    async def _run_all(self, parts: Iterable[Iterator[None]]) -> None:
        for part in parts:
            try:
                for _ in part:
                    await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("telling or hearing notes failed")

    async def _round_trip(self) -> None:
        presence = _Presence(self._seed, self._address.url, self._address.token)
        here = self._note(b"" if self._closing else _encode(presence))
        notes = dict.fromkeys(self._presence, here)
        notes |= {name: self._note(payload) for name, payload in self._mine.items()}
        try:
            async with asyncio.timeout(LIMIT_S):
                reported = await self._exchange.exchange(notes)
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
            _log.warning("replicas hear of one another again")
        for name, received in reported.items():
            if name in self._mine or name in self._presence:  # else its model was removed meanwhile
                self._receive(name, received.records)
        self._agree()

    def _note(self, payload: bytes) -> bytes:
        return _encode(_StoredNote(replica=self._replica, payload=payload))

    def _receive(self, name: str, records: Iterable[tuple[float, bytes]]) -> None:
        now_s = self._clock()
        held = self._theirs.setdefault(name, {})
        for age_s, record in records:
            try:
                note = _decode_note(record)
            except msgspec.DecodeError:
                continue
            if not note.payload:
                held.pop(note.replica, None)
            elif note.replica in held or len(held) < MAX_REPLICAS:
                held[note.replica] = (now_s - age_s, note.payload)
        self._theirs[name] = self._living(name)

    def _living(self, name: str) -> dict[str, tuple[float, bytes]]:
        since_s = self._clock() - SILENT_S
        held = self._theirs.get(name, {})
        return {replica: note for replica, note in held.items() if note[0] >= since_s}

    def _agree(self) -> None:
        """Switch to the oldest seed of all replicas."""
        oldest = self._seed
        for name in self._presence:
            for payload in self.peers(name):
                with contextlib.suppress(msgspec.DecodeError):
                    oldest = min(oldest, _decode_presence(payload).seed)
        if oldest != self._seed:
            self._seed = oldest
            self._on_seed(oldest.value)

    def _failed(self, why: str) -> None:
        self._breaker.failed(self._clock(), self._chance())
        if not self._away and not self._breaker.closed:
            self._away = True
            _log.warning("replicas do not hear of one another: %s", why)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S * (0.9 + 0.2 * self._chance())):
                    await self._hurry.wait()
            self._hurry.clear()
            await self.exchange()


def _is_of(model: str, note: str) -> bool:
    """Whether a note is a model's; the next exchange tells what another's is named like it."""
    return note in (f"replicas:{model}", f"fleet:{model}") or note.startswith(f"{model}/")
