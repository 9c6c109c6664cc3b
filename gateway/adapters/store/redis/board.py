"""Notes that replicas put up for one another on Redis: who is there, and what schedulers know.

Rules:
- Twice a second one round trip tells all notes of this replica and hears those of others
  (`redis_exchange`); no request waits for it. Listeners renew their notes right before it and
  take over the others' right after it. While Redis is away notes of others run out (SILENT_S),
  and each replica goes on with what it knows.
- Every model has a note in which each replica says that it is there, where it is asked, and the
  seed of its prompt digests. All use the seed of the replica that began first, so that prompts
  compare, and keep it when that replica ends. A replica that ends takes its own back.
- An empty note is none. A note is MOST_BYTES at most, and of MOST_REPLICAS others the first are
  heard.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from gateway.adapters.replicas.calls import Address
from gateway.adapters.store.redis.exchange import RedisExchange
from gateway.errors import StateFailure
from gateway.policy.fleet.breaker import Breaker

EVERY_S: Final = 0.5
LIMIT_S: Final = 2.0
"""One exchange, whatever Redis does."""
SILENT_S: Final = 5
"""A replica that was not heard for so long is gone."""
TTL_S: Final = 60
MOST_BYTES: Final = 1 << 20
MOST_REPLICAS: Final = 128
KIND: Final = "notes3"
"""Another layout of notes gets another kind: versions side by side don't hear one another."""

_log = logging.getLogger("sluice.state")


class Listener(Protocol):
    """Tells and hears notes; where it yields, requests go on."""

    def tell(self) -> Iterator[None]:
        """Put up what the others should hear now."""
        ...

    def hear(self) -> Iterator[None]:
        """Take over what the others have told, or that they are silent."""
        ...


class Seed(msgspec.Struct, frozen=True, order=True):
    """The seed of digests, and when it began to be used: the oldest is used by all."""

    since_unix_s: float
    value: int


class _Presence(msgspec.Struct, frozen=True):
    """What a replica says of itself."""

    seed: Seed
    url: str
    token: str


class _Note(msgspec.Struct):
    replica: str
    payload: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_note: Final = msgspec.msgpack.Decoder(_Note).decode
_decode_presence: Final = msgspec.msgpack.Decoder(_Presence).decode


class RedisBoard:
    """One replica's view of the notes."""

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
        """`address`: where the others ask this replica.

        `on_seed` is told another seed that all digests are to have from now on.
        """
        self._presence = [f"replicas:{model}" for model in models]
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
        """By name and replica: when it was written, by this clock, and the note."""
        self._listeners: list[Listener] = []
        self._too_large: set[str] = set()
        self._closing = False
        self._breaker = Breaker()
        self._away = False
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether Redis answers."""
        return self._breaker.closed

    def listen(self, listener: Listener) -> None:
        """Have a listener tell before each exchange, and hear after it."""
        self._listeners.append(listener)

    def publish(self, name: str, payload: bytes) -> None:
        """Put up a note for the others; one that is too large stays away."""
        if len(payload) > MOST_BYTES:
            if name not in self._too_large:
                _log.warning("the note %s is too large to tell: %d bytes", name, len(payload))
            self._too_large.add(name)
            payload = b""
        self._mine[name] = payload

    def peers(self, name: str) -> list[bytes]:
        """The others' notes of that name."""
        return [payload for _, payload in self._living(name).values()]

    def replicas(self, model: str) -> int:
        """Gateways that serve a model now, this one included."""
        return 1 + len(self._living(f"replicas:{model}"))

    def others(self) -> list[Address]:
        """Where the other replicas that serve a model of this one are asked."""
        found = {}
        for name in self._presence:
            for replica, (_, payload) in self._living(name).items():
                with contextlib.suppress(msgspec.DecodeError):
                    told = _decode_presence(payload)
                    found[replica] = Address(told.url, told.token)
        return list(found.values())

    def hurry(self) -> None:
        """Exchange soon: there is news that others should have."""
        self._hurry.set()

    async def start(self) -> None:
        """Hear of the others and what they told, then keep telling; waits LIMIT_S at most."""
        await self.exchange()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Say the last, which is that this replica is gone, and let go of the connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._closing = True
        await self.exchange()
        await self._exchange.close()

    async def exchange(self) -> None:
        """Tell and hear, if the breaker allows it. Never raises but for cancellation."""
        if self._breaker.allows(self._clock()):
            await self._go_through(listener.tell() for listener in self._listeners)
            await self._round_trip()
        await self._go_through(listener.hear() for listener in self._listeners)

    async def _go_through(self, parts: Iterable[Iterator[None]]) -> None:
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
                told = await self._exchange.exchange(notes)
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
        for name, heard in told.items():
            self._hear(name, heard.records)
        self._agree()

    def _note(self, payload: bytes) -> bytes:
        return _encode(_Note(replica=self._replica, payload=payload))

    def _hear(self, name: str, records: Iterable[tuple[float, bytes]]) -> None:
        now_s = self._clock()
        held = self._theirs.setdefault(name, {})
        for age_s, record in records:
            try:
                note = _decode_note(record)
            except msgspec.DecodeError:
                continue
            if not note.payload:
                held.pop(note.replica, None)
            elif note.replica in held or len(held) < MOST_REPLICAS:
                held[note.replica] = (now_s - age_s, note.payload)
        self._theirs[name] = self._living(name)

    def _living(self, name: str) -> dict[str, tuple[float, bytes]]:
        since_s = self._clock() - SILENT_S
        held = self._theirs.get(name, {})
        return {replica: note for replica, note in held.items() if note[0] >= since_s}

    def _agree(self) -> None:
        """Use the oldest seed of all."""
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
