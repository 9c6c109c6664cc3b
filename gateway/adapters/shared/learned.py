"""What estimators learned, exchanged by the worker processes through their parent.

As in Redis (`gateway.adapters.store.redis`): one record a worker and model, told to each of the
others once; merging is the reader's. With `sqlite://` the parent keeps the mean of all records in
the file, and tells it to whoever joins.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from gateway.adapters.shared.hub import Hub, Session
from gateway.adapters.shared.link import Link
from gateway.errors import StateFailure
from gateway.policy.learned import Learned, Peer, Sums, aged, merged, plausible
from gateway.ports import EstimatorState, Heard

INTERVAL_S: Final = 1.0
KEPT: Final = 8
"""Records of a model that workers left which are gone."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, Sums]).decode
_log = logging.getLogger("sluice.state")


class SharedState:
    """EstimatorState of a worker."""

    interval_s = INTERVAL_S

    def __init__(self, link: Link) -> None:
        self._link = link

    async def exchange(self, records: Mapping[str, Learned | None]) -> Heard:
        """See EstimatorState."""
        told = {name: None if r is None else _encode(r) for name, r in records.items()}
        peers, missing = await self._link.call_lazily("learned", told)
        return Heard(
            peers={
                name: tuple(Peer(age_s=age_s, parts=_decode(record)) for age_s, record in found)
                for name, found in peers.items()
            },
            missing=frozenset(missing),
        )

    async def close(self) -> None:
        """See EstimatorState. The parent keeps what is kept."""


class _Record:
    """One worker's record of one model."""

    __slots__ = ("at_s", "number", "payload")

    def __init__(self, payload: bytes, number: int, at_s: float) -> None:
        self.payload = payload
        self.number = number
        """Of its arrival, over all records."""
        self.at_s = at_s


class LearnedDesk:
    """The records of all workers, and the file's."""

    def __init__(
        self,
        hub: Hub,
        subjects: Iterable[str],
        state: EstimatorState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`subjects`: names that models are kept under, by `state` if there is one."""
        self._records: dict[str, dict[str, _Record]] = {name: {} for name in subjects}
        self._heard: dict[str, int] = {}
        """Session owner -> the newest record it was told."""
        self._number = 0
        self._saved = 0
        self._gone: dict[str, None] = {}
        self._state = state
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        hub.serves("learned", self._exchange)
        hub.when_gone(self._forget)

    async def start(self) -> None:
        """Load what is kept, then save now and then."""
        if self._state is None or not self._state.interval_s:
            return
        with self._logged():
            heard = await self._state.exchange(dict.fromkeys(self._records))
            for name, peers in heard.peers.items():
                for peer in peers:
                    self._put(name, "file", _encode(peer.parts), self._clock() - peer.age_s)
        self._saved = self._number
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Save once more, and let go of the file."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self.save()
        if self._state is not None:
            await self._state.close()

    async def save(self) -> None:
        """Keep what is new. Never raises but for cancellation."""
        if self._state is None or self._saved == self._number:
            return
        number = self._number
        with self._logged():
            await self._state.exchange({name: self._mean(name) for name in self._records})
            self._saved = number

    async def _run(self) -> None:
        while self._state is not None:
            await asyncio.sleep(self._state.interval_s)
            await self.save()

    @contextlib.contextmanager
    def _logged(self) -> Any:
        try:
            yield
        except (StateFailure, TimeoutError) as error:
            if not self._failing:
                _log.warning("what was learned is not kept, trying again: %s", error)
            self._failing = True
        else:
            self._failing = False

    # -- inside

    async def _exchange(self, session: Session, told: Any) -> tuple[object, list[str]]:
        since = self._heard.get(session.owner, 0)
        for name, record in told.items():
            if record is not None:
                self._put(name, session.owner, record, self._clock())
        self._heard[session.owner] = self._number
        peers = {}
        for name in told:
            found = [
                (max(0.0, self._clock() - record.at_s), record.payload)
                for owner, record in self._records.get(name, {}).items()
                if owner != session.owner and record.number > since
            ]
            if found:
                peers[name] = found
        missing = [n for n in told if session.owner not in self._records.get(n, {})]
        return peers, missing

    def _put(self, name: str, owner: str, record: bytes, at_s: float) -> None:
        self._number += 1
        self._records.setdefault(name, {})[owner] = _Record(record, self._number, at_s)

    def _forget(self, session: Session) -> None:
        """What a worker knew is told to the one that takes its place; of many, the newest."""
        self._heard.pop(session.owner, None)
        self._gone[session.owner] = None
        while len(self._gone) > KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            for records in self._records.values():
                records.pop(oldest, None)

    def _mean(self, name: str) -> dict[str, Sums] | None:
        """What all workers know of a model, as one record."""
        parts: dict[str, list[Sums]] = {}
        now_s = self._clock()
        records = self._records[name]
        # Those that are connected have taken over what the others left.
        live = [r for owner, r in records.items() if owner in self._heard]
        for record in live or records.values():
            for part, sums in _decode(record.payload).items():
                if plausible(sums):
                    rate = aged(sums.rate, now_s - record.at_s)
                    parts.setdefault(part, []).append(msgspec.structs.replace(sums, rate=rate))
        return {part: merged(found) for part, found in parts.items()} or None
