"""Whether an engine fits its pool, by its own pages: health, sleep, model names, window, adapters.

An engine may change what it serves at any time: it sleeps (vLLM's sleep mode), another model is
swapped in, adapters are loaded. So its pages are read again, and at once where there is doubt.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.adapters.engines.pages import NOT_HAD, EnginePages, Page
from gateway.policy.fleet.engine_models import (
    EngineModel,
    adapters,
    is_asleep,
    not_served,
    read_models,
)
from gateway.policy.model_name import matches
from gateway.policy.model_runtime import ModelRuntime
from gateway.records.attempt import WorkerAddress

MODELS_EVERY: Final = 15
"""Probes for one reading of a worker's model list: adapters may be loaded at any time."""
_SHOWN: Final = 5
"""Most adapters named in a line of the log."""

_log = logging.getLogger("sluice.probes")


class Verdict(NamedTuple):
    """Why an engine cannot serve; "" if it can."""

    why: str = ""
    unfit: bool = False
    """The engine says so itself: one word is enough, and nothing is sent there."""


class Fitness:
    """Reads the pages of engines, and remembers what was read when."""

    def __init__(self, pages: EnginePages, clock: Callable[[], float], interval_s: float) -> None:
        self._pages = pages
        self._clock = clock
        self.interval_s = interval_s
        """Between two looks at an engine."""
        self._sleepless: set[tuple[str, str, str]] = set()
        """(model, pool, worker) of engines without /is_sleeping."""
        self._told: set[str] = set()
        """Models of which a line in the log told of adapters that are ignored."""
        self._read_s: dict[tuple[str, str, str], float] = {}
        """(model, pool, worker) -> time of the last reading of its model list since it came up."""

    def forget(self, served: ModelRuntime, pool: int, worker: int, *, gone: bool = False) -> None:
        """Read an engine's model list anew at the next look; `gone`: forget the engine."""
        state = served.fleet.pools[pool]
        place = (served.name, state.name, state.workers[worker])
        self._read_s.pop(place, None)
        if gone:
            self._sleepless.discard(place)

    async def look(self, served: ModelRuntime, pool: int, worker: int) -> Verdict:
        """Look at an engine's pages. Raises the exceptions in `NOT_HAD`."""
        if why := await self._ails(served.fleet.workers[pool][worker]):
            return Verdict(why)
        if await self._sleeps(served, pool, worker):
            return Verdict("it sleeps: wake it with POST /wake_up", unfit=True)
        return await self._misfit(served, pool, worker)

    async def _ails(self, address: WorkerAddress) -> str:
        """Why an engine is not healthy; "" if it is. Raises the exceptions in `NOT_HAD`."""
        page, path = await self._pages.get(address, "/health"), "/health"
        if page is not None and page.status == 404:  # not every engine has /health
            page, path = await self._pages.get(address, "/v1/models"), "/v1/models"
            if page is not None and page.status == 404:
                return "/health and /v1/models answered 404: is the URL's path right?"
            well = page is not None and page.status < 500
        else:
            well = page is not None and page.status < 500
        if well:
            return ""
        return f"{path} answered {'too much' if page is None else page.status}"

    async def _sleeps(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Whether an engine is in vLLM's sleep mode, where requests would hang.

        An engine without the page is asked again when it comes back.
        """
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        place = (served.name, state.name, address.id)
        if place in self._sleepless and state.up[worker]:
            return False
        page = await self._pages.get(address, "/is_sleeping")
        if page is None or page.status != 200:
            if page is not None and page.status in (404, 405):
                self._sleepless.add(place)
            return False
        self._sleepless.discard(place)
        return is_asleep(page.body)

    async def _misfit(self, served: ModelRuntime, pool: int, worker: int) -> Verdict:
        """Whether an engine's model list matches. Asks now and then, and in doubt."""
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        place = (served.name, state.name, address.id)
        read_s = self._read_s.get(place)
        doubt = not state.up[worker] or (pool, worker) in served.adapters.doubted
        if (
            not doubt
            and read_s is not None
            and self._clock() - read_s < MODELS_EVERY * self.interval_s
        ):
            return Verdict()
        try:
            page = await self._pages.get(address, "/v1/models")
        except NOT_HAD:
            return Verdict()  # it is healthy; the next probe asks again
        if why := _refusal(page, address):
            return Verdict(why)
        models = [] if page is None or page.status != 200 else read_models(page.body)
        why = not_served(models, address.served_model or served.name)
        if not why:
            self._read_s[place] = self._clock()
            self._compare_window(served, pool, worker, models)
            if models:
                self._note_adapters(served, pool, worker, adapters(models))
        return Verdict(why, unfit=bool(why))

    def _note_adapters(
        self, served: ModelRuntime, pool: int, worker: int, listed: list[str]
    ) -> None:
        """Note the LoRA adapters that an engine lists; log new and ignored ones."""
        known, aliases = served.adapters, served.aliases
        named = (*known.named, *aliases)
        taken = [n for n in listed if known.discovers or any(matches(a, n) for a in named)]
        met, new = set(known.names), list[str]()
        for rank in served.fleet.pools[pool].siblings[worker]:
            new = known.listed(pool, rank, taken)
        address = served.fleet.workers[pool][worker].id
        if new:
            names = ", ".join(new[:_SHOWN])
            _log.info("worker %s has %d more LoRA adapters: %s", address, len(new), names)
        for name in (set(new) & aliases) - met:
            _log.warning(
                "alias %s of %s is a LoRA adapter at worker %s, which answers under that name: "
                "move it from `aliases` to `loras`",
                name,
                served.name,
                address,
            )
        ignored = [name for name in listed if name not in taken]
        if ignored and served.name not in self._told:
            self._told.add(served.name)
            _log.info(
                "worker %s lists LoRA adapters that the configuration does not name, such as %s: "
                "clients can use them once they stand in `loras` of %s, or `discover_loras` is on",
                address,
                ignored[0],
                served.name,
            )

    @staticmethod
    def _compare_window(
        served: ModelRuntime, pool: int, worker: int, models: list[EngineModel]
    ) -> None:
        """Remark and warn that an engine's own window differs from the configured one."""
        expected, state = served.routing.pools[pool].window_tokens, served.fleet.pools[pool]
        found = {model.window_tokens for model in models if model.window_tokens is not None}
        remark = ""
        if found and expected not in found:
            said = ", ".join(map(str, sorted(found)))
            remark = (
                f"reports max_model_len {said}, but pool {state.name} says {expected}: set it to "
                "the engine's"
            )
            if state.remarks.get(worker) != remark:
                _log.warning("worker %s %s", served.fleet.workers[pool][worker].id, remark)
        for rank in state.siblings[worker]:
            state.remarks.pop(rank, None)
            if remark:
                state.remarks[rank] = remark


def _refusal(page: Page | None, address: WorkerAddress) -> str:
    """Why an engine does not list its models."""
    if page is None or page.status not in (401, 403):
        return ""
    what = "wants a key" if address.api_key is None else "refuses the key"
    return f"/v1/models answered {page.status}, it {what}: set the worker's `api_key`"
