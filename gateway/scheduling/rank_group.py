"""BF-IO for data-parallel ranks: one central queue, late binding, balanced at the barrier.

The ranks of one engine compute in lockstep: a step takes as long as the fullest rank needs, and
the others idle ("A Universal Load Balancing Principle", sections 3 and 4). A request cannot move
once sent, so requests wait here, and each free slot is filled with the request that best levels
the ranks' KV loads.

- A rank is sent at most its slots plus a small depth; deeper queues would bind too early.
- Priority classes keep their order. Within a class, the candidates are the first by key: two for
  each free slot, and a few more. Fairness decides which jobs are candidates; load balance
  decides which candidate goes.
- Key: arrival in seconds, plus the seconds of the group's recent work that the client had
  beyond an even share (u of QUARTZ, section 4.3, made relative: a lone client's order stays).
- A candidate passed over for `maxage_steps` steps goes first.
- Ranks of one engine live and die together; waiting jobs belong to no rank, so none is lost.

There is no look-ahead (H = 0): it gains 1 % at most and needs output lengths.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

import msgspec

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.scheduling.fairness import ServedShares
from gateway.scheduling.rank_choice import Assign, choose, hit_tokens
from gateway.scheduling.rank_load import RankLine, RankLoad, SentNote, StepClock, streamed
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES, Job

NOTHING: Final[Sequence[Job]] = ()
RETAINED_CANDIDATES: Final = 8
_ALL: Final = "*"
"""Fairness counter of all clients together; no entitlement has this name."""


class RankRules(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for filling the ranks of a group."""

    depth: int = 1
    """Requests a rank may hold beyond its slots, 0 to 8; they hide the latency to the engine."""
    per_slot: int = 2
    """Candidates for each free slot."""
    spare: int = 6
    """Additional candidates, because two are too few a choice when one slot is free."""
    maxage_steps: int = 200
    """Steps that a candidate may be passed over."""
    fairness: float = 2.0
    """Seconds added to the key for each second of work beyond the client's even share."""
    fairness_tau_s: float = 10.0
    """Time in which recent work decays to 1/e."""
    most_waiting: int = 65_536
    """Most waiting jobs; more are not taken."""


ObservedTokens = Callable[[int, float], float | None]
"""(rank, now) -> KV tokens reported by its engine's telemetry; None when stale."""


class RankGroup:
    """A Scheduler with late binding; see `gateway.scheduling.scheduler`."""

    gates = False
    coverage: float | None = None

    def __init__(
        self,
        pool: PoolState,
        solve: Assign,
        *,
        rules: RankRules | None = None,
        observed: ObservedTokens | None = None,
    ) -> None:
        """The pool's workers are the ranks; `pool.engines` group those of one engine."""
        self.replicas = 1
        self.rules = rules or RankRules()
        self.steps = StepClock()
        self.ranks = [RankLoad(self.steps) for _ in pool.workers]
        self.shares = ServedShares(self.rules.fairness_tau_s)
        self._pool = pool
        self._solve = solve
        self._observed = observed
        self._line = RankLine()
        self._orders = 0

    def joined(self, worker: int) -> None:
        if worker == len(self.ranks):
            self.ranks.append(RankLoad(self.steps))
        self.ranks[worker] = RankLoad(self.steps)

    @property
    def waiting(self) -> Sequence[int]:
        return self._line.waiting

    @property
    def limit(self) -> int:
        """Most sequences sent to one rank: this replica's share of slots plus depth, >= 1."""
        held = self._pool.slots_per_worker + self.rules.depth
        return max(1, ceil(held / self.replicas))

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        known = fleet.available(self._pool, now_s)
        full = self._line.total >= self.rules.most_waiting
        if not known or full or (job.barred and job.barred.issuperset(known)):
            job.state = "nowhere"
            return NOTHING
        if job.preferred not in known:
            job.preferred = -1
        job.order = self._orders
        self._orders += 1
        job.policy = SentNote()
        job.key = job.arrived_s + self.rules.fairness * self._excess_s(job, now_s)
        self._line.put(job)
        return self._fill(now_s)

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        """See Scheduler; prefills are not gated here."""
        if job.state == "sent" and not assumed:
            job.state = "answering"
        return NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        if job.state not in ("sent", "answering"):
            return NOTHING
        self.ranks[job.worker].remove(job, now_s)
        if job.emitted is not None:
            tokens = streamed(job, now_s, self.steps.step_s) // max(1, job.sequences)
            self.steps.ended(tokens, now_s - job.sent_s)
        job.state = "gone"
        job.emitted = None
        return self._fill(now_s)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        if job.state == "waiting":
            self._line.take(job)
            job.state = "gone"
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        self.shares.sweep(now_s)
        known = fleet.available(self._pool, now_s)
        if not known:
            lost = list(self._line.all())
            self._line = RankLine()
            for job in lost:
                job.state = "nowhere"
            return lost
        if self._observed is not None:
            for index, rank in enumerate(self.ranks):
                tokens = self._observed(index, now_s)
                if tokens is not None:
                    rank.observe(tokens, now_s)
        return self._fill(now_s)

    # Filling the free slots

    def _fill(self, now_s: float) -> Sequence[Job]:
        """Send jobs to ranks with room, engine by engine, the one with most room first."""
        limit = self.limit
        if not self._line.total or all(rank.sequences >= limit for rank in self.ranks):
            return NOTHING
        out: list[Job] = []
        known = set(fleet.available(self._pool, now_s))
        for rank in self._line.preferred_ranks:
            if rank not in known:
                self._line.release(rank)
                continue
            # Jobs with response affinity go to their rank first: its cache has their prompt.
            for priority_class in range(len(PRIORITY_CLASS_NAMES)):
                for job in self._line.preferring(rank, priority_class, self._room(rank)):
                    if self._room(rank):
                        self._send(job, rank, out, now_s)
        groups = [[w for w in e.ranks if w in known] for e in self._pool.engines]
        rooms = [sum([self._warm_room(rank, now_s) for rank in ranks]) for ranks in groups]
        for room, ranks in sorted(zip(rooms, groups, strict=True), key=lambda pair: -pair[0]):
            if room:
                self._fill_group(ranks, len(known), out, now_s)
        return out

    def _room(self, rank: int) -> int:
        return max(0, self.limit - self.ranks[rank].sequences)

    def _warm_room(self, rank: int, now_s: float) -> int:
        """The same for jobs that other ranks may take, too: less in slow start."""
        warmth = members.warmth(self._pool, rank, now_s)
        return max(0, ceil(self.limit * warmth) - self.ranks[rank].sequences)

    def _fill_group(self, ranks: list[int], known: int, out: list[Job], now_s: float) -> None:
        """Fill one engine's ranks by priority class."""
        rules = self.rules
        for priority_class in range(len(PRIORITY_CLASS_NAMES)):
            caps = [self._warm_room(rank, now_s) for rank in ranks]
            count = rules.per_slot * sum(caps) + rules.spare
            if not any(caps) or not self._line.waiting[priority_class]:
                continue
            jobs = self._line.first(priority_class, count)
            limited = [job for job in jobs if job.excluded or job.barred]
            self._fill_again(ranks, limited, known, out, now_s)
            jobs = [job for job in jobs if not (job.excluded or job.barred)]
            caps = [self._warm_room(rank, now_s) for rank in ranks]
            for job in jobs:
                if job.policy.offered_s < 0:
                    job.policy.offered_s = now_s
            waits_s = [now_s - job.policy.offered_s for job in jobs]  # since they were candidates
            loads = [self.ranks[rank].tokens(now_s) for rank in ranks]
            maxage_s = rules.maxage_steps * self.steps.step_s
            for item, index in choose(self._solve, ranks, loads, caps, jobs, waits_s, maxage_s):
                # A request of several sequences may have taken what was left.
                if self._room(ranks[index]):
                    jobs[item].candidates = list(zip(ranks, loads, strict=True))[
                        :RETAINED_CANDIDATES
                    ]
                    self._send(jobs[item], ranks[index], out, now_s)

    def _fill_again(
        self, ranks: list[int], jobs: list[Job], known: int, out: list[Job], now_s: float
    ) -> None:
        """Send jobs that not every rank may take: retried ones go elsewhere, if possible."""
        for job in jobs:
            able = [rank for rank in ranks if rank not in job.barred]
            left = [rank for rank in able if rank not in job.excluded]
            if not left and len(ranks) == known:
                left = able
            free = [rank for rank in left if self._room(rank)]
            if free:
                loads = [self.ranks[rank].tokens(now_s) for rank in free]
                self._send(job, free[loads.index(min(loads))], out, now_s)

    def _send(self, job: Job, worker: int, out: list[Job], now_s: float) -> None:
        self._line.take(job)
        rank = self.ranks[worker]
        job.worker = worker
        job.state = "sent"
        job.sent_s = now_s
        job.score = rank.tokens(now_s)
        job.active = rank.sequences
        job.hit_tokens = hit_tokens(job, worker)
        rank.add(job, now_s)
        uncached = max(0, job.prompt_tokens - job.hit_tokens)
        self.shares.served(job.client, uncached, now_s)
        self.shares.served(_ALL, uncached, now_s)
        out.append(job)

    def _excess_s(self, job: Job, now_s: float) -> float:
        """Seconds of the group's recent work that a job's client had beyond an even share."""
        total = self.shares.kilotokens(_ALL, now_s)
        if total <= 0:
            return 0.0
        even = total / max(1, len(self.shares) - 1)
        own = self.shares.kilotokens(job.client, now_s) / job.share
        return max(0.0, own - even) / total * self.rules.fairness_tau_s
