"""Applies a changed configuration file to a running gateway. Part of the composition root.

The whole file is read and checked first, in a thread, so a bad one changes nothing and a large one
lets requests run. Then entitlements and token pools are made ready, what can change without a
restart changes in one step of the event loop, and workers follow in steps that let requests run.
Requests in flight keep what they began with. A reload that failed for another reason than the file
is tried again until it is done.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final

from gateway.background_task import BackgroundTasks
from gateway.control.metrics_page import ReloadStatus
from gateway.errors import BadRequest
from gateway.fleet.model_runtime import adapted_aliases
from gateway.settings import Config, ConfigError, load, parse
from gateway.settings.compare import Change, Comparison, changes, compare, merged
from gateway.wiring.model_set import ModelSet, Parts
from predictor.artifact import ArtifactError

LOOK_EVERY_S: Final = 2.0
RETRY_S: Final = 10.0
"""When a reload is tried again that failed for another reason than the file."""
RETIRE_EVERY_S: Final = 1.0
"""How often models that are gone are looked at."""

_log = logging.getLogger("sluice.reload")


class Reloading:
    """Reloads the file that a gateway was configured by."""

    def __init__(self, gateway: Parts) -> None:
        self._gateway = gateway
        self.models = ModelSet(gateway)
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
        self._background.start(self._retire())
        if self._gateway.config.file:
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

    async def reload(self) -> list[Change]:
        """Read the file and apply it. Raises BadRequest; then nothing changed."""
        async with self._lock:
            running = self._gateway.config
            if not running.file:
                raise BadRequest("This gateway has no file.", reason="bad_configuration")
            successful = False
            self._retry_at_s = asyncio.get_running_loop().time() + RETRY_S
            try:
                after, found = await asyncio.to_thread(_read, running)
                self._refuse_adapted_aliases(after)
                target = merged(running, after)
                following = self.models.build(target)  # may raise, before anything changed
                target.note_digest(after.digest)
                await self.models.replace(target, following)
                self._gateway.prober.tune(target.health.interval_s, target.health.timeout_s)
                successful, self._retry_at_s = True, inf
            except (ConfigError, ArtifactError) as error:
                self._retry_at_s = inf
                _log.error("the configuration stays as it was: %s", error)
                raise _refused(error) from None
            except BadRequest:
                self._retry_at_s = inf
                raise
            finally:
                self.status = ReloadStatus(successful=successful, unix_s=time.time())
            late = [change.path for change in found if change.restart]
            _log.info(
                "configuration reloaded: %d changes in force%s",
                len(found) - len(late),
                f"; a restart is needed for {', '.join(late)}" if late else "",
            )
            return found

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
            if taken := adapted_aliases(served, sorted(new)):
                raise BadRequest(
                    f"The alias '{taken[0]}' of '{served.name}' is a LoRA adapter of its engines. "
                    "Name it in `loras`, and remove the alias.",
                    reason="bad_configuration",
                    code="bad_configuration",
                )

    def hang_up(self, then: Callable[[], None] = lambda: None) -> None:
        """Reload because of SIGHUP; `then` is called when that is done or refused.

        Nothing happens before the start, which looks whether the file has changed meanwhile.
        """
        if self._started:
            self._background.start(self._hung_up(then))

    async def _hung_up(self, then: Callable[[], None]) -> None:
        await self._tried()
        then()

    async def _watch(self) -> None:
        file, seen = Path(self._gateway.config.file), self._gateway.config.digest
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            digest = await asyncio.to_thread(_digest_of, file)
            due = asyncio.get_running_loop().time() >= self._retry_at_s
            if digest not in ("", seen):
                seen = digest
                # Else SIGHUP or an admin was faster.
                due = due or digest != self._gateway.config.digest
            if due:
                await self._tried()

    async def _tried(self) -> None:
        try:
            await self.reload()
        except BadRequest:
            return  # logged, and the metric says so
        except Exception:  # noqa: BLE001 - a defect must not end the watch
            _log.exception("the reload failed")

    async def _retire(self) -> None:
        while True:
            await asyncio.sleep(RETIRE_EVERY_S)
            try:
                self.models.sweep()
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("retiring models failed")


class LastGood:
    """The configuration as a reload would have it: the file's, or its last good content."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._seen = config.digest
        self._lock = asyncio.Lock()

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file if its content changed. A bad one changes nothing."""
        async with self._lock:
            digest = await asyncio.to_thread(_digest_of, Path(self.config.file))
            if digest in ("", self._seen):
                return
            self._seen = digest
            try:
                after, _ = await asyncio.to_thread(_read, self.config)
                self.config = merged(self.config, after)
            except ConfigError as error:
                _log.error("replicas that start get the configuration before: %s", error)


def _read(running: Config) -> tuple[Config, list[Change]]:
    """The file's configuration now, and what it changes. Raises ConfigError."""
    after = running.as_started(load(running.file))
    return after, changes(running, after)


def _compared(running: Config, text: str) -> Comparison:
    return compare(running, running.as_started(parse(text, "the file", None)))


def _refused(error: Exception) -> BadRequest:
    return BadRequest(str(error), reason="bad_configuration", code="bad_configuration")


def _digest_of(file: Path) -> str:
    """The digest of a file's content; "" while it cannot be read."""
    try:
        return Config.digest_of(file.read_bytes())
    except OSError:
        return ""
