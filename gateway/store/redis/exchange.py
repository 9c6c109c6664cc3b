"""The notes of replicas in Redis: the newest per name and replica (`gateway.replicas.bus`).

Rules:
- Each name has one hash, `sluice:1:{NAME}:KIND`, whose hash tag keeps all keys of a call in one
  slot of a cluster.
- One pipelined round trip handles all names: `lua/exchange.lua` stores this replica's notes and
  returns those that others wrote since. Notes are opaque here.
- A note carries the number of its exchange. One that is repeated after a time-out, or arrives late
  from a stalled connection's buffer, changes nothing.
- A living replica drops notes that were not renewed for `silent_s`. A key expires `ttl_s` after its
  last exchange. Times are the server's.
- Nothing here retries: the breaker decides.
- In a cluster, names are exchanged separately and concurrently, so an unreachable node affects
  only its own names.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

from gateway.errors import StateFailure
from gateway.replicas.bus import LASTING, SILENT_S, Received
from gateway.store.redis.route import Session, lua, route_of, script

_log = logging.getLogger("sluice.state")


class Kind(NamedTuple):
    """How long notes of a kind are kept; its name changes with their layout."""

    name: str
    silent_s: int
    ttl_s: int


LASTING_SILENT_S: Final = 600
LASTING_TTL_S: Final = 7 * 86400
LASTING_KIND: Final = Kind("learned", silent_s=LASTING_SILENT_S, ttl_s=LASTING_TTL_S)
KIND: Final = Kind("notes4", silent_s=SILENT_S, ttl_s=60)


def kind_of(name: str) -> Kind:
    """The kind of a note."""
    return LASTING_KIND if name.startswith(LASTING) else KIND


def key_of(name: str) -> str:
    """The key of a name, quoted because a brace in it would end the hash tag."""
    return f"sluice:1:{{{quote(name.removeprefix(LASTING), safe=':')}}}:{kind_of(name).name}"


class RedisExchange:
    """NoteStore in Redis."""

    every_s = 0.5
    away = "replicas do not hear of one another"
    back = "replicas hear of one another again"

    def __init__(self, url: str, replica: str) -> None:
        """`url` as in `route`; `replica` must be unique among the replicas."""
        self._replica = replica
        self._sequence = 0
        self._since: dict[str, int] = {}
        self._route = route_of(url)
        self._script = script("exchange", lua("exchange"))
        self._sessions: dict[str, Session] = {}
        """By name in a cluster, else one for all."""
        self._failing = False

    async def exchange(self, notes: Mapping[str, bytes]) -> dict[str, Received]:
        self._sequence += 1
        # Forget names that are gone, and in a cluster hang up where they were.
        self._since = {name: since for name, since in self._since.items() if name in notes}
        one_server = self._route.one_server
        parts = {"": list(notes)} if one_server else {name: [name] for name in notes}
        for name in [name for name in self._sessions if name not in parts]:
            await self._sessions.pop(name).close()
        for name, part in parts.items():
            if name not in self._sessions:
                self._sessions[name] = Session(self._route, key_of(part[0] if part else ""))
        answers = await asyncio.gather(
            *(self._ask(name, part, notes) for name, part in parts.items()), return_exceptions=True
        )
        reported: dict[str, Received] = {}
        failed: list[StateFailure] = []
        for answer in answers:
            if isinstance(answer, StateFailure):
                failed.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                reported |= answer
        if failed and not reported:
            raise failed[0]
        if failed and not self._failing:
            _log.warning("%d of %d keys: %s", len(failed), len(parts), failed[0])
        self._failing = bool(failed)
        return reported

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _ask(
        self, session: str, names: Sequence[str], notes: Mapping[str, bytes]
    ) -> dict[str, Received]:
        """Exchange the names of one server. Raises StateFailure."""
        calls = [
            (
                *(1, key_of(name), self._replica, self._sequence, notes[name]),
                *(self._since.get(name, 0), *kind_of(name)[1:]),
            )
            for name in names
        ]
        received = {}
        answers = await self._sessions[session].run(self._script, calls)
        for name, (revision, held, *rest) in zip(names, answers, strict=True):
            # A lower revision: the server was emptied and its clock set back, so read all again.
            newest = int(revision)
            self._since[name] = newest if newest >= self._since.get(name, 0) else 0
            aged = [(int(ms) / 1000, note) for ms, note in zip(rest[::2], rest[1::2], strict=True)]
            received[name] = Received(held=bool(int(held)), notes=aged)
        return received
