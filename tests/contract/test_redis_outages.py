"""A gateway whose Redis goes away, loses answers, falls back to an older copy or comes back empty.

Any history of one gateway with `fail_mode: local_share`. Always: no entitlement has more in
flight than it may; over any window its bucket pays its rate and its depth at most, but for what
an older copy does not know of; the gateway's own counts are sums over its leases. In the end,
once what nobody holds any more has expired, Redis counts what the gateway does, and where it
never lost anything every token.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bench.common.fleet import RedisServer
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import Refusal
from gateway.ports import AccountView, Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Lease
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis import scripts
from gateway.store.redis.leases import RedisLeases
from tests.builders import served_model
from tests.contract.test_token_pool_invariants import Meter
from tests.fakes import FakeClock
from tests.histories import histories
from tests.token_pools import NOW_S, entitled

pytestmark = pytest.mark.redis

_T = TypeVar("_T")
TERMS = Terms(slots=(6, 5), largest_tokens=300, mean_slo_ms=1000.0, headroom=0)
ENTITLEMENTS = (
    entitled("g", "guaranteed", baseline=(2, 1), limit=3, tokens_per_s=20.0, created=1),
    entitled("r", baseline=(1, 0), limit=3, tokens_per_s=30.0, tokens_per_s_limit=30.0, created=2),
    entitled("e", limit=4, created=3),
    entitled("p", "preemptible", limit=5, created=4),
)
NAMES = tuple(e.name for e in ENTITLEMENTS)
LIMITS = {e.name: e.limit for e in ENTITLEMENTS}
RATES = {e.name: e.tokens_per_s for e in ENTITLEMENTS if e.tokens_per_s}
WHICH = st.integers(0, 11)
"""One of those there are: what is drawn depends on no answer."""
LEAP_S = 2.0
"""By so much time may go on in Redis before a gateway says what has passed."""
KEEPER_S = 5.0
"""How often the gateway renews and ticks, at least."""


class Door:
    """The way to Redis, which may be shut."""

    def __init__(self, port: int) -> None:
        self.redis_port = port
        self.port = 0
        self.open = False
        self.loses_answers = False
        """The next answer is lost with its connection."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def unlock(self) -> None:
        """Let connections through."""
        if not self.open:
            self._server = await asyncio.start_server(self._come, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]
            self.open = True

    async def shut(self) -> None:
        """Break off all connections, and refuse new ones."""
        self.open = False
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        theirs = None
        try:
            inner, theirs = await asyncio.open_connection("127.0.0.1", self.redis_port)
            asking = asyncio.ensure_future(self._pass_on(reader, theirs, answers=False))
            answering = asyncio.ensure_future(self._pass_on(inner, writer, answers=True))
            try:
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asking.cancel()
                answering.cancel()
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            for each in (writer, theirs):
                if each is not None:
                    each.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if answers and self.loses_answers:
                    self.loses_answers = False
                    return
                target.write(data)
                await target.drain()


class GrantedLease:
    """What the test remembers of a lease."""

    def __init__(self, lease: Lease, ask: AdmissionRequest) -> None:
        self.lease = lease
        self.name = ask.entitlement
        self.tokens = ask.estimate_tokens


class OutagesMachine(RuleBasedStateMachine):
    """Any history of one gateway and its Redis."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = FakeClock(NOW_S)
        """What has passed."""
        self.machine = FakeClock(NOW_S)
        """What the clock of the machine, here also Redis's, shows."""
        self.redis = type(self).server.client()
        self.redis.flushall()
        self.door = Door(type(self).server.port)
        self.run(self.door.unlock())
        self.served = served_model()
        self.store = self.run(self.started())
        self.kept: dict[str, GrantedLease] = {}
        self.used = dict.fromkeys(NAMES, 0)
        self.meters = {name: Meter(NOW_S) for name in RATES}
        self.depths = dict.fromkeys(RATES, 0.0)
        self.copies: list[tuple[dict[bytes, Any], dict[str, tuple[float, float]]]] = []
        self.lost = False
        """Redis has lost writes: its ledger is not exact."""
        self.ids = itertools.count()

    def run(self, call: Awaitable[_T]) -> _T:
        async def awaited() -> _T:
            return await call

        return self.runner.run(awaited())

    async def started(self) -> RedisLeases:
        token_pool = TokenPool(TERMS)
        for each in ENTITLEMENTS:
            token_pool.define(each)
        served = {"m": self.served}
        store = RedisLeases(
            f"redis://127.0.0.1:{self.door.port}/0",
            served,
            {"m": token_pool},
            self.clock,
            local=MemoryLeases(served, self.clock),
            fail_mode="local_share",
            owner="o",
            wall_clock=self.machine,
            jitter=lambda: 0.0,
            script_clock=self.machine,
        )
        # No pause between two attempts to reach Redis: time stands still here.
        store._models["m"].link._clock = itertools.count(0, 1000).__next__
        await store.start()
        await store.tick()
        return store

    async def up(self) -> None:
        """Return once Redis decides."""
        deadline = time.monotonic() + 10.0
        while not self.store.up:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)

    async def views(self) -> dict[str, AccountView]:
        return {view.name: view for view in await self.store.view("m", NAMES)}

    # -- what tenants do

    @rule(
        name=st.sampled_from(NAMES),
        pool=st.sampled_from([0, 0, 1]),
        tokens=st.sampled_from([1, 20, 100, 300]),
    )
    def admit(self, name: str, pool: int, tokens: int) -> None:
        ask = AdmissionRequest(
            lease_id=f"l{next(self.ids)}",
            model="m",
            entitlement=name,
            pool=pool,
            alternates=(),
            estimate_tokens=tokens,
            sequences=1,
        )
        try:
            lease = self.run(self.store.admit(ask))
        except Refusal:
            return
        self.kept[ask.lease_id] = GrantedLease(lease, ask)
        if name in RATES:
            assert lease.limits is not None
            self.depths[name] = max(self.depths[name], lease.limits.tokens)
            self.meters[name].take(tokens, self.clock(), RATES[name])
            assert self.meters[name].over <= self.depths[name] + 1e-6

    @rule(name=st.sampled_from(NAMES), tokens=st.sampled_from([1, 60]))
    def crowd(self, name: str, tokens: int) -> None:
        for _ in range(6):
            self.admit(name, 0, tokens)

    @rule(which=WHICH, share=st.sampled_from([None, 0.0, 0.5, 1.0, 3.0]))
    def settle(self, which: int, share: float | None) -> None:
        if not self.kept:
            return
        self.end(list(self.kept)[which % len(self.kept)], share)

    def end(self, lease_id: str, share: float | None) -> None:
        kept = self.kept.pop(lease_id)
        charge = 0 if share is None else int(kept.tokens * share)
        usage = None if share is None else Usage(prompt_tokens=charge, completion_tokens=0)
        self.used[kept.name] += charge
        self.paid(kept.name, charge - kept.tokens)
        self.store.settle(kept.lease, Settlement(usage=usage, dispatched=usage is not None))

    @rule(name=st.sampled_from(sorted(RATES)))
    def spend(self, name: str) -> None:
        """Use all that the bucket gives, one request after the other."""
        for _ in range(8):
            before = set(self.kept)
            self.admit(name, 0, 90)
            for lease_id in set(self.kept) - before:
                self.end(lease_id, 1.0)

    @rule(which=WHICH, tokens=st.sampled_from([0, 50, 400]))
    def resize(self, which: int, tokens: int) -> None:
        if not self.kept:
            return
        kept = list(self.kept.values())[which % len(self.kept)]
        self.store.resize(kept.lease, tokens, 0)
        self.paid(kept.name, tokens - kept.tokens)
        kept.tokens = tokens

    # -- what happens

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        while seconds > 0:
            step_s = min(seconds, KEEPER_S)
            seconds -= step_s
            self.clock.advance(step_s)
            self.machine.advance(step_s)
            if self.door.open:  # no real time passes, in which it would come up
                self.run(self.up())
            self.run(self.store.renew())
            self.run(self.store.tick())

    @rule(seconds=st.sampled_from([-3600.0, -31.0, -1.0, 1.0, 31.0, 3600.0]))
    def step_clock(self, seconds: float) -> None:
        """Somebody sets the machine's clock: forward is worth LEAP_S at most, back is nothing."""
        self.spend("r")
        self.machine.advance(seconds)
        for name, meter in self.meters.items() if seconds > 0 else ():
            meter.over = max(0.0, meter.over - LEAP_S * RATES[name])
        self.spend("r")

    @rule()
    def go_away(self) -> None:
        self.run(self.door.shut())

    @rule()
    def come_back(self) -> None:
        self.run(self.door.unlock())
        self.run(self.up())

    @rule()
    def flap(self) -> None:
        self.go_away()
        self.spend("r")
        self.come_back()

    @precondition(lambda self: self.door.open)
    @rule(name=st.sampled_from(NAMES), tokens=st.sampled_from([1, 60]))
    def lose_an_answer(self, name: str, tokens: int) -> None:
        self.door.loses_answers = True
        self.admit(name, 0, tokens)
        self.door.loses_answers = False

    @rule()
    def copy_is_taken(self) -> None:
        held = {key: self.redis.dump(key) for key in self.redis.scan_iter()}
        over = {name: (meter.over, meter.at_s) for name, meter in self.meters.items()}
        self.copies = [*self.copies[-1:], (held, over)]

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(-2, -1))
    def fail_over(self, which: int) -> None:
        """A server takes over that has not heard of the last writes."""
        held, over = self.copies[max(which, -len(self.copies))]
        self.replaced(held)
        for name, (tokens, at_s) in over.items():
            meter = self.meters[name]
            meter.over, meter.at_s = min(meter.over, tokens), min(meter.at_s, at_s)

    @rule()
    def come_back_empty(self) -> None:
        self.replaced({})
        for meter in self.meters.values():
            meter.over = 0.0

    def replaced(self, held: dict[bytes, Any]) -> None:
        self.lost = True
        self.go_away()
        self.redis.flushall()
        for key, value in held.items():
            self.redis.restore(key, 0, value)
        self.come_back()

    # -- what must hold

    @invariant()
    def the_gateway_counts_its_leases(self) -> None:
        for index, pool in enumerate(self.served.fleet.pools):
            assert pool.inflight == sum(k.lease.pool == index for k in self.kept.values())
        for name, limit in LIMITS.items():
            assert sum(k.name == name for k in self.kept.values()) <= limit, name

    @rule()
    def all_is_told(self) -> None:
        """Redis is there for longer than a lease lives."""
        self.come_back()
        self.pass_time(LEASE_TTL_S + 2 * KEEPER_S)
        self.run(self.up())
        seen = self.run(self.views())
        for name, view in seen.items():
            held = [k for k in self.kept.values() if k.name == name]
            assert sum(view.inflight) == len(held), name
            if not self.lost:
                reserved = sum(k.tokens for k in held)
                assert view.debited - view.refunded == view.used + reserved, name
                assert view.used == self.used[name], name

    def paid(self, name: str, tokens: int) -> None:
        if name in RATES:
            self.meters[name].take(tokens, self.clock(), RATES[name])

    def teardown(self) -> None:
        try:
            self.all_is_told()
            for kept in self.kept.values():
                self.store.settle(kept.lease, Settlement(usage=None, dispatched=False))
            self.kept.clear()
            self.the_gateway_counts_its_leases()
            for name, view in self.run(self.views()).items():
                assert (sum(view.inflight), view.debited - view.refunded) == (0, view.used), name
        finally:
            self.run(self.store.close())
            self.run(self.door.shut())
            self.redis.close()
            self.runner.close()


def test_any_history_of_outages_keeps_the_limits(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scripts read a clock that tests set where they would read the server's.
    monkeypatch.setattr(scripts, "_SERVER_CLOCK", "local t = call('TIME')")
    monkeypatch.setattr(scripts, "_TEST_CLOCK", "local t = {ARGV[#ARGV], 0}")

    class Machine(OutagesMachine):
        server = redis_server

    run_state_machine_as_test(Machine, settings=histories(20))
