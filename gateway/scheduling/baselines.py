"""Schedulers without a queue: every job is sent on arrival, and the engines queue.

They are on the path of every request without another scheduler, so they are kept cheap. Load is
the PoolState's: the requests that this gateway has sent and not seen finish.
"""

from collections.abc import Sequence
from typing import Final

from gateway.fleet import fleet, members
from gateway.fleet.binding import least_loaded
from gateway.fleet.fleet import PoolState
from gateway.scheduling.scheduler import Job
from gateway.scheduling.sticky import pick_sticky

NOTHING: Final[Sequence[Job]] = ()
NO_ONE_WAITS: Final = (0, 0, 0)


class Immediate:
    """A Scheduler that lacks only `_pick`; see `gateway.scheduling.scheduler`."""

    __slots__ = ("_cursor", "_pool", "replicas")

    gates: bool = False
    coverage: float | None = None
    waiting: Sequence[int] = NO_ONE_WAITS

    def __init__(self, pool: PoolState) -> None:
        self.replicas = 1
        self._pool = pool
        self._cursor = 0

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        """Choose one of at least two workers; may fill in the job's score and candidates."""
        raise NotImplementedError

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        choice = present = fleet.available(self._pool, now_s)
        if self._pool.warming:
            choice = members.without_cold(self._pool, choice, now_s)
        if job.barred:
            choice = [w for w in choice if w not in job.barred]
            choice = choice or [w for w in present if w not in job.barred]
        if job.excluded:
            choice = [w for w in choice if w not in job.excluded] or choice
        if not choice:
            job.state = "nowhere"
            return NOTHING
        if job.preferred >= 0 and job.preferred in present:
            worker = job.preferred
        else:
            worker = choice[0] if len(choice) == 1 else self._pick(job, choice)
        job.worker = worker
        for tokens, mask in job.match:
            if mask >> worker & 1:
                job.hit_tokens = tokens
                break
        job.state = "sent"
        job.sent_s = now_s
        return (job,)

    def joined(self, worker: int) -> None:
        """See Scheduler; load is the PoolState's."""

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        if job.state == "sent":
            job.state = "answering"
        return NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        if job.state in {"sent", "answering"}:
            job.state = "gone"
        return NOTHING

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler; no job ever waits here."""
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        return NOTHING


class LeastLoaded(Immediate):
    """Least share of reserved tokens plus of sequences, as in `gateway.fleet.binding`."""

    __slots__ = ()

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        worker, job.score, job.candidates = least_loaded(self._pool, choice)
        return worker


class RoundRobin(Immediate):
    """Workers in turn, whatever their load."""

    __slots__ = ()

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        self._cursor += 1
        return choice[(self._cursor - 1) % len(choice)]


class Sticky(Immediate):
    """Longest cached prefix first, with bounded load; else least loaded by sequences."""

    __slots__ = ()

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        pool = self._pool
        active = pool.active
        self._cursor += 1
        mean, slots = pool.total_active / len(choice), pool.slots_per_worker
        worker = pick_sticky(job.match, choice, active, self._cursor, mean=mean, slots=slots)
        job.score = float(active[worker])
        job.candidates = ((worker, job.score),)
        return worker
