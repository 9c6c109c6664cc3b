"""Assigns the first waiting requests to the ranks of one barrier group.

The objective is BF-IO's: G x max_g L_g - sum L_g after the requests are placed, now (H = 0)
("A Universal Load Balancing Principle", section 4). The solver places several at once; with
one free slot or one waiting request, the best choice is found directly:

- one request, several ranks: the rank that raises the maximum least, then the least loaded;
- one slot, several requests: the longest that fits below the fullest rank, else the shortest.

Ties go to the longer hit in the rank's prefix cache, then to the queue's order. A request that
was passed over until the age limit goes first, because the objective alone lets a request that
fills no gap wait without end.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.scheduling.scheduler import Job

Pairs = list[tuple[int, int]]
"""(index of the request, index of the rank)."""


class Assign(Protocol):
    """`gateway.scheduling.rank_solver.assign`."""

    def __call__(
        self,
        load: Sequence[float],
        cap: Sequence[int],
        sizes: Sequence[float],
        waits: Sequence[float],
        *,
        maxage: float | None,
    ) -> Pairs:
        """Assign min(items, free slots) items to slots."""
        ...


def choose(
    solve: Assign,
    ranks: Sequence[int],
    loads: Sequence[float],
    caps: Sequence[int],
    jobs: Sequence[Job],
    waits_s: Sequence[float],
    maxage_s: float,
) -> Pairs:
    """At most sum(caps) pairs, each job once; `jobs` come in the queue's order."""
    free = [index for index, cap in enumerate(caps) if cap > 0]
    if not free or not jobs:
        return []
    if len(jobs) == 1:
        return [(0, _rank_for(jobs[0], ranks, loads, free))]
    if len(free) == 1 and caps[free[0]] == 1:
        return [(_job_for(free[0], ranks, loads, jobs, waits_s, maxage_s), free[0])]
    sizes = [float(job.prompt_tokens) for job in jobs]
    return solve(loads, caps, sizes, waits_s, maxage=maxage_s)


def hit_tokens(job: Job, rank: int) -> int:
    """Expected prefix hit of a job on a rank, in tokens."""
    for tokens, holders in job.match:
        if holders >> rank & 1:
            return tokens
    return 0


def _rank_for(job: Job, ranks: Sequence[int], loads: Sequence[float], free: list[int]) -> int:
    fullest = max(loads)
    size = job.prompt_tokens

    def cost(index: int) -> tuple[float, float, int]:
        load = loads[index]
        return max(0.0, load + size - fullest), load, -hit_tokens(job, ranks[index])

    return min(free, key=cost)


def _job_for(
    index: int,
    ranks: Sequence[int],
    loads: Sequence[float],
    jobs: Sequence[Job],
    waits_s: Sequence[float],
    maxage_s: float,
) -> int:
    oldest = max(range(len(jobs)), key=waits_s.__getitem__)
    if waits_s[oldest] >= maxage_s:
        return oldest
    others = [load for at, load in enumerate(loads) if at != index]
    room = max(others) - loads[index] if others else 0.0
    group, rank = len(loads), ranks[index]

    def cost(at: int) -> tuple[float, int]:
        size = jobs[at].prompt_tokens
        return group * max(room, size) - size, -hit_tokens(jobs[at], rank)

    return min(range(len(jobs)), key=cost)
