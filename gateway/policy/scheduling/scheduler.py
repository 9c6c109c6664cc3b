"""What assigns a pool's requests to its workers, and when: the shape of every such policy.

Rules:
- A job belongs to one scheduler from `submit` until `finished` (once it was sent) or `cancel`
  (while it waits). Each is sent exactly once or cancelled; after a failed attempt the caller
  submits a new job.
- Every call that may free or fill capacity returns the jobs to send now, in order, each with
  its worker. Whoever calls sends them: the gateway wakes who waits, the simulator submits.
- Early binding (QUARTZ and the baselines) chooses the worker in `submit`; late binding (BF-IO)
  when there is room. `Job.worker` is -1 until it is known.
- Times are arguments, in seconds of any monotonic clock. Load and health of the workers are
  the `PoolState`'s; a scheduler never changes them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

Match = Sequence[tuple[int, int]]
"""What a prefix index found: (tokens, bit mask of the workers that hold so many), longest first."""

Points = tuple[tuple[int, int], ...]
"""(bytes, digest of what lies before), ascending; the last is the whole prompt's."""


class Holders(Protocol):
    """Of a pool's prefix index, what is asked."""

    def match(self, points: Points, tokens_per_byte: float = 1.0) -> Match:
        """Who holds how much of a prompt."""
        ...


class Prefix(NamedTuple):
    """A prompt's beginnings, and where to ask who holds them.

    Looked up for the pool that needs it: the index is large, and what is found there is far
    from the processor.
    """

    points: Points = ()
    """None where no index of prefixes is kept."""
    indexes: Sequence[Holders] = ()
    """By pool."""
    tokens_per_byte: float = 1.0
    """The prompt's tokens by the last point's length."""

    def match(self, pool: int) -> Match:
        """Who of a pool holds how much."""
        return self.indexes[pool].match(self.points, self.tokens_per_byte)

    def hits(self) -> list[int]:
        """The longest expected hit of each pool's workers, in tokens."""
        matches = [self.match(pool) for pool in range(len(self.indexes))]
        return [match[0][0] if match else 0 for match in matches]


NO_PREFIX: Final = Prefix()
BANDS: Final = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 2}
"""Service class -> band; a lower one always goes first. Spilled work ranks as spot."""
BAND_NAMES: Final = ("protected", "elastic", "backfill")

State = Literal["new", "waiting", "sent", "answering", "gone", "nowhere"]


class Job:
    """One request on its way to a worker. The caller fills the first part, the policy the rest."""

    __slots__ = (
        "active",
        "arrived_s",
        "backlog_tokens",
        "band",
        "candidates",
        "cap_tokens",
        "client",
        "emitted",
        "excluded",
        "expected_s",
        "hit_tokens",
        "home",
        "key",
        "kv_tokens",
        "kv_usage",
        "match",
        "mean_s",
        "order",
        "output_tokens",
        "owner",
        "policy",
        "prompt_tokens",
        "quantile_s",
        "score",
        "sent_s",
        "sequences",
        "share",
        "state",
        "stream",
        "tenant",
        "worker",
    )

    def __init__(  # noqa: PLR0915 - one statement a field
        self,
        owner: Any,
        prompt_tokens: int,
        output_tokens: int,
        arrived_s: float,
        client: str = "",
        band: int = 1,
        share: float = 1.0,
        cap_tokens: int | None = None,
        kv_tokens: int = 0,
        sequences: int = 1,
        *,
        stream: bool = True,
        match: Match = (),
        excluded: Sequence[int] = (),
        home: int = -1,
        tenant: str = "",
    ) -> None:
        self.owner = owner
        """The caller's own: what to wake or to send."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Expected (L_out), >= 0."""
        self.arrived_s = arrived_s
        self.client = client
        """Whose fairness counter it feeds: an entitlement."""
        self.tenant = tenant
        """Whose entitlement that is."""
        self.band = band
        """0 protected, 1 elastic, 2 backfill."""
        self.share = share
        """The client's weight in fairness, > 0: its rate over the mean rate."""
        self.cap_tokens = cap_tokens
        """m_r, the client's own limit; None when absent."""
        self.kv_tokens = kv_tokens
        """Reserved: L_cost."""
        self.sequences = sequences
        self.stream = stream
        self.match = match
        self.excluded = excluded
        """Workers that failed this request: taken only when no other is available."""
        self.home = home
        """The worker it must go to while that is available (a stored response); -1 for any."""
        self.state: State = "new"
        """nowhere: no worker is available, and the scheduler does not hold it."""
        self.worker = -1
        self.sent_s = 0.0
        self.hit_tokens = 0
        """Expected prefix hit on its worker."""
        self.backlog_tokens = 0
        """Uncached prefill ahead of it on its worker when it was bound."""
        self.active = 0
        """Sequences on its worker when it was bound."""
        self.kv_usage = 0.0
        """Of its worker's KV cache when it was bound, 0 to 1, as far as known."""
        self.mean_s = 0.0
        """Predicted prefill, mean."""
        self.quantile_s = 0.0
        """Predicted prefill, calibrated upper quantile: s-hat."""
        self.expected_s = 0.0
        """From sending to its first token, mean; inf where nothing predicts it."""
        self.score = 0.0
        self.candidates: Sequence[tuple[int, float]] = ()
        """(worker, score) of those compared; lower is better."""
        self.key = 0.0
        """k_fair: the order within its band."""
        self.order = 0
        """Of arrival; breaks ties."""
        self.emitted: Callable[[], int] | None = None
        """Tokens of its answer streamed so far; set by the caller once it is sent, if it knows."""
        self.policy: Any = None
        """The scheduler's own notes on it."""


class Scheduler(Protocol):
    """Assigns one pool's jobs. Pure: no clock, no I/O, randomness only by seed."""

    gates: bool
    """Whether it holds jobs back until others have their first token: it must be told of them."""
    replicas: int
    """Replicas that share the workers, >= 1: each has that share of every gate."""

    @property
    def waiting(self) -> Sequence[int]:
        """Jobs that wait, by band (three numbers)."""
        ...

    @property
    def coverage(self) -> float | None:
        """Share of recent prefills at most their predicted quantile; None where none is made."""
        ...

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """Take a job, which is in the result if it goes at once.

        Else its state is waiting, or nowhere, and then it was not taken.
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
        """A sent job's prefill is done; `cached_tokens` as the engine reported, if it did yet.

        `assumed`: the answer is not streamed, and by the prediction it should be: that frees
        the gate and teaches nothing. Idempotent.
        """
        ...

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """A sent job left its worker, whether or not it had a first token. Idempotent.

        `answered`: it has its whole answer.
        """
        ...

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """A waiting job will not come. Idempotent."""
        ...

    def tick(self, now_s: float) -> Sequence[Job]:
        """Bind the queues of workers that left anew; called a few times a second.

        A job for which no worker is left is in the result too, with state nowhere: its caller
        refuses it.
        """
        ...
