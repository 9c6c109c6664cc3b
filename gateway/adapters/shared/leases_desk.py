"""The parent's side of the lease store: the very `MemoryLeases` of one process, asked by many.

Rules:
- Every message is decided at once, in the order it came. Only an ask that might be refused because
  of what is pledged (`pledges`) waits until that has been given back.
- A lease is its worker's as long as that is connected. When the worker is gone its leases end,
  at once and once, as those end whose time is up: charged their estimate, for what they used is
  not known.
- A lease must also be renewed by its worker: one that hangs loses its leases as they expire.
- Who has to give way is told through its own worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from gateway.adapters.shared.decisions import ask_of, denied, granted, usage_of
from gateway.adapters.shared.hub import Hub, Session
from gateway.adapters.shared.pledges_desk import Pledges
from gateway.adapters.shared.wire import Message, Op
from gateway.adapters.store.memory import MemoryLeases
from gateway.domain import Ask
from gateway.policy.decision import Denial
from gateway.policy.entitlements import Entitlement
from gateway.policy.passing import Passing
from gateway.policy.pool_terms import Terms
from gateway.ports import PoolView, Settlement

SLICE: Final = 250
"""Leases that end or are renewed between two pauses."""

_encode: Final = msgspec.msgpack.Encoder().encode


class LeasesDesk:
    """Answers the workers from one store."""

    def __init__(
        self,
        hub: Hub,
        store: MemoryLeases,
        pools: Callable[[str], Awaitable[list[PoolView]]] | None = None,
    ) -> None:
        """`pools` gives a model's pools where that is not the store itself."""
        self._hub = hub
        self._store = store
        self._pools = pools or store.pools
        self._owners: dict[str, Session] = {}
        """Lease id -> whose it is."""
        self._waiting: set[str] = set()
        """Ids of asks that wait until pledges are given back."""
        self.pledges = Pledges(hub, store.books)
        self._tasks: set[asyncio.Task[None]] = set()
        store.on_evict(self._evict)
        hub.desk(Op.ADMIT, self._admit)
        hub.desk(Op.LEASES, self._told)
        hub.desk(Op.TRANSFER, self._transfer)
        hub.desk(Op.RESIZE, self._resize)
        hub.desk(Op.SETTLE, self._settle)
        hub.desk(Op.RECLAIM, self._reclaim)
        hub.desk(Op.RENEW, self._renew)
        hub.when_gone(self._gone)
        hub.serves("define", self._define)
        hub.serves("remove", self._remove)
        hub.serves("view", self._view)
        hub.serves("pools", self._shown)
        hub.serves("change", self._change)
        hub.serves("tick", self._tick)

    # -- with each request

    def _admit(self, session: Session, message: Message) -> None:
        ask = ask_of(message)
        if self.pledges.fits(ask):
            self._decide(session, message[1], ask)
        else:
            self._waiting.add(ask.lease_id)
            self._run(self._decide_later(session, message[1], ask))

    def _decide(self, session: Session, number: int, ask: Ask) -> None:
        found = self._store.take(ask, session.owner)
        if isinstance(found, Denial):
            session.wire.send(Op.ANSWER, number, denied(found))
            return
        self._enter(session, ask.lease_id)
        session.wire.send(Op.ANSWER, number, granted(found))
        self.pledges.offer(session, ask, found)

    async def _decide_later(self, session: Session, number: int, ask: Ask) -> None:
        await self.pledges.recall(ask.model)
        if ask.lease_id in self._waiting:  # else whoever asked has left
            self._waiting.discard(ask.lease_id)
            if session.wire.up:
                self._decide(session, number, ask)

    def _told(self, session: Session, message: Message) -> None:
        _, _, taken, passed, settled = message
        for each in taken:
            self._taken(session, each)
        for each in passed:
            self._passed(session, *each)
        for each in settled:
            self._end(session, *each)

    def _taken(self, session: Session, told: list[Any]) -> None:
        number, issued_unix_s, ask = told[0], told[1], ask_of(told)
        found = self._store.take(ask, session.owner, decided=True)
        if isinstance(found, Denial):  # of an entitlement that is no more
            self.pledges.taken(session, number, ask, None)
            return
        self._store.began(ask.lease_id, ask.model, issued_unix_s)
        self._enter(session, ask.lease_id)
        self.pledges.taken(session, number, ask, found)

    def _passed(
        self, session: Session, number: int, model: str, name: str, pool: int, leases: list[Passing]
    ) -> None:
        """Leases of one pledge that have ended, too."""
        tokens = sum(lease[0] for lease in leases)
        if self.pledges.passed(model, number, tokens):
            self._renew_with(session, number, model, name, pool, leases.pop())
        self._store.pass_by(model, name, pool, leases)

    def _renew_with(
        self, session: Session, number: int, model: str, name: str, pool: int, lease: Passing
    ) -> None:
        """Enter one of them as if it were in force, and give the next pledge with it."""
        cost_tokens, sequences, kv_bytes, life_s, used = lease
        ask = Ask(
            lease_id=f"{session.owner} {number}",
            model=model,
            entitlement=name,
            pool=pool,
            alternates=(),
            cost_tokens=cost_tokens,
            sequences=sequences,
            kv_bytes=kv_bytes,
        )
        found = self._store.take(ask, session.owner, decided=True)
        if isinstance(found, Denial):
            return
        self._store.began(ask.lease_id, model, found.issued_unix_s - life_s)
        self.pledges.renew(session, number, ask, found)
        usage = usage_of(used)
        self._store.end(ask.lease_id, model, Settlement(usage=usage, dispatched=usage is not None))

    def _enter(self, session: Session, lease_id: str) -> None:
        session.leases[lease_id] = None
        self._owners[lease_id] = session

    def _transfer(self, session: Session, message: Message) -> None:
        _, number, lease_id, pool, force = message
        found = self._store.move(lease_id, pool, force=force)
        told = denied(found) if isinstance(found, Denial) else None
        session.wire.send(Op.ANSWER, number, told)

    def _resize(self, _session: Session, message: Message) -> None:
        _, _, lease_id, model, cost_tokens, kv_bytes = message
        self._store.extend(lease_id, model, cost_tokens, kv_bytes)

    def _settle(self, session: Session, message: Message) -> None:
        self._end(session, *message[2:])

    def _end(
        self,
        session: Session,
        lease_id: str,
        model: str,
        unix_s: float,
        used: Sequence[int] | None,
    ) -> None:
        self._waiting.discard(lease_id)
        session.leases.pop(lease_id, None)
        self._owners.pop(lease_id, None)
        usage = usage_of(used)
        self._store.end(
            lease_id, model, Settlement(usage=usage, dispatched=usage is not None, unix_s=unix_s)
        )

    def _reclaim(self, session: Session, message: Message) -> None:
        for lease_id in self._store.victims(message[2]):
            self._evict(lease_id)
        session.wire.send(Op.ANSWER, message[1], None)

    # -- upkeep

    def _renew(self, session: Session, _message: Message) -> None:
        self._run(self._renewed(session))

    async def _renewed(self, session: Session) -> None:
        held = list(session.leases)
        for start in range(0, len(held), SLICE):
            self._store.prolong(held[start : start + SLICE])
            await asyncio.sleep(0)

    def _gone(self, session: Session) -> None:
        held = list(session.leases)
        session.leases.clear()
        self._lapse(held[:SLICE])
        if len(held) > SLICE:
            self._run(self._lapsed(held[SLICE:]))

    async def _lapsed(self, held: list[str]) -> None:
        for start in range(0, len(held), SLICE):
            await asyncio.sleep(0)
            self._lapse(held[start : start + SLICE])

    def _lapse(self, held: list[str]) -> None:
        for lease_id in held:
            self._owners.pop(lease_id, None)
            self._store.lapse(lease_id)

    def _evict(self, lease_id: str) -> None:
        session = self._owners.get(lease_id)
        if session is not None:
            session.wire.send(Op.EVICT, 0, lease_id)

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- calls

    async def _define(self, _session: Session, value: Any) -> None:
        terms = msgspec.convert(value, Entitlement)
        book = self._store.books[terms.model]
        known = book.accounts.get(terms.name)
        if known is None or known.terms != terms:
            await self._store.define(terms)

    async def _remove(self, _session: Session, value: Any) -> bool:
        return await self._store.remove(*value)

    async def _view(self, _session: Session, value: Any) -> bytes:
        return _encode(await self._store.view(*value))

    async def _shown(self, _session: Session, model: str) -> bytes:
        return _encode(await self._pools(model))

    async def _change(self, _session: Session, value: Any) -> None:
        model, terms = value
        await self._store.change(model, msgspec.convert(terms, Terms))

    async def _tick(self, _session: Session, _value: Any) -> None:
        await self._store.tick()
