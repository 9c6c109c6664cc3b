"""The Scheduler protocol: assigns a pool's requests to workers and decides when to send them.

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
from typing import Any, Final, Literal, Protocol

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


class Job:
    """One request on its way to a worker. The caller fills the first part, the policy the rest."""

    __slots__ = (
        *("active", "arrived_s", "backlog_tokens", "barred", "candidates", "cap_tokens", "client"),
        *("emitted", "excluded", "expected_s", "hit_tokens", "key", "kv_tokens", "kv_usage"),
        *("match", "mean_s", "order", "output_tokens", "owner", "policy", "preferred"),
        *("priority_class", "prompt_tokens", "quantile_s", "score", "sent_s", "sequences"),
        *("share", "slo_s", "state", "stream", "tenant", "worker", "would_bind", "would_s"),
    )

    def __init__(  # noqa: PLR0915 - one statement a field
        self,
        owner: Any,
        prompt_tokens: int,
        output_tokens: int,
        arrived_s: float,
        client: str = "",
        priority_class: int = 1,
        share: float = 1.0,
        cap_tokens: int | None = None,
        kv_tokens: int = 0,
        sequences: int = 1,
        *,
        stream: bool = True,
        match: Match = (),
        excluded: Sequence[int] = (),
        preferred: int = -1,
        tenant: str = "",
        slo_s: float = 0.0,
    ) -> None:
        self.owner = owner
        """The caller's own object, which it wakes or sends."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Expected output (L_out), >= 0."""
        self.arrived_s = arrived_s
        self.client = client
        """Name of the entitlement, whose fairness counter it feeds."""
        self.tenant = tenant
        """The tenant of that entitlement."""
        self.priority_class = priority_class
        """Priority class: 0 protected, 1 elastic, 2 backfill."""
        self.share = share
        """The client's weight in fairness, > 0: its rate over the mean rate."""
        self.cap_tokens = cap_tokens
        """m_r, the client's own output limit; None when absent."""
        self.kv_tokens = kv_tokens
        """Reserved tokens: L_cost."""
        self.sequences = sequences
        self.slo_s = slo_s
        """Target time to first token; 0 for none."""
        self.stream = stream
        self.match = match
        self.excluded = excluded
        """Workers that failed this request: chosen only when no other is available."""
        self.barred: frozenset[int] = NOBODY
        """Workers that cannot serve it: they lack its LoRA adapter."""
        self.preferred = preferred
        """Worker required by response affinity, while that is available; -1 for any."""
        self.state: State = "new"
        """nowhere: no worker is available, and the scheduler did not keep the job."""
        self.worker = -1
        self.sent_s = 0.0
        self.hit_tokens = 0
        """Expected prefix hit on its worker, in tokens."""
        self.backlog_tokens = 0
        """Uncached prefill ahead of it on its worker when it was bound."""
        self.active = 0
        """Sequences on its worker when it was bound."""
        self.kv_usage = 0.0
        """Share of its worker's KV cache in use when it was bound, 0 to 1; 0 when unknown."""
        self.mean_s = 0.0
        """Predicted prefill time, mean."""
        self.quantile_s = 0.0
        """Predicted prefill time, calibrated upper quantile: s-hat."""
        self.expected_s = 0.0
        """Mean predicted time from sending to first token; only predicting schedulers set it."""
        self.score = 0.0
        self.candidates: Sequence[tuple[int, float]] = ()
        """(worker, score) of the compared workers; lower is better."""
        self.key = 0.0
        """k_fair: the order within its priority class, lowest first."""
        self.order = 0
        """Order of arrival; breaks ties."""
        self.emitted: Callable[[], int] | None = None
        """Returns the answer's tokens streamed so far; the caller may set it after sending."""
        self.policy: Any = None
        """The scheduler's own data about the job."""
        self.would_bind = -1
        """The worker that QUARTZ would choose, where it only watches; -1 otherwise."""
        self.would_s = 0.0
        """Mean predicted time from sending to first token there."""


NOTHING: Final[Sequence[Job]] = ()
"""No job to send."""


class Scheduler(Protocol):
    """Assigns one pool's jobs. Pure: no clock, no I/O, randomness only by seed."""

    gates: bool
    """Whether first tokens matter to it, to free a gate or to learn; then call `first_token`."""
    replicas: int
    """Gateway replicas that share the workers, >= 1: each gets an equal share of every gate."""

    @property
    def waiting(self) -> Sequence[int]:
        """Number of waiting jobs by priority class (three numbers)."""
        ...

    @property
    def coverage(self) -> float | None:
        """Share of recent prefills within their predicted quantile; None without predictions."""
        ...

    def joined(self, worker: int) -> None:
        """A new worker took this place of the pool, which may be one more than there were."""
        ...

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """Take a job; the result contains it if it is sent at once.

        Otherwise its state is waiting, or nowhere if the scheduler did not take it.
        """
        ...

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        """A sent job's prefill is done; `cached_tokens` is the engine's report, if there is one.

        `assumed`: the answer is not streamed, and the prefill should be done by the prediction.
        That frees the gate but does not train the predictor. Idempotent.
        """
        ...

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """A sent job left its worker, whether or not it had a first token. Idempotent.

        `answered`: its answer is complete.
        """
        ...

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """Remove a waiting job. Idempotent."""
        ...

    def tick(self, now_s: float) -> Sequence[Job]:
        """Rebind jobs queued for workers that are gone; called a few times a second.

        Jobs for which no worker is left are in the result too, with state nowhere: the caller
        refuses them.
        """
        ...
