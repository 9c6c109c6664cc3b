"""QUARTZ: predicted prefill times choose the worker, order its queue and control its gate.

Source: "QUARTZ: Quantile-Aware Routing and Queueing for TTFT SLOs in LLM Serving", sections 3
and 4. Three rules:

- Routing: a job goes to the worker with the least S = W-hat + Q-hat + psi (equation 4). W-hat is
  the expected wait there (`Backlogs`), Q-hat the job's predicted prefill. psi is the price of
  its uncached tokens (`locality_price`, `RecentWrites`), of each request running there
  (`request_price_s`), and of the wait for a slot where slots or KV cache are full (`Slots`).
- Gate: a job is sent at once if no prefill is queued behind the worker's prefill in progress, or
  if everything behind it, with the job, takes at most `gate_s`. So the engine never idles
  between two prompts, and all other jobs wait here, where their order can still change.
- Order: by (priority class, k), lowest first, k = s-hat + lambda x arrival + beta x u (equations
  6 to 8). Short prefills and clients with little recent service go first; aging bounds how long
  a job can be overtaken. A tight target counts as an earlier arrival (not in the paper).

Differences from the paper: psi includes running requests, otherwise short prompts would all
follow the first one's cache. W-hat falls with first tokens, and with time only by the predicted
rest of the prefill in progress. In small fleets all workers are compared, because two at random
lose to a plain prefix router. u includes the client's jobs waiting here. There is no fallback
policy: predictions of a third or thrice the truth cost less than the fallback to least-loaded
would (`bench quartz`, docs/develop/benches/quartz.md).
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.scheduling.fairness import ServedShares
from gateway.scheduling.quartz_score import (
    Features,
    KvUsage,
    Predictor,
    QuartzProfile,
    hits_of,
    seconds,
    workers_of,
)
from gateway.scheduling.quartz_worker_state import (
    MAX_WRITE_FACTOR,
    MIN_WRITE_FACTOR,
    Backlogs,
    RecentWrites,
    Slots,
    WorkerQueues,
    uncached_tokens,
)
from gateway.scheduling.scheduler import Job, Match

NOTHING: Final[Sequence[Job]] = ()

_Seen = tuple[Features, float, float, int]
"""A prediction: features x, mean, quantile, calibration bucket."""
_Best = tuple[int, int, _Seen, float, list[tuple[int, float]]]
"""Worker, expected hit there, prediction, score, (worker, score) of those compared."""
NOTHING_SEEN: Final[_Seen] = ((), 0.0, 0.0, 0)


class Quartz:
    """The Scheduler of one pool; it trains `predictor` on observed prefills."""

    __slots__ = (
        "_available",
        "_backlogs",
        "_choice_mask",
        "_cursor",
        "_joined",
        "_kv",
        "_kv_usage",
        "_orders",
        "_pool",
        "_predictor",
        "_queues",
        "_s_per_token",
        "_seen_alive",
        "_seen_until_s",
        "_slots",
        "_timed",
        "_writes",
        "profile",
        "shares",
    )

    gates: bool = True

    def __init__(
        self,
        pool: PoolState,
        predictor: Predictor,
        profile: QuartzProfile,
        *,
        kv_usage: KvUsage | None = None,
    ) -> None:
        workers = len(pool.workers)
        self.profile = profile
        self.shares = ServedShares(profile.fairness_tau_s)
        """Recent service u of the clients."""
        self._pool = pool
        self._predictor = predictor
        self._backlogs = Backlogs(workers)
        self._queues = WorkerQueues(workers)
        self._writes = RecentWrites(workers, profile.writes_tau_s)
        self._kv_usage = kv_usage
        self._kv = [0.0] * workers
        """Share of each worker's KV cache in use at the last tick; 0 when unknown."""
        self._timed = [False] * workers
        """Whether a first token of the worker was seen; the gate stays open before."""
        self._slots = Slots(workers, pool.slots_per_worker)
        self._s_per_token = [1.0 / predictor.prefill_tokens_per_s(w) for w in range(workers)]
        self._joined: set[int] = set()
        """Workers that came at run time."""
        self._cursor = 0
        self._orders = 0
        self._seen_alive: list[int] | None = None
        self._seen_until_s = -inf
        self._available: Sequence[int] = ()
        self._choice_mask = 0

    @property
    def replicas(self) -> int:
        return self._backlogs.replicas

    @replicas.setter
    def replicas(self, replicas: int) -> None:
        self._backlogs.replicas = replicas

    @property
    def waiting(self) -> Sequence[int]:
        return self._queues.waiting

    @property
    def coverage(self) -> float | None:
        return self._predictor.coverage

    @property
    def backlog_tokens(self) -> Sequence[int]:
        """Uncached prompt tokens sent to each worker without a first token yet."""
        return self._backlogs.sent_tokens

    def wait_s(self, worker: int, now_s: float) -> float:
        """W-hat of a worker, >= 0."""
        return self._backlogs.waits_s((worker,), now_s)[0]

    def joined(self, worker: int) -> None:
        if worker == len(self._kv):
            self._kv.append(0.0)
            self._timed.append(False)
            self._s_per_token.append(0.0)
        self._joined.add(worker)
        self._kv[worker] = 0.0
        self._timed[worker] = False
        self._s_per_token[worker] = 1.0 / self._predictor.prefill_tokens_per_s(worker)
        self._backlogs.joined(worker)
        self._queues.joined(worker)
        self._writes.joined(worker)
        self._slots.joined(worker)

    # A job's lifecycle

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        job.order = self._orders
        self._orders += 1
        if not self._bind(job, now_s):
            job.state = "nowhere"
            return NOTHING
        worker = job.worker
        if not self._queues.lengths[worker] and self._open(worker, uncached_tokens(job)):
            self._send(job, now_s)
            return (job,)
        job.key = self._key(job, now_s)
        self._queues.push(job)
        return self._pump(worker, now_s)

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        if job.state != "sent":
            return NOTHING
        job.state = "answering"
        worker = job.worker
        self._backlogs.leave(job, now_s)
        hit = job.hit_tokens if cached_tokens is None else cached_tokens
        if hit < job.prompt_tokens:
            self.shares.served(job.client, job.prompt_tokens - hit, now_s)
        if not assumed:
            x, mean_s, quantile_s, bucket = job.policy
            predictor = self._predictor
            took_s = now_s - job.sent_s
            predictor.observe(worker, x, mean_s, quantile_s, bucket, took_s, job.client)
            self._s_per_token[worker] = 1.0 / predictor.prefill_tokens_per_s(worker)
            self._timed[worker] = True
        return self._pump(worker, now_s) if self._queues.lengths[worker] else NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        if answered and job.state in {"sent", "answering"}:
            self._learn_answer(job, now_s - job.sent_s)
        if job.state == "sent":
            worker = job.worker
            self._backlogs.leave(job, now_s)
            if answered:
                self.shares.served(job.client, uncached_tokens(job), now_s)
            job.state = "gone"
            if self._queues.lengths[worker]:
                return self._pump(worker, now_s)
        elif job.state == "answering":
            job.state = "gone"
        return NOTHING

    def _learn_answer(self, job: Job, took_s: float) -> None:
        """Learn how long a slot is held; without streams, also that a prefill takes no longer."""
        worker = job.worker
        self._slots.learn(worker, took_s, job.active * self._backlogs.replicas)
        if job.stream or self._timed[worker] or job.policy is None:
            return
        x, mean_s, quantile_s, bucket = job.policy
        if took_s < mean_s:
            predictor = self._predictor
            predictor.observe(worker, x, mean_s, quantile_s, bucket, took_s, job.client)
            self._s_per_token[worker] = 1.0 / predictor.prefill_tokens_per_s(worker)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        if job.state == "waiting":
            self._queues.forget(job)
            self._backlogs.unbind(job)
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        if self._kv_usage is not None:
            self._kv = [self._kv_usage(w, now_s) or 0.0 for w in range(len(self._kv))]
            self._slots.read(self._kv, self._pool.active, self._backlogs)
        for worker in self._joined:  # a new one's rate also changes without its own first tokens
            self._s_per_token[worker] = 1.0 / self._predictor.prefill_tokens_per_s(worker)
        self.shares.sweep(now_s)
        self._refresh(now_s)
        out: list[Job] = []
        lengths = self._queues.lengths
        for worker, length in enumerate(lengths):
            if length and not self._choice_mask >> worker & 1:
                self._rebind(worker, out, now_s)
        for worker, length in enumerate(lengths):
            if length:
                out += self._pump(worker, now_s)
        return out

    def follow(self, job: Job, now_s: float, *, advise: bool) -> None:
        """Take a job that another scheduler sent; `advise`: say where it would have been bound.

        Otherwise it only counts as backlog. See `gateway.scheduling.schedulers`.
        """
        worker, hit = job.worker, job.hit_tokens
        if not advise:
            job.mean_s = job.expected_s = uncached_tokens(job) * self._s_per_token[worker]
            self._take(job, now_s)
            return
        choice = self._choice(job, now_s) or (worker,)
        candidates = self._candidates(choice, job.match)
        would, would_hit, seen, _, _ = self._best(job, candidates, now_s)
        job.would_bind = would
        if would != worker:
            job.would_s = self._predict(job, would, would_hit, self._backlogs.sent_tokens[would])[1]
            seen = self._predict(job, worker, hit, 0)
        job.policy = seen
        job.mean_s, job.quantile_s = seen[1], seen[2]
        self._take(job, now_s)
        if would == worker:
            job.would_s = job.expected_s

    def _take(self, job: Job, now_s: float) -> None:
        self._backlogs.bind(job)
        self._writes.add(job.worker, uncached_tokens(job), now_s)
        self._send(job, now_s)

    # Gossip between gateway replicas

    def state(self) -> dict[str, Any]:
        """Plain values for gossip to the other gateways.

        The service of each client in kilotokens, and the pending prefill assigned to each worker
        from here in seconds.
        """
        held = [a + b for a, b in zip(self._pool.active, self._queues.lengths, strict=True)]
        pending_s = list(self._backlogs.bound_s)
        return {"served": self.shares.state(), "pending_s": pending_s, "held": held}

    def merge(self, states: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        """Adopt the latest states of the other gateways, by name.

        Malformed values are ignored. The predictor has a `merge` of its own.
        """
        served: dict[str, Mapping[str, float]] = {}
        others_s = [0.0] * len(self._kv)
        others_held = [0.0] * len(self._kv)
        for name, state in states.items():
            theirs, totals = state.get("pending_s"), state.get("served")
            held = state.get("held")
            if isinstance(totals, Mapping):
                served[name] = totals
            if isinstance(theirs, list | tuple) and len(theirs) == len(others_s):
                others_s = [a + seconds(b) for a, b in zip(others_s, theirs, strict=True)]
            if isinstance(held, list | tuple) and len(held) == len(others_held):
                others_held = [a + seconds(b) for a, b in zip(others_held, held, strict=True)]
        self.shares.merge(served, now_s)
        if states:
            self._backlogs.note_others(others_s, others_held)

    # Routing

    def _bind(self, job: Job, now_s: float) -> bool:
        """Choose the worker; False when none is available."""
        choice = self._choice(job, now_s)
        if not choice:
            return False
        if self._pool.warming and len(choice) > 1:
            choice = members.without_cold(self._pool, list(choice), now_s)
        job.worker, job.hit_tokens, job.policy, job.score, job.candidates = self._best(
            job, self._candidates(choice, job.match), now_s
        )
        _, job.mean_s, job.quantile_s, _ = job.policy
        self._backlogs.bind(job)
        self._writes.add(job.worker, uncached_tokens(job), now_s)
        return True

    def _choice(self, job: Job, now_s: float) -> Sequence[int]:
        """The workers that the job may go to; empty when none is available."""
        if self._pool.alive is not self._seen_alive or now_s >= self._seen_until_s:
            self._refresh(now_s)
        choice = self._available
        if job.preferred >= 0 and job.preferred in choice:
            return (job.preferred,)
        if job.barred:
            choice = [w for w in choice if w not in job.barred]
        if job.excluded:
            return [w for w in choice if w not in job.excluded] or choice
        return choice

    def _candidates(self, choice: Sequence[int], match: Match) -> list[tuple[int, int]]:
        """Workers to compare, each with the hit expected there."""
        if not self.profile.locality:
            match = ()
        if len(choice) > self.profile.compared:
            choice = self._some(choice, match)
        mask = self._choice_mask if choice is self._available else mask_of(choice)
        if match and match[0][1] & mask == mask:
            tokens = match[0][0]  # the usual case: an application's common beginning
            return [(w, tokens) for w in choice]
        hits = hits_of(match, mask)
        return [(w, hits.get(w, 0)) for w in choice]

    def _some(self, choice: Sequence[int], match: Match) -> Sequence[int]:
        """Some workers of a large fleet: holders of the longest prefix, and rotating others."""
        compared = self.profile.compared
        some: list[int] = []
        allowed = self._choice_mask if choice is self._available else mask_of(choice)
        for _, holders in match:
            if holders & allowed:
                some = workers_of(holders & allowed, compared // 2)
                break
        self._cursor += 1
        count = compared - len(some)
        at = self._cursor * compared % len(choice)
        others = [*choice[at : at + count], *choice[: max(0, at + count - len(choice))]]
        return [*some, *[w for w in others if w not in some]] if some else others

    def _best(self, job: Job, candidates: list[tuple[int, int]], now_s: float) -> _Best:
        """The least score; predicts only where wait and psi alone could still beat it."""
        profile, prompt, kv = self.profile, job.prompt_tokens, self._kv
        s_per_token, active, lengths = self._s_per_token, self._pool.active, self._queues.lengths
        price, (written, even, mean) = profile.locality_price, self._writes.levels()
        request_price_s = profile.request_price_s
        waits_s = self._backlogs.waits_s([worker for worker, _ in candidates], now_s)
        aheads = self._slots.aheads(candidates, active, lengths, self._backlogs)
        slots, free = self._pool.slots_per_worker, min(aheads) <= 0.0
        turn_s = self._slots.answer_s * (max(1.0, price) if free else 1.0)
        bases = []
        for (worker, hit), wait_s, ahead in zip(candidates, waits_s, aheads, strict=True):
            share = (written[worker] + even) / mean
            if share < MIN_WRITE_FACTOR:
                share = MIN_WRITE_FACTOR
            elif share > MAX_WRITE_FACTOR:
                share = MAX_WRITE_FACTOR
            psi_s = price * share * (prompt - hit) * s_per_token[worker]
            base = psi_s + wait_s + request_price_s * active[worker]
            if ahead > 0.0:
                if free and active[worker] + lengths[worker] >= slots:
                    continue  # no prefix is worth a wait for a slot while another is free
                base += turn_s * ahead
            bases.append((base, active[worker], worker, hit))
        if len(bases) > 1:
            bases.sort()
        least, best, best_hit, best_seen = inf, -1, 0, NOTHING_SEEN
        scores = []
        predict, by_quantile = self._predictor.predict_request, profile.quantile
        cap, output, stream = job.cap_tokens, job.output_tokens, job.stream
        for base, _, worker, hit in bases:
            if base >= least:
                break
            busy = min(active[worker], slots - 1)  # the wait for a slot is in the base
            seen = predict(worker, prompt, hit, cap, output, busy, 0, kv[worker], stream)
            score = base + (seen[2] if by_quantile else seen[1])
            scores.append((worker, score))
            if score < least:
                least = score
                best, best_hit, best_seen = worker, hit, seen
        return best, best_hit, best_seen, least, scores

    def _predict(self, job: Job, worker: int, hit: int, backlog_tokens: int) -> _Seen:
        return self._predictor.predict_request(
            worker,
            job.prompt_tokens,
            hit,
            job.cap_tokens,
            job.output_tokens,
            self._pool.active[worker],
            backlog_tokens,
            self._kv[worker],
            job.stream,
        )

    # Order

    def _key(self, job: Job, now_s: float) -> float:
        """The ordering key of a bound job that is about to wait."""
        profile = self.profile
        if profile.order != "size":
            return job.arrived_s
        size_s = job.quantile_s if profile.quantile else job.mean_s
        excess = self._queues.excess_tokens(job.client, len(self.shares))
        u = self.shares.kilotokens(job.client, now_s) + excess / 1000.0
        fair_s = profile.fairness_s_per_kilotoken * u / job.share
        lead_s = max(0.0, profile.patience_s - job.slo_s) if job.slo_s > 0 else 0.0
        return size_s + profile.aging * (job.arrived_s - lead_s) + fair_s

    # Gate

    def _open(self, worker: int, tokens: int) -> bool:
        """Whether the gate lets these uncached tokens through to a worker."""
        if not self._choice_mask >> worker & 1:
            return False
        if not self._timed[worker]:
            return True
        behind = self._backlogs.behind_tokens(worker)
        if not behind:
            return True
        ahead_s = (behind + tokens) * self._s_per_token[worker]
        return ahead_s * self._backlogs.replicas <= self.profile.gate_s

    def _pump(self, worker: int, now_s: float) -> Sequence[Job]:
        """Send the queued jobs that the gate lets through."""
        if self._pool.alive is not self._seen_alive:
            self._refresh(now_s)
        out: list[Job] = []
        while True:
            job = self._queues.first(worker)
            if job is None or not self._open(worker, uncached_tokens(job)):
                return out
            self._queues.pop(worker)
            self._send(job, now_s)
            out.append(job)

    def _send(self, job: Job, now_s: float) -> None:
        worker, backlogs = job.worker, self._backlogs
        job.backlog_tokens = backlog_tokens = backlogs.sent_tokens[worker]
        job.active = self._pool.active[worker]
        job.kv_usage = self._kv[worker]
        if job.policy is not None:
            full = job.active >= self._pool.slots_per_worker
            if backlog_tokens or full or job.state == "waiting":
                # The predictor learns from a prediction made now, with the current backlog.
                job.policy = self._predict(job, worker, job.hit_tokens, backlog_tokens)
                job.quantile_s = job.policy[2]
            job.expected_s = job.policy[1]
        job.state = "sent"
        job.sent_s = now_s
        backlogs.send(job, uncached_tokens(job), now_s)

    def _rebind(self, worker: int, out: list[Job], now_s: float) -> None:
        """Rebind a worker's queue; jobs without a worker are appended to `out`, state nowhere."""
        for job in self._queues.drain(worker):
            self._backlogs.unbind(job)
            if self._bind(job, now_s):
                job.key = self._key(job, now_s)
                self._queues.push(job)
            else:
                job.state = "nowhere"
                out.append(job)

    def _refresh(self, now_s: float) -> None:
        """Update the available workers; each change of health replaces the pool's `alive` list."""
        pool = self._pool
        if pool.alive is self._seen_alive and now_s < self._seen_until_s:
            return
        self._seen_alive = pool.alive
        pending = [e.ejected_until_s for e in pool.engines if e.ejected_until_s > now_s]
        self._seen_until_s = min(pending, default=inf)
        self._available = fleet.available(pool, now_s)
        self._choice_mask = mask_of(self._available)


def mask_of(workers: Sequence[int]) -> int:
    """A bit mask of workers."""
    mask = 0
    for worker in workers:
        mask |= 1 << worker
    return mask
