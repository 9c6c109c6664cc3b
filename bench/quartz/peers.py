"""Routers that bench quartz compares with and that are not in the gateway."""

from collections.abc import Sequence
from math import ceil
from random import Random
from typing import Any, Final

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import NOTHING, Immediate, pick_least
from gateway.scheduling.quartz_worker_state import Backlogs, WorkerQueues
from gateway.scheduling.scheduler import Job, Match
from predictor.features import ACTIVE, BACKLOG, UNCACHED, features
from predictor.online import PrefillPredictor
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER

CACHE_THRESHOLD: Final = 0.5
BALANCE_ABS: Final = 32
BALANCE_REL: Final = 1.1


def hit_tokens(match: Match, worker: int) -> int:
    """Longest prefix that a worker is expected to hold, in tokens."""
    bit = 1 << worker
    for tokens, mask in match:
        if mask & bit:
            return tokens
    return 0


class CacheAware(Immediate):
    """A model of SGLang's cache-aware routing, as its documentation describes it.

    While load is balanced: the worker with the longest match, if that is more than
    CACHE_THRESHOLD of the prompt, else the worker whose tree is smallest. Load is unbalanced
    when most - least is above BALANCE_ABS requests and most above BALANCE_REL x least: then the
    least loaded. Its thresholds' defaults changed over time: 32 or 64; 1.0001, 1.1 or 1.5.
    """

    __slots__ = ("_trees",)

    def __init__(self, pool: PoolState) -> None:
        super().__init__(pool)
        self._trees = [0] * len(pool.workers)  # tokens

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        active = self._pool.active
        loads = [active[w] for w in choice]
        most, least = max(loads), min(loads)
        hit = 0
        if most - least > BALANCE_ABS and most > BALANCE_REL * least:
            worker = choice[loads.index(least)]
        elif job.match and job.match[0][0] > CACHE_THRESHOLD * job.prompt_tokens:
            hit, mask = job.match[0]
            worker = next((w for w in choice if mask >> w & 1), choice[loads.index(least)])
        else:
            worker = min(choice, key=self._trees.__getitem__)
        self._trees[worker] += job.prompt_tokens - hit
        return worker


class TwoChoices(Immediate):
    """The less loaded of two workers drawn at random (the paper's FIFO-P2C)."""

    __slots__ = ("_random",)

    def __init__(self, pool: PoolState) -> None:
        super().__init__(pool)
        self._random = Random(0)

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        return min(self._random.sample(choice, 2), key=self._pool.active.__getitem__)


class Oracle(PrefillPredictor):
    """Knows what a prefill costs the bench's engine, as mean and as quantile (the paper's Oracle).

    What else is under way there when it starts, nobody knows before.
    """

    def predict_request(
        self, worker: int, *asked: Any
    ) -> tuple[tuple[float, ...], float, float, int]:
        """Steps and tokens of the uncached part."""
        x = features(*asked)
        tokens = x[UNCACHED] + x[BACKLOG]
        steps = ceil(tokens / WORKER.max_num_batched_tokens)
        cost_s = steps * (WORKER.w_s + WORKER.h_s * x[ACTIVE]) + tokens * WORKER.prefill_s_per_token
        return x, cost_s, cost_s, 0

    def observe(self, *seen: Any) -> None:
        """It has nothing to learn."""

    def prefill_tokens_per_s(self, worker: int) -> float:
        """Of full steps."""
        chunk = WORKER.max_num_batched_tokens
        return chunk / (WORKER.w_s + chunk * WORKER.prefill_s_per_token)


class Shifted(PrefillPredictor):
    """A predictor whose every prediction is wrong by a factor, whatever it learns.

    `low` or `high`, drawn anew for each prediction: the same twice is a shift, 1/3 and 3 a poisoned
    predictor.
    """

    def __init__(self, low: float, high: float, **more: Any) -> None:
        super().__init__(**more)
        self._factors_drawn = (low, high)
        self.misses: list[bool] = []
        self._random = Random(1)

    def predict_request(
        self, worker: int, *asked: Any
    ) -> tuple[tuple[float, ...], float, float, int]:
        """The true predictor's, times the factor."""
        x, mean_s, quantile_s, bucket = super().predict_request(worker, *asked)
        factor = self._random.choice(self._factors_drawn)
        return x, factor * mean_s, factor * quantile_s, bucket

    def observe(
        self,
        worker: int,
        x: tuple[float, ...],
        mean_s: float,
        quantile_s: float,
        bucket: int,
        actual_s: float,
        client: str = "",
    ) -> None:
        """Counts the miss; learns as if the prediction had been right by the true predictor."""
        true_mean_s, true_quantile_s, _ = self.predict(worker, x)
        missed = actual_s > quantile_s
        super().observe(worker, x, true_mean_s, true_quantile_s, bucket, actual_s, client)
        self.misses.append(missed)

    @property
    def coverage(self) -> float | None:
        """Share of all prefills within what was predicted."""
        return 1.0 - sum(self.misses) / len(self.misses) if self.misses else None


class Uncalibrated(PrefillPredictor):
    """The predictor without its online calibration (the paper's No Calibration)."""

    def predict(self, worker: int, x: tuple[float, ...]) -> tuple[float, float, int]:
        """Mean and raw quantile; neither calibration nor the worker's speed."""
        mean_s, quantile_s = self.raw(x)
        return mean_s, quantile_s, 0

    def predict_request(
        self, worker: int, *asked: Any
    ) -> tuple[tuple[float, ...], float, float, int]:
        """The same of a request."""
        x = features(*asked)
        return x, *self.predict(worker, x)


class WeightedScores(Immediate):
    """A weighted sum of prefix, queue and KV scores, as llm-d's default profile has it.

    Prefix: matched share of the prompt, weight 3. Queue: requests that wait at the worker,
    the fewest 1 and the most 0, weight 2. KV: the share of the cache that is free, weight 2.
    Of equal scores one is drawn.
    """

    __slots__ = ("_kv_tokens", "_random", "_waiting")

    def __init__(self, pool: PoolState, seed: int) -> None:
        super().__init__(pool)
        self._kv_tokens = WORKER.kv_blocks * BLOCK_TOKENS
        self._random = Random(seed)
        self._waiting = [0] * len(pool.workers)

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        waiting = [self._waiting[w] for w in choice]
        most, least = max(waiting), min(waiting)
        span = max(1, most - least)
        scores = [
            3.0 * hit_tokens(job.match, worker) / job.prompt_tokens
            + 2.0 * (most - queued) / span
            + 2.0 * (1.0 - self._pool.tokens[worker] / self._kv_tokens)
            for worker, queued in zip(choice, waiting, strict=True)
        ]
        best = max(scores)
        worker = self._random.choice([w for w, s in zip(choice, scores, strict=True) if s == best])
        self._waiting[worker] += 1
        return worker

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        """A request waits at its worker until its first token."""
        if job.state == "sent":
            self._waiting[job.worker] = max(0, self._waiting[job.worker] - 1)
        return super().first_token(job, now_s, cached_tokens, assumed=assumed)


class TokenFair:
    """Token-based fairness in admission, size and locality unseen ("TokenFair", section 5.3).

    Least-loaded routing. Each queue is served in the order of start tags (start-time fair
    queueing): a client's next request starts where its last one ended, counted in prompt tokens
    over its share, and never before what is being served. A worker is sent one request behind
    the prefill in progress.
    """

    gates: bool = True
    coverage: float | None = None

    def __init__(self, pool: PoolState) -> None:
        workers = len(pool.workers)
        self.replicas = 1
        self._pool = pool
        self._backlogs = Backlogs(workers)
        self._queues = WorkerQueues(workers)
        self._turn = 0
        self._served = 0.0  # the latest start tag sent: virtual time
        self._ends: dict[str, float] = {}

    @property
    def waiting(self) -> Sequence[int]:
        """See Scheduler."""
        return self._queues.waiting

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        choice = fleet.available(self._pool, now_s)
        if not choice:
            job.state = "nowhere"
            return NOTHING
        load = [a + b for a, b in zip(self._pool.active, self._queues.lengths, strict=True)]
        self._turn += 1
        job.order = self._turn
        job.worker = pick_least(choice, load, self._turn)
        job.hit_tokens = hit_tokens(job.match, job.worker)
        job.key = max(self._served, self._ends.pop(job.client, 0.0))
        self._ends[job.client] = job.key + job.prompt_tokens / job.share
        self._queues.push(job)
        return self._pump(job.worker, now_s)

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        """See Scheduler."""
        if job.state != "sent":
            return NOTHING
        job.state = "answering"
        self._backlogs.leave(job, now_s)
        return self._pump(job.worker, now_s)

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """See Scheduler."""
        was, job.state = job.state, "gone"
        if was != "sent":
            return NOTHING
        self._backlogs.leave(job, now_s)
        return self._pump(job.worker, now_s)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        if job.state == "waiting":
            self._queues.forget(job)
        return NOTHING

    def joined(self, worker: int) -> None:
        """See Scheduler: nothing is kept by worker."""

    def tick(self, now_s: float) -> Sequence[Job]:
        """See Scheduler: the bench's workers stay well."""
        return NOTHING

    def _pump(self, worker: int, now_s: float) -> Sequence[Job]:
        ready = []
        while self._queues.lengths[worker] and len(self._backlogs.sent[worker]) < 2:
            job = self._queues.pop(worker)
            if job is None:
                break
            self._served = max(self._served, job.key)
            job.state = "sent"
            job.sent_s = now_s
            self._backlogs.send(job, job.prompt_tokens, now_s)
            ready.append(job)
        return ready
