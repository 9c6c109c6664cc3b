"""QUARTZ: predicted prefill times choose the worker, order its queue and control its gate.

Source: "QUARTZ: Quantile-Aware Routing and Queueing for TTFT SLOs in LLM Serving", sections 3
and 4. Three rules:

- Routing: a job goes to the worker with the least S = W-hat + Q-hat + psi (equation 4). W-hat is
  the expected wait there (`Worker.wait_s`), Q-hat the job's predicted prefill. psi is the price of
  its uncached tokens (`locality_price`, `writes_tau_s`), of each request running there
  (`request_price_s`), and of the wait for a slot where slots or KV cache are full.
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
from heapq import heapify, heappop, heappush
from math import exp, inf
from typing import Any, Final

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import turned
from gateway.scheduling.fairness import ServedShares
from gateway.scheduling.quartz_score import (
    KvUsage,
    QuartzProfile,
    hits_of,
    mask_of,
    seconds,
    workers_of,
)
from gateway.scheduling.scheduler import NOTHING, Job, Match, Scheduler
from predictor.online import PrefillPredictor

SPARE_ENTRIES: Final = 64
FIRST_ANSWER_S: Final = 10.0
"""How long a sequence is taken to hold its slot before the first one has ended."""
ANSWERS_KEPT: Final = 50
KV_FULL: Final = 0.8
"""Share of a KV cache beyond which sequences that grow preempt one another."""
EVEN_TOKENS: Final = 1024
"""Added to every worker's writes, so that a few requests do not skew the shares."""
MIN_WRITE_FACTOR: Final = 0.1
MAX_WRITE_FACTOR: Final = 10.0
_RESCALE_AT: Final = 200.0
"""Age in units of tau at which writes are rescaled, long before exp overflows."""

_Entry = tuple[int, float, int, Job]
_Seen = tuple[tuple[float, ...], float, float, int]
"""A prediction: features x, mean, quantile, calibration bucket."""
_Best = tuple[int, int, _Seen, float, list[tuple[int, float]]]
"""Worker, expected hit there, prediction, score, (worker, score) of those compared."""
NOTHING_SEEN: Final[_Seen] = ((), 0.0, 0.0, 0)


def uncached_tokens(job: Job) -> int:
    """Uncached prompt tokens of a bound job, >= 1."""
    return max(1, job.prompt_tokens - job.hit_tokens)


class Worker:
    """One worker's queue in the gateway, and its pending prefill: jobs bound without first token.

    The queue is a heap, lowest (priority class, key, arrival) first. A cancelled job stays in it,
    no longer in state `waiting`, until it reaches the top or a cleanup: a heap holds at most twice
    its waiting jobs plus SPARE_ENTRIES.

    The expected wait (the paper's W-hat) is the predicted prefill of all jobs bound to the worker,
    less the elapsed part of the prefill in progress. It falls no further until first tokens come,
    so a worker that stalls, or whose slots are full, keeps the rest of its backlog.
    """

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.waiting = 0
        """Waiting jobs."""
        self.sent: dict[Job, int] = {}
        """The bound jobs already sent, oldest first, with their uncached tokens."""
        self.sent_tokens = 0
        """Sum of the tokens in `sent`."""
        self._oldest_s = 0.0
        """Predicted prefill of the oldest job sent; 0 without one."""
        self._since_s = 0.0
        """Earliest time at which that prefill may have begun."""
        self.written = 0.0
        """Uncached tokens assigned lately, in the unit of `Quartz`."""
        self.restart(0.0, 0.0)

    def restart(self, slots: float, s_per_token: float) -> None:
        """A new worker took this place: nothing is bound to it, and its caches are empty."""
        self.bound_s = 0.0
        """Predicted prefill of the jobs bound here without a first token; >= 0."""
        self.others_s = 0.0
        """The other gateways' `bound_s`, summed, as of their last gossip."""
        self.others_held = 0.0
        """Likewise the sequences that they have at the worker, running or waiting for it."""
        self.slots = slots
        """Sequences that it can run: those configured, or less where its KV cache holds fewer."""
        self.kv = 0.0
        """Share of its KV cache in use at the last tick; 0 when unknown."""
        self.timed = False
        """Whether a first token of it was seen; the gate stays open before."""
        self.s_per_token = s_per_token

    def push(self, job: Job) -> None:
        """Queue a bound job; its key must not change until it leaves."""
        job.state = "waiting"
        heappush(self.heap, (job.priority_class, job.key, job.order, job))
        self.waiting += 1

    def first(self) -> Job | None:
        """The next job, which stays queued; None when the queue is empty."""
        heap = self.heap
        while heap and heap[0][3].state != "waiting":
            heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> None:
        """Take the job that `first` gave."""
        heappop(self.heap)
        self.waiting -= 1

    def cancel(self, job: Job) -> None:
        """Remove a waiting job; its state becomes `gone`."""
        job.state = "gone"
        self.waiting -= 1
        if len(self.heap) > 2 * self.waiting + SPARE_ENTRIES:
            self.heap = [entry for entry in self.heap if entry[3].state == "waiting"]
            heapify(self.heap)

    def wait_s(self, now_s: float, share: int) -> float:
        """W-hat, >= 0: seconds until a newcomer's prefill may begin.

        `share`: gateways taken to have as much bound as this one.
        """
        wait_s = self.bound_s * share + self.others_s
        done_s = now_s - self._since_s
        if done_s > 0.0:
            wait_s -= min(done_s, self._oldest_s)
        return max(0.0, wait_s)

    def unbind(self, job: Job) -> None:
        """Take a job off `bound_s`: it has its first token, or never will."""
        left_s = self.bound_s - job.mean_s
        self.bound_s = left_s if left_s > 1e-9 else 0.0

    def send(self, job: Job, tokens: int, now_s: float) -> None:
        """Record that a bound job is sent; `tokens` are its uncached ones."""
        if not self.sent:
            self._oldest_s = job.mean_s
            self._since_s = now_s
        self.sent[job] = tokens
        self.sent_tokens += tokens

    def leave(self, job: Job, now_s: float) -> None:
        """Remove a sent job that has its first token, or ended without one."""
        self.sent_tokens -= self.sent.pop(job)
        self._oldest_s = next(iter(self.sent)).mean_s if self.sent else 0.0
        self._since_s = now_s
        self.unbind(job)


class Quartz(Scheduler):
    """The Scheduler of one pool; it trains `predictor` on observed prefills."""

    gates: bool = True

    def __init__(
        self,
        pool: PoolState,
        predictor: PrefillPredictor,
        profile: QuartzProfile,
        *,
        kv_usage: KvUsage | None = None,
    ) -> None:
        super().__init__(pool)
        self.profile = profile
        self.shares = ServedShares(profile.fairness_tau_s)
        """Recent service u of the clients."""
        self.waiting_tokens: dict[str, int] = {}
        """Waiting uncached prompt tokens by client; no entry for none."""
        self._waiting_tokens = 0
        """Their sum."""
        self._predictor = predictor
        self._kv_usage = kv_usage
        self._workers: list[Worker] = []
        self._others_known = False
        """Whether the other gateways have told of their backlogs."""
        self._answers = 0
        self._answer_s = FIRST_ANSWER_S
        """Mean time from start to end of an answer."""
        # Writes to caches decay to 1/e in `writes_tau_s`. Instead of decaying the counters, new
        # writes are added in a growing unit: only ratios are read.
        self._written = 0.0
        self._even = float(EVEN_TOKENS)  # in the unit of the last assignment
        self._writes_start_s = 0.0
        self._joined: set[int] = set()
        """Workers that came at run time."""
        self._cursor = 0
        self._orders = 0
        self._seen_alive: list[int] | None = None
        self._seen_until_s = -inf
        self._available: Sequence[int] = ()
        self._choice_mask = 0
        for worker in range(len(pool.workers)):
            self.joined(worker)
        self._joined.clear()

    @property
    def coverage(self) -> float | None:
        return self._predictor.coverage

    def joined(self, worker: int) -> None:
        if worker == len(self._workers):
            self._workers.append(Worker())
        here = self._workers[worker]
        here.restart(float(self._pool.slots_per_worker), 0.0)
        self._joined.add(worker)
        self._read_rate(worker)
        # It starts with the mean of the others' writes.
        self._written -= here.written
        others = len(self._workers) - 1
        here.written = self._written / others if others else 0.0
        self._written += here.written

    def forecast(self, job: Job, now_s: float) -> tuple[float, float]:
        choice = self._choice(job, now_s)
        if not choice:
            return super().forecast(job, now_s)
        place, hit, _, _, _ = self._best(job, self._candidates(choice, job.match), now_s)
        worker, gateways = self._workers[place], self._share()
        held = (self._pool.active[place] + worker.waiting) * gateways + worker.others_held
        turns = max(0.0, held + 1 - worker.slots) / worker.slots
        wait_s = worker.wait_s(now_s, gateways) + self._answer_s * turns
        return wait_s, self._predict(job, place, hit, 0)[1]

    # A job's lifecycle

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        job.order = self._orders
        self._orders += 1
        if not self._bind(job, now_s):
            job.state = "nowhere"
            return NOTHING
        worker = job.worker
        if not self._workers[worker].waiting and self._open(worker, uncached_tokens(job)):
            self._send(job, now_s)
            return (job,)
        self._queue(job, now_s)
        return self._pump(worker, now_s)

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        if job.state != "sent":
            return NOTHING
        job.state = "answering"
        worker = self._workers[job.worker]
        worker.leave(job, now_s)
        hit = job.hit_tokens if cached_tokens is None else cached_tokens
        if hit < job.prompt_tokens:
            self.shares.served(job.client, job.prompt_tokens - hit, now_s)
        if not assumed:
            self._learn(job, now_s - job.sent_s)
            worker.timed = True
        return self._pump(job.worker, now_s) if worker.waiting else NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        if job.state not in ("sent", "answering"):
            return NOTHING
        worker, took_s = self._workers[job.worker], now_s - job.sent_s
        if answered:
            held_s, others = took_s, job.active * self.replicas
            if others >= worker.slots:  # it waited for its slot first
                held_s *= worker.slots / (others + 1)
            self._answers += 1
            self._answer_s += (held_s - self._answer_s) / min(self._answers, ANSWERS_KEPT)
            # Without streams: a prefill takes no longer than the answer.
            if not (job.stream or worker.timed or job.policy is None) and took_s < job.policy[1]:
                self._learn(job, took_s)
        was, job.state = job.state, "gone"
        if was == "answering":
            return NOTHING
        worker.leave(job, now_s)
        if answered:
            self.shares.served(job.client, uncached_tokens(job), now_s)
        return self._pump(job.worker, now_s) if worker.waiting else NOTHING

    def _learn(self, job: Job, took_s: float) -> None:
        x, mean_s, quantile_s, bucket = job.policy
        self._predictor.observe(job.worker, x, mean_s, quantile_s, bucket, took_s, job.client)
        self._read_rate(job.worker)

    def _read_rate(self, worker: int) -> None:
        self._workers[worker].s_per_token = 1.0 / self._predictor.prefill_tokens_per_s(worker)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        if job.state == "waiting":
            worker = self._workers[job.worker]
            worker.cancel(job)
            self._left_queue(job)
            worker.unbind(job)
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        if self._kv_usage is not None:
            share, slots = self._share(), float(self._pool.slots_per_worker)
            for place, worker in enumerate(self._workers):
                worker.kv = usage = self._kv_usage(place, now_s) or 0.0
                running = self._pool.active[place] * share + worker.others_held
                # A cache that is nearly empty, or filled by what is unknown here, says little.
                says = usage >= KV_FULL / 2 and running >= 1
                fit = KV_FULL * running / usage if says else slots
                worker.slots = min(slots, max(1.0, fit))
        for place in self._joined:  # a new one's rate also changes without its own first tokens
            self._read_rate(place)
        self.shares.sweep(now_s)
        self._refresh(now_s)
        out: list[Job] = []
        for place, worker in enumerate(self._workers):
            if worker.waiting and not self._choice_mask >> place & 1:
                self._rebind(worker, out, now_s)
        for place, worker in enumerate(self._workers):
            if worker.waiting:
                out += self._pump(place, now_s)
        return out

    def follow(self, job: Job, now_s: float, *, advise: bool) -> None:
        """Take a job that another scheduler sent; `advise`: say where it would have been bound.

        Otherwise it only counts as backlog. See `gateway.scheduling.schedulers`.
        """
        worker, hit = job.worker, job.hit_tokens
        if not advise:
            job.mean_s = job.expected_s = uncached_tokens(job) * self._workers[worker].s_per_token
            self._take(job, now_s)
            self._send(job, now_s)
            return
        choice = self._choice(job, now_s) or (worker,)
        candidates = self._candidates(choice, job.match)
        would, would_hit, prediction, _, _ = self._best(job, candidates, now_s)
        job.would_bind = would
        if would != worker:
            ahead = self._workers[would].sent_tokens
            job.would_s = self._predict(job, would, would_hit, ahead)[1]
            prediction = self._predict(job, worker, hit, 0)
        job.policy = prediction
        job.mean_s, job.quantile_s = prediction[1], prediction[2]
        self._take(job, now_s)
        self._send(job, now_s)
        if would == worker:
            job.would_s = job.expected_s

    # Gossip between gateway replicas

    def state(self) -> dict[str, Any]:
        """Plain values for gossip to the other gateways.

        The service of each client in kilotokens, and the pending prefill assigned to each worker
        from here in seconds.
        """
        pairs = zip(self._pool.active, self._workers, strict=True)
        return {
            "served": self.shares.state(),
            "pending_s": [worker.bound_s for worker in self._workers],
            "held": [active + worker.waiting for active, worker in pairs],
        }

    def merge(self, states: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        """Adopt the latest states of the other gateways, by name.

        Malformed values are ignored. The predictor has a `merge` of its own.
        """
        served: dict[str, Mapping[str, float]] = {}
        sums = {"pending_s": [0.0] * len(self._workers), "held": [0.0] * len(self._workers)}
        for name, state in states.items():
            totals = state.get("served")
            if isinstance(totals, Mapping):
                served[name] = totals
            for key, total in sums.items():
                theirs = state.get(key)
                if isinstance(theirs, list | tuple) and len(theirs) == len(total):
                    sums[key] = [a + seconds(b) for a, b in zip(total, theirs, strict=True)]
        self.shares.merge(served, now_s)
        if states:
            self._others_known = True
            for worker, pending_s, held in zip(self._workers, *sums.values(), strict=True):
                worker.others_s, worker.others_held = pending_s, held

    def _share(self) -> int:
        """Before gossip, all gateways are taken to have as much as this one."""
        return 1 if self._others_known else self.replicas

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
        self._take(job, now_s)
        return True

    def _take(self, job: Job, now_s: float) -> None:
        """Count a bound job into its worker's backlog and writes."""
        worker = self._workers[job.worker]
        worker.bound_s += job.mean_s
        age = (now_s - self._writes_start_s) / self.profile.writes_tau_s
        if age > _RESCALE_AT:
            scale = exp(-min(age, 700.0))
            for other in self._workers:
                other.written *= scale
            self._written = sum([other.written for other in self._workers])
            self._writes_start_s = now_s
            age = 0.0
        unit = exp(age) if age > 0.0 else 1.0
        self._even = EVEN_TOKENS * unit
        weight = uncached_tokens(job) * unit
        worker.written += weight
        self._written += weight

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
        """Workers to compare, each with the hit expected there.

        Of a large fleet: holders of the longest prefix, and rotating others.
        """
        match, compared = match if self.profile.locality else (), self.profile.compared
        mask = self._choice_mask if choice is self._available else mask_of(choice)
        if len(choice) > compared:
            longest = next((held & mask for _, held in match if held & mask), 0)
            some = workers_of(longest, compared // 2)
            self._cursor += 1
            at = self._cursor * compared % len(choice)
            others = turned(choice, at, compared - len(some))
            choice = [*some, *[w for w in others if w not in some]] if some else others
            mask = mask_of(choice)
        if match and match[0][1] & mask == mask:
            tokens = match[0][0]  # the usual case: an application's common beginning
            return [(w, tokens) for w in choice]
        hits = hits_of(match, mask)
        return [(w, hits.get(w, 0)) for w in choice]

    def _best(self, job: Job, candidates: list[tuple[int, int]], now_s: float) -> _Best:
        """The least score; predicts only where wait and psi alone could still beat it."""
        profile, prompt, active = self.profile, job.prompt_tokens, self._pool.active
        workers, slots, gateways = self._workers, self._pool.slots_per_worker, self._share()
        price, request_price_s, even = profile.locality_price, profile.request_price_s, self._even
        mean = self._written / max(1, len(workers)) + even
        # How many answers must end before one more can start, over those running; 0 or less: none.
        aheads = []
        for place, _ in candidates:
            worker = workers[place]
            held = (active[place] + worker.waiting) * gateways + worker.others_held
            aheads.append((held + 1 - worker.slots) / worker.slots)
        free = min(aheads) <= 0.0
        turn_s = self._answer_s * (max(1.0, price) if free else 1.0)
        bases = []
        for (place, hit), ahead in zip(candidates, aheads, strict=True):
            worker = workers[place]
            # An uncached prefill evicts prefixes: sooner on a worker with many recent writes.
            share = (worker.written + even) / mean
            if share < MIN_WRITE_FACTOR:
                share = MIN_WRITE_FACTOR
            elif share > MAX_WRITE_FACTOR:
                share = MAX_WRITE_FACTOR
            psi_s = price * share * (prompt - hit) * worker.s_per_token
            base = psi_s + worker.wait_s(now_s, gateways) + request_price_s * active[place]
            if ahead > 0.0:
                if free and active[place] + worker.waiting >= slots:
                    continue  # no prefix is worth a wait for a slot while another is free
                base += turn_s * ahead
            bases.append((base, active[place], place, hit))
        if len(bases) > 1:
            bases.sort()
        least, best, best_hit, best_seen = inf, -1, 0, NOTHING_SEEN
        scores = []
        predict, by_quantile = self._predictor.predict_request, profile.quantile
        cap, output, stream = job.cap_tokens, job.output_tokens, job.stream
        for base, _, place, hit in bases:
            if base >= least:
                break
            busy = min(active[place], slots - 1)  # the wait for a slot is in the base
            kv = workers[place].kv
            prediction = predict(place, prompt, hit, cap, output, busy, 0, kv, stream)
            score = base + (prediction[2] if by_quantile else prediction[1])
            scores.append((place, score))
            if score < least:
                least = score
                best, best_hit, best_seen = place, hit, prediction
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
            self._workers[worker].kv,
            job.stream,
        )

    # Order

    def _queue(self, job: Job, now_s: float) -> None:
        """Let a bound job wait, by its ordering key k."""
        profile, client = self.profile, job.client
        job.key = job.arrived_s
        if profile.order == "size":
            size_s = job.quantile_s if profile.quantile else job.mean_s
            # u counts what waits here beyond an even share; a lone client has no such excess.
            held = self.waiting_tokens.get(client, 0)
            even = self._waiting_tokens / max(1, len(self.shares))
            excess = max(0.0, held - even) if held else 0.0
            u = self.shares.kilotokens(client, now_s) + excess / 1000.0
            fair_s = profile.fairness_s_per_kilotoken * u / job.share
            left_s = job.slo_s - job.after_s
            lead_s = max(0.0, profile.patience_s - left_s) if job.slo_s > 0 else 0.0
            job.key = size_s + profile.aging * (job.arrived_s - lead_s) + fair_s
        self._workers[job.worker].push(job)
        self.waiting[job.priority_class] += 1
        tokens = uncached_tokens(job)
        self.waiting_tokens[client] = self.waiting_tokens.get(client, 0) + tokens
        self._waiting_tokens += tokens

    def _left_queue(self, job: Job) -> None:
        self.waiting[job.priority_class] -= 1
        tokens = uncached_tokens(job)
        self._waiting_tokens -= tokens
        left = self.waiting_tokens.pop(job.client) - tokens
        if left > 0:
            self.waiting_tokens[job.client] = left

    # Gate

    def _open(self, place: int, tokens: int) -> bool:
        """Whether the gate lets these uncached tokens through to a worker."""
        worker = self._workers[place]
        if not self._choice_mask >> place & 1:
            return False
        if not worker.timed or not worker.sent:
            return True
        behind = worker.sent_tokens - next(iter(worker.sent.values()))
        if not behind:  # the oldest is in progress
            return True
        return (behind + tokens) * worker.s_per_token * self.replicas <= self.profile.gate_s

    def _pump(self, place: int, now_s: float) -> Sequence[Job]:
        """Send the queued jobs that the gate lets through."""
        if self._pool.alive is not self._seen_alive:
            self._refresh(now_s)
        worker = self._workers[place]
        out: list[Job] = []
        while (job := worker.first()) is not None and self._open(place, uncached_tokens(job)):
            worker.pop()
            self._left_queue(job)
            self._send(job, now_s)
            out.append(job)
        return out

    def _send(self, job: Job, now_s: float) -> None:
        worker = self._workers[job.worker]
        job.backlog_tokens = backlog_tokens = worker.sent_tokens
        job.active = self._pool.active[job.worker]
        job.kv_usage = worker.kv
        if job.policy is not None:
            full = job.active >= self._pool.slots_per_worker
            if backlog_tokens or full or job.state == "waiting":
                # The predictor learns from a prediction made now, with the current backlog.
                job.policy = self._predict(job, job.worker, job.hit_tokens, backlog_tokens)
                job.quantile_s = job.policy[2]
            job.expected_s = job.policy[1]
        job.state = "sent"
        job.sent_s = now_s
        worker.send(job, uncached_tokens(job), now_s)

    def _rebind(self, worker: Worker, out: list[Job], now_s: float) -> None:
        """Rebind a worker's queue; jobs without a worker are appended to `out`, state nowhere."""
        waiting = [e[3] for e in sorted(worker.heap) if e[3].state == "waiting"]
        worker.heap, worker.waiting = [], 0
        for job in waiting:
            self._left_queue(job)
        for job in waiting:
            worker.unbind(job)
            if self._bind(job, now_s):
                self._queue(job, now_s)
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
