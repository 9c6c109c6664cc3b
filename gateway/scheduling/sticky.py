"""Prefix affinity with bounded load: the longest cached prefix, unless its worker is crowded.

A worker is crowded when its load is above `CROWDED` times the mean plus `SLACK`, or when its slots
are full and another's are not. Without such a bound, affinity keeps sending requests to the
worker that already has most. With more than
`COMPARED` workers, each choice examines a rotating part of them, so that its cost is bounded.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from gateway.scheduling.scheduler import Match

CROWDED: Final = 1.25
SLACK: Final = 4.0
"""Requests."""
COMPARED: Final = 64
"""Most workers examined for the least loaded."""
HOLDERS: Final = 16
"""Most holders of one prefix examined in a fleet of more than `COMPARED` workers."""


def pick_sticky(
    match: Match,
    choice: Sequence[int],
    load: Sequence[float],
    cursor: int,
    *,
    mean: float | None = None,
    slots: float = inf,
) -> int:
    """The uncrowded worker with the longest cached prefix, else the least loaded.

    `choice` ascends; `load` is in requests, by worker; ties rotate with the cursor. `mean` is
    the mean load of `choice`; computed when not given. `slots`: what one worker runs at a time.
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
                holder = min(holders, key=load.__getitem__)
                if load[holder] >= slots:
                    least = pick_least(choice, load, cursor)
                    return holder if load[least] >= slots else least
                return holder
    return pick_least(choice, load, cursor)


def pick_least(choice: Sequence[int], load: Sequence[float], cursor: int) -> int:
    """The least loaded of the examined workers; ties rotate with the cursor."""
    if len(choice) > COMPARED:
        at = cursor * COMPARED % len(choice)
        choice = [*choice[at : at + COMPARED], *choice[: max(0, at + COMPARED - len(choice))]]
    least = min([load[w] for w in choice])
    ties = [w for w in choice if load[w] <= least]
    return ties[cursor % len(ties)]


def _holders(mask: int, choice: Sequence[int], cursor: int) -> list[int]:
    """Up to HOLDERS workers of the mask that are in `choice`, rotating with the cursor."""
    found: list[int] = []
    for worker in _turned(mask, cursor):
        place = bisect_left(choice, worker)
        if place < len(choice) and choice[place] == worker:
            found.append(worker)
            if len(found) == HOLDERS:
                break
    return found


def _turned(mask: int, cursor: int) -> Iterator[int]:
    """At most `COMPARED` workers of a mask, starting at a worker that rotates with the cursor."""
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
