"""Probes all engines of a configuration once, as the gateway does. Part of the composition root."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain

from gateway.errors import StateFailure
from gateway.fleet import members
from gateway.fleet.model_runtime import ModelRuntime, adapted_aliases
from gateway.fleet.probes import Prober
from gateway.fleet.rotation import Rotation
from gateway.metrics import Metrics
from gateway.records.record import Record
from gateway.settings import Config
from gateway.store.backends import backend_of, open_directory
from gateway.upstream import HttpUpstream
from gateway.wiring.discovery import Discovery
from gateway.wiring.models import served_model

_FIXES = (
    ("refuse", "start the engine, or correct host and port"),
    ("no answer", "is it started, and does a firewall let this machine through?"),
    ("name not found", "correct the host in its URL; here it is looked up by: getent hosts HOST"),
    ("certificate", "give its `ca_file`, or the host that the certificate names"),
    ("404", "give the URL that the engine's own /health is under, without /v1"),
    ("sleeps", "wake it: curl -X POST ENGINE/wake_up"),
    ("max_model_len", "set the pool's max_model_len to the engine's"),
)
_OTHER = "see the engine's log"


class LiveFinding(Record, frozen=True, kw_only=True):
    """How one worker, or one source of workers, answered."""

    model: str
    pool: str
    worker: str
    ready: bool
    problem: str = ""
    """Why it is not ready, or what is odd about it; "" if nothing."""
    fix: str = ""


async def look(config: Config) -> list[LiveFinding]:
    """Find the engines and probe each once. Raises nothing for engines that do not answer."""
    models = tuple(served_model(config, model) for model in config.models)
    upstream = HttpUpstream()
    prober = Prober(
        models,
        interval_s=config.health.interval_s,
        timeout_s=config.health.timeout_s,
        upstream=upstream,
    )
    rotation = Rotation(models, prober, Metrics(), time.monotonic, disconnect=upstream.disconnect)
    discovery = Discovery(config, models, rotation)
    try:
        await discovery.start()
        await asyncio.gather(
            *(
                prober.probe(pool, worker)
                for served in models
                for pool in served.fleet.pools
                for worker in [engine.ranks[0] for engine in pool.engines]
            )
        )
        engines = chain.from_iterable(map(_engines, models))
        return [*await _store(config), *_sources(discovery), *engines]
    finally:
        await discovery.close()
        await prober.close()
        await upstream.close()


async def _store(config: Config) -> list[LiveFinding]:
    """The state store, where it is another host's; reads and changes nothing of it."""
    url = config.state.address
    if backend_of(url) != "redis":
        return []
    directory = open_directory(url)
    problem = ""
    try:
        await directory.read(0, "")
    except StateFailure as error:
        problem = str(error)
    finally:
        await directory.close()
    fix = "start it, or correct state.url and its password" if problem else ""
    return [
        LiveFinding(
            model="", pool="state", worker="store", ready=not problem, problem=problem, fix=fix
        )
    ]


def _sources(discovery: Discovery) -> Iterator[LiveFinding]:
    for source in discovery.report():
        problem = source.failing or ("" if source.engines else "it names no engine")
        yield LiveFinding(
            model=source.model,
            pool=source.pool,
            worker=source.source,
            ready=not source.failing,
            problem=problem,
            fix="correct the URL, or have its server answer" if source.failing else "",
        )


def _engines(served: ModelRuntime) -> Iterator[LiveFinding]:
    """Workers, and aliases that engines list as LoRA adapters."""
    for pool in served.fleet.pools:
        finding = partial(LiveFinding, model=served.name, pool=pool.name)
        for place, name in members.present(pool):
            engine = pool.engine_of[place]
            problem = engine.why_down or engine.remark
            problem, _, fix = problem.partition(": set ")
            if fix:
                fix = f"set {fix}"
            elif problem:
                fix = next((how for word, how in _FIXES if word in problem), _OTHER)
            yield finding(worker=name, ready=engine.up, problem=problem, fix=fix)
        for alias in adapted_aliases(served, served.aliases):
            for worker in served.adapters.workers(alias, pool):
                yield finding(
                    worker=pool.workers[worker],
                    ready=False,
                    problem=f"the alias {alias} is a LoRA adapter here",
                    fix=f"move {alias} from `aliases` to `loras`",
                )
