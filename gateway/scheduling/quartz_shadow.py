"""QUARTZ in the shadow of another policy: it predicts and advises, and decides nothing.

The other scheduler binds each job as it would alone. Then QUARTZ scores the workers for the same
job, predicts the prefill on the worker that was chosen, and learns from its first token. So the
accuracy of predictions, and the worker that QUARTZ would choose, are known before a switch, and
the request log of any fleet can train a predictor.

Predictions cost CPU that no request gains from, so a busy pool makes `PER_S` a second; of all
further requests only the backlog and the prefix are kept.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.scheduling.baselines import Immediate
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.scheduler import Job

PER_S: Final = 200.0
BURST_S: Final = 1.0
"""So much of the allowance may be saved up."""


class Shadow:
    """A Scheduler: `inner` decides, `quartz` watches."""

    __slots__ = ("_inner", "_next_s", "_quartz")

    gates: bool = True  # first tokens are to be told, although no job waits for one

    def __init__(self, inner: Immediate, quartz: Quartz) -> None:
        self._inner = inner
        self._quartz = quartz
        self._next_s = -inf
        """When the allowance permits another prediction."""

    @property
    def replicas(self) -> int:
        return self._quartz.replicas

    @replicas.setter
    def replicas(self, replicas: int) -> None:
        self._inner.replicas = self._quartz.replicas = replicas

    @property
    def waiting(self) -> Sequence[int]:
        return self._inner.waiting

    @property
    def coverage(self) -> float | None:
        return self._quartz.coverage

    def joined(self, worker: int) -> None:
        """See Scheduler; QUARTZ counts workers, too."""
        self._inner.joined(worker)
        self._quartz.joined(worker)

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        ready = self._inner.submit(job, now_s)
        if ready:
            advise = self._next_s <= now_s
            if advise:
                self._next_s = max(self._next_s, now_s - BURST_S) + 1.0 / PER_S
            self._quartz.follow(job, now_s, advise=advise)
        return ready

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        unseen = assumed or job.would_bind < 0
        return self._quartz.first_token(job, now_s, cached_tokens, assumed=unseen)

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        return self._quartz.finished(job, now_s, answered=answered)

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler; no job ever waits here."""
        return self._inner.cancel(job, now_s)

    def tick(self, now_s: float) -> Sequence[Job]:
        return self._quartz.tick(now_s)
