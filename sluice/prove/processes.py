"""Runs trials: short ones here, long ones in two processes, with their progress."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any, Final, Protocol

from sluice.prove.trial import Trial, run
from sluice.prove.verdict import Tally

FEW: Final = 30_000
"""Requests of all trials that are not worth processes of their own."""
PROCESSES: Final = 2


class Progress(Protocol):
    """Shows how far all trials are."""

    def __call__(self, *, completed: int, total: int) -> None:
        """So many requests arrived, of so many."""
        ...


_arrived: Any = None
"""In a process of its own: arrivals by trial, shared with the one that waits."""


def run_all(trials: Sequence[Trial], progress: Progress) -> list[Tally]:
    """The tallies, in order."""
    sizes = [len(trial.sample.recorded.at_s) for trial in trials]
    total = sum(sizes)
    if total <= FEW:
        tallies = []
        for place, trial in enumerate(trials):
            tallies.append(run(trial))
            progress(completed=sum(sizes[: place + 1]), total=total)
        return tallies
    spawn = multiprocessing.get_context("spawn")
    arrived = spawn.Array("q", len(trials))
    with ProcessPoolExecutor(PROCESSES, spawn, _share, (arrived,)) as pool:
        futures = [pool.submit(_run_apart, place, trial) for place, trial in enumerate(trials)]
        while wait(futures, timeout=0.5).not_done:
            progress(completed=sum(arrived[:]), total=total)
        return [future.result() for future in futures]


def _share(arrived: Any) -> None:
    global _arrived  # noqa: PLW0603 - the way in which a pool hands shared memory on
    _arrived = arrived


def _run_apart(place: int, trial: Trial) -> Tally:
    def progress(count: int) -> None:
        _arrived[place] = count

    return run(trial, progress)
