"""Admission for requests that another proxy forwards: leases held until it reports usage.

Routes: POST /admission/authorize, POST /admission/usage. Both take the tenant's own key and refuse
in the data plane's format.

The token-pools paper (section 4) separates the gateway from the authorisation service; this module
is the service. Rules:

- The same stages decide as for the gateway's own requests: estimate, plan, admit, settle.
- A lease belongs to the tenant whose key requested it. The first usage report settles it; a
  repeated report gets the same settlement.
- A lease without a report in time is charged its estimate. Every lease is charged at least what
  its slots produce in the time that it held them.
- The number of held leases is bounded: in total, per tenant and, beyond reserved baselines,
  per pool.
- A lease that must give way to a protected request ends at once and is charged its estimate.
- Reports may not exceed the pool's window. They teach estimates only where the entitlement has
  `trusted_usage`, and then its own tenant's, guarded like an engine's reports.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.admission.denials import limit_lines
from gateway.background_task import BackgroundTasks
from gateway.control.external_admission import (
    AuthorizeAnswer,
    AuthorizeBody,
    Ending,
    ExternalLease,
    Settled,
    UsageReport,
    charge_of,
    estimated_usage,
    facts_of,
    lesson_of,
    nano_held,
    refused_record,
    settled_record,
    usage_of,
    with_time_held,
)
from gateway.control.peers import settle_anywhere
from gateway.control.surface import MAX_BODY_BYTES, Authenticate, read_within
from gateway.errors import NotFound, RateLimited, Refusal, TooLarge, Unavailable
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.data_plane import shutting_down
from gateway.metrics import Metrics
from gateway.payload.head import pairs_of, read_head
from gateway.payload.refusals import undecodable
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.settlement import cost_of, count, money_of
from gateway.ports import LeaseStore, RecordSink, Settlement
from gateway.records.attempt import Usage
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import key_name
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Principal
from gateway.replicas.calls import ReplicaCalls
from gateway.routing.routing import defaulted_cap
from gateway.tenancy import keyring as stage_authenticate

MAX_HELD = 10_000
"""Leases held at once; further ones are refused with 503."""
MAX_HELD_EACH = 2_000
"""Leases held at once for one tenant, over all of its entitlements; further ones get 429."""
RETAINED_SETTLED = 10_000
"""Settlements remembered for repeated reports."""
SWEEP_S = 1.0
"""Interval of the search for expired leases."""

_authorize: Final = msgspec.json.Decoder(AuthorizeBody).decode
_usage: Final = msgspec.json.Decoder(UsageReport).decode
_B = TypeVar("_B", bound=msgspec.Struct)


class AdmissionService:
    """Admits and settles requests of other proxies. Runs on one event loop; never blocks."""

    def __init__(
        self,
        *,
        models: Mapping[str, ModelRuntime],
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

        `replicas` gives the number of gateways that share a model, this one included.
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
        self._tasks = BackgroundTasks()
        self.arrival: Awaitable[None] | None = None
        """Of the last settlement: awaited before a proxy hears that its lease ended."""
        self._held: dict[str, ExternalLease] = {}
        self._taken: Counter[object] = Counter()
        """Leases held or being requested, of all (None) and by tenant; and by (model, pool)
        their sequences beyond reserved baselines."""
        self._settled: OrderedDict[str, tuple[str, Settled]] = OrderedDict()

    @property
    def held(self) -> int:
        """Number of leases that wait for a usage report."""
        return len(self._held)

    async def admit(
        self,
        principal: Principal,
        request: AuthorizeBody,
        *,
        key: str | None = None,
        entitlement: str | None = None,
    ) -> AuthorizeAnswer:
        """Take a lease and hold it. Raises the same Refusals as the data plane.

        `key` names the key that the proxy presented, `entitlement` the one that it asks for; None
        for the key's first.
        """
        lease_id = self._new_id()
        now_s, unix_s = self._clock(), self._wall_clock()
        served: ModelRuntime | None = None
        estimate: LengthEstimate | None = None
        lease: Lease | None = None
        if self._draining():
            raise shutting_down()
        tenant = principal.tenant
        if self._taken[None] >= MAX_HELD:
            raise Unavailable(
                "This gateway holds as many leases as it can. Report usage when a request ends.",
                reason="too_many_leases",
                retry_after_s=5.0,
            )
        what = f"The tenant '{tenant}' holds {MAX_HELD_EACH} leases whose usage was not reported."
        self._take(tenant, 1, MAX_HELD_EACH, what)
        self._taken[None] += 1
        try:
            served = stage_plan.find_model(self._models, request.model)
            principal = stage_authenticate.entitled(
                principal,
                served.name,
                unix_s,
                entitlement,
                adapter=served.adapter(request.model),
            )
            estimate = stage_plan.estimate(served, CHAT, facts_of(request), principal)
            plan = stage_plan.applied(served, estimate, stage_plan.plan(served, CHAT, estimate))
            asked = await stage_plan.admit(self._store, served, principal, lease_id, estimate, plan)
            slots_of = self._take_slots(served, asked)
            lease = asked
        except Refusal as refusal:
            record = refused_record(
                principal, request, key, served, estimate, refusal, lease_id, unix_s
            )
            count(self._metrics, record, estimate, served, None)
            self._records.append(record)
            raise
        finally:
            if lease is None:
                self._free_place(tenant)
        self._held[lease_id] = ExternalLease(
            lease=lease,
            served=served,
            principal=principal,
            slots_of=slots_of,
            estimate=estimate,
            request=request,
            key=key,
            received_s=now_s,
            received_unix_s=unix_s,
            ends_s=now_s + request.lease_s,
        )
        cap = defaulted_cap(served.routing, estimate, lease.pool)
        return AuthorizeAnswer(
            lease_id=lease.id,
            pool=served.fleet.pools[lease.pool].name,
            spilled=lease.spilled,
            weight=lease.weight,
            reserved_tokens=lease.cost_tokens,
            reserved_kv_bytes=lease.kv_bytes,
            max_tokens=request.max_tokens if cap is None else cap,
            expires_in_s=request.lease_s,
            would_deny=lease.would_deny or None,
            limits=lease.limits,
        )

    def _take_slots(self, served: ModelRuntime, lease: Lease) -> str:
        """Count slots against the pool's share for other proxies; if full, settle and refuse.

        Returns the pool that they count in; "" where the lease is within a baseline, or admission
        is not enforced.
        """
        if lease.weight <= 0 or lease.protected or served.admission.observe:
            return ""
        pool = served.fleet.pools[lease.pool]
        slots = sum(pool.present) * pool.slots_per_worker
        share = served.admission.held_share / self._replicas(served.name)
        most = max(1, int(slots * share))
        what = f"Leases of other proxies hold as many slots of this pool as they may ({most})."
        try:
            self._take((lease.model, pool.name), lease.sequences, most, what)
        except Refusal:
            self._store.settle(
                lease, Settlement(usage=None, dispatched=False, unix_s=self._wall_clock())
            )
            raise
        return pool.name

    def _take(self, of: object, count: int, most: int, what: str) -> None:
        """Take places of a tenant or a pool. Raises RateLimited, which says `what` is taken."""
        if self._taken[of] + count > most:
            raise RateLimited(
                f"{what} Report usage when a request ends.",
                reason="too_many_leases",
                code="rate_limit_exceeded",
                retry_after_s=5.0,
            )
        self._taken[of] += count

    def _free_place(self, tenant: str) -> None:
        self._taken[None] -= 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    def evict(self, lease_id: str) -> None:
        """End a lease that must give way; ignores leases that are not held here."""
        if (open_lease := self._held.get(lease_id)) is not None:
            self._end(open_lease, "evicted", estimated_usage(open_lease))

    def settle(self, report: UsageReport, tenant: str, trusted: bool) -> Settled:  # noqa: FBT001
        """Charge the reported usage and release the lease; an ended lease returns its settlement.

        `trusted`: whether the tenant's report may teach its estimates.
        Raises NotFound for a lease that is unknown, another tenant's, or settled too long ago;
        BadRequest for impossible usage (see `usage_of`).
        """
        known = self._settled.get(report.lease_id)
        if known is not None and known[0] == tenant:
            return known[1]
        open_lease = self._held.get(report.lease_id)
        if open_lease is None or open_lease.principal.tenant != tenant:
            raise NotFound(
                f"No lease '{report.lease_id}' is held for this key. Report to the gateway that "
                "gave it.",
                reason="lease_not_found",
                param="lease_id",
            )
        usage = usage_of(report, open_lease)
        settled = self._end(open_lease, report.status, usage, report.latency_s)
        if trusted and open_lease.principal.trusted_usage:
            lesson = lesson_of(report, usage, open_lease)
            if lesson is not None:
                open_lease.served.estimator.learn(lesson)
        return settled

    def sweep(self) -> None:
        """End expired leases and charge their estimates."""
        now_s = self._clock()
        for open_lease in [held for held in self._held.values() if held.ends_s <= now_s]:
            self._end(open_lease, "expired", estimated_usage(open_lease))

    def start(self) -> None:
        """Start sweeping; call within the running loop."""
        self._tasks.start(self._sweeping())

    async def close(self) -> None:
        """Stop and expire every lease, because no report can reach this process any more."""
        await self._tasks.close()
        for open_lease in list(self._held.values()):
            self._end(open_lease, "expired", estimated_usage(open_lease))

    async def _sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def _end(
        self,
        open_lease: ExternalLease,
        ending: Ending,
        usage: Usage | None,
        latency_s: float | None = None,
    ) -> Settled:
        """Settle a lease. There is no await here, so a lease cannot end twice.

        `latency_s` is the proxy's own, for the log; charges go by the time that the lease was held.
        """
        lease, served = open_lease.lease, open_lease.served
        del self._held[lease.id]
        self._free_place(open_lease.principal.tenant)
        if open_lease.slots_of:  # as it was then: a reload may have changed the mode since
            self._taken[lease.model, open_lease.slots_of] -= lease.sequences
        held_s = self._clock() - open_lease.received_s
        usage, held_tokens = with_time_held(open_lease, usage, held_s)
        unix_s = self._wall_clock()
        cost = None if usage is None else cost_of(served, usage, nano_held(open_lease, held_s))
        self.arrival = self._store.settle(
            lease,
            Settlement(
                usage=usage,
                dispatched=True,  # as far as anybody here knows
                unix_s=unix_s,
                money=money_of(lease, cost),
            ),
            heard=True,
        )
        settled = Settled(
            lease_id=lease.id,
            status=ending,
            charge_tokens=None if usage is None else charge_of(open_lease, usage),
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            held_tokens=held_tokens,
        )
        self._settled[lease.id] = (open_lease.principal.tenant, settled)
        if len(self._settled) > RETAINED_SETTLED:
            self._settled.popitem(last=False)
        took_s = held_s if latency_s is None else latency_s
        record = settled_record(open_lease, settled, cost, took_s, unix_s)
        count(self._metrics, record, open_lease.estimate, served, lease)
        self._records.append(record)
        return settled


def admission_router(
    service: AdmissionService, authenticate: Authenticate, peers: ReplicaCalls
) -> APIRouter:
    """The two routes over a service; `peers` are other replicas that serve the same proxy."""
    app = APIRouter()

    @app.post("/admission/authorize")
    async def authorize(request: Request) -> Response:
        """Decide whether a request may be forwarded: 200 with a lease, or a refusal."""
        head = read_head(request.scope["headers"])
        principal = await authenticate(head)
        found = await service.admit(
            principal,
            await _read(request, _authorize),
            key=key_name(principal, head.key_digest),
            entitlement=head.entitlement,
        )
        headers = () if found.limits is None else pairs_of(limit_lines(found.limits).encode())
        return _answer(found, {name.decode(): value.decode() for name, value in headers})

    @app.post("/admission/usage")
    async def usage(request: Request) -> Response:
        """Report what the request used, which settles its lease once."""
        principal = await authenticate(read_head(request.scope["headers"]))
        report = await _read(request, _usage)
        settled = await settle_anywhere(
            peers, service.settle, report, principal.tenant, trusted=principal.trusted_usage
        )
        arrival, service.arrival = service.arrival, None
        if arrival is not None:
            await arrival
        return _answer(settled)

    return app


def _answer(content: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


async def _read(request: Request, decode: Callable[[bytes], _B]) -> _B:
    """The decoded body. Raises BadRequest, TooLarge."""
    refusal = TooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    body = await read_within(request, MAX_BODY_BYTES, refusal)
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(error) from None
