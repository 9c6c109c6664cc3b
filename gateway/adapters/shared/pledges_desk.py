"""The parent's side of pledges (`pledges` has the rules): what is out, and calling it back."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from gateway.adapters.shared.decisions import granted
from gateway.adapters.shared.hub import Hub, Session
from gateway.adapters.shared.pledges import (
    KEYS_KEPT,
    LATE_S,
    LEAST_SEQUENCES,
    MOST_SEQUENCES,
    PART,
    PLEDGE_S,
    RECALL,
    TIMES,
    Key,
    Pledge,
    Room,
    room_of,
)
from gateway.adapters.shared.wire import Op
from gateway.domain import Ask, Lease
from gateway.policy.ledger import TokenPool

_OFTEN: Final = 4
"""A pledge has room for so many requests like the one it came with, or there is none."""


class Out:
    """What is pledged of one entitlement, or of one pool."""

    __slots__ = ("kv_bytes", "sequences", "tokens")

    def __init__(self) -> None:
        self.sequences = self.tokens = self.kv_bytes = 0

    def add(self, sequences: int, tokens: int, kv_bytes: int) -> None:
        """More, or with negative figures less."""
        self.sequences += sequences
        self.tokens += tokens
        self.kv_bytes += kv_bytes


class Pledges:
    """All that is pledged, by model."""

    def __init__(
        self,
        hub: Hub,
        books: Mapping[str, TokenPool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`books`: those of the store, by model; `clock` monotonic."""
        self._hub = hub
        self._books = books
        self._clock = clock
        self._number = 0
        self._out: dict[str, OrderedDict[int, tuple[Session, Pledge]]] = {}
        """By model and number, oldest first."""
        self._of_entitlement: dict[tuple[str, str], Out] = {}
        self._of_pool: dict[tuple[str, int], Out] = {}
        self._asked: OrderedDict[tuple[str, Key], float] = OrderedDict()
        """When a worker last asked for something."""
        self._recalls: dict[str, asyncio.Task[None]] = {}
        hub.when_gone(self._gone)

    def fits(self, ask: Ask) -> bool:
        """Whether an ask can be decided now: nothing that is pledged could matter to it."""
        out = self._out.get(ask.model)
        if not out:
            return ask.model not in self._recalls
        self._expire(out)
        book = self._books[ask.model]
        account = book.accounts.get(ask.entitlement)
        if account is None:
            return True  # nobody's: denied whatever is pledged
        free = self._free(ask.model, ask.entitlement, ask.pool, room_of(book, account, ask.pool))
        return _holds(free, ask)

    def any_of(self, model: str) -> bool:
        """Whether anything of a model is pledged."""
        return bool(self._out.get(model))

    async def recall(self, model: str) -> None:
        """Return once nothing of a model is pledged, and all that was taken is entered."""
        known = self._recalls.get(model)
        if known is None:
            known = self._recalls[model] = asyncio.ensure_future(self._recalled(model))
        await known

    async def recall_all(self) -> None:
        """The same for all models."""
        for model in list(self._out):
            await self.recall(model)

    def offer(self, session: Session, ask: Ask, lease: Lease) -> None:
        """After a grant: pledge more of it to a worker that asks often, if there is plenty."""
        if ask.model not in self._books or lease.contended or lease.spilled or lease.would_deny:
            return
        key: Key = (ask.model, ask.entitlement, ask.pool)
        now_s = self._clock()
        last_s = self._asked.pop((session.owner, key), -PLEDGE_S)
        self._asked[session.owner, key] = now_s
        if len(self._asked) > KEYS_KEPT:
            self._asked.popitem(last=False)
        if now_s - last_s < PLEDGE_S:
            self._give(session, ask, lease, now_s)

    def taken(self, session: Session, number: int, ask: Ask, lease: Lease | None) -> None:
        """A worker took this of a pledge; with a lease, it may get the next one."""
        out = self._out.get(ask.model)
        known = None if out is None else out.get(number)
        if known is None:
            return  # it was late, and is entered all the same
        pledge = known[1]
        pledge.sequences -= ask.sequences
        pledge.tokens -= ask.cost_tokens
        pledge.kv_bytes -= ask.kv_bytes
        self._count(pledge.key, -ask.sequences, -ask.cost_tokens, -ask.kv_bytes)
        if lease is not None and self._is_due(pledge):
            self.renew(session, number, ask, lease)

    def passed(self, model: str, number: int, tokens: int) -> bool:
        """Leases of a pledge came and went, and left it all but tokens; is the next one due?"""
        known = self._out.get(model, _NO_PLEDGES).get(number)
        if known is None:
            return False
        pledge = known[1]
        pledge.tokens -= tokens
        self._count(pledge.key, 0, -tokens, 0)
        return self._is_due(pledge)

    def renew(self, session: Session, number: int, ask: Ask, lease: Lease) -> None:
        """Give the next pledge, once, with a lease that was just granted."""
        known = self._out.get(ask.model, _NO_PLEDGES).get(number)
        if known is not None:
            known[1].said = True
            self._give(session, ask, lease, self._clock())

    # -- inside

    def _is_due(self, pledge: Pledge) -> bool:
        if pledge.said:
            return False
        return pledge.is_low() or self._clock() > pledge.until_s - PLEDGE_S / 2

    def _give(self, session: Session, ask: Ask, lease: Lease, now_s: float) -> None:
        if ask.model in self._recalls:
            return
        book = self._books[ask.model]
        account = book.accounts.get(ask.entitlement)
        if account is None:
            return
        room = room_of(book, account, ask.pool)
        free = self._free(ask.model, ask.entitlement, ask.pool, room)
        part = PART * max(1, len(self._hub.sessions))
        sequences = int(min(MOST_SEQUENCES, free.sequences / part, free.pool_sequences / part))
        tokens = int(min(free.tokens / part, sequences * TIMES * ask.cost_tokens))
        kv_bytes = int(
            min(free.kv_bytes / part, free.pool_kv_bytes / part, sequences * 2 * ask.kv_bytes)
        )
        if (
            sequences < LEAST_SEQUENCES * ask.sequences
            or tokens < _OFTEN * ask.cost_tokens
            or kv_bytes < _OFTEN * ask.kv_bytes
        ):
            return
        self._number += 1
        key: Key = (ask.model, ask.entitlement, ask.pool)
        until_s = now_s + PLEDGE_S
        half = (sequences // 2, tokens // 2)
        pledge = Pledge(self._number, key, sequences, tokens, kv_bytes, until_s, *half)
        self._out.setdefault(ask.model, OrderedDict())[self._number] = (session, pledge)
        self._count(key, sequences, tokens, kv_bytes)
        told = (self._number, key, sequences, tokens, kv_bytes, until_s, granted(lease))
        session.wire.send(Op.PLEDGE, 0, *told)

    def _free(self, model: str, entitlement: str, pool: int, room: Room) -> Room:
        """A room less what is pledged of it."""
        own = self._of_entitlement.get((model, entitlement)) or _NOTHING
        all_ = self._of_pool.get((model, pool)) or _NOTHING
        return Room(
            room.sequences - own.sequences,
            room.tokens - own.tokens,
            room.kv_bytes - own.kv_bytes,
            room.pool_sequences - all_.sequences,
            room.pool_kv_bytes - all_.kv_bytes,
        )

    def _count(self, key: Key, sequences: int, tokens: int, kv_bytes: int) -> None:
        model, entitlement, pool = key
        self._of_entitlement.setdefault((model, entitlement), Out()).add(
            sequences, tokens, kv_bytes
        )
        self._of_pool.setdefault((model, pool), Out()).add(sequences, tokens, kv_bytes)

    def _forget(self, pledge: Pledge) -> None:
        self._count(pledge.key, -pledge.sequences, -pledge.tokens, -pledge.kv_bytes)

    def _expire(self, out: OrderedDict[int, tuple[Session, Pledge]]) -> None:
        """Pledges are void after their time, and what was taken of them has been told LATE_S on."""
        now_s = self._clock()
        while out:
            pledge = next(iter(out.values()))[1]
            if pledge.until_s + LATE_S > now_s:
                return
            self._forget(pledge)
            del out[pledge.number]

    async def _recalled(self, model: str) -> None:
        try:
            # Those without a pledge, too: they may have leases to settle that were taken of one.
            # Who does not answer hangs; by then its pledges are void.
            asked = self._hub.others(None)
            await self._hub.gather(RECALL, model.encode(), asked, PLEDGE_S)
            for _, pledge in self._out.pop(model, OrderedDict()).values():
                self._forget(pledge)
            self._sweep(model)
        finally:
            del self._recalls[model]

    def _sweep(self, model: str) -> None:
        """Nothing of a model is out: forget its sums."""
        for key in [key for key in self._of_entitlement if key[0] == model]:
            del self._of_entitlement[key]
        for pool_key in [key for key in self._of_pool if key[0] == model]:
            del self._of_pool[pool_key]

    def _gone(self, session: Session) -> None:
        for out in self._out.values():
            for number in [n for n, (whose, _) in out.items() if whose is session]:
                self._forget(out.pop(number)[1])


def _holds(free: Room, ask: Ask) -> bool:
    return (
        free.sequences >= ask.sequences
        and free.tokens >= ask.cost_tokens
        and free.kv_bytes >= ask.kv_bytes
        and free.pool_sequences >= ask.sequences
        and free.pool_kv_bytes >= ask.kv_bytes
    )


_NOTHING: Final = Out()
_NO_PLEDGES: Final[Mapping[int, tuple[Session, Pledge]]] = {}
