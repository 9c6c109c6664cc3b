"""Prefix locality first, with bounded load: where the longest cached prefix is, unless crowded.

A worker is crowded when its load is above `CROWDED` times the mean, and a few requests more:
affinity without such a bound sends ever more to the worker that has most (a death spiral).
Of more than `COMPARED` workers some are looked at, others at the next request, so that a choice
costs the same whatever the fleet.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.policy.scheduling.scheduler import Match

CROWDED: Final = 1.25
SLACK: Final = 4.0
"""Requests."""
COMPARED: Final = 64
"""Workers looked at for the least loaded, where there are more."""
HOLDERS: Final = 16
"""Workers looked at that hold one and the same prefix, where there are more than `COMPARED`."""


def pick_sticky(
    match: Match,
    choice: Sequence[int],
    load: Sequence[float],
    cursor: int,
    *,
    mean: float | None = None,
) -> int:
    """The worker with the longest prefix that is not crowded, else the least loaded.

    `choice` ascends; `load` is in requests, by worker; ties go round with the cursor. `mean` is
    the load's where the caller keeps it: without it all that can be chosen are added up.
    """
    if match:
        if mean is None:
            mean = sum([load[w] for w in choice]) / len(choice)
        bound = CROWDED * mean + SLACK
        few = len(choice) <= COMPARED
        for _, mask in match:
            known = choice if few else _holders(mask, choice, cursor)
            holders = [w for w in known if mask >> w & 1 and load[w] <= bound]
            if holders:
                return min(holders, key=load.__getitem__)
    return pick_least(choice, load, cursor)


def pick_least(choice: Sequence[int], load: Sequence[float], cursor: int) -> int:
    """The least loaded of those looked at; ties go round with the cursor."""
    if len(choice) > COMPARED:
        at = cursor * COMPARED % len(choice)
        choice = [*choice[at : at + COMPARED], *choice[: max(0, at + COMPARED - len(choice))]]
    least = min([load[w] for w in choice])
    ties = [w for w in choice if load[w] <= least]
    return ties[cursor % len(ties)]


def _holders(mask: int, choice: Sequence[int], cursor: int) -> list[int]:
    """Some workers of the mask that can be chosen, others with another cursor."""
    found: list[int] = []
    for worker in _turned(mask, cursor):
        place = bisect_left(choice, worker)
        if place < len(choice) and choice[place] == worker:
            found.append(worker)
            if len(found) == HOLDERS:
                break
    return found


def _turned(mask: int, cursor: int) -> Iterator[int]:
    """At most `COMPARED` workers of a mask, beginning at another one with another cursor."""
    start = cursor * HOLDERS % max(1, mask.bit_length())
    upper = mask >> start << start
    left = COMPARED
    for part in (upper, mask ^ upper):
        rest = part
        while rest and left:
            low = rest & -rest
            yield low.bit_length() - 1
            rest ^= low
            left -= 1
