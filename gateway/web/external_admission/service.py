"""Admission for requests that another proxy forwards: leases held until it reports usage.

The token-pools paper splits gateway and authorisation service (section 4); this is the latter's
side. Rules:

- The same stages decide as for the gateway's own requests: estimate, plan, admit, settle.
- A lease belongs to the tenant whose key asked for it. Its usage settles it once; a repeated
  report gets the first settlement. What nobody reports within the lease's time is charged its
  estimate, and no lease less than what its slots make in the time that it held them.
- What is held is bounded: in all, for each entitlement and, beyond reserved baselines, in each
  pool.
- A lease that is to give way to a protected request ends at once, charged its estimate.
- Reports are believed within what the pool's window allows, and teach no estimator: a tenant
  must not steer the estimates of others.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

from gateway.errors import NotFound, Refusal, Unavailable
from gateway.metrics import Metrics
from gateway.policy.admission.external_admission import (
    Admitted,
    Ending,
    HeldLease,
    Report,
    Settled,
    Wanted,
    estimated_usage,
    facts_of,
    settled_as,
    usage_of,
    with_time_held,
)
from gateway.policy.model_runtime import ServedModel
from gateway.policy.pools.routing import defaulted_cap
from gateway.ports import LeaseStore, RecordSink, Settlement
from gateway.records.attempt import Usage
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Principal
from gateway.stages import admit as stage_admit
from gateway.stages import authenticate as stage_authenticate
from gateway.stages import estimate as stage_estimate
from gateway.stages import plan as stage_plan
from gateway.stages import request_metrics
from gateway.web.external_admission.held_slots import Places
from gateway.web.external_admission.records import refused_record, settled_record

SETTLED_KEPT = 10_000
"""Settlements that a repeated report still gets."""
SWEEP_S = 1.0
"""How often leases are looked at whose time may be up."""


class AdmissionDesk:
    """Admits and settles on behalf of another proxy. One event loop; nothing here blocks."""

    def __init__(
        self,
        *,
        models: Mapping[str, ServedModel],
        store: LeaseStore,
        metrics: Metrics,
        records: RecordSink,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        draining: Callable[[], bool] = lambda: False,
        replicas: Callable[[str], int] = lambda _: 1,
    ) -> None:
        """`models` by name and alias; `clock` monotonic, `wall_clock` Unix time, in seconds.

        `replicas`: how many gateways share a model, this one included.
        """
        self._models = models
        self._store = store
        self._metrics = metrics
        self._records = records
        self._new_id = new_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._draining = draining
        self._replicas = replicas
        self._task: asyncio.Task[None] | None = None
        self._held: dict[str, HeldLease] = {}
        self._places = Places()
        self._deadlines: list[tuple[float, str]] = []
        self._settled: OrderedDict[str, tuple[str, Settled]] = OrderedDict()

    @property
    def held(self) -> int:
        """Leases that wait for their usage."""
        return len(self._held)

    async def admit(self, principal: Principal, wanted: Wanted) -> Admitted:
        """Take a lease and hold it. Raises Refusal, as the data plane would."""
        self.sweep()
        lease_id = self._new_id()
        now_s, unix_s = self._clock(), self._wall_clock()
        served: ServedModel | None = None
        estimate: LengthEstimate | None = None
        lease: Lease | None = None
        place = principal.entitlement
        self._refuse_when_draining()
        self._places.take(place)
        try:
            served = stage_estimate.find_model(self._models, wanted.model)
            stage_authenticate.permit_model(principal, served.name)
            estimate = stage_estimate.estimate(served, CHAT, facts_of(wanted), principal)
            plan = stage_plan.applied(served, estimate, stage_plan.plan(served, CHAT, estimate))
            asked = await stage_admit.admit(
                self._store, served, principal, lease_id, estimate, plan
            )
            self._take_slots(served, asked)
            lease = asked
        except Refusal as refusal:
            record = refused_record(principal, wanted, served, estimate, refusal, lease_id, unix_s)
            self._note(record, served, estimate, None)
            raise
        finally:
            if lease is None:
                self._places.free(place)
        self._held[lease_id] = HeldLease(
            lease=lease,
            served=served,
            principal=principal,
            estimate=estimate,
            wanted=wanted,
            received_s=now_s,
            received_unix_s=unix_s,
        )
        self._expire_at(now_s + wanted.lease_s, lease_id)
        cap = defaulted_cap(served.routing, estimate, lease.pool)
        return Admitted(
            lease=lease,
            pool=served.pools[lease.pool].name,
            max_tokens=wanted.max_tokens if cap is None else cap,
            expires_in_s=wanted.lease_s,
        )

    def _take_slots(self, served: ServedModel, lease: Lease) -> None:
        """Hold slots of a pool within the share of other proxies. Raises Refusal."""
        if not _is_counted(served, lease):
            return
        pool = served.pools[lease.pool]
        slots = len(pool.workers) * pool.slots_per_worker
        share = served.held_share / self._replicas(served.name)
        try:
            self._places.take_slots(lease, max(1, int(slots * share)))
        except Refusal:
            self._store.settle(
                lease, Settlement(usage=None, dispatched=False, unix_s=self._wall_clock())
            )
            raise

    def evict(self, lease_id: str) -> None:
        """End a lease that is to give way; one that is not held here: nothing."""
        if (held := self._held.get(lease_id)) is not None:
            duration_s = self._clock() - held.received_s
            self._end(held, "evicted", estimated_usage(held), duration_s)

    def settle(self, principal: Principal, report: Report) -> Settled:
        """Charge what was used and let go of the lease; a lease that ended says how it did.

        Raises NotFound for a lease that is unknown, another tenant's, or was settled too long
        ago; BadRequest for usage that cannot be (see `usage_of`).
        """
        self.sweep()
        known = self._settled.get(report.lease_id)
        if known is not None and known[0] == principal.tenant:
            return known[1]
        held = self._held.get(report.lease_id)
        if held is None or held.principal.tenant != principal.tenant:
            raise NotFound(
                f"No lease '{report.lease_id}' is held for this key. Report to the gateway that "
                "gave it.",
                reason="lease_not_found",
                code="lease_not_found",
                param="lease_id",
            )
        usage = usage_of(report, held)
        duration_s = report.latency_s
        if duration_s is None:
            duration_s = self._clock() - held.received_s
        return self._end(held, report.status, usage, duration_s)

    def sweep(self) -> None:
        """End leases whose time is up: they are charged their estimate."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, lease_id = heappop(self._deadlines)
            if (held := self._held.get(lease_id)) is not None:
                self._end(held, "expired", estimated_usage(held), now_s - held.received_s)

    def start(self) -> None:
        """Begin to sweep; call within the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; every lease ends as if its time were up, for nobody can report to this process."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        now_s = self._clock()
        for held in list(self._held.values()):
            self._end(held, "expired", estimated_usage(held), now_s - held.received_s)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def _expire_at(self, deadline_s: float, lease_id: str) -> None:
        """Note a deadline; those of leases that ended are cleared away now and then."""
        if len(self._deadlines) > 2 * len(self._held) + 1_000:
            self._deadlines = [due for due in self._deadlines if due[1] in self._held]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline_s, lease_id))

    def _refuse_when_draining(self) -> None:
        if self._draining():
            raise Unavailable(
                "This gateway is shutting down. Try again: another one will answer.",
                reason="shutting_down",
                code="shutting_down",
                retry_after_s=1.0,
                should_retry=True,
            )

    def _end(
        self, held: HeldLease, ending: Ending, usage: Usage | None, duration_s: float
    ) -> Settled:
        """Without an await, so that a lease ends once."""
        lease, served = held.lease, held.served
        del self._held[lease.id]
        self._places.free(held.principal.entitlement)
        if _is_counted(served, lease):
            self._places.free_slots(lease)
        usage, held_tokens = with_time_held(held, usage, self._clock() - held.received_s)
        unix_s = self._wall_clock()
        self._store.settle(
            lease, Settlement(usage=usage, dispatched=usage is not None, unix_s=unix_s)
        )
        settled = settled_as(held, ending, usage, held_tokens)
        self._settled[lease.id] = (held.principal.tenant, settled)
        if len(self._settled) > SETTLED_KEPT:
            self._settled.popitem(last=False)
        self._note(settled_record(held, settled, duration_s, unix_s), served, held.estimate, lease)
        return settled

    def _note(
        self,
        record: DecisionRecord,
        served: ServedModel | None,
        estimate: LengthEstimate | None,
        lease: Lease | None,
    ) -> None:
        request_metrics.count(self._metrics, record, estimate, served, lease)
        self._records.append(record)


def _is_counted(served: ServedModel, lease: Lease) -> bool:
    """Whether a lease counts in its pool's share: where admission refuses, beyond baselines."""
    return lease.weight > 0 and not lease.protected and not served.observe_admission
