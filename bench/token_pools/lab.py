"""A model's token pool before engines, in virtual time: the shipped admission, no processes.

Decisions, settlements, ticks and renewals are calls of `gateway.admission`, in the gateway's own
order; engines are `simulator.engine.engine`. Events run in order of time, and at one time the
engines come first. Without a token pool every request enters: that is "no admission control".
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec

from gateway.admission import admission, capacity, checks, debt
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Denial, Grant, Terms
from gateway.admission.token_pool import RENEW_EVERY_S, TokenPool
from gateway.records.entitlement import Entitlement
from simulator.engine.engine import Emission, Engine, EngineProfile, EngineRequest

EPOCH_S = 1_700_000_000.0
"""Unix time at which every experiment begins; its own times start at 0."""
RETRY_AFTER_S = 60.0
"""No cap on waits: Retry-After is never longer."""
SLOTS = 16
ITERATION_S = 16 * (64 + 64) / 240 / 64
"""16 slots that hold 64 + 64 tokens each make 240 tokens/s (token-pools paper, section 5.1)."""
PER_SLOT_S = 0.001
POOL_REASONS = ("low priority", "overshoot", "headroom")
"""Why the pool, not the entitlement, refuses; the first is the paper's "low-priority denial"."""


class AdmittedJob(msgspec.Struct, kw_only=True):
    """One request that was let in. Times in seconds of the experiment; -1 before they are known."""

    id: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    asked_s: float
    reserved_tokens: int
    engine: int = 0
    emitted: int = 0
    first_s: float = -1.0
    done_s: float = -1.0
    queue_s: float = -1.0
    evicted: bool = False

    @property
    def ttft_s(self) -> float:
        """From asking to the first token; infinite when none came."""
        return self.first_s - self.asked_s if self.first_s >= 0 else math.inf


class RefusedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One 429."""

    at_s: float
    tenant: str
    reason: str
    """As admission names it; `priority` is told apart as in POOL_REASONS."""
    retry_after_s: float


class PoolMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one moment. Mappings by tenant."""

    at_s: float
    running: int
    waiting: int
    inflight: dict[str, int]
    debt: dict[str, float]
    kv_bytes: int = 0
    kv_used: float = 0.0
    """Share of the engines' blocks in use."""


def spark(slots: int = SLOTS) -> EngineProfile:
    """An engine of the paper's pace: an iteration lasts ITERATION_S with all slots taken."""
    return EngineProfile(
        name="spark",
        w_s=ITERATION_S - slots * PER_SLOT_S,
        h_s=PER_SLOT_S,
        max_num_seqs=slots,
        prefix_cache_tokens=0,
    )


class Lab:
    """Drive it with `at`, `offer` and `run`."""

    def __init__(
        self,
        terms: Terms | None,
        profiles: Sequence[EngineProfile],
        seed: int,
        *,
        tenants: Sequence[Entitlement] = (),
        sample_s: float = 0.25,
        every_token: bool = False,
        mean_slo_ms: float = 0.0,
        owes_all: bool = False,
    ) -> None:
        """`terms` None: no admission. `mean_slo_ms` 0: the mean over bound entitlements.

        `owes_all`: debt grows in a contended pool for who was not denied, too. The policy does
        not do so; it shows what the published debts mean.
        """
        self.random = Random(seed)
        self.now_s = 0.0
        self.engines = [Engine(profile) for profile in profiles]
        self.up = len(self.engines)
        """Engines that take new requests, from the first on."""
        self.token_pool = None if terms is None else TokenPool(terms)
        self.jobs: list[AdmittedJob] = []
        self.live: dict[str, AdmittedJob] = {}
        self.refused: list[RefusedJob] = []
        self.samples: list[PoolMoment] = []
        self.most_kv_at_entry = 0
        """Most KV bytes reserved right after a request entered."""
        self._mean_slo_ms = mean_slo_ms
        self._owes_all = owes_all
        self._every_token = every_token
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ids = count()
        self._tenants: dict[str, Entitlement] = {}
        self._done: dict[str, Callable[[AdmittedJob], None]] = {}
        for tenant in tenants:
            self.join(tenant)
        self._every(sample_s, self._sample, first_s=0.0)
        if terms is not None and self.token_pool is not None:
            self.token_pool.ticked_s = EPOCH_S
            self._every(terms.profile.tick_s, self._tick)
            self._every(RENEW_EVERY_S, self._renew)

    # -- time

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Call `action` then; what is due at once runs in order of these calls."""
        heappush(self._heap, (at_s, next(self._order), action))

    def run(self, until_s: float) -> None:
        """Run everything up to a time."""
        while True:
            times = [t for e in self.engines if (t := e.next_event_s()) is not None]
            times += [at_s for at_s, _, _ in self._heap[:1]]
            now_s = min(times, default=math.inf)
            if now_s > until_s:
                self.now_s = until_s
                return
            self.now_s = now_s
            for engine in self.engines:
                for at_s, emission in engine.run_until(now_s, every_token=self._every_token):
                    self._emitted(at_s, emission)
            while self._heap and self._heap[0][0] <= now_s:
                heappop(self._heap)[2]()

    def _every(self, each_s: float, action: Callable[[], None], first_s: float = -1.0) -> None:
        start_s = self.now_s + each_s if first_s < 0 else first_s
        steps = count()

        def step() -> None:
            action()
            self.at(start_s + (next(steps) + 1) * each_s, step)

        self.at(start_s, step)

    @property
    def unix_s(self) -> float:
        """The policy's clock."""
        return EPOCH_S + self.now_s

    # -- the pool

    def join(self, tenant: Entitlement) -> None:
        """Bring an entitlement into force."""
        self._tenants[tenant.name] = tenant
        if self.token_pool is not None:
            self.token_pool.define(tenant)
            self._assess()

    def resize_pool(self, slots: int, up: int) -> None:
        """Give the pool other slots, with so many engines taking new requests."""
        self.up = up
        if self.token_pool is not None:
            self.token_pool.change(msgspec.structs.replace(self.token_pool.terms, slots=(slots,)))
            self._assess()

    def _assess(self) -> None:
        assert self.token_pool is not None
        terms = self.token_pool.terms
        held = capacity.Capacity(
            slots=terms.slots,
            kv_bytes=tuple(terms.kv_of(pool) for pool in range(len(terms.slots))),
            tokens_per_s=terms.tokens_per_s,
        )
        in_order = sorted(self._tenants.values(), key=lambda t: t.created)
        *_, found = capacity.assess_capacity(in_order, held, self.unix_s)
        assert found is not None
        self.token_pool.change(
            msgspec.structs.replace(
                terms,
                bound_until=found.bound_until,
                mean_slo_ms=self._mean_slo_ms or found.mean_slo_ms,
            )
        )

    def _tick(self) -> None:
        assert self.token_pool is not None
        elapsed_s = self.unix_s - self.token_pool.ticked_s
        if self._owes_all:
            for account in self.token_pool.accounts.values():
                account.denied = max(1, account.denied)
        debt.tick(self.token_pool, sorted(self.token_pool.active), elapsed_s, self.unix_s)
        debt.close(self.token_pool, elapsed_s, self.unix_s)

    def _renew(self) -> None:
        assert self.token_pool is not None
        for lease_id in list(self.live):
            admission.renew(self.token_pool, lease_id, self.unix_s)

    # -- requests

    def offer(
        self,
        tenant: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        reserve_tokens: int = 0,
        kv_bytes_per_token: int = 0,
        done: Callable[[AdmittedJob], None] | None = None,
    ) -> RefusedJob | None:
        """Ask to be let in; the refusal, or None. `reserve_tokens` 0: what it will need."""
        reserved = reserve_tokens or prompt_tokens + output_tokens
        job = AdmittedJob(
            id=f"{tenant}-{next(self._ids)}",
            tenant=tenant,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            asked_s=self.now_s,
            reserved_tokens=reserved,
        )
        if self.token_pool is not None:
            refused = self._ask(self.token_pool, job, reserved * kv_bytes_per_token)
            if refused is not None:
                self.refused.append(refused)
                return refused
        self._submit(job)
        if done is not None:
            self._done[job.id] = done
        return None

    def _ask(self, token_pool: TokenPool, job: AdmittedJob, kv_bytes: int) -> RefusedJob | None:
        request = AdmissionRequest(
            lease_id=job.id,
            entitlement=job.tenant,
            pool=0,
            estimate_tokens=job.reserved_tokens,
            kv_bytes=kv_bytes,
        )
        outranked = self._outranked(token_pool, job.tenant)
        full = token_pool.pools[0].inflight + 1 > token_pool.terms.slots[0]
        found = admission.admit(token_pool, request, self.unix_s, observe=False)
        if isinstance(found, Grant):
            kv_reserved = token_pool.pools[0].kv_bytes
            self.most_kv_at_entry = max(self.most_kv_at_entry, kv_reserved)
            return None
        reason: str = found.reason
        if reason == "priority":
            kv_full = 0 < token_pool.terms.kv_of(0) < token_pool.pools[0].kv_bytes + kv_bytes
            uncontended = not full and not kv_full
            reason = POOL_REASONS[2 if uncontended else 0 if outranked else 1]
        return RefusedJob(
            at_s=self.now_s,
            tenant=job.tenant,
            reason=reason,
            retry_after_s=self._retry_after_s(found),
        )

    def _outranked(self, token_pool: TokenPool, tenant: str) -> bool:
        account = token_pool.accounts[tenant]
        if account.terms.service_class == "preemptible":
            return True
        return token_pool.weight_now(account) <= checks.min_weight(token_pool, 0)

    def _retry_after_s(self, denial: Denial) -> float:
        return float(retry_after_s(denial.wait_s, self.random.random()))

    def _submit(self, job: AdmittedJob) -> None:
        loads = [e.running + e.waiting for e in self.engines[: self.up]]
        job.engine = loads.index(min(loads))
        request = EngineRequest(
            id=job.id, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens
        )
        self.engines[job.engine].submit(request, self.now_s)
        self.jobs.append(job)
        self.live[job.id] = job

    def _emitted(self, at_s: float, emission: Emission) -> None:
        job = self.live[emission.id]
        job.emitted = emission.index
        if emission.index == 1:
            job.first_s, job.queue_s = at_s, emission.queue_s
        if emission.finished:
            self._finish(job, at_s)

    def _finish(self, job: AdmittedJob, at_s: float) -> None:
        job.done_s = at_s
        del self.live[job.id]
        if self.token_pool is not None:
            used = job.prompt_tokens + job.emitted if job.first_s >= 0 else 0
            admission.settle(self.token_pool, job.id, used, EPOCH_S + at_s)
        done = self._done.pop(job.id, None)
        if done is not None:
            done(job)

    def reclaim(self, job_id: str, cancel_s: float) -> None:
        """Have others give way to a protected request; cancelling takes `cancel_s`."""
        assert self.token_pool is not None
        if job_id not in self.token_pool.leases:
            return
        for record in admission.evict(self.token_pool, 0, 1):
            self.at(self.now_s + cancel_s, partial(self._cancel, record.id))

    def _cancel(self, job_id: str) -> None:
        job = self.live.get(job_id)
        if job is None:
            return
        job.evicted = True
        self.engines[job.engine].abort(job_id)
        self._finish(job, self.now_s)

    # -- what is seen

    def _sample(self) -> None:
        inflight = dict.fromkeys(self._tenants, 0)
        for job in self.live.values():
            inflight[job.tenant] = inflight.get(job.tenant, 0) + 1
        token_pool = self.token_pool
        accounts = {} if token_pool is None else token_pool.accounts
        self.samples.append(
            PoolMoment(
                at_s=self.now_s,
                running=sum(e.running for e in self.engines),
                waiting=sum(e.waiting for e in self.engines),
                inflight=inflight,
                debt={name: a.debt for name, a in accounts.items()},
                kv_bytes=0 if token_pool is None else token_pool.pools[0].kv_bytes,
                kv_used=max(e.kv_usage for e in self.engines),
            )
        )

    def count(self, tenant: str, reason: str, start_s: float = 0.0, end_s: float = 1e9) -> int:
        """Refusals of a tenant for a reason, asked within a time."""
        return sum(
            r.tenant == tenant and r.reason == reason and start_s <= r.at_s < end_s
            for r in self.refused
        )


class Thread:
    """A client that asks, waits for the answer, and asks again."""

    def __init__(
        self,
        lab: Lab,
        tenant: str,
        draw: Callable[[], tuple[int, int]],
        *,
        until_s: float,
        wait_cap_s: float,
    ) -> None:
        self._lab, self._tenant, self._draw = lab, tenant, draw
        self._until_s, self._wait_cap_s = until_s, wait_cap_s

    def ask(self) -> None:
        """A new request."""
        self._send(*self._draw())

    def _send(self, prompt: int, output: int) -> None:
        if self._lab.now_s >= self._until_s:
            return
        refused = self._lab.offer(self._tenant, prompt, output, done=self._answered)
        if refused is not None:
            wait_s = min(refused.retry_after_s, self._wait_cap_s)
            self._lab.at(self._lab.now_s + wait_s, lambda: self._send(prompt, output))

    def _answered(self, _: AdmittedJob) -> None:
        self._lab.at(self._lab.now_s, self.ask)
