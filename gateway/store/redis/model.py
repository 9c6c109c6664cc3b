"""One managed model: its leases, entitlements and upkeep in Redis, and here while Redis is away.

Redis decides while the link is up. Otherwise `fail_mode` applies: `closed` refuses with 503,
`local_share` decides over this process's share of the token pool. Everything that Redis must
learn is posted in order (see `link`): Redis adopts a lease that was taken locally before it is
settled, and an admission whose answer was lost is given back.

A gateway defines a model that Redis does not know, and has Redis adopt leases that it lost (the
server was emptied). Only the leader runs ticks and sets capacity.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec

from gateway.admission import admission, debt
from gateway.admission.admission import spent_by
from gateway.admission.denials import refusal_of
from gateway.admission.terms import AdmissionRequest, Denial, Grant, LeaseRecord, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import Unavailable
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView, PoolView, Settlement
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitUse, LimitView, Spent
from gateway.records.record import Record
from gateway.store.memory_leases import (
    SteadyClock,
    account_view,
    charge_of,
    lease_of,
    pool_views,
    quoted,
    warn,
)
from gateway.store.redis import fallback
from gateway.store.redis.lease_codec import (
    LOCAL_SUFFIX,
    NOTHING,
    RedisLease,
    decision,
    limit_views,
    moved,
    token_pool_of,
)
from gateway.store.redis.link import ModelLost, RedisAway, RedisLink
from gateway.store.redis.scripts import argument, grouped

FailMode = Literal["local_share", "closed"]
SLICE = 100
"""Most entitlements or leases in one script call, as Redis answers no admission meanwhile."""
TICK_CALL_US = 2_000
"""Server time that one call of a tick may take; the call reports the time that it took."""
MIN_TICKED, MAX_TICKED = 10, 500
"""Bounds on the entitlements in one call of a tick."""
SILENT_S = LEASE_TTL_S
"""A replica that did not tick for this long is gone."""
LEADER_MS = 15_000
"""A leader that did not tick for this long is replaced."""


class Process(Record, frozen=True, kw_only=True):
    """Settings that all models of a process share."""

    owner: str
    fail_mode: FailMode
    clock: Callable[[], float]
    wall_clock: SteadyClock
    """Unix seconds; once it is known, the time of limits in Redis."""
    jitter: Callable[[], float]
    limits: fallback.KnownLimits
    replicas: int
    """Gateways that share the limits, until Redis tells their number."""
    evict: Callable[[str], None]
    """Told of evictions, by lease id, and of limits whose level that warns was reached."""
    warned: Callable[[Limit, LimitUse], None]


class RedisModel:
    """A model whose token pool is in Redis."""

    link: RedisLink
    limits_key: str
    """The hash of the counters of limits over all models."""

    def __init__(
        self,
        name: str,
        models: Mapping[str, ModelRuntime],
        token_pool: TokenPool,
        process: Process,
    ) -> None:
        """`models` as they are served now, by name. Set `link` and `limits_key` before use.

        `token_pool`: the model's terms and entitlements, with the known bucket levels.
        """
        self.token_pool = token_pool
        self.leases: dict[str, RedisLease] = {}
        self.replicas = process.replicas
        self.leads = False
        self.alone_total = 0
        """Leases taken without Redis."""
        self.evictable = 0
        """Leases of this process that others may evict."""
        self._name = name
        self._models = models
        self._process = process
        self._now_s = process.wall_clock
        self._share: TokenPool | None = None
        """Decides while Redis is away, for one of `_parts` replicas."""
        self._parts = 1
        self._epoch = ""
        self._introduced = False
        self._ticked = SLICE
        self._server_time: tuple[float, float] | None = None
        """(time in Redis, time by this process's clock) at the last tick."""

    # -- LeaseStore

    async def admit(self, ask: AdmissionRequest) -> Lease:
        earlier = self.leases.get(ask.lease_id)
        if earlier is not None:
            return earlier.lease
        served, limits = self._models[self._name], self._process.limits
        observe = served.routing.observe or served.admission.observe
        asked = self._asked(ask.limits, ask) if ask.limits else None
        packed = grouped(
            "admit", ask, owner=self._process.owner, observe=observe, asked=asked, dry=None
        )
        op = None
        for _ in range(2):
            if not self.link.up:
                break
            try:
                op = self.link.begin("admit", packed)
                assert op.done is not None  # noqa: S101 - a call has one
                decided, gives_way, issued_s = decision(await op.done)
            except (RedisAway, asyncio.CancelledError) as error:
                if op is not None and op.sent and ask.lease_id not in self.leases:
                    self._release(ask.lease_id, None)
                op = None
                if isinstance(error, RedisAway):
                    continue
                raise
            now_s = self._now_s()
            tokens = ask.estimate_tokens
            fallback.note_decision(self.token_pool, ask.entitlement, tokens, decided, now_s)
            if ask.limits:
                limits.note(ask.limits, decided, now_s)
            held = self._taken(ask, decided, ask.lease_id, issued_s, gives_way=gives_way)
            held.epoch = self._epoch
            return held.lease
        if self._process.fail_mode == "closed":
            raise _unavailable()
        share = self._alone()
        decided = admission.admit(share, ask, self._now_s(), observe=observe)
        record = share.leases.get(ask.lease_id)
        gives_way = record is not None and record.id in share.pools[record.pool].evictable
        key = ask.lease_id + LOCAL_SUFFIX
        held = self._taken(ask, decided, key, self._now_s(), gives_way=gives_way)
        self.alone_total += 1
        self.link.post("adopt", self._adoption([held]))
        return held.lease

    async def quote(self, ask: AdmissionRequest, counted: Sequence[Limit]) -> Lease | Denial:
        """See LeaseStore."""
        served = self._models[self._name]
        observe = served.routing.observe or served.admission.observe
        asked = self._asked(ask.limits, ask) if ask.limits else None
        dry = self._asked(counted, ask)
        packed = grouped("admit", ask, owner="", observe=observe, asked=asked, dry=dry)
        try:
            decided, itself, now_s = decision(await self.link.call("admit", packed))
        except RedisAway:
            if self._process.fail_mode == "closed":
                raise _unavailable() from None
            share, now_s, jitter = self._alone(), self._now_s(), self._process.jitter
            itself, decided = False, quoted(share, ask, counted, now_s, jitter, observe=observe)
        if not isinstance(decided, Denial):
            return lease_of(ask, decided, now_s)
        if itself:
            raise refusal_of(decided, ask.entitlement, self._process.jitter(), counted)
        return decided

    def _taken(
        self,
        ask: AdmissionRequest,
        decided: Grant | Denial,
        key: str,
        issued_s: float,
        *,
        gives_way: bool,
    ) -> RedisLease:
        if isinstance(decided, Denial):
            raise refusal_of(decided, ask.entitlement, self._process.jitter(), ask.limits)
        earlier = self.leases.get(ask.lease_id)
        if earlier is not None:  # admitted twice at the same time
            return earlier
        lease = lease_of(ask, decided, issued_s)
        record = LeaseRecord(
            *(key, lease.entitlement, lease.pool, lease.sequences, lease.cost_tokens),
            kv_bytes=lease.kv_bytes,
            weight=lease.weight,
            issued_s=issued_s,
            expires_s=0.0,
            funded=decided.funded,
            owner=self._process.owner,
            would_deny=lease.would_deny,
            spilled=lease.spilled,
            held=decided.held,
        )
        pools = ask.pools or self._models[self._name].fleet.routed
        pools[lease.pool].inflight += lease.sequences
        held = self.leases[lease.id] = RedisLease(lease, record, gives_way, pools)
        self.evictable += gives_way
        if lease.uses:
            warn(lease, self._process.warned)
        return held

    async def transfer(self, lease: Lease, pool: int, *, force: bool) -> Lease:
        held = self.leases.get(lease.id)
        if held is None or held.lease.pool == pool:
            return lease if held is None else held.lease
        key, gives_way, denied = held.record.id, held.gives_way, None
        try:
            answer = await self.link.call(
                "transfer", grouped("transfer", lease_id=key, pool=pool, force=force)
            )
            gives_way, denied = moved(answer)
        except RedisAway:
            place, refused = pool, None
            if not force and self._process.fail_mode == "closed":
                place, refused = held.lease.pool, _unavailable()
            elif not force:
                share, now_s = self._alone(), self._now_s()
                denied = admission.transfer(share, lease.id, pool, now_s, force=False)
                place = pool if denied is None else held.lease.pool
            # Redis may have moved it already; the decision made here counts.
            self.link.post("transfer", grouped("transfer", lease_id=key, pool=place, force=True))
            if refused is not None:
                raise refused from None
        if denied is not None:
            raise refusal_of(denied, lease.entitlement, self._process.jitter())
        if self.leases.get(lease.id) is not held:  # settled meanwhile
            return lease
        held.pools[held.lease.pool].inflight -= held.lease.sequences
        held.pools[pool].inflight += held.lease.sequences
        held.lease, held.record.pool = msgspec.structs.replace(held.lease, pool=pool), pool
        if self._share is not None:
            admission.transfer(self._share, lease.id, pool, self._now_s(), force=True)
        self.evictable += gives_way - held.gives_way
        held.gives_way = gives_way
        return held.lease

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        held = self.leases.get(lease.id)
        if held is None:
            return
        fallback.note_charge(self.token_pool, held, cost_tokens, self._now_s())
        record = held.record
        record.estimate_tokens, record.kv_bytes = cost_tokens, kv_bytes
        packed = grouped(
            "resize", lease_id=record.id, estimate_tokens=cost_tokens, kv_bytes=kv_bytes
        )
        if held.resizing is not None and not held.resizing.sent:
            held.resizing.argument = packed
        else:
            held.resizing = self.link.post("resize", packed)
        if self._share is not None:
            admission.resize(self._share, lease.id, cost_tokens, kv_bytes, self._now_s())

    def settle(
        self, lease: Lease, settlement: Settlement, *, heard: bool
    ) -> Awaitable[None] | None:
        charge = charge_of(self.token_pool.terms.profile, settlement)
        spent = spent_by(settlement.usage, settlement.money, dispatched=settlement.dispatched)
        held = self.leases.pop(lease.id, None)
        if held is None:
            # Another gateway's lease, or one from before this gateway restarted.
            for key in (lease.id, lease.id + LOCAL_SUFFIX):
                self._release(key, charge, spent)
            return None
        held.pools[held.lease.pool].inflight -= held.lease.sequences
        self.evictable -= held.gives_way
        fallback.note_charge(self.token_pool, held, charge or 0, self._now_s())
        if held.record.held:
            self._process.limits.note_settled(held.record.held, spent)
        else:
            spent = None
        heard = heard and held.nearly_full
        done = self._release(held.record.id, charge, spent, heard=heard)
        if self._share is not None:
            admission.settle(self._share, lease.id, charge, self._now_s(), spent)
        return done

    def _release(
        self, key: str, charge: int | None, spent: Spent | None = None, *, heard: bool = False
    ) -> Awaitable[None] | None:
        charged: Any = False if charge is None else charge
        packed = grouped("settle", lease_id=key, charge=charged, timely=self.link.up, spent=spent)
        return self.link.post("settle", packed, heard=heard).done

    async def reclaim(self, lease: Lease) -> None:
        held, owner = self.leases.get(lease.id), self._process.owner
        if held is None:
            return
        packed = argument(lease_id=held.record.id, sequences=lease.sequences, owner=owner)
        try:
            self._report_evicted(await self.link.call("evict", packed))
        except RedisAway:
            record = None if self._share is None else self._share.leases.get(lease.id)
            if self._share is not None and record is not None:
                for victim in admission.evict(self._share, record.pool, lease.sequences):
                    self._process.evict(victim.id)

    async def take_evicted(self) -> None:
        """Read and report the evictions of this process's leases by other replicas."""
        try:
            keys = await self.link.call("evicted", argument(owner=self._process.owner))
        except RedisAway:
            return
        self._report_evicted(keys)

    def _report_evicted(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            lease_id = key.decode().removesuffix(LOCAL_SUFFIX)
            if lease_id in self.leases:
                self._process.evict(lease_id)

    # -- Budgets; these raise RedisAway

    async def budgets(self, limits: Sequence[Limit], added: int = 0) -> list[LimitView]:
        """Counters of limits; `added` to the first one."""
        packed = argument(asked=self._asked(limits, NOTHING), added=added)
        return limit_views(await self.link.call("budget", packed))

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        ids: list[str] = []
        page, more = "0", True
        while more or ids:
            packed = argument(hash=self.limits_key, page=page, ids=ids)
            page, page_ids = msgspec.msgpack.decode(await self.link.call("sweep", packed))
            ids = [limit_id for limit_id in page_ids if more and not defined(limit_id)]
            more = more and page != "0"

    def _asked(self, limits: Sequence[Limit], wanted: AdmissionRequest) -> list[Any]:
        encoder = self._process.limits.encoder
        return encoder.asked(limits, wanted, self._now_s(), self.limits_key)

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        """See TokenPools. While Redis is away, takes effect there when it is back."""
        self.token_pool.define(terms)
        if self._share is not None:
            self._share.define(fallback.part_of(terms, self._parts))
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
        whole = await self._seen(names)
        now_s = self._now_s()
        accounts = [whole.accounts.get(name) for name in names]
        return [account_view(whole, account, now_s) for account in accounts if account is not None]

    async def pools(self) -> list[PoolView]:
        return pool_views(await self._seen(()))

    async def _seen(self, names: Sequence[str]) -> TokenPool:
        try:
            token_pool = token_pool_of(await self.link.call("view", argument(names=names)))
        except RedisAway:
            return self._share or self.token_pool
        fallback.note_view(self.token_pool, token_pool, self._server_time_s(), self._now_s())
        return token_pool

    # -- Upkeep

    async def change(self, terms: Terms) -> None:
        self.token_pool.change(terms)
        if self._share is not None:
            self._share.change(fallback.part_of(terms, self._parts))
        try:
            await self.link.call("change", self._terms())
        except RedisAway:
            return

    async def renew(self) -> None:
        if self._share is not None:
            for lease_id in self.leases:
                admission.renew(self._share, lease_id, self._now_s())
        for part in _slices([held.record.id for held in self.leases.values()]):
            try:
                gone = await self.link.call("renew", argument(lease_ids=part))
            except RedisAway:
                return
            self._adopt_again({raw.decode() for raw in gone})

    async def tick(self) -> None:
        try:
            while await self.link.call("reap", argument(most=SLICE)) == SLICE:
                pass
            left = 1
            while left > 0:
                packed = argument(
                    owner=self._process.owner,
                    leader_ms=LEADER_MS,
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
        except RedisAway:
            self.leads = False
            share, now_s = self._share, self._now_s()
            elapsed_s = 0.0 if share is None else now_s - share.ticked_s
            if share is not None and elapsed_s >= share.terms.profile.tick_s:
                debt.tick(share, list(share.active), elapsed_s, now_s)
                debt.close(share, elapsed_s, now_s)
            return
        if epoch.decode() != self._epoch:
            self._epoch = epoch.decode()
            self._adopt_again({held.record.id for held in self.leases.values()})

    def _server_time_s(self) -> float:
        """Lower bound on the time in Redis, from its last answer; 0 before the first answer."""
        if self._server_time is None:
            return 0.0
        then_s, received_s = self._server_time
        return then_s + self._process.clock() - received_s

    def _adopt_again(self, keys: set[str]) -> None:
        """Have Redis adopt leases that it no longer holds; their requests are still running."""
        for part in _slices([held for held in self.leases.values() if held.record.id in keys]):
            self.link.post("adopt", self._adoption(part))

    def _adoption(self, leases: Iterable[RedisLease]) -> bytes:
        pairs = [(held.record, held.epoch) for held in leases]
        return argument(owner=self._process.owner, limits=self.limits_key, leases=pairs)

    def _terms(self) -> bytes:
        return argument(
            owner=self._process.owner,
            leader_ms=LEADER_MS,
            terms=self.token_pool.terms,
            epoch=secrets.token_hex(8),
        )

    # -- Redis goes and comes

    def _alone(self) -> TokenPool:
        """The share, made when it is first asked for."""
        if self._share is None:
            self._parts, leases = self.replicas, list(self.leases.values())
            limits = self._process.limits.begin(self, leases, self._parts)
            self._share = fallback.share_of(
                self.token_pool, leases, self._parts, self._now_s(), limits
            )
        return self._share

    def came_up(self) -> None:
        """End the share: Redis decides again."""
        if self._share is not None:
            fallback.take_back(self.token_pool, self._share, self._parts)
            self._process.limits.end(self)
            self._share = None

    async def prepare(self, link: RedisLink) -> None:
        """Define the model in Redis if needed, and renew or re-create this process's leases."""
        answer, lost = [], False
        try:
            answer = await link.ask("view", argument(names=()))
        except ModelLost:
            lost = True
        if lost or not self._introduced:
            for part in _slices([account.terms for account in self.token_pool.accounts.values()]):
                await link.ask("define", _definitions(part))
            if lost:
                await link.ask("change", self._terms())
            answer = await link.ask("view", argument(names=()))
            self._introduced = True
        self._epoch = msgspec.msgpack.decode(answer[1])["epoch"]
        leases = {held.record.id: held for held in self.leases.values()}
        for part in _slices(list(leases)):
            # An emptied server knows none of the leases; one that fell behind lacks the newest.
            gone = await link.ask("renew", argument(lease_ids=part))
            await link.ask("adopt", self._adoption(leases[raw.decode()] for raw in gone))
        for held in leases.values():
            held.epoch = self._epoch


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


def _unavailable() -> Unavailable:
    return Unavailable(
        "The gateway cannot admit requests at the moment: its shared state does not answer.",
        reason="state_unavailable",
        retry_after_s=1.0,
        should_retry=True,
    )
