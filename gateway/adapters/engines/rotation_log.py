"""Logs every change of a worker's state once, with cause and undo, whoever saw it.

Probes, traffic and the breaker change a worker's state; none of them logs it. Draining is logged
by the audit.
"""

import logging
from collections.abc import Iterable
from itertools import chain

from gateway.policy.fleet import fleet
from gateway.policy.fleet.fleet import PoolState
from gateway.policy.model_runtime import ModelRuntime

_log = logging.getLogger("sluice.workers")


class RotationLog:
    """Compares what is out of the rotation with what was last told."""

    def __init__(self) -> None:
        self._told: dict[PoolState, tuple[int, dict[str, str]]] = {}
        """The pool's revision, and its workers that were out -> why."""

    def look(self, models: Iterable[ModelRuntime], now_s: float) -> None:
        """Log what changed since the last look; about once a second."""
        told = self._told
        self._told = {}
        for served in models:
            for pool in served.fleet.pools:
                revision, before = told.get(pool, (-1, {}))
                if revision == pool.revision and not before:
                    now = before
                else:
                    now = fleet.out_of_rotation(pool, now_s)
                    _tell(f"{served.name}/{pool.name}", before, now)
                self._told[pool] = (pool.revision, now)


def _tell(place: str, before: dict[str, str], now: dict[str, str]) -> None:
    for worker in dict.fromkeys(chain(before, now)):
        if worker not in now:
            _log.info("worker %s of %s is back in the rotation", worker, place)
        elif now[worker] != before.get(worker):
            _log.warning("worker %s of %s is out of the rotation: %s", worker, place, now[worker])
