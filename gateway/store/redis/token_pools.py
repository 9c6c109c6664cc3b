"""The token pool of one managed model in Redis: its entitlements and its upkeep.

A gateway defines a model that Redis does not know, and has Redis adopt leases that it lost (the
server was emptied). Only the leader runs ticks and sets capacity.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec

from gateway.admission import admission
from gateway.admission.terms import Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.ports import AccountView, PoolView
from gateway.records.entitlement import Entitlement
from gateway.records.record import Record
from gateway.store.memory_leases import SteadyClock, account_view, pool_views
from gateway.store.redis.fallback import KnownLimits, LocalFallback, note_view
from gateway.store.redis.lease_codec import LOCAL_SUFFIX, RedisLease, token_pool_of
from gateway.store.redis.link import ModelLost, RedisAway, RedisLink
from gateway.store.redis.scripts import argument

FailMode = Literal["local_share", "closed"]
SLICE = 100
"""Most entitlements or leases in one script call, as Redis answers no admission meanwhile."""
TICK_CALL_US = 2_000
"""Server time that one call of a tick may take; the call reports the time that it took."""
MIN_TICKED, MAX_TICKED = 10, 500
"""Bounds on the entitlements in one call of a tick."""
SILENT_S = LEASE_TTL_S
"""A replica that did not tick for this long is gone."""
LEADER_S = 15.0
"""A leader that did not tick for this long is replaced."""


class Process(Record, frozen=True, kw_only=True):
    """Settings that all models of a process share."""

    owner: str
    fail_mode: FailMode
    clock: Callable[[], float]
    wall_clock: SteadyClock
    """Unix seconds; once it is known, the time of limits in Redis."""
    jitter: Callable[[], float]
    limits: KnownLimits
    replicas: int
    """Gateways that share the limits, until Redis tells their number."""


class RedisPools:
    """A model's TokenPools and Upkeep."""

    def __init__(self, token_pool: TokenPool, process: Process) -> None:
        """`token_pool`: the model's terms and entitlements, with the known bucket levels."""
        self.token_pool = token_pool
        self.leases: dict[str, RedisLease] = {}
        self.evict: Callable[[str], None] = lambda _: None
        self.link: RedisLink
        self.replicas = process.replicas
        self.leads = False
        self._process = process
        self.limits_key = ""
        """The hash of the counters of limits over all models."""
        self._now_s = process.wall_clock
        self._fallback = LocalFallback(token_pool, self._now_s, process.limits)
        self._epoch = ""
        self._introduced = False
        self._ticked = SLICE
        self._server_time: tuple[float, float] | None = None
        """(time in Redis, time by this process's clock) at the last tick."""

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        """See TokenPools. While Redis is away, takes effect there when it is back."""
        self.token_pool.define(terms)
        self._fallback.define(terms)
        packed = _definitions([terms])
        try:
            await self.link.call("define", packed)
        except RedisAway:
            self.link.post("define", packed)

    async def remove(self, name: str) -> bool:
        try:
            done = bool(await self.link.call("remove", argument(name=name)))
        except RedisAway:
            return False
        if done:
            self.token_pool.remove(name)
        return done

    async def view(self, names: Sequence[str]) -> list[AccountView]:
        seen = await self._seen(names)
        now_s = self._now_s()
        found = [seen.accounts.get(name) for name in names]
        return [account_view(seen, account, now_s) for account in found if account is not None]

    async def pools(self) -> list[PoolView]:
        return pool_views(await self._seen(()))

    # -- Upkeep

    async def change(self, terms: Terms) -> None:
        self.token_pool.change(terms)
        self._fallback.change(terms)
        try:
            await self.link.call("change", self._terms())
        except RedisAway:
            return

    async def renew(self) -> None:
        if (share := self._fallback.share) is not None:
            for lease_id in self.leases:
                admission.renew(share, lease_id, self._now_s())
        for part in _slices([redis_lease.key for redis_lease in self.leases.values()]):
            try:
                gone = await self.link.call("renew", argument(lease_ids=part))
            except RedisAway:
                return
            self._adopt_again({raw.decode() for raw in gone})

    async def tick(self) -> None:
        try:
            while await self.link.call("reap", argument(most=SLICE)) == SLICE:
                pass
            epoch = await self._tick()
        except RedisAway:
            self.leads = False
            self._fallback.tick()
            return
        if epoch != self._epoch:
            self._epoch = epoch
            self._adopt_again({redis_lease.key for redis_lease in self.leases.values()})

    async def take_evicted(self) -> None:
        """Read and report the evictions of this process's leases by other replicas."""
        try:
            self._send(await self.link.call("evicted", argument(owner=self._process.owner)))
        except RedisAway:
            return

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        ids: list[str] = []
        page, more = "0", True
        while more or ids:
            packed = argument(hash=self.limits_key, page=page, ids=ids)
            page, found = msgspec.msgpack.decode(await self.link.call("sweep", packed))
            ids = [limit_id for limit_id in found if more and not defined(limit_id)]
            more = more and page != "0"

    # -- callbacks of the link

    async def prepare(self, link: RedisLink) -> None:
        """Define the model in Redis if needed, and renew or re-create this process's leases."""
        try:
            answer = await link.ask("view", argument(names=()))
            lost = False
        except ModelLost:
            answer, lost = [], True
        if lost or not self._introduced:
            for part in _slices([account.terms for account in self.token_pool.accounts.values()]):
                await link.ask("define", _definitions(part))
            if lost:
                await link.ask("change", self._terms())
            answer = await link.ask("view", argument(names=()))
            self._introduced = True
        self._epoch = msgspec.msgpack.decode(answer[1])["epoch"]
        held = {redis_lease.key: redis_lease for redis_lease in self.leases.values()}
        for part in _slices(list(held)):
            # An emptied server knows none of the leases; one that fell behind lacks the newest.
            gone = await link.ask("renew", argument(lease_ids=part))
            records = [held[raw.decode()].record(self.limits_key) for raw in gone]
            await link.ask("adopt", self._adoption(records))
        for redis_lease in held.values():
            redis_lease.epoch = self._epoch

    def came_up(self) -> None:
        """End the local share: Redis decides again."""
        self._fallback.end()

    # -- inside

    async def _tick(self) -> str:
        while True:
            packed = argument(
                owner=self._process.owner,
                leader_ms=int(LEADER_S * 1000),
                silent_s=SILENT_S,
                most=self._ticked,
                least_s=self._server_time_s(),
                limits=self.limits_key,
                limits_least_s=self._now_s() if self._now_s.follows else 0.0,
            )
            answer = await self.link.call("tick", packed)
            leads, left, self.replicas, epoch, took_us, now_s, limits_s = answer
            self._server_time = (float(now_s), self._process.clock())
            self._now_s.follow(float(limits_s))
            if left > 0:
                self._ticked = next_slice(self._ticked, took_us)
            if leads and not self.leads:
                # The former leader may have published another capacity.
                await self.link.call("change", self._terms())
            self.leads = bool(leads)
            if left <= 0:
                return str(epoch.decode())

    def _server_time_s(self) -> float:
        """Lower bound on the time in Redis, from its last answer; 0 before the first answer."""
        if self._server_time is None:
            return 0.0
        then_s, received_s = self._server_time
        return then_s + self._process.clock() - received_s

    async def _seen(self, names: Sequence[str]) -> TokenPool:
        try:
            found = token_pool_of(await self.link.call("view", argument(names=names)))
        except RedisAway:
            return self._fallback.share or self.token_pool
        note_view(self.token_pool, found, self._server_time_s(), self._now_s())
        return found

    def _adopt_again(self, keys: set[str]) -> None:
        """Have Redis adopt leases that it no longer holds; their requests are still running."""
        gone = [
            redis_lease.record(self.limits_key)
            for redis_lease in self.leases.values()
            if redis_lease.key in keys
        ]
        for part in _slices(gone):
            self.link.post("adopt", self._adoption(part))

    def _send(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            lease_id = key.decode().removesuffix(LOCAL_SUFFIX)
            if lease_id in self.leases:
                self.evict(lease_id)

    def _adoption(self, records: Sequence[dict[str, Any]]) -> bytes:
        return argument(owner=self._process.owner, leases=records)

    def _terms(self) -> bytes:
        return argument(
            owner=self._process.owner,
            leader_ms=int(LEADER_S * 1000),
            terms=self.token_pool.terms,
            epoch=secrets.token_hex(8),
        )


def next_slice(ticked: int, took_us: int) -> int:
    """Entitlements in the next call of a tick, after `ticked` took `took_us` (0: unknown).

    At most twice as many as before, because one measurement is not reliable.
    """
    fitting = ticked * TICK_CALL_US // took_us if took_us > 0 else ticked
    return max(MIN_TICKED, min(fitting, 2 * ticked, MAX_TICKED))


def _definitions(entitlements: Sequence[Entitlement]) -> bytes:
    return argument(entitlements=[(e.name, e) for e in entitlements])


def _slices(items: Sequence[Any]) -> Iterable[list[Any]]:
    left = iter(items)
    while part := list(islice(left, SLICE)):
        yield part
