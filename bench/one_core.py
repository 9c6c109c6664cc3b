"""One core for the gateway, the others for who asks it and whom it asks (Linux).

What a request costs depends on how busy its process is. Processes that share an offered load are
each less busy than one that serves it all, unless they share its core, too.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from bench.overhead_tools import tree


def can_be_kept() -> bool:
    """Whether this machine has cores to divide, and a way to do so."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


@contextlib.contextmanager
def on_one_core(roots: Sequence[int]) -> Iterator[None]:
    """Keep the process trees `roots` on one core, this process and its other children off it.

    Children that come meanwhile stay where who starts them is. Afterwards all may use all cores.
    """
    cores = os.sched_getaffinity(0)
    theirs = {pid for root in roots for pid in tree(root)}
    everybody = set(tree(os.getpid()))
    one = {min(cores)}
    _keep(theirs, one)
    _keep(everybody - theirs, cores - one)
    try:
        yield
    finally:
        _keep(everybody | theirs, cores)


def _keep(pids: Iterable[int], cores: Collection[int]) -> None:
    """Every thread of these processes; those that have ended meanwhile are nobody's concern."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
