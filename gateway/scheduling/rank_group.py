"""BF-IO for data-parallel ranks: one central queue, late binding, balanced at the barrier.

The ranks of one engine compute in lockstep: a step takes as long as the fullest rank needs, and
the others idle ("A Universal Load Balancing Principle", sections 3 and 4). A request cannot move
once sent, so requests wait here, and each free slot is filled with the request that best levels
the ranks' KV loads.

- A rank is sent at most its slots plus a small depth; deeper queues would bind too early.
- Priority classes keep their order. Within a class, the candidates are the first by key: two for
  each free slot, and a few more. Fairness decides which jobs are candidates; load balance
  decides which candidate goes (`choose`).
- Key: arrival in seconds, plus the seconds of the group's recent work that the client had
  beyond an even share (u of QUARTZ, section 4.3, made relative: a lone client's order stays). A
  target time to first token below `patience_s` counts as an arrival earlier by the difference, as
  in QUARTZ: nobody is put behind requests that arrive more than `patience_s` later.
- A candidate passed over for `maxage_steps` steps goes first, because the objective alone lets a
  request that fills no gap wait without end. After these goes one of whose target more than half
  has passed, and not all: beyond that, haste keeps no promise and costs balance.
- Ranks of one engine live and die together; waiting jobs belong to no rank, so none is lost.

A rank's load (L_g) is the prompts of its requests plus the tokens streamed of their answers. Each
sequence grows by one token a step, so the load is extrapolated by the step time between two
counts of the streams. Requests that are not streamed are assumed to grow like the others.

There is no look-ahead (H = 0): it gains 1 % at most and needs output lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import RETAINED_CANDIDATES
from gateway.scheduling.fairness import ServedShares
from gateway.scheduling.quartz_score import DEFAULT
from gateway.scheduling.scheduler import (
    NOTHING,
    PRIORITY_CLASS_NAMES,
    BarrierLoad,
    Job,
    Scheduler,
    hit_tokens,
)

_ALL: Final = "*"
"""Fairness counter of all clients together; no entitlement has this name."""
_ANY: Final = -1
"""In place of a rank: the jobs that may go to any."""
RECOUNT_S: Final = 0.25
"""Seconds between two counts of a rank's streams; a count costs a call per request."""
FIRST_STEP_S: Final = 0.03
"""Step time assumed until answers were timed."""
_MIN_TOKENS: Final = 8
_FOREIGN_PART: Final = 0.05
_MEMORY: Final = 0.95

Pairs = list[tuple[int, int]]
"""(index of the request, index of the rank)."""
Assign = Callable[..., Pairs]
"""`gateway.scheduling.rank_solver.assign`, which only pools of ranks import."""
ObservedTokens = Callable[[int, float], float | None]
"""(rank, now) -> KV tokens reported by its engine's telemetry; None when stale."""
_Entry = tuple[float, int, Job]
"""(key, order, job); orders are unique, so jobs are never compared."""


@dataclass(frozen=True, kw_only=True)
class RankRules:
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


class StepClock:
    """Estimates the group's step time from completed answers: one token a step."""

    def __init__(self) -> None:
        self.step_s = FIRST_STEP_S
        self._known = 0.0

    def ended(self, tokens: int, took_s: float) -> None:
        """Learn from an answer's tokens and duration; short answers are mostly prefill, ignored."""
        if tokens < _MIN_TOKENS or took_s <= 0:
            return
        self._known = _MEMORY * self._known + (1 - _MEMORY)
        self.step_s += (1 - _MEMORY) / self._known * (took_s / tokens - self.step_s)


class RankLoad:
    """The load of one rank."""

    def __init__(self, steps: StepClock) -> None:
        self.jobs: dict[Job, None] = {}
        self.sequences = 0
        self.foreign_tokens = 0.0
        """KV tokens that the engine's telemetry reports beyond those sent from here."""
        self._steps = steps
        self._tokens = 0.0
        self._beyond_tokens = 0.0
        self._at_s = self._counted_s = -inf

    def tokens(self, now_s: float) -> float:
        """L_g, in tokens."""
        return self._own(now_s) + self.foreign_tokens

    def observe(self, tokens: float, now_s: float) -> None:
        """Take in the KV tokens its engine's telemetry reports; an excess over ours is foreign.

        A reading is seconds old and may be above or below the current load, so only an excess
        that persists over many readings counts.
        """
        beyond = tokens - self._own(now_s)
        self._beyond_tokens += _FOREIGN_PART * (beyond - self._beyond_tokens)
        self.foreign_tokens = max(0.0, self._beyond_tokens)

    def add(self, job: Job, now_s: float) -> None:
        """Add a job that is sent to this rank."""
        self._tokens = self._own(now_s) + job.prompt_tokens
        self.jobs[job] = None
        self.sequences += job.sequences

    def remove(self, job: Job, now_s: float) -> None:
        """Remove a job that left this rank."""
        left = self._own(now_s) - self._of(job, now_s)
        del self.jobs[job]
        self.sequences -= job.sequences
        self._tokens = max(0.0, left) if self.jobs else 0.0

    def _own(self, now_s: float) -> float:
        """Counted every RECOUNT_S, extrapolated in between."""
        if now_s - self._counted_s >= RECOUNT_S:
            self._tokens = float(sum([self._of(job, now_s) for job in self.jobs]))
            self._counted_s = now_s
        else:
            self._tokens += self.sequences * (now_s - self._at_s) / self._steps.step_s
        self._at_s = now_s
        return self._tokens

    def _of(self, job: Job, now_s: float) -> int:
        return job.prompt_tokens + streamed(job, now_s, self._steps.step_s)


def streamed(job: Job, now_s: float, step_s: float) -> int:
    """Tokens of a sent job's answer: counted by its stream, else estimated from the time."""
    if job.emitted is not None:
        return job.emitted()
    return min(job.output_tokens, int((now_s - job.sent_s) / step_s)) * job.sequences


def _nears(job: Job, now_s: float) -> bool:
    """Whether more than half of its target has passed, and not all."""
    return job.slo_s / 2 <= now_s - job.arrived_s < job.slo_s


def choose(
    solve: Assign,
    ranks: Sequence[int],
    loads: Sequence[float],
    caps: Sequence[int],
    jobs: Sequence[Job],
    waits_s: Sequence[float],
    maxage_s: float,
) -> Pairs:
    """At most sum(caps) pairs, each job once; `jobs` come in the queue's order.

    The objective is BF-IO's: G x max_g L_g - sum L_g after the requests are placed. The solver
    places several at once; with one request or one free slot the best choice is found directly.
    Ties go to the longer hit in the rank's prefix cache, then to the queue's order.
    """
    free = [index for index, cap in enumerate(caps) if cap > 0]
    if not free or not jobs:
        return []
    if len(jobs) == 1:  # the rank that raises the maximum least, then the least loaded
        fullest, size, match = max(loads), jobs[0].prompt_tokens, jobs[0].match
        keyed = [
            (max(0.0, loads[at] + size - fullest), loads[at], -hit_tokens(match, ranks[at]), at)
            for at in free
        ]
        return [(0, min(keyed)[3])]
    if len(free) > 1 or caps[free[0]] > 1:
        sizes = [float(job.prompt_tokens) for job in jobs]
        return solve(loads, caps, sizes, waits_s, maxage=maxage_s)
    slot = free[0]
    oldest = max(range(len(jobs)), key=waits_s.__getitem__)
    if waits_s[oldest] >= maxage_s:
        return [(oldest, slot)]
    # The longest that fits below the fullest rank, else the shortest.
    room = max([load for at, load in enumerate(loads) if at != slot], default=loads[slot])
    room -= loads[slot]
    costs = []
    for at, job in enumerate(jobs):
        cost = len(loads) * max(room, job.prompt_tokens) - job.prompt_tokens
        costs.append((cost, -hit_tokens(job.match, ranks[slot]), at))
    return [(min(costs)[2], slot)]


class RankGroup(Scheduler):
    """A Scheduler with late binding."""

    def __init__(
        self,
        pool: PoolState,
        solve: Assign,
        *,
        rules: RankRules | None = None,
        observed: ObservedTokens | None = None,
    ) -> None:
        """The pool's workers are the ranks; `pool.engines` group those of one engine."""
        super().__init__(pool)
        self.rules = rules or RankRules()
        self.steps = StepClock()
        self.ranks = [RankLoad(self.steps) for _ in pool.workers]
        self.shares = ServedShares(self.rules.fairness_tau_s)
        self._solve = solve
        self._observed = observed
        self._lines = {_ANY: _no_jobs()}
        """Waiting jobs by preferred rank and priority class, in order."""
        self._orders = 0
        self._looked_s = -inf

    def joined(self, worker: int) -> None:
        if worker == len(self.ranks):
            self.ranks.append(RankLoad(self.steps))
        self.ranks[worker] = RankLoad(self.steps)

    @property
    def limit(self) -> int:
        """Most sequences sent to one rank: this replica's share of slots plus depth, >= 1."""
        held = self._pool.slots_per_worker + self.rules.depth
        return max(1, ceil(held / self.replicas))

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        known = fleet.available(self._pool, now_s)
        full = sum(self.waiting) >= self.rules.most_waiting
        if not known or full or (job.barred and job.barred.issuperset(known)):
            job.state = "nowhere"
            return NOTHING
        if job.preferred not in known:
            job.preferred = -1
        job.order = self._orders
        self._orders += 1
        job.policy = -1.0  # when it first became a candidate
        job.key = job.arrived_s
        if job.slo_s > 0:
            job.key -= max(0.0, DEFAULT.patience_s - job.slo_s)
        total = self.shares.kilotokens(_ALL, now_s)
        if total > 0:  # the work that its client had beyond an even share
            even = total / max(1, len(self.shares) - 1)
            own = self.shares.kilotokens(job.client, now_s) / job.share
            excess_s = max(0.0, own - even) / total * self.rules.fairness_tau_s
            job.key += self.rules.fairness * excess_s
        job.state = "waiting"  # key, class and preferred rank stay until it leaves
        insort(self._line(job), (job.key, job.order, job))
        self.waiting[job.priority_class] += 1
        return self._fill(now_s)

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
            self._take(job)
            job.state = "gone"
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        self.shares.sweep(now_s)
        known = fleet.available(self._pool, now_s)
        if not known:
            lost = [e[2] for lines in self._lines.values() for line in lines for e in line]
            self._lines = {_ANY: _no_jobs()}
            self.waiting = [0] * len(PRIORITY_CLASS_NAMES)
            for job in lost:
                job.state = "nowhere"
            return lost
        loads = []
        for index, rank in enumerate(self.ranks):
            tokens = None if self._observed is None else self._observed(index, now_s)
            if tokens is not None:
                rank.observe(tokens, now_s)
            loads.append(rank.tokens(now_s) if tokens is None else tokens)
        self._look(set(known), loads, now_s)
        return self._fill(now_s)

    def _look(self, known: set[int], loads: Sequence[float], now_s: float) -> None:
        """Count the time since the last look at each engine's barrier."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        before, self.barriers = self.barriers, {}
        for engine in self._pool.engines:
            ours = [loads[rank] for rank in engine.ranks if rank in known]
            if len(ours) > 1:
                name = self._pool.workers[engine.ranks[0]].partition("#")[0]
                most, total = max(ours), sum(ours)
                barrier = self.barriers[name] = before.get(name) or BarrierLoad()
                barrier.imbalance_tokens = len(ours) * most - total
                if most > 0 and passed_s < inf:
                    barrier.busy_s += passed_s
                    barrier.idle_s += passed_s * barrier.imbalance_tokens / (len(ours) * most)

    # Filling the free slots

    def _fill(self, now_s: float) -> Sequence[Job]:
        """Send jobs to ranks with room, engine by engine, the one with most room first."""
        limit = self.limit
        if not any(self.waiting) or all(rank.sequences >= limit for rank in self.ranks):
            return NOTHING
        out: list[Job] = []
        known = set(fleet.available(self._pool, now_s))
        for rank, lines in list(self._lines.items()):
            if rank == _ANY or not any(lines):
                continue
            if rank not in known:  # its jobs may go to any other
                for entry in [entry for line in self._lines.pop(rank) for entry in line]:
                    entry[2].preferred = _ANY
                    insort(self._line(entry[2]), entry)
                continue
            # Jobs with response affinity go to their rank first: its cache has their prompt.
            for line in lines:
                room = self._room(rank)
                for _, _, job in line[:room]:
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
            if not any(caps) or not self.waiting[priority_class]:
                continue
            jobs = [entry[2] for entry in self._lines[_ANY][priority_class][:count]]
            limited = [job for job in jobs if job.excluded or job.barred]
            self._fill_again(ranks, limited, known, out, now_s)
            jobs = [job for job in jobs if not (job.excluded or job.barred)]
            caps = [self._warm_room(rank, now_s) for rank in ranks]
            for job in jobs:
                if job.policy < 0:
                    job.policy = now_s
            maxage_s = rules.maxage_steps * self.steps.step_s
            waits_s = [now_s - job.policy for job in jobs]  # since they were candidates
            near = [at for at, job in enumerate(jobs) if _nears(job, now_s)]
            if len(near) <= max(1, len(jobs) // 4):  # haste for most would be haste for none
                for at in near:
                    waits_s[at] = max(waits_s[at], maxage_s)
            loads = [self.ranks[rank].tokens(now_s) for rank in ranks]
            compared = list(zip(ranks, loads, strict=True))[:RETAINED_CANDIDATES]
            for item, index in choose(self._solve, ranks, loads, caps, jobs, waits_s, maxage_s):
                # A request of several sequences may have taken what was left.
                if self._room(ranks[index]):
                    jobs[item].candidates = compared
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
        self._take(job)
        rank = self.ranks[worker]
        job.worker = worker
        job.state = "sent"
        job.sent_s = now_s
        job.score = rank.tokens(now_s)
        job.active = rank.sequences
        job.hit_tokens = hit_tokens(job.match, worker)
        rank.add(job, now_s)
        uncached = max(0, job.prompt_tokens - job.hit_tokens)
        self.shares.served(job.client, uncached, now_s)
        self.shares.served(_ALL, uncached, now_s)
        out.append(job)

    def _take(self, job: Job) -> None:
        line = self._line(job)
        del line[bisect_left(line, (job.key, job.order))]
        self.waiting[job.priority_class] -= 1

    def _line(self, job: Job) -> list[_Entry]:
        if job.preferred not in self._lines:
            self._lines[job.preferred] = _no_jobs()
        return self._lines[job.preferred][job.priority_class]


def _no_jobs() -> list[list[_Entry]]:
    return [[] for _ in PRIORITY_CLASS_NAMES]
