"""Routers that bench quartz compares with and that are not in the gateway."""

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from gateway.estimate.estimator import LengthEstimator
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelAdmission, ModelFleet, ModelRuntime, Pool
from gateway.records.attempt import HealthRules, WorkerAddress
from gateway.replicas.notes import SchedulerNotes
from gateway.routing.routing import PoolShape, ResponseAffinity, Routing
from gateway.scheduling.baselines import Immediate, pick_least
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import NOTHING, Job, Scheduler, hit_tokens
from gateway.store.redis.exchange import RedisExchange
from predictor.features import features
from predictor.online import PrefillPredictor
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER, SimulatedGateway

# -- gossip between several gateways of one simulation, by the shipped notes


_APART: Final = (0.9 * RedisExchange.every_s, 1.1 * RedisExchange.every_s)
"""Seconds from one exchange of a board to the next."""


class _GossipBoard:
    """One gateway's: what it put up, and what it heard at its last exchange."""

    def __init__(self, place: int, told: dict[int, dict[str, bytes]]) -> None:
        self._place = place
        self._told = told
        self._mine: dict[str, bytes] = {}
        self._theirs: dict[str, dict[str, bytes]] = {}

    def publish(self, name: str, payload: bytes) -> None:
        self._mine[name] = payload

    def peers(self, name: str) -> dict[str, bytes]:
        return {who: notes[name] for who, notes in self._theirs.items() if name in notes}

    def exchange(self) -> None:
        self._told[self._place] = dict(self._mine)
        self._theirs = {str(p): notes for p, notes in self._told.items() if p != self._place}


class Gossip:
    """Call it at each tick."""

    def __init__(
        self, gateways: Sequence[SimulatedGateway], seed: int, *, prefixes: bool = True
    ) -> None:
        """`prefixes`: whether each hears of the others' prompts."""
        self._random = Random(f"gossip/{seed}")
        self._now_s = 0.0
        told: dict[int, dict[str, bytes]] = {}
        self._boards = [_GossipBoard(place, told) for place in range(len(gateways))]
        self._notes = [
            SchedulerNotes(
                [_served(gateway, prefixes)],
                board.publish,
                board.peers,
                lambda _: len(gateways),
                lambda: self._now_s,
            )
            for gateway, board in zip(gateways, self._boards, strict=True)
        ]
        self._due_s = [RedisExchange.every_s * self._random.random() for _ in gateways]

    def __call__(self, now_s: float) -> None:
        """Do what is due."""
        self._now_s = now_s
        while (due_s := min(self._due_s)) <= now_s:
            place = self._due_s.index(due_s)
            for _ in self._notes[place].send():
                pass
            self._boards[place].exchange()
            for _ in self._notes[place].receive():
                pass
            self._due_s[place] += self._random.uniform(*_APART)


def _served(gateway: SimulatedGateway, prefixes: bool) -> ModelRuntime:
    index = gateway.prefixes
    if not (prefixes and isinstance(index, PrefixIndex)):
        index = PrefixIndex(len(gateway.pool.workers))  # nobody asks it
    addresses = [
        WorkerAddress(id=worker, scheme="http", host=worker, port=1)
        for worker in gateway.pool.workers
    ]
    pool = Pool("pool", addresses, gateway.pool.slots_per_worker)
    pool.scheduler, pool.predictor, pool.prefixes = gateway.scheduler, gateway.predictor, index
    pool.gossip = gateway.prefix_gossip
    return ModelRuntime(
        name="m",
        routing=Routing(
            pools=(
                PoolShape(name="pool", window_tokens=WORKER.max_model_len, boundary_tokens=None),
            )
        ),
        estimator=LengthEstimator(),
        fleet=ModelFleet(
            pools=(pool,),
            health=HealthRules(),
            response_affinity=ResponseAffinity(),
        ),
        admission=ModelAdmission(spill_queue=0),
    )


class TwoChoices(Immediate):
    """The less loaded of two workers drawn at random (the paper's FIFO-P2C)."""

    def __init__(self, pool: PoolState) -> None:
        super().__init__(pool)
        self._random = Random(0)

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        return min(self._random.sample(choice, 2), key=self._pool.active.__getitem__)


class TokenFair(Scheduler):
    """Token-based fairness in admission, size and locality unseen ("TokenFair", section 5.3).

    Least-loaded routing. Each queue is served in the order of start tags (start-time fair
    queueing): a client's next request starts where its last one ended, counted in prompt tokens
    over its share, and never before what is being served. A worker is sent one request behind
    the prefill in progress.
    """

    gates = True

    def __init__(self, pool: PoolState) -> None:
        super().__init__(pool)
        self._queues: list[list[tuple[float, int, Job]]] = [[] for _ in pool.workers]
        self._sent = [0] * len(pool.workers)
        self._turn = 0
        self._served = 0.0  # the latest start tag sent: virtual time
        self._ends: dict[str, float] = {}

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        load = [a + len(queue) for a, queue in zip(self._pool.active, self._queues, strict=True)]
        self._turn += 1
        job.worker = pick_least(fleet.available(self._pool, now_s), load, self._turn)
        job.hit_tokens = hit_tokens(job.match, job.worker)
        start = max(self._served, self._ends.get(job.client, 0.0))
        self._ends[job.client] = start + job.prompt_tokens / job.share
        job.state = "waiting"
        self.waiting[job.priority_class] += 1
        heappush(self._queues[job.worker], (start, self._turn, job))
        return self._pump(job.worker, now_s)

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        return self._prefilled(job, now_s) if job.state == "sent" else NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        ready = self._prefilled(job, now_s) if job.state == "sent" else NOTHING
        job.state = "gone"
        return ready

    def _prefilled(self, job: Job, now_s: float) -> Sequence[Job]:
        job.state = "answering"
        self._sent[job.worker] -= 1
        return self._pump(job.worker, now_s)

    def _pump(self, worker: int, now_s: float) -> Sequence[Job]:
        ready, queue = [], self._queues[worker]
        while queue and self._sent[worker] < 2:
            start, _, job = heappop(queue)
            self._served = max(self._served, start)
            self.waiting[job.priority_class] -= 1
            job.state, job.sent_s = "sent", now_s
            self._sent[worker] += 1
            ready.append(job)
        return ready


CACHE_THRESHOLD: Final = 0.5
BALANCE_ABS: Final = 32
BALANCE_REL: Final = 1.1


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
