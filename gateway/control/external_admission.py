"""Admission for requests that another proxy forwards: leases held until it reports usage.

Routes: POST /admission/authorize, POST /admission/usage. Both take the tenant's own key and refuse
in the data plane's format. Unknown fields of a body are refused, because a misspelt limit must not
count as absent.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from msgspec.structs import replace

from gateway.admission.admission import believed, charge_tokens
from gateway.admission.denials import limit_lines
from gateway.background_task import BackgroundTasks
from gateway.control.peers import understood
from gateway.control.surface import MAX_BODY_BYTES, Authenticate, read_within
from gateway.errors import BadRequest, NotFound, RateLimited, Refusal, TooLarge, Unavailable
from gateway.fleet.model_runtime import ModelRuntime
from gateway.http.data_plane import shutting_down
from gateway.metrics import Metrics
from gateway.payload.body import facts_of
from gateway.payload.head import MAX_REQUEST_ID, pairs_of, read_head
from gateway.payload.schema import CountedBody, Tokens, invalid, missing, undecodable
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.settlement import cost_of, count, money_of, usage_section
from gateway.ports import LeaseStore, RecordSink, Settlement
from gateway.records.attempt import Usage
from gateway.records.decision import (
    DECISION_SCHEMA,
    NO_USAGE,
    AdmissionSection,
    DecisionRecord,
    EstimateSection,
    RequestSection,
    TimingSection,
)
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import key_name
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.lease import Lease, Limits
from gateway.records.record import Record
from gateway.records.request import Principal
from gateway.replicas.calls import ReplicaCalls
from gateway.routing.routing import defaulted_cap
from gateway.tenancy.keyring import entitled

MAX_HELD = 10_000
"""Leases held at once; further ones are refused with 503."""
MAX_HELD_EACH = 2_000
"""Leases held at once for one tenant, over all of its entitlements; further ones get 429."""
RETAINED_SETTLED = 10_000
"""Settlements remembered for repeated reports."""
SWEEP_S = 1.0
"""Interval of the search for expired leases."""
MAX_LEASE_S: Final = 3_600
LEASE_S: Final = 600.0

Ending = Literal["ok", "failed", "cancelled", "expired", "evicted"]
"""How a lease ended. expired: no report in time; evicted: made room for a protected request."""


class AuthorizeBody(CountedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that another proxy would forward: the body of POST /admission/authorize."""

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    lease_s: Annotated[float, Meta(ge=1, le=MAX_LEASE_S)] = LEASE_S


class AuthorizeAnswer(Record, frozen=True, kw_only=True):
    """A lease. If no usage is reported within `expires_in_s`, its estimate is charged."""

    lease_id: str
    pool: str
    spilled: bool
    weight: float
    reserved_tokens: int
    reserved_kv_bytes: int
    max_tokens: int | None
    """The limit to send upstream: the request's own, or the model's default."""
    expires_in_s: float
    would_deny: str | None
    limits: Limits | None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request ended: the body of POST /admission/usage; for absent tokens see `usage_of`."""

    lease_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
    status: Literal["ok", "failed", "cancelled"] = "ok"
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    latency_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class Settled(Record, frozen=True, kw_only=True):
    """The settlement of a lease; repeated reports get the same answer."""

    lease_id: str
    status: Ending
    charge_tokens: int | None
    """None for a full refund."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    held_tokens: int = 0
    """Part of `completion_tokens`: added because the slot was held longer than usage explains."""


class ExternalLease(Record, frozen=True, kw_only=True):
    """A lease whose usage is not reported yet."""

    lease: Lease
    served: ModelRuntime
    principal: Principal
    slots_of: str
    """The pool whose slots for other proxies it counts against; "" for none."""
    estimate: LengthEstimate
    request: AuthorizeBody
    received_s: float
    record: DecisionRecord
    """Its decision, as far as it is known before the lease ends."""

    @property
    def estimated(self) -> Usage:
        """The reserved estimate as usage: the charge when the proxy reports nothing."""
        estimate = self.estimate
        return Usage(
            prompt_tokens=estimate.input_tokens_total,
            completion_tokens=estimate.sequences * estimate.output_tokens,
            source="counted",
        )

    def charge(self, usage: Usage) -> int:
        """In the entitlement's tokens."""
        return charge_tokens(self.served.admission.profile, usage)


def usage_of(report: UsageReport, open_lease: ExternalLease) -> Usage | None:
    """The usage to charge for a report; None refunds all.

    `ok` needs the prompt's tokens. `failed` without tokens is refunded. `cancelled` without tokens
    is charged the estimated prompt. Raises BadRequest for implausible usage, by the same rules as
    for an engine (`gateway.admission.admission`).
    """
    prompt, completion = report.prompt_tokens, report.completion_tokens
    if prompt is None:
        if report.status == "ok":
            raise missing("prompt_tokens")
        if report.status == "failed" and not completion:
            return None
        prompt = open_lease.estimate.input_tokens_total
    if report.status == "failed" and not prompt + completion:
        return None
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(report.cached_tokens, prompt),
    )
    window_tokens = open_lease.served.routing.pools[open_lease.lease.pool].window_tokens
    estimate = open_lease.estimate
    if believed(usage, estimate, window_tokens) is usage:
        return usage
    if not usage.prompt_tokens:
        raise invalid("prompt_tokens", "no engine serves a request without a prompt.")
    cap = estimate.cap_tokens
    if cap is not None and usage.completion_tokens > cap * estimate.sequences:
        raise invalid("completion_tokens", f"the request allows {cap * estimate.sequences}.")
    raise invalid(
        "prompt_tokens" if usage.prompt_tokens > window_tokens else "completion_tokens",
        f"prompt and completion together are more than the pool's window and twice the estimate "
        f"allow ({window_tokens} tokens a sequence).",
    )


_OUTCOMES: dict[Ending, tuple[str, int]] = {
    "ok": ("ok", 200),
    "failed": ("upstream_error", 502),
    "cancelled": ("disconnected", 499),
    "expired": ("expired", 504),
    "evicted": ("evicted", 429),
}
_pack: Final = msgspec.msgpack.Encoder().encode
_authorize: Final = msgspec.json.Decoder(AuthorizeBody).decode
_usage: Final = msgspec.json.Decoder(UsageReport).decode
_B = TypeVar("_B", bound=msgspec.Struct)


@dataclass(eq=False, kw_only=True)
class AdmissionService:
    """Admits and settles requests of other proxies. Runs on one event loop; never blocks."""

    models: Mapping[str, ModelRuntime]
    """By name and alias."""
    store: LeaseStore
    metrics: Metrics
    records: RecordSink
    new_id: Callable[[], str]
    clock: Callable[[], float]
    """Monotonic, in seconds."""
    wall_clock: Callable[[], float]
    """Unix time, in seconds."""
    draining: Callable[[], bool] = lambda: False
    replicas: Callable[[str], int] = lambda _: 1
    """Number of gateways that share a model, this one included."""
    arrival: Awaitable[None] | None = None
    """Of the last settlement: awaited before a proxy hears that its lease ended."""
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)
    _held: dict[str, ExternalLease] = field(default_factory=dict, init=False)
    _taken: Counter[object] = field(default_factory=Counter, init=False)
    """Leases held or being requested, of all (None) and by tenant; and by (model, pool)
    their sequences beyond reserved baselines."""
    _settled: OrderedDict[str, tuple[str, Settled]] = field(default_factory=OrderedDict, init=False)

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
        lease_id = self.new_id()
        now_s, unix_s = self.clock(), self.wall_clock()
        record = DecisionRecord(
            schema=DECISION_SCHEMA,
            time_unix_s=unix_s,
            request_id=request.request_id or lease_id,
            endpoint="admission",
            outcome="refused",
            status=0,
            asked_model=request.model,
            tenant=principal.tenant,
            key=key,
        )
        served: ModelRuntime | None = None
        estimate: LengthEstimate | None = None
        lease: Lease | None = None
        if self.draining():
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
            served = stage_plan.find_model(self.models, request.model)
            principal = entitled(
                principal,
                served.name,
                unix_s,
                entitlement,
                adapter=served.adapter(request.model),
            )
            estimate = stage_plan.estimate(served, CHAT, facts_of(request), principal)
            plan = stage_plan.applied(served, estimate, stage_plan.plan(served, CHAT, estimate))
            asked = await stage_plan.admit(self.store, served, principal, lease_id, estimate, plan)
            slots_of = self._take_slots(served, asked)
            lease = asked
        except Refusal as refusal:
            total_tokens = None if estimate is None else estimate.fit_tokens
            record = replace(
                record,
                status=refusal.status,
                model=None if served is None else served.name,
                entitlement=principal.entitlement or None,
                reason=refusal.reason,
                retry_after_s=refusal.retry_after_s,
                figures=refusal.figures,
                estimate=EstimateSection(total_tokens=total_tokens),
                admission=AdmissionSection(lease_id=lease_id),
            )
            count(self.metrics, record, estimate, served, None)
            self.records(record)
            raise
        finally:
            if lease is None:
                self._free_place(tenant)
        pool = served.fleet.pools[lease.pool].name
        self._held[lease_id] = ExternalLease(
            lease=lease,
            served=served,
            principal=principal,
            slots_of=slots_of,
            estimate=estimate,
            request=request,
            received_s=now_s,
            record=replace(
                record,
                model=served.name,
                entitlement=principal.entitlement,
                pool=pool,
                request=RequestSection(text_bytes=request.text_bytes),
                estimate=EstimateSection(
                    category=estimate.category,
                    input_tokens=estimate.input_tokens_total,
                    output_tokens=estimate.output_tokens,
                    total_tokens=estimate.fit_tokens,
                    cap_tokens=estimate.cap_tokens,
                    sequences=estimate.sequences,
                ),
            ),
        )
        cap = defaulted_cap(served.routing, estimate, lease.pool)
        return AuthorizeAnswer(
            lease_id=lease.id,
            pool=pool,
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
        share = served.admission.held_share / self.replicas(served.name)
        most = max(1, int(slots * share))
        what = f"Leases of other proxies hold as many slots of this pool as they may ({most})."
        try:
            self._take((lease.model, pool.name), lease.sequences, most, what)
        except Refusal:
            self.store.settle(
                lease, Settlement(usage=None, dispatched=False, unix_s=self.wall_clock())
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
            self._end(open_lease, "evicted", open_lease.estimated)

    def settle(self, report: UsageReport, tenant: str, trusted: bool) -> Settled:  # noqa: FBT001
        """Charge the reported usage and release the lease; an ended lease returns its settlement.

        `trusted`: whether the tenant's report may teach its estimates.
        Raises NotFound for a lease that is unknown, another tenant's, or settled too long ago;
        BadRequest for impossible usage (see `usage_of`).
        """
        earlier = self._settled.get(report.lease_id)
        if earlier is not None and earlier[0] == tenant:
            return earlier[1]
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
        if not (trusted and open_lease.principal.trusted_usage):
            return settled
        # The same counts as an engine's: prompts only as the proxy counted them, and no length of
        # an answer that failed. An answer that was cancelled, or as long as allowed, was cut.
        if usage is not None and report.status != "failed":
            served, estimate = open_lease.served, open_lease.estimate
            cap = defaulted_cap(served.routing, estimate, open_lease.lease.pool)
            cap = estimate.cap_tokens if cap is None else cap
            full = cap is not None and usage.completion_tokens >= cap * estimate.sequences
            served.estimator.learn(
                Observation(
                    endpoint=CHAT.name,
                    tenant=tenant,
                    measure=facts_of(open_lease.request).measure,
                    prompt_tokens=report.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    sequences=estimate.sequences,
                    output_censored=full or report.status == "cancelled",
                )
            )
        return settled

    def sweep(self) -> None:
        """End expired leases and charge their estimates."""
        now_s = self.clock()
        for open_lease in [
            held for held in self._held.values() if held.received_s + held.request.lease_s <= now_s
        ]:
            self._end(open_lease, "expired", open_lease.estimated)

    def start(self) -> None:
        """Start sweeping; call within the running loop."""

        async def sweeping() -> None:
            while True:
                await asyncio.sleep(SWEEP_S)
                self.sweep()

        self._tasks.start(sweeping())

    async def close(self) -> None:
        """Stop and expire every lease, because no report can reach this process any more."""
        await self._tasks.close()
        for open_lease in list(self._held.values()):
            self._end(open_lease, "expired", open_lease.estimated)

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
        held_s, unix_s = self.clock() - open_lease.received_s, self.wall_clock()
        # The proxy reports usage itself: without this minimum it could hold slots for free.
        sequences = open_lease.estimate.sequences
        least_tokens = int(held_s * served.admission.slot_tokens_per_s * sequences)
        held_tokens = max(0, least_tokens - (open_lease.charge(usage) if usage else 0))
        if held_tokens:
            usage = usage or Usage(prompt_tokens=0, completion_tokens=0)
            usage = replace(usage, completion_tokens=usage.completion_tokens + held_tokens)
        pool, cost, charge = served.fleet.pools[lease.pool], None, None
        if usage is not None:
            slot_nano = 0.0
            if pool.slot_clock is not None:  # one slot of the pool for each sequence
                slot_s = lease.sequences * held_s
                slot_nano = pool.slot_clock.nano_per_s * slot_s / max(pool.slots_per_worker, 1)
            cost, charge = cost_of(served, usage, slot_nano), open_lease.charge(usage)
        self.arrival = self.store.settle(
            lease,
            Settlement(
                usage=usage,
                dispatched=True,  # as far as anybody here knows
                unix_s=unix_s,
                money=money_of(lease, cost),
            ),
            heard=True,
        )
        source = "counted" if ending in ("expired", "evicted") else "proxy"
        used = NO_USAGE
        if usage is not None:
            used = replace(usage_section(usage, cost), source=source)
        settled = Settled(
            lease_id=lease.id,
            status=ending,
            charge_tokens=charge,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_tokens=used.cached_tokens,
            held_tokens=held_tokens,
        )
        self._settled[lease.id] = (open_lease.principal.tenant, settled)
        if len(self._settled) > RETAINED_SETTLED:
            self._settled.popitem(last=False)
        outcome, status = _OUTCOMES[ending]
        began = open_lease.record
        record = replace(
            began,
            outcome=outcome,
            status=status,
            admission=AdmissionSection(
                lease_id=lease.id,
                spilled=lease.spilled,
                admitted_unix_s=began.time_unix_s,
                settled_unix_s=unix_s,
                reserved_tokens=lease.cost_tokens,
                reserved_kv_bytes=lease.kv_bytes,
                priority=lease.weight,
                contended=lease.contended,
                would_deny=lease.would_deny or None,
                evicted=ending == "evicted",
                charge_tokens=charge,
            ),
            usage=used,
            timing=TimingSection(duration_s=held_s if latency_s is None else latency_s),
        )
        count(self.metrics, record, open_lease.estimate, served, lease)
        self.records(record)
        return settled


def admission_router(
    service: AdmissionService, authenticate: Authenticate, peers: ReplicaCalls
) -> APIRouter:
    """The two routes over a service; `peers` are other replicas that serve the same proxy."""
    app = APIRouter()
    peers.on("usage", partial(settled_here, service.settle))

    @app.post("/admission/authorize")
    async def authorize(request: Request) -> Response:
        """Decide whether a request may be forwarded: 200 with a lease, or a refusal."""
        head = read_head(request.scope["headers"])
        principal = await authenticate(head)
        lease = await service.admit(
            principal,
            await _read(request, _authorize),
            key=key_name(principal, head.key_digest),
            entitlement=head.entitlement,
        )
        headers = () if lease.limits is None else pairs_of(limit_lines(lease.limits).encode())
        return _answer(lease, {name.decode(): value.decode() for name, value in headers})

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


# -- reports to another replica than the one that holds the lease

Settle = Callable[[UsageReport, str, bool], Settled]
"""Settles a lease by a report of a tenant; the last says whether it may teach estimates."""
_Why = tuple[str, str, str | None, str | None]
"""Message, reason, code and param of a refused report."""
_reported: Final = msgspec.msgpack.Decoder(tuple[UsageReport, str, bool]).decode
_settlement: Final = msgspec.msgpack.Decoder(tuple[Settled | None, _Why | None]).decode


def settled_here(settle: Settle, asked: bytes) -> bytes | None:
    """Settle a lease that this replica holds, for usage reported to another."""
    try:
        return _pack((settle(*_reported(asked)), None))
    except NotFound:
        return None
    except BadRequest as error:
        return _pack((None, (error.message, error.reason, error.code, error.param)))


async def settle_anywhere(
    peers: ReplicaCalls, settle: Settle, report: UsageReport, tenant: str, *, trusted: bool
) -> Settled:
    """Settle a lease on the replica that holds it. Raises NotFound, BadRequest, Unavailable."""
    try:
        return settle(report, tenant, trusted)
    except NotFound as unknown:
        asked = _pack((report, tenant, trusted))
        for settled, why in understood(_settlement, await peers.search("usage", asked)):
            if settled is not None:
                return settled
            if why is not None:
                message, reason, code, param = why
                raise BadRequest(message, reason=reason, code=code, param=param) from None
        raise unknown from None
