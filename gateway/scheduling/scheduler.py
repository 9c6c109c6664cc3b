"""The Scheduler: assigns a pool's requests to workers and decides when to send them.

Rules:
- A job belongs to one scheduler from `submit` until `finished` (once it was sent) or `cancel`
  (while it waits). Each job is sent exactly once or cancelled; after a failed attempt the
  caller submits a new job.
- Every call that may free or fill capacity returns the jobs to send now, in order, each with
  its worker. The caller sends them: the gateway wakes waiting requests, the simulator submits.
- Early binding (QUARTZ and the baselines) chooses the worker in `submit`; late binding (BF-IO)
  when there is room. `Job.worker` is -1 until it is known.
- Times are arguments, in seconds of any monotonic clock. The `PoolState` holds the workers'
  load and health; a scheduler never changes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState

Match = Sequence[tuple[int, int]]
"""Prefix hits: (tokens, bit mask of the workers that hold that many), longest first."""

Points = tuple[tuple[int, int], ...]
"""(length in bytes, digest of the prompt up to there), ascending; the last is the whole prompt."""


def hit_tokens(match: Match, worker: int) -> int:
    """The longest prefix that a worker is expected to hold, in tokens."""
    for tokens, holders in match:
        if holders >> worker & 1:
            return tokens
    return 0


NOBODY: Final[frozenset[int]] = frozenset()
PRIORITY_CLASS: Final = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 2}
"""Service class -> priority class; lower goes first. Spilled work ranks as spot."""
PRIORITY_CLASS_NAMES: Final = ("protected", "elastic", "backfill")
"""Priority classes, by number."""

State = Literal["new", "waiting", "sent", "answering", "gone", "nowhere"]


@dataclass(eq=False, repr=False)
class Job:
    """One request on its way to a worker. The policy fills what comes after `barred`."""

    owner: Any
    """The caller's own object, which it wakes or sends."""
    prompt_tokens: int
    output_tokens: int
    """Expected output (L_out), >= 0."""
    arrived_s: float
    client: str = ""
    """Name of the entitlement, whose fairness counter it feeds."""
    priority_class: int = 1
    """Priority class: 0 protected, 1 elastic, 2 backfill."""
    share: float = 1.0
    """The client's weight in fairness, > 0: its rate over the mean rate."""
    cap_tokens: int | None = None
    """m_r, the client's own output limit; None when absent."""
    kv_tokens: int = 0
    """Reserved tokens: L_cost."""
    sequences: int = 1
    stream: bool = field(default=True, kw_only=True)
    match: Match = field(default=(), kw_only=True)
    excluded: Sequence[int] = field(default=(), kw_only=True)
    """Workers that failed this request: chosen only when no other is available."""
    preferred: int = field(default=-1, kw_only=True)
    """Worker required by response affinity, while that is available; -1 for any."""
    tenant: str = field(default="", kw_only=True)
    """The tenant of that entitlement."""
    slo_s: float = field(default=0.0, kw_only=True)
    """Target time to first token; 0 for none."""
    after_s: float = field(default=0.0, kw_only=True)
    """Expected time from the end of its prefill to its first token, on other engines: it leaves
    less of the target, and is in no other figure."""
    barred: frozenset[int] = NOBODY
    """Workers that cannot serve it: they lack its LoRA adapter."""
    state: State = "new"
    """nowhere: no worker is available, and the scheduler did not keep the job."""
    worker: int = -1
    sent_s: float = 0.0
    hit_tokens: int = 0
    """Expected prefix hit on its worker, in tokens."""
    backlog_tokens: int = 0
    """Uncached prefill ahead of it on its worker when it was bound."""
    active: int = 0
    """Sequences on its worker when it was bound."""
    kv_usage: float = 0.0
    """Share of its worker's KV cache in use when it was bound, 0 to 1; 0 when unknown."""
    mean_s: float = 0.0
    """Predicted prefill time, mean."""
    quantile_s: float = 0.0
    """Predicted prefill time, calibrated upper quantile: s-hat."""
    expected_s: float = 0.0
    """Mean predicted time from sending to first token; only predicting schedulers set it."""
    score: float = 0.0
    candidates: Sequence[tuple[int, float]] = ()
    """(worker, score) of the compared workers; lower is better."""
    key: float = 0.0
    """k_fair: the order within its priority class, lowest first."""
    order: int = 0
    """Order of arrival; breaks ties."""
    emitted: Callable[[], int] | None = None
    """Returns the answer's tokens streamed so far; the caller may set it after sending."""
    policy: Any = None
    """The scheduler's own data about the job."""
    would_bind: int = -1
    """The worker that QUARTZ would choose, where it only watches; -1 otherwise."""
    would_s: float = 0.0
    """Mean predicted time from sending to first token there."""


@dataclass
class BarrierLoad:
    """How evenly the ranks of one engine were loaded while it had any load."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    """Of that, the mean rank's share in which it waits for the fullest: 1 - mean L / max L."""
    imbalance_tokens: float = 0.0
    """Sum over ranks of max L - L, at the last look."""


AHEAD_S: Final = 0.2
REQUEST_S: Final = 0.005
PREFILL_S: Final = 1e-4
"""Of each request ahead, each running, and each prompt token, where nothing predicts."""

NOTHING: Final[Sequence[Job]] = ()
"""No job to send."""


class Scheduler:
    """Assigns one pool's jobs. Pure: no clock, no I/O, randomness only by seed.

    This one keeps no queue and learns nothing; it lacks only `submit`.
    """

    gates: bool = False
    """Whether first tokens matter to it, to free a gate or to learn; then call `first_token`."""

    def __init__(self, pool: PoolState) -> None:
        self._pool = pool
        self.replicas = 1
        """Gateway replicas that share the workers, >= 1: each gets an equal share of every gate."""
        self.waiting = [0] * len(PRIORITY_CLASS_NAMES)
        """Number of waiting jobs by priority class."""
        self.barriers: dict[str, BarrierLoad] = {}
        """By engine; only of schedulers that balance ranks."""

    @property
    def coverage(self) -> float | None:
        """Share of recent prefills within their predicted quantile; None without predictions."""
        return None

    def forecast(self, job: Job, now_s: float) -> tuple[float, float]:
        """Expected seconds until a job's prefill may begin, and of its prefill.

        The job is not submitted, and nothing changes. Here they are only in proportion: to the
        requests that wait before it, here or at the worker with the fewest, for a first token.
        """
        pool, workers = self._pool, fleet.available(self._pool, now_s)
        ahead, held = 0.0, 0
        if workers:
            held, worker = min([(pool.active[worker], worker) for worker in workers])
            engine = pool.engine_of[worker]
            ahead = sum(self.waiting[: job.priority_class + 1]) / len(workers)
            ahead += len(engine.progress.waiting()) / max(1, len(engine.ranks))
        return ahead * AHEAD_S + held * REQUEST_S, job.prompt_tokens * PREFILL_S

    def joined(self, worker: int) -> None:
        """A new worker took this place of the pool, which may be one more than there were."""

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """Take a job; the result contains it if it is sent at once.

        Otherwise its state is waiting, or nowhere if the scheduler did not take it.
        """
        raise NotImplementedError

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        """A sent job's prefill is done; `cached_tokens` is the engine's report, if there is one.

        `assumed`: the answer is not streamed, and the prefill should be done by the prediction.
        That frees the gate but does not train the predictor. Idempotent.
        """
        if job.state == "sent":
            job.state = "answering"
        return NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """A sent job left its worker, whether or not it had a first token. Idempotent.

        `answered`: its answer is complete.
        """
        if job.state in {"sent", "answering"}:
            job.state = "gone"
        return NOTHING

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """Remove a waiting job. Idempotent."""
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        """Rebind jobs queued for workers that are gone; called a few times a second.

        Jobs for which no worker is left are in the result too, with state nowhere: the caller
        refuses them.
        """
        return NOTHING
