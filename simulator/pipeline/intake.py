"""A simulated request's way to a pool: estimate, plan, admit, compress, adjust the lease.

These are the gateway's own decisions in the order of its pipeline. What a gateway cannot know, the
lengths of prompt and answer, is estimated by its estimator, which learns as requests end.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

import msgspec

from gateway.errors import ContextLengthExceeded
from gateway.fleet.model_runtime import NO_PREFIX, Prefix, PrefixEntry
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import Entitlement
from gateway.records.estimate import LengthEstimate, Observation, Plan
from gateway.records.request import BodyFacts, Measure
from gateway.routing.routing import (
    CompressionWindow,
    compression_window_of,
    fixed_tokens,
    has_room,
    lowered,
    mostly_new,
    plan_pool,
    requested,
    stay,
    window_plan,
)
from gateway.scheduling.scheduler import PRIORITY_CLASS, Job, Scheduler
from simulator.fleet.traffic import Random
from simulator.pipeline.leases import Held, Leases, Refused
from simulator.pipeline.records import REFUSED_LENGTH, Gateway, TenantTraffic

OPEN: Final = Entitlement(name="open", tenant="open", model="")


class Flight:
    """One request in the gateway or in an engine."""

    __slots__ = (
        "answered",
        "cached_tokens",
        "compressed",
        "entry",
        "estimate",
        "facts",
        "held",
        "index",
        "job",
        "kv_at",
        "kv_s",
        "output_tokens",
        "place",
        "planned",
        "pools",
        "prefill",
        "prefilled_s",
        "prefix",
        "prompt_tokens",
        "scheduler",
        "tenant",
        "tries",
        "where",
        "whole",
    )

    def __init__(self, index: int, tenant: Entitlement, facts: BodyFacts) -> None:
        self.index = index
        self.tenant = tenant
        self.facts = facts
        self.estimate: LengthEstimate
        """Of what is sent."""
        self.whole: LengthEstimate
        """Of the client's own prompt."""
        self.held: Held
        self.planned = -1
        """The pool that the boundary chose."""
        self.pools: Sequence[int] = ()
        """Pools to bind in, best first."""
        self.prompt_tokens = 0
        """As engines count what is sent."""
        self.output_tokens = 0
        self.compressed = False
        self.prefix: Prefix = NO_PREFIX
        """The beginnings of the sent prompt that pools and workers hold."""
        self.entry: PrefixEntry | None = None
        self.cached_tokens = 0
        """Of its prompt, as the engine that computed it said."""
        self.job: Job | None = None
        self.scheduler: Scheduler | None = None
        self.where = (-1, -1)
        """Pool and worker that serve it; -1 for none."""
        self.place = -1
        """The pool whose engine it is bound to, or waits for: the lease's, or its prefill pool."""
        self.prefill = False
        """Whether its next engine computes its prompt for another one."""
        self.prefilled_s = 0.0
        """When another engine had computed its prompt."""
        self.kv_at: tuple[int, int] | None = None
        """Pool and worker that hold its prompt's KV for the engine that decodes."""
        self.kv_s = inf
        """When its lease ends, and once it is fetched, when it will have come."""
        self.tries = 0
        self.answered = False
        """Whether it has a first token."""


class Intake:
    """Stages 2 to 6 for every request of a run."""

    def __init__(
        self, gateway: Gateway, requests: TenantTraffic, leases: Leases, random: Random
    ) -> None:
        self._gateway, self._served = gateway, gateway.served
        self._leases = leases
        self._tenants = gateway.entitlements or (OPEN,)
        p_c = gateway.compressible if requests.compressible is None else requests.compressible
        self._lucky: list[bool] = (random.random(len(requests)) < p_c).tolist()
        traffic = requests.traffic
        self._prompts: list[int] = traffic.prompt_tokens.tolist()
        self._outputs: list[int] = traffic.output_tokens.tolist()
        self.owners: list[int] = requests.entitlement.tolist()
        """Index of the entitlement with which each request goes."""
        self._bytes: list[int] = requests.text_bytes.tolist()
        self._asked: list[int] = requests.asked_tokens.tolist()
        self._categories = requests.categories
        self._shared = requests.prompts
        self.uncut: list[int] = []
        """Requests in the compression window that could not be cut."""

    def enter(self, index: int, now_s: float) -> Flight | Refused:
        """The request with its lease, or why it is refused."""
        flight = self._read(index)
        served = self._served
        default = served.routing.default_max_tokens
        flight.whole = flight.estimate = estimate = served.estimator.estimate(
            CHAT, flight.facts, flight.tenant.tenant, None, default
        )
        flight.prefix = prefix = self._look_up(flight)
        try:
            planned = plan_pool(served.routing, estimate)
        except ContextLengthExceeded:
            return Refused(REFUSED_LENGTH)
        if prefix.points and planned.pool:  # its conversation may be held elsewhere
            held_in = stay(planned.pool, served.routing, estimate, prefix.hits())
            if held_in is not None:
                others = (planned.pool, *planned.alternates)
                planned = Plan(pool=held_in, alternates=others, reason="prefix_held")
        flight.planned = planned.pool
        window = self._window(flight, planned, now_s)
        plan = planned if window is None else window_plan(planned, window)
        held = self._leases.admit(index, flight.tenant.name, estimate, plan, now_s)
        if isinstance(held, Refused):
            return held
        flight.held = held
        flight.pools = (held.pool, *(p for p in plan.alternates if p != held.pool))
        if window is None or held.pool != window.pool:
            return flight
        return self._compress(flight, window, planned, now_s) or flight

    def job_of(self, flight: Flight, now_s: float) -> Job:
        """The request as a scheduler sees it."""
        tenant, estimate = flight.tenant, flight.estimate
        if flight.prefill:
            estimate = msgspec.structs.replace(estimate, output_tokens=1, cap_tokens=1)
        return Job(
            flight,
            estimate.input_tokens_total,
            estimate.output_tokens,
            now_s,
            tenant.name,
            2 if flight.held.spilled else PRIORITY_CLASS[tenant.service_class],
            self._served.admission.rates.share(tenant.tokens_per_s),
            estimate.cap_tokens,
            flight.held.cost_tokens,
            tenant=tenant.tenant,
            slo_s=tenant.slo_ms / 1000,
        )

    def uncompress(self, flight: Flight, now_s: float) -> None:
        """Send the client's own prompt: the pool that takes it is not the one it was cut for."""
        if not flight.compressed:
            return
        flight.compressed = False
        flight.estimate, flight.prompt_tokens = flight.whole, self._prompts[flight.index]
        flight.prefix = self._look_up(flight)
        flight.held = self._leases.resize(flight.index, flight.whole.cost_tokens, now_s)

    def blocks(self, flight: Flight, block_tokens: int) -> tuple[int, ...]:
        """Hashes of the blocks of what is sent; () where prefix caches are not simulated."""
        if self._shared is None:
            return ()
        hashes = self._shared.blocks_of_cut if flight.compressed else self._shared.blocks
        return hashes(flight.index, flight.prompt_tokens, block_tokens)

    def _look_up(self, flight: Flight) -> Prefix:
        served, shared = self._served, self._shared
        points = shared.points(flight.index) if shared and served.scheduling.indexed else ()
        if not points:
            return NO_PREFIX
        tokens_per_byte = flight.whole.input_tokens_total / points[-1][0]
        return Prefix(points, served.fleet.pools, tokens_per_byte, served.fleet.phases)

    def teach(self, indexes: Iterable[int]) -> None:
        """Teach the estimator what these requests are, as a gateway knows that has served them."""
        for index in indexes:
            self.learn(self._read(index))

    def learn(self, flight: Flight) -> None:
        """Teach the estimator what a served request turned out to be."""
        asked = flight.facts.cap_tokens
        if self._served.compression is not None and not flight.compressed:
            conversations = self._served.compression.conversations
            conversations.remember(flight.tenant.tenant, flight.prefix.points)
        self._served.estimator.learn(
            Observation(
                endpoint=CHAT.name,
                tenant=flight.tenant.tenant,
                measure=flight.facts.measure,
                prompt_tokens=flight.prompt_tokens,
                completion_tokens=flight.output_tokens,
                sequences=1,
                output_censored=asked is not None and flight.output_tokens >= asked,
                learn_ratio=not flight.compressed,
            )
        )

    def _read(self, index: int) -> Flight:
        size, asked = self._bytes[index], self._asked[index]
        measure = Measure(
            text_bytes=size,
            longest_text_bytes=size,
            messages=1,
            category=self._categories[index],
        )
        facts = BodyFacts(
            model=self._served.name, measure=measure, stream=True, cap_tokens=asked or None
        )
        flight = Flight(index, self._tenants[self.owners[index]], facts)
        flight.prompt_tokens = self._prompts[index]
        # A client that sets a limit gets no more than that.
        flight.output_tokens = min(self._outputs[index], asked or self._outputs[index])
        return flight

    def _window(self, flight: Flight, planned: Plan, now_s: float) -> CompressionWindow | None:
        compression = self._served.compression
        if compression is None or not flight.tenant.compress:
            return None
        rules = compression.rules
        if not requested(rules, header=None):
            return None
        if rules.only_when_busy and has_room(self._served.fleet.pools[planned.pool], now_s):
            return None
        if compression.conversations.continues(flight.tenant.tenant, flight.prefix.points):
            return None
        if not mostly_new(flight.estimate.input_tokens, flight.prefix.hits()):
            return None
        found = compression_window_of(
            self._served.routing, rules, CHAT, flight.facts, flight.estimate, planned
        )
        return found if isinstance(found, CompressionWindow) else None

    def _compress(
        self, flight: Flight, window: CompressionWindow, planned: Plan, now_s: float
    ) -> Refused | None:
        """Cut the prompt to its budget, or send it where it belongs, if it may go there."""
        compression, estimate = self._served.compression, flight.estimate
        fixed = fixed_tokens(flight.facts, estimate)
        after = int((window.budget_tokens - fixed) * estimate.ratio_conservative)
        cut = 1 - after / estimate.text_bytes
        possible = compression is not None and cut <= compression.rules.max_cut
        if self._lucky[flight.index] and possible:
            flight.compressed, flight.prefix = True, NO_PREFIX
            flight.estimate = lowered(estimate, flight.facts, after, None, window.budget_tokens)
            kept = 1 - max(0.0, cut)
            flight.prompt_tokens = max(1, round(flight.prompt_tokens * kept))
            flight.held = self._leases.resize(flight.index, flight.estimate.cost_tokens, now_s)
            return None
        self.uncut.append(flight.index)
        moved = self._leases.move(flight.index, planned.pool, now_s, force=False)
        if isinstance(moved, Refused):
            self._leases.settle(flight.index, None, now_s)
            return moved
        flight.held = moved
        flight.pools = (planned.pool, *planned.alternates)
        return None


def with_output(flight: Flight, window_tokens: int) -> int:
    """Tokens of the answer in an engine of this window."""
    return max(1, min(flight.output_tokens, window_tokens - flight.prompt_tokens))


def fits(flight: Flight, window_tokens: int) -> bool:
    """Whether an engine of this window takes the request, by its own exact count."""
    return flight.prompt_tokens + max(1, flight.facts.cap_tokens or 1) <= window_tokens
