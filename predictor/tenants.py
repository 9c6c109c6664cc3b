"""How far each tenant may have moved what all tenants' predictions share.

What a tenant's requests have moved, in sum, stays within a bound for each learned logarithm.
What one pulls beyond its due, the others' requests pull back, and it has nothing left to pull
with. A tenant that nobody else is known beside is not held: nobody else knows better.
Processes add up what they learn, so each allows a tenant its part of the bound.
"""

from collections.abc import Mapping
from itertools import islice
from math import log
from typing import Any, Final

Pulls = dict[int, float]
"""What one tenant has moved, in sum, by the index of the logarithm."""

MOST_TENANTS: Final = 256
"""Told apart; all further ones are held together as one."""
SPEED_PULL: Final = log(2.0)
"""Of a worker's speed."""
CALIBRATION_PULL: Final = log(2.0) / 2
"""Of a regime's correction, and as much of the correction of all."""


def held(pulls: Pulls, index: int, step: float, most: float) -> float:
    """As much of a step as leaves the tenant within its bound, or brings it back there."""
    pulled = pulls.get(index, 0.0)
    if -most <= pulled + step <= most:
        return step
    return (most if pulled + step > 0.0 else -most) - pulled


class Tenants:
    """What each tenant has moved: calibration, and speeds."""

    __slots__ = ("_elsewhere", "_known")

    def __init__(self) -> None:
        self._known: dict[str, tuple[Pulls, Pulls]] = {}
        self._elsewhere: set[str] = set()
        """Of those that other processes know: two of each process at most."""

    def of(self, client: str) -> tuple[Pulls, Pulls] | None:
        """Pulls on calibration and on speeds; None where the tenant is not held."""
        known = self._known
        pulls = known.get(client)
        if pulls is None:
            if not client:
                return None
            if len(known) >= MOST_TENANTS:
                client = ""
                pulls = known.get(client)
            if pulls is None:
                pulls = known[client] = ({}, {})
        return pulls if len(known) > 1 or self._elsewhere - {client} else None

    def state(self) -> dict[str, Any]:
        """Two that are known here, so that each of them is known beside another."""
        return {"known": list(islice(self._known, 2))}

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in which tenants the other processes know."""
        told = [state.get("known") for state in others.values()]
        self._elsewhere = {
            client
            for known in told
            if isinstance(known, list)
            for client in known[:2]
            if isinstance(client, str)
        }

    def forget(self, worker: int) -> None:
        """Another engine is there now."""
        for _, speeds in self._known.values():
            speeds.pop(worker, None)
