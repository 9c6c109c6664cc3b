"""Limits how far each tenant's requests can move the predictions that all tenants share.

For each learned logarithm, the sum of a tenant's changes (its pull) stays within a bound. If one
tenant distorts a value, the others' requests correct it, and the tenant has no pull left to
distort it again. The only known tenant is not bounded: there is nobody to protect.
Processes add up what they learn, so each process allows a tenant its part of the bound.
"""

from collections.abc import Mapping
from itertools import islice
from math import log
from typing import Any, Final

Pulls = dict[int, float]
"""One tenant's summed changes, by the index of the logarithm."""

MAX_TENANTS: Final = 256
"""Tenants tracked separately; all further ones share one bound."""
SPEED_PULL: Final = log(2.0)
"""Bound for a worker's speed, as a logarithm."""
CALIBRATION_PULL: Final = log(2.0) / 2
"""Bound for a regime's correction, and likewise for the global one."""


def held(pulls: Pulls, index: int, step: float, most: float) -> float:
    """The step, shortened so that the tenant's sum ends within its bound `most`."""
    pulled = pulls.get(index, 0.0)
    if -most <= pulled + step <= most:
        return step
    return (most if pulled + step > 0.0 else -most) - pulled


class Tenants:
    """Each tenant's pulls on calibration and on speeds."""

    __slots__ = ("_elsewhere", "_known")

    def __init__(self) -> None:
        self._known: dict[str, tuple[Pulls, Pulls]] = {}
        self._elsewhere: set[str] = set()
        """Tenants that other processes know, at most two from each."""

    def of(self, client: str) -> tuple[Pulls, Pulls] | None:
        """A tenant's pulls on calibration and on speeds; None where it is not bounded."""
        known = self._known
        pulls = known.get(client)
        if pulls is None:
            if not client:
                return None
            if len(known) >= MAX_TENANTS:
                client = ""
                pulls = known.get(client)
            if pulls is None:
                pulls = known[client] = ({}, {})
        return pulls if len(known) > 1 or self._elsewhere - {client} else None

    def state(self) -> dict[str, Any]:
        """Two tenants known here: enough for any process to see that a tenant is not alone."""
        return {"known": list(islice(self._known, 2))}

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Store the tenants that the other processes know."""
        lists = [state.get("known") for state in others.values()]
        self._elsewhere = {
            client
            for known in lists
            if isinstance(known, list)
            for client in known[:2]
            if isinstance(client, str)
        }

    def forget(self, worker: int) -> None:
        """Drop all pulls on a worker's speed: another engine is there now."""
        for _, speeds in self._known.values():
            speeds.pop(worker, None)
