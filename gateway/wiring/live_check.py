"""Probes all engines of a configuration once, as the gateway does. Part of the composition root."""

import asyncio
import contextlib
import time
from functools import partial
from typing import Literal

import msgspec

from gateway.errors import StateFailure
from gateway.fleet import members
from gateway.fleet.model_runtime import Pool
from gateway.fleet.probes import NOT_HAD, EnginePages, Prober
from gateway.fleet.rotation import Rotation
from gateway.metrics import Metrics
from gateway.records.record import Record
from gateway.settings import Config
from gateway.store.backends import backend_of, open_cluster, open_directory
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
    """How one worker, one source of workers, or the state store answered."""

    model: str = ""
    pool: str
    worker: str
    ready: bool
    problem: str = ""
    """Why it is not ready, or what is odd about it; "" if nothing."""
    fix: str = ""


class _ServerInfo(msgspec.Struct):
    disaggregation_mode: Literal["prefill", "decode", "null"] | None = None


async def _note_phase(pages: EnginePages, pool: Pool, worker: int, phase: str) -> None:
    """Remark on an engine of SGLang that says it serves another phase than its pool's."""
    reported = phase
    with contextlib.suppress(*NOT_HAD, msgspec.DecodeError, RecursionError):
        page = await pages.get(pool.addresses[worker], "/get_server_info")
        if page is not None and page.status == 200:
            reported = msgspec.json.decode(page.body, type=_ServerInfo).disaggregation_mode or phase
    if reported != phase:
        pool.engine_of[worker].remark = (
            f"its disaggregation_mode is {reported}, and the file has it in {phase}: set "
            f"--disaggregation-mode {phase}, or move it"
        )


async def _store(config: Config) -> LiveFinding:
    """How the shared state store answers, and what the controller published there."""
    url, problem, fix = config.state.address, "", ""
    directory, cluster = open_directory(url), open_cluster(url)
    try:
        await directory.read(0, "")
        if (expected := config.state.controller) is not None:
            news, fix = await cluster.read(), "see `sluice controller`'s log"
            if news is None:
                problem = "no controller has published"
            elif news.age_s > expected.stale_after_s:
                problem = f"the controller's last news is {news.age_s:.0f} s old"
    except StateFailure as error:
        problem, fix = str(error), "start it, or correct state.url and its password"
    finally:
        await directory.close()
        await cluster.close()
    return LiveFinding(pool="state", worker="store", ready=not problem, problem=problem, fix=fix)


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
    findings: list[LiveFinding] = []
    pages = EnginePages(upstream, config.health.timeout_s)
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
        await asyncio.gather(
            *(
                _note_phase(pages, pool, engine.ranks[0], phase)
                for served in models
                for place, pool in enumerate(served.fleet.pools)
                if (phase := served.fleet.phase_of(place)) is not None
                for engine in pool.engines
            )
        )
        if backend_of(config.state.address) == "redis":  # another host's; nothing is changed there
            findings.append(await _store(config))
        findings += (
            LiveFinding(
                model=source.model,
                pool=source.pool,
                worker=source.source,
                ready=not source.failing,
                problem=source.failing or ("" if source.engines else "it names no engine"),
                fix="correct the URL, or have its server answer" if source.failing else "",
            )
            for source in discovery.report()
        )
    finally:
        await discovery.close()
        await prober.close()
        await upstream.close()
    for served in models:
        for pool in served.fleet.pools:
            finding = partial(LiveFinding, model=served.name, pool=pool.name)
            for place, name in members.present(pool):
                engine = pool.engine_of[place]
                problem, _, fix = (engine.why_down or engine.remark).partition(": set ")
                if fix:
                    fix = f"set {fix}"
                elif problem:
                    fix = next((how for word, how in _FIXES if word in problem), _OTHER)
                findings.append(finding(worker=name, ready=engine.up, problem=problem, fix=fix))
            # Aliases that engines list as LoRA adapters.
            findings += (
                finding(
                    worker=pool.workers[worker],
                    ready=False,
                    problem=f"the alias {alias} is a LoRA adapter here",
                    fix=f"move {alias} from `aliases` to `loras`",
                )
                for alias in served.aliases
                if alias in served.adapters
                for worker in served.adapters.workers(alias, pool)
            )
    return findings
