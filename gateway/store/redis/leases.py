"""The lease store that several gateways share: every managed model's token pool is in Redis.

Models that are not managed stay in this process (`local`). `model` describes what happens while
Redis is away, `link` how calls travel; `lua/` holds the decisions.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from gateway.admission.terms import AdmissionRequest, Denial, Terms
from gateway.admission.token_pool import TokenPool
from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView, PoolView, Settlement
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitUse, LimitView
from gateway.store.memory_leases import MemoryLeases, SteadyClock
from gateway.store.redis.fallback import KnownLimits
from gateway.store.redis.link import RedisLink
from gateway.store.redis.model import FailMode, Process, RedisModel
from gateway.store.redis.route import route_of
from gateway.store.redis.scripts import Calls, Scripts

LIMITS_AT_ONCE: Final = 100
"""Most limits whose counters one script reads."""
LEVELS_EVERY_S: Final = 60.0
LEVELS_READ: Final = 1_000
"""How often levels of budgets are read, so that they are known without Redis, and how many."""
EVICTED_EVERY_S: Final = 0.1
"""How often a process that holds evictable leases asks for evictions."""

_log = logging.getLogger("sluice.state")


class RedisLeases:
    """LeaseStore, TokenPools and Upkeep over Redis."""

    def __init__(
        self,
        url: str,
        models: Mapping[str, ModelRuntime],
        token_pools: Mapping[str, TokenPool],
        clock: Callable[[], float],
        *,
        local: MemoryLeases,
        fail_mode: FailMode,
        owner: str,
        replicas: int = 1,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        script_clock: Callable[[], float] | None = None,
    ) -> None:
        """`token_pools` by model: terms and entitlements of managed models.

        `owner` is unique among the gateways, of which there are `replicas` until Redis tells the
        number. `clock` monotonic, `wall_clock` Unix time (read once), both in seconds; tests give
        scripts the time of `script_clock` instead of the server's.
        """
        self._local = local
        self._served = models
        self._models: dict[str, RedisModel] = {}
        self._ended: list[RedisModel] = []
        """Models that are not managed any more, while leases of theirs are held."""
        self.pending: set[str] = set()
        """Models whose token pool is being prepared: it does not decide yet."""
        self._evict: Callable[[str], None] = lambda _: None
        self.on_warning: Callable[[Limit, LimitUse], None] = lambda _limit, _use: None
        """Called for the first request in a window that reaches a level that warns."""
        self._background = BackgroundTasks()
        self._known: Mapping[str, Limit] = {}
        self._known_from = 0
        """Which of these limits to read next."""
        self._levels_at_s = 0.0
        self._process = Process(
            owner=owner,
            fail_mode=fail_mode,
            clock=clock,
            wall_clock=SteadyClock(clock, wall_clock),
            jitter=jitter,
            limits=KnownLimits(),
            replicas=replicas,
            evict=lambda lease_id: self._evict(lease_id),  # noqa: PLW0108 - set later
            warned=lambda limit, use: self.on_warning(limit, use),  # noqa: PLW0108 - set later
        )
        self._scripts, self._route = Scripts(script_clock), route_of(url)
        for name, token_pool in token_pools.items():
            self._models[name] = self._model(name, token_pool)

    async def start(self) -> None:
        """Connect; returns after the first attempt, successful or not."""
        await asyncio.gather(*(model.link.start() for model in self._models.values()))
        self._background.start(self._receive())

    async def manage(self, served: ModelRuntime, token_pool: TokenPool) -> None:
        """Have a model's token pool ready; it decides once the model is not `pending` any more."""
        model = self._model(served.name, token_pool)
        self.pending.add(served.name)
        await model.link.start()
        self._models[served.name] = model

    def unmanage(self, model: str) -> None:
        """Decide about a model no more; its leases settle where they were taken."""
        ended = self._models.pop(model, None)
        if ended is not None:
            self._ended.append(ended)

    def _model(self, name: str, token_pool: TokenPool) -> RedisModel:
        process = self._process
        if not self._route.one_server:  # each has a time of its own
            clock = SteadyClock(process.clock, process.wall_clock)
            process = msgspec.structs.replace(process, wall_clock=clock)
        model = RedisModel(name, self._served, token_pool, process)
        calls = Calls(self._scripts, name, len(token_pool.pools))
        model.limits_key = calls.limits_key(one_server=self._route.one_server)
        model.link = RedisLink(
            self._route,
            calls,
            clock=process.clock,
            chance=process.jitter,
            prepare=model.prepare,
            on_up=model.came_up,
        )
        return model

    def _holder(self, lease: Lease) -> RedisModel | MemoryLeases:
        """Who holds a lease: a model, or this process's own store."""
        holder = self._models.get(lease.model)
        if holder is not None and lease.id in holder.leases:
            return holder
        if self._local.holds(lease.id):
            return self._local
        ended = (model for model in self._ended if lease.id in model.leases)
        return next(ended, holder) or self._local

    @property
    def _all(self) -> tuple[RedisModel, ...]:
        """Every model with leases here."""
        return (*self._models.values(), *self._ended)

    async def close(self) -> None:
        """Send pending posts within a time limit and close the connections."""
        await self._background.close()
        await asyncio.gather(*(model.link.close() for model in self._all))

    @property
    def up(self) -> bool:
        """Whether Redis decides for every managed model."""
        return all(model.link.up for model in self._models.values())

    @property
    def active(self) -> int:
        """Leases in force in this process."""
        return self._local.active + sum(len(model.leases) for model in self._all)

    @property
    def alone_total(self) -> int:
        """Leases taken while Redis was away."""
        return sum(model.alone_total for model in self._models.values())

    @property
    def failures_total(self) -> int:
        """Round trips and connections that failed."""
        return sum(model.link.failures_total for model in self._models.values())

    @property
    def dropped_total(self) -> int:
        """Settlements and other posts dropped because too many waited for Redis."""
        return sum(model.link.dropped_total for model in self._models.values())

    @property
    def led(self) -> tuple[str, ...]:
        """Models whose capacity this process publishes."""
        return tuple(name for name, model in self._models.items() if model.leads)

    def replicas(self, model: str) -> int:
        """Gateways that share the model, as last reported."""
        return self._models[model].replicas

    # -- LeaseStore

    async def admit(self, ask: AdmissionRequest) -> Lease:
        model = None if ask.model in self.pending else self._models.get(ask.model)
        return await (self._local if model is None else model).admit(ask)

    async def quote(self, ask: AdmissionRequest, counted: Sequence[Limit]) -> Lease | Denial:
        model = None if ask.model in self.pending else self._models.get(ask.model)
        return await (self._local if model is None else model).quote(ask, counted)

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        return await self._holder(lease).transfer(lease, pool, force=force)

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        self._holder(lease).resize(lease, cost_tokens, kv_bytes)

    def settle(
        self, lease: Lease, settlement: Settlement, *, heard: bool = False
    ) -> Awaitable[None] | None:
        return self._holder(lease).settle(lease, settlement, heard=heard)

    async def reclaim(self, lease: Lease) -> None:
        await self._holder(lease).reclaim(lease)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        self._evict = evict

    # -- Budgets

    def know(self, limits: Mapping[str, Limit]) -> None:
        self._known, self._levels_at_s = limits, 0.0

    async def levels(self, limits: Sequence[Limit]) -> list[LimitView]:
        counted: dict[RedisModel, list[Limit]] = {}
        for limit in limits:
            counted.setdefault(self._counting(limit), []).append(limit)
        by_id: dict[str, LimitView] = {}
        for model, some in counted.items():
            for start in range(0, len(some), LIMITS_AT_ONCE):
                views = await model.budgets(some[start : start + LIMITS_AT_ONCE])
                by_id.update((view.id, view) for view in views)
        return [by_id[limit.id] for limit in limits]

    async def add(self, limit: Limit, amount: int) -> LimitView:
        return (await self._counting(limit).budgets([limit], amount))[0]

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        self._process.limits.sweep(defined, self._process.wall_clock())
        leaders = {m.limits_key: m for m in self._models.values() if m.leads}
        for model in leaders.values():
            await model.sweep(defined)

    def _counting(self, limit: Limit) -> RedisModel:
        """The model in whose hash a limit is counted: in a cluster, that of its entitlement."""
        models = self._models.values()
        holding = (model for model in models if limit.name in model.token_pool.accounts)
        counting = next(holding, None) or next(iter(models), None)
        if counting is None:
            raise StateFailure("no model is managed yet")
        return counting

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        await self._models[terms.model].define(terms)

    async def remove(self, model: str, name: str) -> bool:
        return await self._models[model].remove(name)

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        return await self._models[model].view(names)

    async def pools(self, model: str) -> list[PoolView]:
        return await self._models[model].pools()

    # -- Upkeep

    async def change(self, model: str, terms: Terms) -> None:
        await self._models[model].change(terms)

    async def renew(self) -> None:
        await asyncio.gather(*(model.renew() for model in self._all))
        over = [model for model in self._ended if not model.leases]
        self._ended = [model for model in self._ended if model.leases]
        await asyncio.gather(*(model.link.close() for model in over))

    async def tick(self) -> None:
        await asyncio.gather(*(model.tick() for model in self._models.values()))
        if not self._known or self._process.clock() < self._levels_at_s:
            return
        # Levels of budgets are learned, so that their parts are right if Redis goes away.
        start = self._known_from if self._known_from < len(self._known) else 0
        some = [
            limit
            for limit in islice(self._known.values(), start, start + LEVELS_READ)
            if limit.budget
        ]
        try:
            views = await self.levels(some)
        except StateFailure:
            return
        self._process.limits.note_views(some, views, self._process.wall_clock())
        self._known_from = start + LEVELS_READ
        self._levels_at_s = self._process.clock() + LEVELS_EVERY_S

    async def _receive(self) -> None:
        """Ask for evictions while this process holds evictable leases."""
        while True:
            await asyncio.sleep(EVICTED_EVERY_S)
            for model in self._all:
                try:
                    if model.evictable and model.link.up:
                        await model.take_evicted()
                except Exception:  # noqa: BLE001 - a failed callback must not stop the others
                    _log.exception("telling of an eviction failed")
