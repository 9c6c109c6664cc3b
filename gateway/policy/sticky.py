"""Prefix locality first, with bounded load: where the longest cached prefix is, unless crowded.

A worker is crowded when its load is above `CROWDED` times the mean, and a few requests more:
affinity without such a bound sends ever more to the worker that has most (a death spiral).
"""

from collections.abc import Sequence
from typing import Final

from gateway.policy.scheduling import Match

CROWDED: Final = 1.25
SLACK: Final = 4.0
"""Requests."""


def pick_sticky(match: Match, choice: Sequence[int], load: Sequence[float], cursor: int) -> int:
    """The worker with the longest prefix that is not crowded, else the least loaded.

    `load` is in requests, by worker; ties go round with the cursor.
    """
    if match:
        bound = CROWDED * sum([load[w] for w in choice]) / len(choice) + SLACK
        for _, mask in match:
            holders = [w for w in choice if mask >> w & 1 and load[w] <= bound]
            if holders:
                return min(holders, key=load.__getitem__)
    return pick_least(choice, load, cursor)


def pick_least(choice: Sequence[int], load: Sequence[float], cursor: int) -> int:
    """The least loaded; ties go round with the cursor."""
    least = min([load[w] for w in choice])
    ties = [w for w in choice if load[w] <= least]
    return ties[cursor % len(ties)]
