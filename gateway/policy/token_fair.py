"""Token-based fairness in admission, size and locality unseen: a baseline of the QUARTZ paper.

Least-loaded routing; each queue is served in the order of start tags (start-time fair
queueing): a client's next request starts where its last one ended, counted in prompt tokens
over its share, and never before what is being served. So clients with work get tokens in
proportion to their shares, whatever their requests are like ("TokenFair", section 5.3).
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.policy.fleet import PoolState
from gateway.policy.gated import Gated
from gateway.policy.quartz_profile import QuartzProfile
from gateway.policy.scheduling import Job
from gateway.policy.sticky import pick_least

MOST_CLIENTS: Final = 16_384


class TokenFair(Gated):
    """One pool's scheduler; of the profile it takes the gate and the breaker."""

    __slots__ = ("_cursor", "_ends", "_served")

    def __init__(self, pool: PoolState, profile: QuartzProfile) -> None:
        super().__init__(pool, profile)
        self._cursor = 0
        self._served = 0.0  # the latest start tag sent: virtual time
        self._ends: dict[str, float] = {}

    def _bind(self, job: Job, choice: Sequence[int], now_s: float) -> None:
        active, lengths = self._pool.active, self._queues.lengths
        load = [a + b for a, b in zip(active, lengths, strict=True)]
        self._cursor += 1
        job.worker = pick_least(choice, load, self._cursor)
        job.score = float(load[job.worker])
        job.candidates = ((job.worker, job.score),)
        if job.state == "new":  # bound anew, it keeps its tag
            job.key = max(self._served, self._ends.pop(job.client, 0.0))
            self._ends[job.client] = job.key + job.prompt_tokens / job.share
            if len(self._ends) > MOST_CLIENTS:
                del self._ends[next(iter(self._ends))]

    def _sending(self, job: Job, now_s: float) -> float:
        self._served = max(self._served, job.key)
        job.backlog_tokens = self.backlog_tokens[job.worker]
        return inf
