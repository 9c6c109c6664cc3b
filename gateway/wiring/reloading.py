"""Applies a changed configuration file to a running gateway. Part of the composition root.

The whole file is read and checked first, so a bad one changes nothing. Then what can change
without a restart changes in one step of the event loop, except for workers and entitlements, which
follow at once in steps that let requests run. Requests in flight keep what they began with.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gateway.adapters.background_task import BackgroundTasks
from gateway.adapters.engines.probes import Prober
from gateway.adapters.engines.rotation import CONFIGURED, Rotation
from gateway.errors import BadRequest
from gateway.policy.model_runtime import ModelRuntime
from gateway.settings import Config, ConfigError, ModelConfig, load, parse
from gateway.settings.diff import Change, changes, merged
from gateway.web.metrics.page import ReloadStatus
from gateway.wiring.discovery import Discovery
from gateway.wiring.models import served_model
from gateway.wiring.token_pools import AdmissionRuntime
from gateway.wiring.workers import Workers
from predictor.artifact import ArtifactError

LOOK_EVERY_S: Final = 2.0

_log = logging.getLogger("sluice.reload")
_set: Final = msgspec.structs.force_setattr
_replace: Final = msgspec.structs.replace


class Parts(Protocol):
    """The parts of a gateway that a reload changes."""

    config: Config
    models: tuple[ModelRuntime, ...]
    pools: AdmissionRuntime
    prober: Prober
    rotation: Rotation
    discovery: Discovery
    workers: Workers


class Reloading:
    """Reloads the file that a gateway was configured by."""

    def __init__(self, gateway: Parts, wall_clock: Callable[[], float] = time.time) -> None:
        self._gateway = gateway
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()
        self._background = BackgroundTasks()
        self.status = ReloadStatus(successful=True, unix_s=wall_clock())

    async def start(self) -> None:
        """Watch the file by its content from now on."""
        if self._gateway.config.file:
            self._background.start(self._watch())

    async def close(self) -> None:
        """Stop."""
        await self._background.close()

    def compare(self, text: str) -> list[Change]:
        """What a file with this text would change. Raises BadRequest, which names its problems."""
        config = self._gateway.config
        try:
            return changes(config, config.as_started(parse(text, "the file", os.environ)))
        except ConfigError as error:
            raise _refused(error) from None

    async def reload(self) -> list[Change]:
        """Read the file and apply it. Raises BadRequest; then nothing changed."""
        async with self._lock:
            running = self._gateway.config
            try:
                if not running.file:
                    raise BadRequest("This gateway has no file.", reason="bad_configuration")
                after = running.as_started(load(running.file))
                found = changes(running, after)
                await self._apply(running, after)
            except (ConfigError, ArtifactError) as error:
                self.status = ReloadStatus(successful=False, unix_s=self._wall_clock())
                _log.error("the configuration stays as it was: %s", error)
                raise _refused(error) from None
            self.status = ReloadStatus(successful=True, unix_s=self._wall_clock())
            late = [change.path for change in found if change.restart]
            _log.info(
                "configuration reloaded: %d changes in force%s",
                len(found) - len(late),
                f"; a restart is needed for {', '.join(late)}" if late else "",
            )
            return found

    def hang_up(self, then: Callable[[], None] = lambda: None) -> None:
        """Reload because of SIGHUP; `then` is called when that is done or refused."""
        self._background.start(self._hung_up(then))

    async def _hung_up(self, then: Callable[[], None]) -> None:
        await self._tried()
        then()

    async def _watch(self) -> None:
        file, seen = Path(self._gateway.config.file), self._gateway.config.digest
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            digest = await asyncio.to_thread(_digest_of, file)
            if digest not in ("", seen):
                seen = digest
                if digest != self._gateway.config.digest:  # else SIGHUP or an admin was faster
                    await self._tried()

    async def _tried(self) -> None:
        try:
            await self.reload()
        except BadRequest:
            return  # logged, and the metric says so
        except Exception:  # noqa: BLE001 - a defect must not end the watch
            self.status = ReloadStatus(successful=False, unix_s=self._wall_clock())
            _log.exception("the reload failed")

    async def _apply(self, running: Config, after: Config) -> None:
        """Apply what needs no restart. Raises ArtifactError before anything changed."""
        gateway, target = self._gateway, merged(running, after)
        fresh = [served_model(target, model) for model in target.models]
        for served, new, model in zip(gateway.models, fresh, target.models, strict=True):
            _adopt(served, new, model)
        gateway.pools.respecify(target)
        gateway.prober.tune(target.health.interval_s, target.health.timeout_s)
        target.note_digest(after.digest)
        gateway.config = gateway.workers.config = target
        for served, old, model in zip(gateway.models, running.models, target.models, strict=True):
            for index, (name, pool) in enumerate(model.pools.items()):
                engines = [worker.addresses for worker in pool.listed]
                await gateway.rotation.apply(served.name, index, CONFIGURED, engines)
                await gateway.discovery.change(
                    served.name, index, name, old.pools[name].workers, pool.workers
                )
        if target.entitlements != running.entitlements:
            await gateway.pools.adopt_entitlements(target)
        gateway.pools.adopt_tenants(target)  # after the entitlements that their keys open


def _adopt(served: ModelRuntime, new: ModelRuntime, model: ModelConfig) -> None:
    """Give a served model new rules; its pools, workers and all that was learned stay."""
    moved = model.boundary.auto  # its boundaries are the controller's
    shapes = zip(served.routing.pools, new.routing.pools, strict=True)
    kept = tuple(
        _replace(shape, boundary_tokens=old.boundary_tokens) if moved else shape
        for old, shape in shapes
    )
    fleet, scheduling = served.fleet, served.scheduling
    for state, pool in zip(fleet.pools, model.pools.values(), strict=True):
        state.slots_per_worker = pool.max_num_seqs
        state.may_be_empty = pool.may_be_empty
    _set(served, "routing", _replace(new.routing, pools=kept))
    _set(served, "price", new.price)
    _set(served, "admission", _replace(new.admission, rates=served.admission.rates))
    rules = {"health": new.fleet.health, "timeouts": new.fleet.timeouts}
    _set(served, "fleet", _replace(fleet, max_attempts=new.fleet.max_attempts, **rules))
    _set(
        served,
        "scheduling",
        _replace(
            scheduling,
            queue=new.scheduling.queue,
            salted=new.scheduling.salted,
            engine_priority=new.scheduling.engine_priority,
        ),
    )
    if served.compression is not None and new.compression is not None:
        _set(served, "compression", _replace(served.compression, rules=new.compression.rules))


def _refused(error: Exception) -> BadRequest:
    return BadRequest(str(error), reason="bad_configuration", code="bad_configuration")


def _digest_of(file: Path) -> str:
    """The digest of a file's content; "" while it cannot be read."""
    try:
        return Config.digest_of(file.read_bytes())
    except OSError:
        return ""
