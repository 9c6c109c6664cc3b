"""Applies what sources of engines say to the pools, for as long as the gateway runs.

A source that fails keeps its last set, and is asked again after a pause that grows and is random,
so that many gateways do not come back to it at once.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

from gateway.background_task import TasksByKey
from gateway.ports import Discovery, DiscoveryFailure
from gateway.records.attempt import FoundEngine, WorkerAddress
from gateway.records.record import without_credentials

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
MAX_WORKERS: Final = 10_000
"""Of one source, ranks counted: as many as a pool may list."""
FIRST_SET_S: Final = 5.0
"""How long the start waits for the sources' first sets."""
SLICE: Final = 20
"""Engines read between two turns of the requests."""
WRONG_SHOWN: Final = 5
"""Of a set, entries that are named because they are no engines."""

_log = logging.getLogger("sluice.discovery")

Engine = tuple[WorkerAddress, ...]


class Source:
    """A source of one pool's engines."""

    def __init__(
        self,
        model: str,
        pool: str,
        url: str,
        discovery: Discovery,
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
        self._discovery = discovery
        self._engine_of = engine_of
        self._apply = apply

    async def run(self) -> None:
        """Follow the source until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with aclosing(self._discovery.sets()) as sets:
                    async for found in sets:
                        await self._take(found)
                        pause_s = FIRST_PAUSE_S
            except DiscoveryFailure as failure:
                self._failed(str(failure))
            except Exception as error:  # noqa: BLE001 - a defect must not end the task
                _log.exception("discovery of %s failed", self.url)
                self._failed(type(error).__name__)
            self.first.set()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _take(self, found: Sequence[FoundEngine]) -> None:
        engines: list[Engine] = []
        wrong, workers = 0, 0
        for number, each in enumerate(found, start=1):
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

    def _failed(self, why: str) -> None:
        if why != self.failing:
            kept = "no engine is known" if self.found is None else f"the last {self.found} stay"
            _log.warning("%s does not name engines: %s; %s", self.url, why, kept)
        self.failing = why


class Discovering:
    """The sources of all pools."""

    def __init__(self) -> None:
        self.sources: dict[tuple[str, str, str], Source] = {}
        """(model, pool, URL) -> source."""
        self._background = TasksByKey()
        self._started = False

    def add(self, source: Source) -> None:
        """Follow a source, from `start` on or at once if that was."""
        key = (source.model, source.pool, source.url)
        self.sources[key] = source
        if self._started:
            self._background.start(key, source.run())

    def remove(self, model: str, pool: str, url: str) -> None:
        """Follow a source no more; its engines stay until they are dropped."""
        self.sources.pop((model, pool, url), None)
        self._background.end((model, pool, url))

    async def start(self) -> None:
        """Follow all sources; waits a few seconds for what they say first."""
        self._started = True
        for key, source in self.sources.items():
            self._background.start(key, source.run())
        firsts = [asyncio.ensure_future(source.first.wait()) for source in self.sources.values()]
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=FIRST_SET_S)
            for waiting in late:
                waiting.cancel()

    async def close(self) -> None:
        await self._background.close()
