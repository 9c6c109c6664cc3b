"""Health probes: each worker's /health, its window as /v1/models reports it, its KV cache.

One task an engine, whose ranks share the verdict. A probe changes only whether a worker is in the
rotation, never its load. A worker that refused a request's connection is probed again at the next
interval and returns by itself. Probes are spread evenly over the interval: a round of thousands
at once would keep the event loop from requests.
"""

import asyncio
import logging
from collections.abc import Iterable
from math import floor
from typing import Any, Final

import msgspec

from gateway.adapters.engine_kv import EngineKv
from gateway.adapters.engine_pages import NOT_HAD, EnginePages
from gateway.domain import WorkerAddress
from gateway.errors import UpstreamFailure
from gateway.policy import fleet
from gateway.policy.served import ServedModel
from gateway.ports import Upstream

FIRST_AT_ONCE: Final = 128
"""Engines that are probed at a time before the first request is served."""

_log = logging.getLogger("sluice.probes")

_Which = tuple[ServedModel, int, int]
"""Model, pool, the first worker of an engine."""


class Prober:
    """Probes every worker of every model until stopped."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        *,
        interval_s: float,
        timeout_s: float,
        upstream: Upstream | None = None,
        kv: EngineKv | None = None,
    ) -> None:
        """`upstream`: whose connections to use; without it they are its own.

        `kv` is filled with what engines tell of their KV caches.
        """
        self._kv = kv
        self._models = list(models)
        self._interval_s = interval_s
        self._pages = EnginePages(upstream, timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._warned: set[tuple[str, str]] = set()

    async def start(self) -> None:
        """Probe everything once, then go on in the background."""
        engines: list[_Which] = [
            (served, pool, ranks[0])
            for served in self._models
            for pool, state in enumerate(served.pools)
            for ranks in state.engines
        ]
        left = iter(engines)

        async def first() -> None:
            for which in left:
                await self.probe(*which)

        await asyncio.gather(*(first() for _ in range(min(FIRST_AT_ONCE, len(engines)))))
        began_s = asyncio.get_running_loop().time()
        self._tasks = [
            asyncio.create_task(
                self._run(which, began_s + self._interval_s * (1 + number / len(engines)))
            )
            for number, which in enumerate(engines)
        ]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pages.close()

    async def probe(self, served: ServedModel, pool: int, worker: int) -> bool:
        """Probe one worker and apply the verdict to its engine, all ranks of it."""
        address = served.workers[pool][worker]
        state = served.pools[pool]
        try:
            ok = await self._answers(address)
        except UpstreamFailure:  # the gateway's own machine could not ask
            return state.up[worker]
        if fleet.probed(state, worker, ok=ok):
            level = logging.INFO if ok else logging.WARNING
            what = "is ready" if ok else "is not ready"
            _log.log(level, "worker %s of %s/%s %s", address.id, served.name, state.name, what)
        if ok and (served.name, address.id) not in self._warned:
            self._warned.add((served.name, address.id))
            await self._check_window(served, pool, address)
        if self._kv is not None:
            for rank in state.siblings[worker]:
                if not ok:
                    self._kv.forget(served, pool, rank)
                elif self._kv.asks(served, pool, rank):
                    await self._kv.learn(served, pool, rank, self._pages)
        return ok

    async def _answers(self, address: WorkerAddress) -> bool:
        """Whether an engine is healthy. Raises UpstreamFailure where that cannot be asked."""
        try:
            page = await self._pages.get(address, "/health")
            if page is None or page.status != 404:
                return page is not None and page.status < 500
            page = await self._pages.get(address, "/v1/models")  # not every engine has /health
        except UpstreamFailure as failure:
            if failure.kind == "local":
                raise
            return False
        except OSError:
            return False
        return page is not None and page.status == 200

    async def _check_window(self, served: ServedModel, pool: int, address: WorkerAddress) -> None:
        """Warn when an engine's own window differs from the configured one."""
        try:
            page = await self._pages.get(address, "/v1/models")
        except NOT_HAD:
            return
        expected = served.routing.pools[pool].window_tokens
        found = set() if page is None or page.status != 200 else _windows(page.body)
        if found and expected not in found:
            _log.warning(
                "worker %s reports max_model_len %s, but pool %s says %d: set it to the engine's",
                address.id,
                ", ".join(map(str, sorted(found))),
                served.pools[pool].name,
                expected,
            )

    async def _run(self, which: _Which, at_s: float) -> None:
        """Probe an engine at this time of the loop's and every interval after it."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(at_s - loop.time())
            await self.probe(*which)
            # In step with itself, so that engines stay spread; what took longer leaves one out.
            at_s += self._interval_s * (1 + max(0, floor((loop.time() - at_s) / self._interval_s)))


def _windows(body: bytes) -> set[int]:
    """The windows that a list of models tells of; nothing where it is none."""
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return set()
    cards = told.get("data") if isinstance(told, dict) else None
    windows = [
        card.get("max_model_len")
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict)
    ]
    return {window for window in windows if isinstance(window, int)}
