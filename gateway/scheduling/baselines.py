"""Schedulers without a queue: every job is sent on arrival, and the engines queue.

They are on the path of every request without another scheduler, so they are kept cheap. Load is
the PoolState's: the requests that this gateway has sent and not seen finish.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.scheduling.scheduler import NOTHING, Job, Match, Scheduler, hit_tokens

CROWDED: Final = 1.25
SLACK: Final = 4.0
"""Requests."""
COMPARED: Final = 64
"""Most workers compared per request; in a larger pool the next request compares the next ones.
The least loaded of 64 balances as well as that of thousands, at a fixed cost."""
RETAINED_CANDIDATES: Final = 8
"""Most candidates with their scores in a decision record."""
HOLDERS: Final = 16
"""Most holders of one prefix examined in a fleet of more than `COMPARED` workers."""


def turned(choice: Sequence[int], at: int, count: int) -> list[int]:
    """At most `count` workers of the choice from place `at` on, which goes round."""
    return [*choice[at : at + count], *choice[: max(0, at + count - len(choice))]]


def pick_sticky(
    match: Match,
    choice: Sequence[int],
    load: Sequence[float],
    cursor: int,
    *,
    mean: float,
    slots: float = inf,
) -> int:
    """The uncrowded worker with the longest cached prefix, else the least loaded.

    `choice` ascends; `load` is in requests, by worker; ties rotate with the cursor. `mean` is
    the mean load of `choice`. `slots`: what one worker runs at a time.
    """
    bound = CROWDED * mean + SLACK
    for _, mask in match:
        examined = choice if len(choice) <= COMPARED else _holders(mask, choice, cursor)
        holders = [w for w in examined if mask >> w & 1 and load[w] <= bound]
        if holders:
            holder = min(holders, key=load.__getitem__)
            if load[holder] < slots:
                return holder
            least = pick_least(choice, load, cursor)
            return holder if load[least] >= slots else least
    return pick_least(choice, load, cursor)


def pick_least(choice: Sequence[int], load: Sequence[float], cursor: int) -> int:
    """The least loaded of the examined workers; ties rotate with the cursor."""
    if len(choice) > COMPARED:
        choice = turned(choice, cursor * COMPARED % len(choice), COMPARED)
    least = min([load[w] for w in choice])
    ties = [w for w in choice if load[w] <= least]
    return ties[cursor % len(ties)]


def _holders(mask: int, choice: Sequence[int], cursor: int) -> list[int]:
    """Up to HOLDERS workers of the mask that are in `choice`, of COMPARED looked at in turn."""
    start = cursor * HOLDERS % max(1, mask.bit_length())
    upper = mask >> start << start
    holders: list[int] = []
    left = COMPARED
    for part in (upper, mask ^ upper):
        rest = part
        while rest and left and len(holders) < HOLDERS:
            low = rest & -rest
            worker = low.bit_length() - 1
            place = bisect_left(choice, worker)
            if place < len(choice) and choice[place] == worker:
                holders.append(worker)
            rest ^= low
            left -= 1
    return holders


class Immediate(Scheduler):
    """A Scheduler that lacks only `_pick`."""

    def __init__(self, pool: PoolState) -> None:
        super().__init__(pool)
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
            left = [w for w in choice if w not in job.excluded]
            # One in slow start goes before one that has just failed.
            left = left or [w for w in present if w not in job.excluded and w not in job.barred]
            choice = left or choice
        if not choice:
            job.state = "nowhere"
            return NOTHING
        if job.preferred >= 0 and job.preferred in present:
            worker = job.preferred
        else:
            worker = choice[0] if len(choice) == 1 else self._pick(job, choice)
        job.worker, job.active = worker, self._pool.active[worker]
        job.hit_tokens = hit_tokens(job.match, worker)
        job.state = "sent"
        job.sent_s = now_s
        return (job,)


def least_loaded(
    pool: PoolState, choice: Sequence[int]
) -> tuple[int, float, Sequence[tuple[int, float]]]:
    """The worker of the least score, that score, and some (worker, score) compared with it."""
    if len(choice) > COMPARED:
        choice = turned(choice, pool.cursor * COMPARED % len(choice), COMPARED)
    kv, active = pool.tokens, pool.active
    kv_unit = 1.0 / (pool.total_tokens or 1)
    active_unit = 1.0 / (pool.total_active or 1)
    scores = [kv[i] * kv_unit + active[i] * active_unit for i in choice]
    least = min(scores)
    compared = tuple(zip(choice[:RETAINED_CANDIDATES], scores, strict=False))
    pool.cursor += 1
    if scores.count(least) == 1:
        return choice[scores.index(least)], least, compared
    ties = [i for i, score in zip(choice, scores, strict=True) if score <= least]
    return ties[(pool.cursor - 1) % len(ties)], least, compared


class LeastLoaded(Immediate):
    """Least share of reserved tokens plus of sequences, each queued ones included.

    The score is in [0, 2], lower is better, and 0 in an idle pool; ties rotate over the workers in
    order. For independent replicas this equals or beats join-shortest-queue on mean TPOT and cuts
    its p99 (docs/develop/benches/bfio.md). Counts are this gateway's own in-flight work, including
    requests that wait in the engine's queue.
    """

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        worker, job.score, job.candidates = least_loaded(self._pool, choice)
        return worker


class RoundRobin(Immediate):
    """Workers in turn, whatever their load."""

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        self._cursor += 1
        return choice[(self._cursor - 1) % len(choice)]


class Sticky(Immediate):
    """Longest cached prefix first, with bounded load; else least loaded by sequences."""

    def _pick(self, job: Job, choice: Sequence[int]) -> int:
        active, slots = self._pool.active, self._pool.slots_per_worker
        mean = self._pool.total_active / len(choice)
        self._cursor += 1
        worker = pick_sticky(job.match, choice, active, self._cursor, mean=mean, slots=slots)
        job.score = float(active[worker])
        job.candidates = ((worker, job.score),)
        return worker
