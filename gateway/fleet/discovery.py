"""Sources of engines: their sets are applied to the pools for as long as the gateway runs.

A source that fails keeps its last set, and is asked again after a pause that grows and is random,
so that many gateways do not come back to it at once.

The source of this module is a YAML file that other software writes (Slurm, Ray, Ansible): a list of
URLs or of mappings with `url`, and `model` and `ranks` if they differ from the configuration; or a
mapping with that list under `workers`. It is watched by content: a replaced file and a swapped
symbolic link are changes, a touched one is not. A file that is being written is left alone until
two readings agree: half of it would take engines out. An empty file, as a full disk leaves one, is
a failure for the same reason: `[]` stands for no engines.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.ports import DiscoveryFailure, Sets
from gateway.records.attempt import FoundEngine, WorkerAddress
from gateway.records.record import without_credentials

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
MAX_WORKERS: Final = 10_000
"""Of one source, ranks counted: as many as a pool may list."""
SLICE: Final = 20
"""Engines read between two turns of the requests."""
WRONG_SHOWN: Final = 5
"""Of a set, entries that are named because they are no engines."""
LOOK_EVERY_S: Final = 1.0
SETTLE_S: Final = 0.05
"""Between two readings of a changed file that must agree."""
MAX_BYTES: Final = 2 * 1024 * 1024
"""Enough for 10,000 engines; the parser takes seconds for more."""
MAX_RANKS: Final = 256

_log = logging.getLogger("sluice.discovery")

Engine = tuple[WorkerAddress, ...]


class Source:
    """A source of one pool's engines."""

    def __init__(
        self,
        model: str,
        pool: str,
        url: str,
        sets: Callable[[], Sets],
        engine_of: Callable[[FoundEngine], Engine],
        apply: Callable[[Sequence[Engine]], Awaitable[None]],
    ) -> None:
        """`engine_of` raises ValueError for an engine that cannot be one; `apply` takes a set."""
        self.model = model
        self.pool = pool
        self.url = url
        self.failing = ""
        """Why it does not answer; "" while it does."""
        self.found: int | None = None
        """Engines in its last set; None before the first."""
        self.first = asyncio.Event()
        """Set after its first set or failure."""
        self._sets = sets
        self._engine_of = engine_of
        self._apply = apply

    async def run(self) -> None:
        """Follow the source until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            why = ""
            try:
                async with aclosing(self._sets()) as sets:
                    async for engines in sets:
                        await self._take(engines)
                        pause_s = FIRST_PAUSE_S
            except DiscoveryFailure as failure:
                why = str(failure)
            except Exception as error:  # noqa: BLE001 - a defect must not end the task
                _log.exception("discovery of %s failed", self.url)
                why = type(error).__name__
            if why != self.failing:
                rest = "no engine is known" if self.found is None else f"the last {self.found} stay"
                _log.warning("%s does not name engines: %s; %s", self.url, why, rest)
            self.failing = why
            self.first.set()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _take(self, engines_named: Sequence[FoundEngine]) -> None:
        engines: list[Engine] = []
        wrong, workers = 0, 0
        for number, each in enumerate(engines_named, start=1):
            try:
                engines.append(self._engine_of(each))
                workers += len(engines[-1])
            except ValueError as error:
                wrong += 1
                if wrong <= WRONG_SHOWN:
                    named = without_credentials(each.urls[0].partition("?")[0])
                    _log.warning("%s names %.200s: %s", self.url, named, error)
            if workers > MAX_WORKERS:
                raise DiscoveryFailure(f"it names over {MAX_WORKERS} workers")
            if number % SLICE == 0:
                await asyncio.sleep(0)  # requests run in between
        if self.failing:
            _log.warning("%s answers again", self.url)
        self.failing, self.found = "", len(engines)
        await self._apply(engines)
        self.first.set()


async def sets_of_file(path: str, every_s: float = LOOK_EVERY_S) -> Sets:
    """The engines that a file lists."""
    before: bytes | None = None
    while True:
        content = await asyncio.to_thread(_read, Path(path))
        while content != before:
            await asyncio.sleep(SETTLE_S)
            again = await asyncio.to_thread(_read, Path(path))
            if again == content:
                break
            content = again
        if content != before:
            yield await asyncio.to_thread(engines_of, content)
            before = content
        await asyncio.sleep(every_s)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DiscoveryFailure(f"{path}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise DiscoveryFailure(f"{path} is over {MAX_BYTES >> 20} MiB")
    return content


def engines_of(content: bytes) -> tuple[FoundEngine, ...]:
    """The engines that a file's content lists. Raises DiscoveryFailure, which names the entry."""
    try:
        document = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise DiscoveryFailure(f"not YAML: {' '.join(str(error).split())}") from error
    if isinstance(document, dict) and set(document) == {"workers"}:
        document = document["workers"]
    if document is None:
        raise DiscoveryFailure("empty: write [] for no workers")
    if not isinstance(document, list):
        raise DiscoveryFailure("not a list of workers")
    return tuple(_engine(number, entry) for number, entry in enumerate(document, start=1))


def _engine(number: int, entry: Any) -> FoundEngine:
    fields = {"url": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not {"url"} <= fields.keys() <= {"url", "model", "ranks"}:
        raise DiscoveryFailure(f"entry {number} is no URL and no mapping of url, model, ranks")
    url, model, ranks = fields["url"], fields.get("model"), fields.get("ranks", 0)
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise DiscoveryFailure(f"entry {number}: url is not http://host:port")
    if not isinstance(model, str | None) or type(ranks) is not int or not 0 <= ranks <= MAX_RANKS:
        raise DiscoveryFailure(f"entry {number}: model is a name, ranks a number up to {MAX_RANKS}")
    return FoundEngine(urls=(url,), model=model, ranks=ranks)
