"""QUARTZ: predicted quantiles choose the worker and order its queue.

Source: "QUARTZ: Quantile-Aware Routing and Queueing for TTFT SLOs in LLM Serving", sections 3
and 4. A job goes to the candidate with the least S = W-hat + Q-hat + psi (equation 4) and waits
there by (band, k), the least first: k = s-hat + lambda x arrival + beta x u (equations 6 to 8).

Where this goes beyond the paper, or against it:
- Candidates are the worker with the longest cached prefix and the one with the least W-hat (all
  workers when there are few): two at random lose to a plain prefix router.
- psi prices uncached tokens (`QuartzProfile.locality_price`), more of them where more were
  written lately (`quartz_writes`).
- Q-hat and s-hat are for a worker with nothing ahead: what is ahead is W-hat's. What is
  calibrated is a second prediction, made when the job is sent, of the time to its first token.
- u counts what waits here of the client, too, beyond an even part of all that waits. Aging
  would else let a client in that asks for more than it can be served: its backlog grows old.
- The fallback is first come, first served to sticky-locality or least-loaded workers.
- Gateways that share the workers share the gate. In W-hat each counts its own assignments for
  all of them, until it is told what the others have assigned (`merge`).
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, Final

from gateway.policy.fairness import ServedShares
from gateway.policy.fleet import PoolState
from gateway.policy.gated import Gated
from gateway.policy.quartz_backlog import Backlogs
from gateway.policy.quartz_fallback import Fallback
from gateway.policy.quartz_profile import QuartzProfile
from gateway.policy.quartz_queue import uncached_tokens
from gateway.policy.quartz_score import (
    Features,
    Predictor,
    hit_tokens,
    hits_of,
    pressure_s,
    seconds,
    workers_of,
)
from gateway.policy.quartz_unseen import FirstTokens, UnseenPrefills
from gateway.policy.quartz_writes import LEAST, MOST, RecentWrites
from gateway.policy.scheduling import Job, Match
from gateway.policy.sticky import pick_least, pick_sticky

KvUsage = Callable[[int, float], float | None]
"""Worker and time to the share of its KV cache in use; None when not known or stale."""

MOST_HOLDERS: Final = 16
"""Workers looked at that hold one and the same prefix."""

_Seen = tuple[Features, float, float, int]
"""What was predicted from: x, mean, quantile, bucket."""


class Quartz(Gated):
    """One pool's scheduler; `predictor` learns from it."""

    __slots__ = (
        "_backlogs",
        "_cursor",
        "_fallback",
        "_first_tokens",
        "_kv",
        "_kv_usage",
        "_pending_s",
        "_predictor",
        "_pressures_s",
        "_random",
        "_s_per_token",
        "_writes",
        "profile",
        "shares",
        "unseen",
    )

    def __init__(
        self,
        pool: PoolState,
        predictor: Predictor,
        profile: QuartzProfile,
        *,
        kv_usage: KvUsage | None = None,
        first_tokens: FirstTokens | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(pool, profile)
        workers = len(pool.workers)
        self.profile = profile
        self.shares = ServedShares(profile.fairness_tau_s)
        """u of the clients."""
        self._predictor = predictor
        self._backlogs = Backlogs(workers)
        self._pending_s = [0.0] * workers
        self._writes = RecentWrites(workers, profile.writes_tau_s)
        self._fallback = Fallback(profile.fallback_enter, profile.fallback_leave)
        self.unseen = UnseenPrefills(workers)
        """Of answers that are not streamed."""
        self._first_tokens = first_tokens
        self._kv_usage = kv_usage
        self._kv = [0.0] * workers
        """Share of each KV cache in use as of the last tick; 0 where it is not known."""
        self._pressures_s: list[float] | None = None
        """What each one's KV costs (psi); None while none is nearly full."""
        self._random = Random(seed)
        self._s_per_token = [1.0 / predictor.prefill_tokens_per_s(w) for w in range(workers)]
        self._cursor = 0

    @property
    def fallback(self) -> bool:
        """See Scheduler."""
        return self._fallback.active

    @property
    def coverage(self) -> float | None:
        """See Scheduler."""
        return self._predictor.coverage

    @property
    def fallbacks_total(self) -> int:
        """How often the fallback was entered."""
        return self._fallback.entered_total

    def wait_s(self, worker: int, now_s: float) -> float:
        """W-hat of a worker, >= 0."""
        return self._backlogs.wait_s(worker, now_s)

    def tick(self, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        if self._kv_usage is not None:
            profile = self.profile
            self._kv = [self._kv_usage(w, now_s) or 0.0 for w in range(len(self._kv))]
            pressures_s = [
                pressure_s(usage, profile.kv_threshold, profile.kv_price_s) for usage in self._kv
            ]
            self._pressures_s = pressures_s if any(pressures_s) else None
        if self._first_tokens is not None:
            self._hear(self._first_tokens, now_s)
        self.shares.sweep(now_s)
        return super().tick(now_s)

    def state(self) -> dict[str, Any]:
        """Plain values for the other processes of this gateway.

        Who was served how much, and the work that each worker has been assigned here and has
        not answered, in seconds.
        """
        return {"served": self.shares.state(), "pending_s": list(self._pending_s)}

    def merge(self, states: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        """Take in the states of the others, by their names, as often as they are told.

        W-hat is set to what all have assigned and not seen answered. What is malformed is
        ignored. The predictor has a `merge` of its own.
        """
        served: dict[str, Mapping[str, float]] = {}
        pending_s = list(self._pending_s)
        for name, state in states.items():
            theirs, totals = state.get("pending_s"), state.get("served")
            if isinstance(totals, Mapping):
                served[name] = totals
            if isinstance(theirs, list | tuple) and len(theirs) == len(pending_s):
                pending_s = [a + seconds(b) for a, b in zip(pending_s, theirs, strict=True)]
        self.shares.merge(served, now_s)
        if states:
            for worker, work_s in enumerate(pending_s):
                self._backlogs.set(worker, now_s + max(0.0, work_s))

    def _hear(self, first_tokens: FirstTokens, now_s: float) -> None:
        """Learn from what engines say of first tokens that nobody here sees."""
        for worker in tuple(self.unseen.workers):
            reading = first_tokens(worker, now_s)
            if reading is None:
                continue
            told = self.unseen.read(worker, *reading)
            if told is not None:
                self._predictor.told(worker, *told)
                self._s_per_token[worker] = 1.0 / self._predictor.prefill_tokens_per_s(worker)

    # Choosing

    def _choice_changed(self) -> None:
        self._backlogs.keep(self._choice)

    def _bind(self, job: Job, choice: Sequence[int], now_s: float) -> None:
        profile = self.profile
        match: Match = job.match if profile.locality else ()
        safe = self._fallback.active
        if safe or profile.route != "score":
            self._bind_safely(job, choice, match if safe else (), now_s)
        else:
            self._bind_best(job, self._candidates(choice, match, now_s), now_s)
        _, mean_s, quantile_s, _ = job.policy
        self._backlogs.add(job.worker, mean_s * self.replicas, now_s)
        self._pending_s[job.worker] += mean_s
        self._writes.add(job.worker, uncached_tokens(job), now_s)
        job.mean_s, job.quantile_s = mean_s, quantile_s

    def _rank(self, job: Job, now_s: float) -> None:
        profile = self.profile
        if profile.order != "size":
            job.key = job.arrived_s
            return
        key = profile.aging * job.arrived_s
        if not self._fallback.active:
            key += job.quantile_s if profile.quantile else job.mean_s
            excess = self._queues.excess_tokens(job.client, len(self.shares))
            u = self.shares.kilotokens(job.client, now_s) + excess / 1000.0
            key += profile.fairness_s_per_kilotoken * u / job.share
        job.key = key

    def _candidates(
        self, choice: Sequence[int], match: Match, now_s: float
    ) -> list[tuple[int, int]]:
        """Workers to compare, each with the hit expected there."""
        profile = self.profile
        if profile.candidates == "random":
            two = self._random.sample(choice, 2) if len(choice) > 2 else choice
            return [(w, hit_tokens(match, w)) for w in two]
        if len(choice) <= profile.compare_all_up_to:
            if not match:
                return [(w, 0) for w in choice]
            mask = self._choice_mask if len(choice) > 1 else -1
            tokens, holders = match[0]
            if holders & mask == mask:  # nearly every prompt: what an application begins with
                return [(w, tokens) for w in choice]
            hits = hits_of(match, mask)
            return [(w, hits.get(w, 0)) for w in choice]
        free_at_s = self._backlogs.free_at_s
        if choice is self._choice:
            least, mask = self._backlogs.least(), self._choice_mask
        else:
            least = min(choice, key=free_at_s.__getitem__)
            mask = sum(1 << w for w in choice)
        found = [(least, hit_tokens(match, least))]
        for tokens, holders in match:
            if holders := holders & mask:
                if not holders >> least & 1:
                    best = min(workers_of(holders, MOST_HOLDERS), key=free_at_s.__getitem__)
                    found.append((best, tokens))
                break
        return found

    def _bind_best(self, job: Job, candidates: list[tuple[int, int]], now_s: float) -> None:
        """The least score; who cannot beat it by backlog and psi alone is not predicted."""
        profile, prompt, kv, pressures_s = (
            self.profile,
            job.prompt_tokens,
            self._kv,
            self._pressures_s,
        )
        free_at_s, s_per_token = self._backlogs.free_at_s, self._s_per_token
        price, (written, even, mean) = profile.locality_price, self._writes.levels()
        bases = []
        for worker, hit in candidates:
            share = (written[worker] + even) / mean
            if share < LEAST:
                share = LEAST
            elif share > MOST:
                share = MOST
            base = price * share * (prompt - hit) * s_per_token[worker]
            free_s = free_at_s[worker]
            if free_s > now_s:
                base += free_s - now_s
            if pressures_s is not None:
                base += pressures_s[worker]
            # Of workers alike, the one that was given work longest ago: it has most room.
            bases.append((base, free_s, worker, hit))
        if len(bases) > 1:
            bases.sort()
        least = inf
        scores = []
        predict, active, told = self._predictor.predict_request, self._pool.active, profile.quantile
        cap, output, stream = job.cap_tokens, job.output_tokens, job.stream
        for base, _, worker, hit in bases:
            if base >= least:
                break
            seen = predict(worker, prompt, hit, cap, output, active[worker], 0, kv[worker], stream)
            score = base + (seen[2] if told else seen[1])
            scores.append((worker, score))
            if score < least:
                least = score
                job.worker, job.hit_tokens, job.policy = worker, hit, seen
        job.score, job.candidates = least, scores

    def _bind_safely(self, job: Job, choice: Sequence[int], match: Match, now_s: float) -> None:
        """By requests, sent and waiting; predicted all the same, for the way back."""
        active, lengths = self._pool.active, self._queues.lengths
        load = [a + b for a, b in zip(active, lengths, strict=True)]
        self._cursor += 1
        if match:
            worker = pick_sticky(match, choice, load, self._cursor)
        else:
            worker = pick_least(choice, load, self._cursor)
        job.worker = worker
        job.hit_tokens = hit_tokens(job.match, worker)
        job.score = float(load[worker])
        job.candidates = ((worker, job.score),)
        job.policy = self._predict(job, worker, job.hit_tokens, 0)

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

    # What happens to a bound job

    def _unbind(self, job: Job, now_s: float) -> None:
        self._backlogs.remove(job.worker, job.mean_s * self.replicas, now_s)
        self._pending_s[job.worker] -= job.mean_s

    def _sending(self, job: Job, now_s: float) -> float:
        owed, worker = self._owed, job.worker
        backlog_tokens = owed.tokens[worker] - owed.overdue_tokens[worker]
        job.backlog_tokens = backlog_tokens
        job.active = self._pool.active[worker]
        job.kv_usage = self._kv[worker]
        if backlog_tokens or job.state != "new":
            job.policy = self._predict(job, worker, job.hit_tokens, backlog_tokens)
            job.quantile_s = job.policy[2]
        mean_s: float = job.policy[1]
        return mean_s

    def _answered(
        self, job: Job, now_s: float, cached_tokens: int | None, *, teaches: bool
    ) -> None:
        self._pending_s[job.worker] -= job.mean_s
        hit = job.hit_tokens if cached_tokens is None else cached_tokens
        if hit < job.prompt_tokens:
            self.shares.served(job.client, job.prompt_tokens - hit, now_s)
        worker = job.worker
        if not teaches:
            if not job.stream:
                self.unseen.add(worker, job.expected_s)
            return
        self.unseen.saw(worker)
        predictor = self._predictor
        seen: _Seen = job.policy
        x, mean_s, quantile_s, bucket = seen
        predictor.observe(worker, x, mean_s, quantile_s, bucket, now_s - job.sent_s)
        self._s_per_token[worker] = 1.0 / predictor.prefill_tokens_per_s(worker)
        if self.profile.fallback:
            self._fallback.update(predictor.miss_rate)

    def _answered_whole(self, job: Job, now_s: float) -> None:
        self.shares.served(job.client, uncached_tokens(job), now_s)
        self.unseen.add(job.worker, job.expected_s)
