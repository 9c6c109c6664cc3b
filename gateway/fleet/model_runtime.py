"""One model as the gateway serves it: routing table, estimator, and the state of its pools."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.live_demand import LiveDemand
from gateway.fleet import fleet, members
from gateway.fleet.fleet import DECODE_TOKENS_PER_S, PoolState
from gateway.fleet.lora_adapters import Adapters
from gateway.records.attempt import HealthRules, PhaseTimeouts, Usage, WorkerAddress
from gateway.records.decision import CompressionSection
from gateway.records.entitlement import PROFILES, AdmissionProfile, MeanRate
from gateway.records.usage import TokenPrice
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.routing import CompressionRules, Conversations, ResponseAffinity, Routing
from gateway.scheduling.baselines import LeastLoaded
from gateway.scheduling.outlook import Outlook
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import ExpectedHit, PrefixIndex
from gateway.scheduling.prefix_notices import PrefixNotices
from gateway.scheduling.scheduler import Job, Match, Points, Scheduler
from predictor.online import PrefillPredictor

MEMORY: Final = 500
"""Prompts over which the success of compression is averaged."""
PRIORITY_FLAGS: Final = {
    "vllm": "--scheduling-policy priority",
    "sglang": "--enable-priority-scheduling",
}
"""What an engine is started with so that it heeds priorities, by `engine_priority`."""


class TransferTime:
    """What is learned of the time from the end of a prefill to the first token of decode."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._sum_s = 0.0
        self._tokens = 0.0
        """Prompt tokens whose transfers took `_sum_s`; both decay."""

    def predict(self, tokens: int, prior_s_per_token: float) -> float:
        """Seconds for a prompt of so many tokens; by the prior before anything was learned."""
        s_per_token = self._sum_s / self._tokens if self._tokens else prior_s_per_token
        return self._wait_s + s_per_token * tokens

    def learn(self, wait_s: float, transfer_s: float, tokens: int) -> None:
        """Note a wait for a decode worker, then the time until it gave its first token."""
        self._wait_s += (wait_s - self._wait_s) * _LEARNED
        self._sum_s += transfer_s - self._sum_s * _LEARNED
        self._tokens += tokens - self._tokens * _LEARNED


_LEARNED: Final = 0.05
"""Weight of the newest transfer."""


class Pool(PoolState):
    """A pool as it is served: the state of its workers, and all that serves and learns of them.

    A reload may give it another scheduler; what it learned stays with it.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[WorkerAddress],
        slots_per_worker: int,
        engines: Sequence[Sequence[int]] = (),
        *,
        may_be_empty: bool = False,
    ) -> None:
        """As of `PoolState`."""
        ids = [address.id for address in addresses]
        super().__init__(name, ids, slots_per_worker, engines, may_be_empty=may_be_empty)
        self.addresses = list(addresses)
        """Of its workers, by place."""
        self.scheduler: Scheduler = LeastLoaded(self)
        self.queued: dict[Job, Scheduler] = {}
        """Jobs whose requests wait here, in order of arrival, and where."""
        self.outlook = Outlook()
        """What its requests may expect."""
        self.predictor: PrefillPredictor | None = None
        """None where nobody predicts."""
        self.prefixes: PrefixIndex | None = None
        """None where its scheduler looks at none, nor a shadow."""
        self.follows_prefixes = True
        """Whether `prefixes` bind requests; else they only serve a shadow's predictions."""
        self.gossip = PrefixGossip()
        """The part of `prefixes` that this replica tells the others."""
        self.notices: dict[int, PrefixNotices] = {}
        """Of workers whose engines say what they evict."""
        self.transfer = TransferTime()
        """To its engines, where they only decode."""
        self.parts: Mapping[tuple[Hashable, ...], Any] = {}
        """These parts by what they are made from, as of `ModelRuntime.parts`."""

    def join(
        self, addresses: Sequence[WorkerAddress], now_s: float, *, up: bool = False
    ) -> tuple[int, ...]:
        """Add an engine, with an address for each rank; returns their places.

        It starts with the pool's learned speed, no prefixes, and in slow start if others serve.
        """
        ranks = members.join(self, [address.id for address in addresses], now_s, up=up)
        for rank, address in zip(ranks, addresses, strict=True):
            if rank == len(self.addresses):
                self.addresses.append(address)
            self.addresses[rank] = address
            if self.predictor is not None:
                self.predictor.join(rank)
            if self.prefixes is not None:
                self.prefixes.joined(rank)
            self.scheduler.joined(rank)
        return ranks

    @property
    def here(self) -> int:
        """Sequences at its workers, and those that wait for them here."""
        return self.total_active + sum(job.sequences for job in self.queued)

    def finished(self, workers: Collection[int]) -> Iterator[int]:
        """Those of leaving workers whose engines serve nothing and for which nothing waits."""
        awaited = {job.worker for job in self.queued} if workers else set[int]()
        for worker in workers:
            if members.finished(self, worker) and awaited.isdisjoint(self.engine_of[worker].ranks):
                yield worker


TransferKind = Literal["vllm", "sglang"]
"""Whose protocol hands a prompt's KV from a prefill engine to a decode engine."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """How a routed pool, whose engines decode, has its prompts computed by another pool."""

    prefill: int
    """Place of the pool that computes the prompts in `ModelFleet.pools`."""
    kind: TransferKind
    skip_below_tokens: int
    """Prompt tokens below which decode computes the prompt itself; 0: never."""
    bytes_per_second: float | None
    """Assumed speed of a transfer until one was measured."""
    bootstrap_port: int
    """Of SGLang's prefill engines."""


NO_PHASES: Final[Mapping[int, Phases]] = {}


class Prefix(NamedTuple):
    """A prompt's prefixes, and the pools to look them up in.

    Only pools that need it are looked up: an index is large and misses the processor's caches.
    """

    points: Points = ()
    """Empty where no prefix index is kept."""
    pools: Sequence[Pool] = ()
    tokens_per_byte: float = 1.0
    """The prompt's tokens divided by its length in bytes."""
    phases: Mapping[int, Phases] = NO_PHASES
    """As of `ModelFleet.phases`."""

    def match(self, pool: int) -> Match:
        """The pool's workers that hold a prefix of this prompt."""
        index = self.pools[pool].prefixes
        return () if index is None else index.match(self.points, self.tokens_per_byte)

    def hits(self) -> list[int]:
        """The longest expected hit of each pool's workers, in tokens; 0 where not followed.

        Of a pool in phases those count that compute its prompts.
        """
        places = list(range(len(self.pools) - len(self.phases)))
        for place, phases in self.phases.items():
            places[place] = phases.prefill
        matches = [self.match(p) if self.pools[p].follows_prefixes else () for p in places]
        return [match[0][0] if match else 0 for match in matches]


NO_PREFIX: Final = Prefix()


class PrefixEntry:
    """A request's entry in the prefix index of the pool where it is bound.

    Made when it is bound, not when it is sent: requests that arrive while it waits would
    otherwise not know of it and scatter one prompt over all workers. Withdrawn when it is not
    served there.
    """

    __slots__ = ("_index", "_points", "_tokens_per_byte", "_worker", "expected", "session")

    def __init__(self, points: Points) -> None:
        self._points = points
        self._index: PrefixIndex | None = None
        """Where it is entered, and of which worker."""
        self._worker = -1
        self._tokens_per_byte = 1.0
        self.session = ""
        """Names it in the events of its engine; "" where none are heard."""
        self.expected: ExpectedHit | None = None
        """The part of the prompt that the worker was expected to have cached."""

    def enter(self, pool: Pool, job: Job) -> None:
        """The job is bound in the pool: enter the prompt, once for each worker."""
        index, points = pool.prefixes, self._points
        if self.expected is not None:
            if self._index is index and self._worker == job.worker:
                return
            self.withdraw()
        if index is None:
            return
        tokens_per_byte = job.prompt_tokens / points[-1][0]
        expected = index.insert(points, job.worker, tokens_per_byte)
        self._index, self._worker = index, job.worker
        self._tokens_per_byte, self.expected = tokens_per_byte, expected
        if job.worker in pool.notices:
            self.session = pool.notices[job.worker].begin(points, tokens_per_byte)
        if pool.gossip.has_listeners:
            pool.gossip.sent(points, job.worker, tokens_per_byte, expected.hit_tokens)

    def withdraw(self) -> None:
        """It gets no first token there, so the worker does not hold the prompt. Idempotent."""
        self.session, expected, self.expected = "", self.expected, None
        if expected is not None and self._index is not None:
            self._index.withdraw(self._points, self._worker, expected, self._tokens_per_byte)

    def correct(self, pool: Pool, worker: int, reported: Usage | None) -> None:
        """Correct the index by the cached tokens that the worker reports."""
        if self.expected is None or reported is None or reported.source != "engine":
            return
        if reported.cached_reported:
            pool.reports_cached.add(worker)
        if pool.prefixes is not None and worker in pool.reports_cached:
            pool.prefixes.correct(worker, self.expected, reported.cached_tokens)


@dataclass(frozen=True, kw_only=True)
class ModelFleet:
    """A model's pools and workers, and how they are called."""

    pools: tuple[Pool, ...]
    """The routed ones in routing's order, then the prefill pools of those in phases."""
    health: HealthRules
    response_affinity: ResponseAffinity
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)
    max_attempts: int = 3
    reads_metrics: bool = False
    """Whether engines' own figures are read."""
    phases: Mapping[int, Phases] = field(default_factory=lambda: NO_PHASES)
    """Of the routed pools in phases, by place; their own engines decode."""

    @property
    def routed(self) -> tuple[Pool, ...]:
        """The pools that routing and admission know, in routing's order."""
        return self.pools[: len(self.pools) - len(self.phases)]

    def route_of(self, pool: int) -> int:
        """Place of the routed pool that a pool is, or that it computes prompts for."""
        return next((at for at, phases in self.phases.items() if phases.prefill == pool), pool)

    def phase_of(self, pool: int) -> Literal["prefill", "decode"] | None:
        """What a pool's engines do of a request; None where they do all."""
        route = self.route_of(pool)
        if route not in self.phases:
            return None
        return "decode" if route == pool else "prefill"

    def inflight(self, pool: int) -> int:
        """Sequences with a lease that a pool's engines have, or that wait for them."""
        state, phases = self.pools[pool], self.phases.get(pool)
        if pool >= len(self.pools) - len(self.phases):
            return state.here
        return state.inflight - (0 if phases is None else self.inflight(phases.prefill))

    def stored_at(self, response_id: str | None) -> tuple[int, int] | None:
        """(pool, worker) of a stored response; None if that is unknown or the pool is gone."""
        location = self.response_affinity.find(response_id)
        names = () if location is None else [pool.name for pool in self.pools]
        if location is None or location.pool not in names:
            return None
        return names.index(location.pool), location.worker


@dataclass(frozen=True, kw_only=True)
class ModelAdmission:
    """What a request of a model costs, and what its pools may be asked for."""

    spill_queue: int
    profile: AdmissionProfile = PROFILES["default"]
    observe: bool = False
    """Admission is computed and counted, not applied (so it is where all of the model is)."""
    slot_tokens_per_s: float = DECODE_TOKENS_PER_S
    """What a slot makes of the model's tokens/s: the price of holding one."""
    held_share: float = 1.0
    """Of a pool's slots: what other proxies' leases may hold beyond reserved baselines."""
    kv_bytes_per_token: int = 0
    """0 where KV is not enforced."""
    reclaim_s: float = 0.5
    """How long a protected request waits for its first byte before others give way."""
    rates: MeanRate = field(default_factory=MeanRate)
    """Of its entitlements."""


@dataclass(frozen=True, kw_only=True)
class ModelScheduling:
    """Which worker takes a request of a model, and when."""

    queue_limit: int = 1000
    """Requests that may wait in the gateway for a worker of one pool."""
    queue_timeout_s: float = 60.0
    waiting_for_workers: dict[Any, Sequence[PoolState]] = field(default_factory=dict)
    """Futures of requests that wait for a first worker, in order of arrival, and their pools."""
    indexed: bool = False
    """Whether any pool has an index of prefixes."""
    salted: bool = False
    """Whether tenants' prefix caches are kept apart."""
    engine_priority: Literal["none", "vllm", "sglang"] = "none"
    """Whose `priority` field the engines understand."""


@dataclass(eq=False, kw_only=True)
class ModelCompression:
    """How prompts of a model are compressed."""

    rules: CompressionRules
    conversations: Conversations = field(default_factory=Conversations)
    """What engines hold as it came; the next turn of those is not compressed."""
    judged: int = 0
    """Prompts in the compression window, those refused before the compressor as well."""
    success: float | None = None
    """Share of the latest of these that were compressed, p_c; None before the first."""

    def settled(self, section: CompressionSection) -> None:
        """Count a settled request in p_c, if its prompt was in the window and looked at."""
        cut = section.cut
        if cut is not None:
            self.judged += 1
            share = self.success or 0.0
            self.success = share + (float(cut) - share) / min(self.judged, MEMORY)


@dataclass(eq=False, kw_only=True)
class ModelRuntime:
    """What the stages need to know of a model, by purpose.

    Requests keep the one that they began with; after a reload another has its pools.
    """

    name: str
    routing: Routing
    """Read once where a request is planned; `move_boundaries` replaces it."""
    estimator: LengthEstimator
    fleet: ModelFleet
    admission: ModelAdmission
    scheduling: ModelScheduling = field(default_factory=ModelScheduling)
    compression: ModelCompression | None = None
    """None where it is not enabled."""
    demand: LiveDemand = field(default_factory=LiveDemand)
    watch: BoundaryWatch | None = None
    """What settled requests say of the boundaries."""
    aliases: frozenset[str] = frozenset()
    """Its other names."""
    price: TokenPrice | None = None
    """Of its tokens; None where they have none."""
    by_hour: bool = False
    """Whether its workers have a price by the hour, and requests a share of it."""
    fallbacks: tuple[str, ...] = ()
    """Models that may answer instead, in order."""
    adapters: Adapters = field(default_factory=Adapters)
    """Its LoRA adapters: engines are sent their names as they are."""
    parts: Mapping[tuple[Hashable, ...], Any] = field(default_factory=dict)
    """What it is made of, by what that was made from: a reload keeps what is made from the same."""

    def adapter(self, asked: str) -> str:
        """The adapter that a request for this name is for; "" for the model itself."""
        return asked if self.adapters.any and asked in self.adapters else ""

    def move_boundaries(self, tokens: Sequence[int]) -> None:
        """Set the boundaries, one for each pool but the last. Requests in flight keep theirs."""
        pools = self.routing.pools
        moved = tuple(
            replace(shape, boundary_tokens=boundary)
            for shape, boundary in zip(pools[:-1], tokens, strict=True)
        )
        self.routing = replace(self.routing, pools=(*moved, pools[-1]))


def drain_worker(models: Iterable[ModelRuntime], worker: str, *, on: bool) -> int:
    """Take a worker, or all ranks of an engine, out of the rotation, or return it; how many."""
    hits = 0
    pools = {id(pool): pool for served in models for pool in served.fleet.pools}
    for pool in pools.values():
        for i, name in members.present(pool):
            if worker in (name, name.partition("#")[0]):
                fleet.drain(pool, i, on=on)
                hits += 1
    return hits


def vacate(served: ModelRuntime, pool: Pool, workers: Collection[int], now_s: float) -> None:
    """Remove workers' engines that have `finished`, with all that is known of them."""
    ranks = {rank for worker in workers for rank in pool.engine_of[worker].ranks}
    for worker in workers:
        members.vacate(pool, worker, now_s)
    served.fleet.response_affinity.left(pool.name, ranks)
    for rank in ranks:
        if pool.prefixes is not None:
            pool.prefixes.left(rank)
        served.adapters.forget(pool, rank)
