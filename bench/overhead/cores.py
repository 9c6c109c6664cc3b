"""Gives the measured process a core of its own.

A gateway is one thread. On two cores the kernel wakes an engine, the load generator or Redis on
the gateway's core while the other is idle: a gateway that always had work spent 10 to 13 % of
the time waiting for its core, and its utilisation was .85 to .9. It therefore gets a core, and
all other processes the rest. The core changes by turns, since on a shared host one may be slower
for a while: in two runs on the first core, two hours apart, the same gateway took 214 and 300 us
a request; the peers, which were not bound, took 151 and 157, 14,092 and 14,778. Contenders of
many threads are not bound: they do best unbound.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.common.tools import tree


@contextlib.contextmanager
def own_core(pid: int, turn: int) -> Iterator[None]:
    """Bind a process tree to one core, and this process and all its others to the other cores.

    `turn` counts on from core to core. Processes started within the block are bound like this
    one. With a single core nothing is bound; afterwards everybody may go anywhere again.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    core = sorted(cores)[turn % len(cores)]
    measured = tree(pid)
    others = set(tree(os.getpid())) - set(measured)
    _bind(others, cores - {core})
    _bind(measured, {core})
    try:
        yield
    finally:
        _bind([*tree(os.getpid()), *measured], cores)


def _bind(pids: Iterable[int], cores: set[int]) -> None:
    """Bind every thread of these processes; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)
