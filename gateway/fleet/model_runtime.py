"""One model as the gateway serves it: routing table, estimator, and the state of its pools."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from gateway.estimate.estimator import LengthEstimator
from gateway.fleet import engine_telemetry, fleet, members
from gateway.fleet.engine_telemetry import TelemetryView
from gateway.fleet.fleet import PoolState
from gateway.fleet.lora_adapters import Adapters
from gateway.fleet.progress import DECODE_TOKENS_PER_S
from gateway.records.attempt import HealthRules, PhaseTimeouts, WorkerAddress
from gateway.records.decision import CompressionSection
from gateway.records.entitlement import PROFILES, AdmissionProfile, MeanRate
from gateway.records.usage import TokenPrice
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.conversations import Conversations, ResponseAffinity
from gateway.routing.routing import CompressionRules, Routing
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import Job, Scheduler
from predictor.online import PrefillPredictor

MEMORY: Final = 500
"""Prompts over which the success of compression is averaged."""
PRIORITY_FLAGS: Final = {
    "vllm": "--scheduling-policy priority",
    "sglang": "--enable-priority-scheduling",
}
"""What an engine is started with so that it heeds priorities, by `engine_priority`."""


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """How much may wait in the gateway for a worker of one pool, and how long."""

    limit: int = 1000
    """Requests a pool."""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class ModelFleet:
    """A model's pools and workers, and how they are called."""

    pools: tuple[PoolState, ...]
    workers: tuple[list[WorkerAddress], ...]
    """By pool, in the order of `pools[i].workers`."""
    health: HealthRules
    response_affinity: ResponseAffinity
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)
    max_attempts: int = 3
    telemetry: tuple[TelemetryView, ...] = ()
    """By pool, where engines' own figures are read; else nothing."""

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

    schedulers: tuple[Scheduler, ...] = ()
    """By pool."""
    queue: QueueRules = field(default_factory=QueueRules)
    queued: dict[Job, Scheduler] = field(default_factory=dict)
    """Jobs whose requests wait here, in order of arrival, and where."""
    waiting_for_workers: dict[Any, Sequence[PoolState]] = field(default_factory=dict)
    """Futures of requests that wait for a first worker, in order of arrival, and their pools."""
    predictors: tuple[PrefillPredictor | None, ...] = ()
    """By pool; None where nobody predicts."""
    prefixes: tuple[PrefixIndex | None, ...] = ()
    """By pool; None where its scheduler looks at none, and nothing at all where none does."""
    follows_prefixes: tuple[bool, ...] = ()
    """By pool, whether `prefixes` bind requests; elsewhere they only serve a shadow's predictions.
    Nothing at all: wherever there are any."""
    prefix_gossip: tuple[PrefixGossip | None, ...] = ()
    """By pool, what the other replicas are told of prefixes; with `prefixes`."""
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
            known = self.success or 0.0
            self.success = known + (float(cut) - known) / min(self.judged, MEMORY)


@dataclass(eq=False, kw_only=True)
class ModelRuntime:
    """What the stages need to know of a model, by purpose.

    All stages hold this object; a reload changes its fields one by one, each at once.
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


def adapted_aliases(served: ModelRuntime, aliases: Iterable[str]) -> list[str]:
    """Those aliases that engines of the model list as LoRA adapters."""
    return [name for name in aliases if name in served.adapters]


def drain_worker(models: Iterable[ModelRuntime], worker: str, *, on: bool) -> int:
    """Take a worker, or all ranks of an engine, out of the rotation, or return it; how many."""
    hits = 0
    pools = {id(pool): pool for served in models for pool in served.fleet.pools}
    for pool in pools.values():
        for i, known in members.present(pool):
            if worker in (known, known.partition("#")[0]):
                fleet.drain(pool, i, on=on)
                hits += 1
    return hits


def join(
    served: ModelRuntime,
    pool: int,
    addresses: Sequence[WorkerAddress],
    now_s: float,
    *,
    up: bool = False,
) -> tuple[int, ...]:
    """Add an engine, with an address for each rank; returns their places.

    It starts with the pool's learned speed, no prefixes, and in slow start if others serve.
    """
    state, known = served.fleet.pools[pool], served.fleet.workers[pool]
    ranks = members.join(state, [address.id for address in addresses], now_s, up=up)
    scheduling = served.scheduling
    for rank, address in zip(ranks, addresses, strict=True):
        if rank == len(known):
            known.append(address)
        known[rank] = address
        if served.fleet.telemetry:
            engine_telemetry.join(served.fleet.telemetry[pool], rank)
        if scheduling.predictors and (predictor := scheduling.predictors[pool]) is not None:
            predictor.join(rank)
        if scheduling.prefixes and (prefixes := scheduling.prefixes[pool]) is not None:
            prefixes.joined(rank)
        scheduling.schedulers[pool].joined(rank)
    return ranks


def finished(served: ModelRuntime, pool: int, workers: Collection[int]) -> Iterator[int]:
    """Those of leaving workers whose engines serve nothing and for which nothing waits."""
    if not workers:
        return
    state, scheduling = served.fleet.pools[pool], served.scheduling
    scheduler = scheduling.schedulers[pool]
    awaited = {job.worker for job, where in scheduling.queued.items() if where is scheduler}
    for worker in workers:
        if members.finished(state, worker) and awaited.isdisjoint(state.engine_of[worker].ranks):
            yield worker


def vacate(served: ModelRuntime, pool: int, workers: Collection[int], now_s: float) -> None:
    """Remove workers' engines that have `finished`, with all that is known of them."""
    state, scheduling = served.fleet.pools[pool], served.scheduling
    ranks = {rank for worker in workers for rank in state.engine_of[worker].ranks}
    for worker in workers:
        members.vacate(state, worker, now_s)
    served.fleet.response_affinity.left(state.name, ranks)
    for rank in ranks:
        if served.fleet.telemetry:
            engine_telemetry.forget(served.fleet.telemetry[pool], rank)
        if scheduling.prefixes and (prefixes := scheduling.prefixes[pool]) is not None:
            prefixes.left(rank)
        served.adapters.forget(state, rank)
