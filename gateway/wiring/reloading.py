"""Applies a changed configuration file to a running gateway. Part of the composition root.

The whole file is read and checked first, in a thread, so a bad one changes nothing and a large one
lets requests run. Then entitlements and token pools are made ready, what can change without a
restart changes in one step of the event loop, and workers follow in steps that let requests run.
Requests in flight keep what they began with. A reload that failed for another reason than the file
is tried again until it is done.

A model that changes is replaced by another object, which shares the pools that both have: workers,
load, what was learned, queues. Requests that wait are placed anew where their pool has another
scheduler. Whoever holds the earlier object keeps it, and its leases settle in the books that they
came from. A pool or model that is gone takes no new requests, but its engines stay until the last
request that may use them has ended; then it retires.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from gateway.background_task import BackgroundTasks
from gateway.control.metrics_page import ReloadStatus
from gateway.control.roles import RoleKeys
from gateway.errors import BadRequest, Conflict
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.fleet.probes import Prober
from gateway.fleet.rotation import CONFIGURED, Engine, Rotation
from gateway.metrics import Metrics
from gateway.records.proof import Proof
from gateway.settings import Config, ConfigError, ModelConfig, load, parse
from gateway.settings.compare import Change, Comparison, changes, compare, merged
from gateway.settings.config import digest_of
from gateway.settings.worker import WorkerConfig
from gateway.usage.claims import Claims
from gateway.usage.report import FleetBill
from gateway.wiring.auth import role_keys
from gateway.wiring.discovery import Discovery
from gateway.wiring.models import Served, artifact_of, equip, equipment, next_model
from gateway.wiring.replicas import Replicas
from gateway.wiring.token_pools import AdmissionRuntime
from gateway.wiring.workers import Workers
from predictor.artifact import Artifact, ArtifactError

LOOK_EVERY_S: Final = 2.0
RETRY_S: Final = 10.0
"""When a reload is tried again that failed for another reason than the file."""

GRACE_S: Final = 5.0
"""A model that is gone stays at least this long, for requests that read its name just before."""

_log = logging.getLogger("sluice.reload")


class Parts(Protocol):
    """The parts of a gateway that know its models."""

    config: Config
    metrics: Metrics
    pools: AdmissionRuntime
    prober: Prober
    rotation: Rotation
    discovery: Discovery
    workers: Workers
    replicas: Replicas
    bill: FleetBill
    role_keys: RoleKeys
    claims: Claims
    served: Served


class _Next(NamedTuple):
    """One model of the next configuration."""

    model: ModelConfig
    before: ModelRuntime | None
    now: ModelRuntime
    """`before`, where nothing of it changes."""
    artifact: Artifact | None


class _Retiree(NamedTuple):
    """A model, or pools of one, that is gone."""

    served: ModelRuntime
    pools: Sequence[Pool]
    engines: Sequence[Engine]
    since_s: float


class Reloading:
    """Reloads the file that a gateway was configured by."""

    def __init__(self, gateway: Parts) -> None:
        self._gateway = gateway
        self._retirees: list[_Retiree] = []
        self._followed: dict[tuple[str, str], Sequence[WorkerConfig]] = {
            (model.name, name): pool.workers
            for model in gateway.config.models
            for name, pool in model.all_pools.items()
        }
        """Model and pool -> the workers and sources that are followed, also after a failure."""
        self._lock = asyncio.Lock()
        self._comparing = asyncio.Lock()
        self._retry_at_s = inf
        """By the event loop's clock."""
        self._started = False
        self._background = BackgroundTasks()
        self.status = ReloadStatus(successful=True, unix_s=time.time())

    async def start(self) -> None:
        """Watch the file by its content from now on."""
        self._started = True
        if self._gateway.config.origin.file:
            self._background.start(self._watch())

    async def close(self) -> None:
        await self._background.close()

    async def compare(self, text: str) -> Comparison:
        """What a file with this text would change. Raises BadRequest, which names its problems."""
        async with self._comparing:  # one thread, however many ask
            try:
                return await asyncio.to_thread(_compared, self._gateway.config, text)
            except ConfigError as error:
                raise _refused(error) from None

    async def reload(self, proof: Proof | None = None) -> list[Change]:
        """Read the file, apply it, and attach its proof.

        Raises BadRequest, or Conflict for a proof of another file; then nothing changed.
        """
        async with self._lock:
            running = self._gateway.config
            if not running.origin.file:
                raise BadRequest("This gateway has no file.", reason="bad_configuration", code=None)
            successful = False
            self._retry_at_s = asyncio.get_running_loop().time() + RETRY_S
            try:
                after, changed = await asyncio.to_thread(_read, running)
                if proof is not None and proof.config_sha256 != after.origin.digest:
                    successful = self.status.successful
                    raise Conflict(
                        f"The proof is of a file with SHA-256 {proof.config_sha256[:12]}…; "
                        f"{after.origin.file} has {after.origin.digest[:12]}…. Prove that one.",
                        reason="proof_of_another_file",
                    )
                self._refuse_adapted_aliases(after)
                target = merged(running, after)
                following = self._build(target)  # may raise, before anything changed
                target.note(digest=after.origin.digest)
                await self._replace(target, following)
                self._gateway.prober.tune(target.health.interval_s, target.health.timeout_s)
                self._gateway.claims.use(after.origin.digest, proof, time.time())
                successful, self._retry_at_s = True, inf
            except (ConfigError, ArtifactError) as error:
                self._retry_at_s = inf
                _log.error("the configuration stays as it was: %s", error)
                raise _refused(error) from None
            except (BadRequest, Conflict):
                self._retry_at_s = inf
                raise
            finally:
                self.status = ReloadStatus(successful=successful, unix_s=time.time())
            late = [change.path for change in changed if change.restart]
            _log.info(
                "configuration reloaded: %d changes in force%s",
                len(changed) - len(late),
                f"; a restart is needed for {', '.join(late)}" if late else "",
            )
            return changed

    async def decide_anew(self) -> None:
        """Apply the configuration in force to the token pools: keys got limits at run time."""
        async with self._lock:
            gateway = self._gateway
            served = {model.name: model for model in gateway.served.models}
            await gateway.pools.prepare(gateway.config, served)
            gateway.pools.use(gateway.config, served)

    def _refuse_adapted_aliases(self, after: Config) -> None:
        """Refuse an alias that a running engine lists as a LoRA adapter. Raises BadRequest."""
        models = {model.name: model for model in after.models}
        for served in self._gateway.served.models:
            new = set(models[served.name].aliases if served.name in models else ()) - served.aliases
            if taken := [name for name in sorted(new) if name in served.adapters]:
                raise BadRequest(
                    f"The alias '{taken[0]}' of '{served.name}' is a LoRA adapter of its engines. "
                    "Name it in `loras`, and remove the alias.",
                    reason="bad_configuration",
                )

    def hang_up(self, then: Callable[[], None] = lambda: None) -> None:
        """Reload because of SIGHUP; `then` is called when that is done or refused.

        Nothing happens before the start, which looks whether the file has changed meanwhile.
        """

        async def hung_up() -> None:
            await self._tried()
            then()

        if self._started:
            self._background.start(hung_up())

    async def _watch(self) -> None:
        file, last = Path(self._gateway.config.origin.file), self._gateway.config.origin.digest
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            digest = await asyncio.to_thread(_digest_of, file)
            due = asyncio.get_running_loop().time() >= self._retry_at_s
            if digest not in ("", last):
                last = digest
                # Else SIGHUP or an admin was faster.
                due = due or digest != self._gateway.config.origin.digest
            if due:
                await self._tried()

    async def _tried(self) -> None:
        try:
            await self.reload()
        except BadRequest:
            return  # logged, and the metric says so
        except Exception:  # noqa: BLE001 - a defect must not end the watch
            _log.exception("the reload failed")

    def _build(self, target: Config) -> list[_Next]:
        """Build what changes. Raises ArtifactError; nothing has changed."""
        running = self._gateway.config
        configured = {model.name: model for model in running.models}
        now = {served.name: served for served in self._gateway.served.models}
        following = []
        rules = ("server", "health", "timeouts", "retry")
        alike = all(getattr(running, name) == getattr(target, name) for name in rules)
        for model in target.models:
            before, artifact = now.get(model.name), None
            served = before
            if served is None or not alike or configured[model.name] != model:
                artifact = artifact_of(model)
                served = next_model(target, model, before)
            following.append(_Next(model, before, served, artifact))
        return following

    async def _replace(self, target: Config, following: Sequence[_Next]) -> None:
        """Serve the next configuration's models."""
        gateway = self._gateway
        new = [
            (step.now, pool)
            for step in following
            for pool in step.now.fleet.pools
            if step.before is None or pool not in step.before.fleet.pools
        ]
        try:
            for served, pool in new:
                gateway.prober.follow(served, [pool])
            await gateway.prober.look([(pool, e.ranks[0]) for _, pool in new for e in pool.engines])
            await gateway.pools.prepare(target, {step.model.name: step.now for step in following})
        except BaseException:  # it is tried again, with other pools
            for served, pool in new:
                self._forget(served, pool)
            raise
        async with gateway.rotation.still():
            self._switch(target, following)
        await self._follow_workers(target)

    def _forget(self, served: ModelRuntime, pool: Pool) -> None:
        """Forget what engines of a pool that is gone, or never came, were found to be."""
        self._gateway.prober.drop(pool)
        for place in range(len(pool.workers)):
            served.adapters.forget(pool, place)

    def _switch(self, target: Config, following: Sequence[_Next]) -> None:
        """All at once: no request runs in between."""
        gateway, served = self._gateway, self._gateway.served
        before = {old.name: old for old in served.models}
        changed = [step for step in following if step.now is not step.before]
        equipped = {  # all that may fail comes first
            now.name: equipment(target, model, now, artifact) for model, _, now, artifact in changed
        }
        for model, old, now, _ in following:
            before.pop(now.name, None)
            if old is now:
                continue
            equip(equipped[now.name])
            for pool in now.fleet.pools:  # requests that wait with another scheduler bind again
                for job, where in list(pool.queued.items()):
                    waiting = job.owner is not None and not job.owner.done()
                    if waiting and where is not pool.scheduler:
                        where.cancel(job, time.monotonic())
                        job.state = "nowhere"
                        job.owner.set_result(True)
            now.adapters.use(model.loras, discovers=model.discover_loras)
            if old is not None and old.watch is now.watch and model.boundary.auto:
                now.move_boundaries([s.boundary_tokens or 0 for s in old.routing.pools[:-1]])
            self._retire_later(old, now)
        for gone in before.values():
            self._retire_later(gone, None)
        served.models[:] = [step.now for step in following]
        served.name(target)
        gateway.pools.use(target, {step.now.name: step.now for step in following})
        gateway.role_keys.follow(role_keys(target, gateway.pools.tokens))
        gateway.config = gateway.workers.config = target
        gateway.replicas.follow(target)
        gateway.bill.follow((m.name, pool) for m in served.models for pool in m.fleet.pools)

    def _retire_later(self, old: ModelRuntime | None, now: ModelRuntime | None) -> None:
        engines = self._gateway.rotation.replace(old, now)
        staying = () if now is None else now.fleet.pools
        pools = [] if old is None else [pool for pool in old.fleet.pools if pool not in staying]
        if old is None or not pools:
            return
        for pool in pools:
            old.fleet.response_affinity.left(pool.name, range(len(pool.workers)))
            self._forget(old, pool)
        self._retirees.append(_Retiree(old, pools, engines, time.monotonic()))
        self._gateway.served.retiring.append(old)

    def sweep(self) -> None:
        """Retire what is gone and serves nothing any more."""
        gateway, now_s = self._gateway, time.monotonic()
        for retiree in list(self._retirees):
            old, pools, engines, since_s = retiree
            if now_s - since_s < GRACE_S or any(
                pool.inflight or any(pool.active) or pool.queued for pool in pools
            ):
                continue  # a request may be under way
            self._retirees.remove(retiree)
            gateway.served.retiring.remove(old)
            gateway.pools.forget(old)
            gateway.rotation.close_connections(engines)
            here = {m.name: [p.name for p in m.fleet.pools] for m in gateway.served.models}
            if old.name not in here:
                gateway.metrics.forget(model=old.name)
                _log.info("model %s is gone", old.name)
            for pool in pools:
                self._forget(old, pool)  # what its last requests told of it
                for worker in pool.workers:
                    gateway.metrics.ejections.values.pop((pool.name, worker), None)
                if pool.name not in here.get(old.name, ()):
                    gateway.metrics.forget(model=old.name, pool=pool.name)
                    if not any(pool.name in names for names in here.values()):
                        gateway.metrics.forget(pool=pool.name)  # some families name no model
                    _log.info("pool %s/%s is gone", old.name, pool.name)

    async def _follow_workers(self, target: Config) -> None:
        gateway, followed = self._gateway, self._followed
        now = {(m.name, name): pool for m in target.models for name, pool in m.all_pools.items()}
        for gone in [place for place in followed if place not in now]:
            await gateway.discovery.change(*gone, followed[gone], ())
            del followed[gone]
        for place, pool in now.items():
            engines = [worker.addresses for worker in pool.listed]
            await gateway.rotation.apply_to(*place, CONFIGURED, engines)
            await gateway.discovery.change(*place, followed.get(place, ()), pool.workers)
            followed[place] = pool.workers


class LastGood:
    """The configuration as a reload would have it: the file's, or its last good content."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._digest = config.origin.digest
        self._lock = asyncio.Lock()

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file if its content changed. A bad one changes nothing."""
        async with self._lock:
            digest = await asyncio.to_thread(_digest_of, Path(self.config.origin.file))
            if digest in ("", self._digest):
                return
            self._digest = digest
            try:
                after, _ = await asyncio.to_thread(_read, self.config)
                self.config = merged(self.config, after)
            except ConfigError as error:
                _log.error("replicas that start get the configuration before: %s", error)


def _read(running: Config) -> tuple[Config, list[Change]]:
    """The file's configuration now, and what it changes. Raises ConfigError."""
    after = running.as_started(load(running.origin.file))
    return after, changes(running, after)


def _compared(running: Config, text: str) -> Comparison:
    return compare(running, running.as_started(parse(text, "the file", None)))


def _refused(error: Exception) -> BadRequest:
    return BadRequest(str(error), reason="bad_configuration")


def _digest_of(file: Path) -> str:
    """The digest of a file's content; "" while it cannot be read."""
    try:
        return digest_of(file.read_bytes())
    except OSError:
        return ""
