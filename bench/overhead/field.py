"""The contenders of `bench overhead` before the same engines, by turns.

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
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.common.redis_server import RedisServer, redis_program
from bench.common.report import Row, judged
from bench.common.tools import start_engines, tree
from bench.overhead.peers import MAKERS, Make, Start, sluice
from sluice.children import ChildDied, Children, free_ports

EMBEDDED: Final = "sluice"
ON_REDIS: Final = "sluice on Redis"
LEAST_LOADED: Final = "sluice, least-loaded"
ROUTER: Final = "sglang-router"
LITELLM: Final = "litellm"
NAMES: Final = (EMBEDDED, ON_REDIS, *(name for name in MAKERS if name != EMBEDDED))
ONLY: Final = os.environ.get("SLUICE_BENCH_PEERS", "").split()
"""Peers to measure, the gateways always; empty for all."""
_COMES_TO_S: Final = 0.5
"""What fell due while one was stopped is done by then."""


def is_gateway(name: str) -> bool:
    """Whether a contender is ours, and uses one core at most."""
    return name.startswith(EMBEDDED)


class Contender(NamedTuple):
    """One that runs. `pids`: `self`, and `redis` where it has one of its own."""

    name: str
    port: int
    pids: dict[str, int]


class Field(NamedTuple):
    """Engines and the contenders before them."""

    engine_ports: list[int]
    contenders: dict[str, Contender]
    missing: list[Row]
    load: Path


def field(
    stack: ExitStack,
    folder: Path,
    tools: tuple[Path, Path],
    names: Iterable[str],
    *,
    tick_us: int,
    engines: int = 4,
    makers: Mapping[str, Make] = MAKERS,
) -> Field:
    """Start them; they end with `stack`."""
    engine, load = tools
    children = stack.enter_context(Children())
    engine_ports = start_engines(children, engine, engines, tick_us)
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    contenders: dict[str, Contender] = {}
    missing = []
    for name in names:
        if ONLY and name not in ONLY and not is_gateway(name):
            continue
        pids, port = {}, free_ports(1)[0]
        if name != ON_REDIS:
            make = makers[name]
        elif redis_program() is None:
            missing.append(Row(name, None, "redis-server is not on PATH"))
            continue
        else:
            server = stack.enter_context(RedisServer())
            assert server.process is not None
            pids["redis"] = server.process.pid
            make = partial(sluice, state=server.url)
        start = make(folder, port, urls)
        process = None if start is None else _ready(children, start, port)
        if process is not None:
            contenders[name] = Contender(name, port, {"self": process.pid, **pids})
        elif is_gateway(name):
            missing.append(judged(name, None, "runs", False, "did not start"))
        else:
            missing.append(Row(name, None, "not installed or did not start: make bench-peers"))
    return Field(engine_ports, contenders, missing, load)


def _ready(children: Children, start: Start, port: int) -> subprocess.Popen[bytes] | None:
    process = children.start(start.command, env=start.env, quiet=True, silent=True)
    try:
        children.wait_for(f"http://127.0.0.1:{port}{start.ready_path}")
    except ChildDied:
        with contextlib.suppress(ValueError):
            children.forget(process)
        process.kill()
        process.wait()
        return None
    time.sleep(start.warm_up_s)
    return process


@contextlib.contextmanager
def by_turns(found: Field) -> Iterator[None]:
    """Stop all contenders where they are while the block runs, but for whom `alone` lets go on.

    One that is not measured would use processor and caches of the one that is.
    """
    for contender in found.contenders.values():
        _signal(contender, signal.SIGSTOP)
    try:
        yield
    finally:
        for contender in found.contenders.values():
            _signal(contender, signal.SIGCONT)


@contextlib.contextmanager
def alone(contender: Contender) -> Iterator[None]:
    """Let this one go on."""
    _signal(contender, signal.SIGCONT)
    time.sleep(_COMES_TO_S)
    try:
        yield
    finally:
        _signal(contender, signal.SIGSTOP)


def _signal(contender: Contender, number: signal.Signals) -> None:
    for pid in contender.pids.values():
        for process in tree(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


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
    _bind(set(tree(os.getpid())) - set(measured), cores - {core})
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


def may_open(files: int) -> str | None:
    """Raise this process's limit on open files, which children inherit; None, or what lacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        return f"needs {files} open files, the limit is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    return None
