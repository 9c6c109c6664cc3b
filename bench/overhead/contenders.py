"""Start the contenders of `bench overhead` before the same engines."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from bench.common.redis_server import RedisServer, redis_program
from bench.common.report import Row
from bench.common.tools import start_engines, tree
from bench.overhead.peers import MAKERS, PeerStart, sluice_on_redis
from sluice.children import ChildDied, Children, free_ports

EMBEDDED: Final = "sluice"
ON_REDIS: Final = "sluice on Redis"
LEAST_LOADED: Final = "sluice, least-loaded"
TENANTS: Final = "sluice, tenants"
ROUTER: Final = "sglang-router"
GATEWAYS: Final = (EMBEDDED, ON_REDIS, LEAST_LOADED, TENANTS)
LITELLM: Final = "litellm"
OF_ONE_CORE: Final = (*GATEWAYS, LITELLM)
"""Python programs of one process: they use one core at most."""
NAMES: Final = (EMBEDDED, ON_REDIS, *(name for name in MAKERS if name not in (EMBEDDED, TENANTS)))

ROUNDS: Final = int(os.environ.get("SLUICE_BENCH_ROUNDS", "5"))
"""Rounds that count, of each section that goes by rounds."""
ONLY: Final = os.environ.get("SLUICE_BENCH_PEERS", "").split()
"""Peers to measure, the gateways always; empty for all."""
TIME_SCALE: Final = float(os.environ.get("SLUICE_BENCH_TIME_SCALE", "1"))
"""Runs of the load generator are so many times as long: below 1 for a trial."""


_COMES_TO_S: Final = 0.5
"""What fell due while one was stopped is done by then."""


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
) -> Field:
    """Start them; they end with `stack`."""
    engine, load = tools
    children = stack.enter_context(Children())
    engine_ports = start_engines(children, engine, engines, tick_us)
    contenders: dict[str, Contender] = {}
    missing = []
    for name in names:
        if ONLY and name not in (*ONLY, *GATEWAYS):
            continue
        if name == ON_REDIS and redis_program() is None:
            missing.append(_missing(name, "redis-server is not on PATH"))
            continue
        found = _start(stack, children, folder, name, engine_ports)
        if found is None:
            missing.append(_missing(name, "not installed or did not start: make bench-peers"))
        else:
            contenders[name] = found
    return Field(engine_ports, contenders, missing, load)


@contextlib.contextmanager
def by_turns(field: Field) -> Iterator[None]:
    """Stop all contenders where they are while the block runs, but for whom `alone` lets go on.

    One that is not measured would use processor and caches of the one that is.
    """
    for contender in field.contenders.values():
        _signal(contender, signal.SIGSTOP)
    try:
        yield
    finally:
        for contender in field.contenders.values():
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


def _missing(name: str, note: str) -> Row:
    """The gateway itself may not be missing."""
    holds = False if name == EMBEDDED else None
    return Row(
        metric=name,
        measured=None,
        target="runs" if holds is False else None,
        holds=holds,
        note=note,
    )


def _start(
    stack: ExitStack, children: Children, folder: Path, name: str, engine_ports: Sequence[int]
) -> Contender | None:
    port = free_ports(1)[0]
    pids = {}
    if name == ON_REDIS:
        server = stack.enter_context(RedisServer())
        assert server.process is not None
        pids["redis"] = server.process.pid
        peer: PeerStart | None = sluice_on_redis(folder, port, engine_ports, server.url)
    else:
        peer = MAKERS[name](folder, port, engine_ports)
    process = None if peer is None else _ready(children, peer, port)
    if process is None:
        return None
    return Contender(name, port, {"self": process.pid, **pids})


def _ready(children: Children, peer: PeerStart, port: int) -> subprocess.Popen[bytes] | None:
    process = children.start(peer.command, env=peer.env, quiet=True, silent=True)
    try:
        children.wait_for(f"http://127.0.0.1:{port}{peer.ready_path}")
    except ChildDied:
        with contextlib.suppress(ValueError):
            children.forget(process)
        process.kill()
        process.wait()
        return None
    time.sleep(peer.warm_up_s)
    return process


def may_open(files: int) -> str | None:
    """Raise this process's limit on open files, which children inherit; None, or what lacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        return f"needs {files} open files, the limit is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    return None
