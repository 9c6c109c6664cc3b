"""Health probes: each worker's /health, the models it lists, its KV cache, its progress.

Each engine has one task; its ranks share the verdict. A probe changes only whether a worker is in
rotation, never its load. `gateway.fleet.fleet` decides how many missed probes take a worker
out. A worker that refused a request's connection is probed at the next interval and returns by
itself. Probes are spread evenly over the interval, because thousands at once would block the
event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from math import floor
from typing import Final, NamedTuple

from gateway.background_task import TasksByKey
from gateway.fleet import fleet
from gateway.fleet.engine_models import (
    EngineModel,
    adapters,
    is_asleep,
    not_served,
    read_models,
)
from gateway.fleet.engine_pages import NOT_HAD, Counted, EnginePages, Page
from gateway.fleet.fleet import PoolState
from gateway.fleet.kv_capacity import EngineKv
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Upstream
from gateway.records.attempt import WorkerAddress
from gateway.records.endpoint import matches

PROBE_BATCH: Final = 128
"""Engines probed concurrently before the first request is served."""
OWN_SHARE: Final = 0.25
"""Share of a probe's time limit. After a longer stall of the event loop, a time-out is ignored."""
MODELS_EVERY: Final = 15
"""Probes for one reading of a worker's model list: adapters may be loaded at any time."""
BEAT_S: Final = 0.1
NOTED_S: Final = 0.05
"""A shorter delay of the event loop is a busy loop, not a stall."""
_SHOWN: Final = 5
"""Most adapters named in a line of the log."""

_log = logging.getLogger("sluice.probes")

OnFrozen = Callable[[ModelRuntime, int, int], None]
"""Called with (model, pool, worker) of a frozen engine, which gives no token to any client."""
_Which = tuple[ModelRuntime, int, int]
"""Model, pool, the first worker of an engine."""


class Prober:
    """Probes every worker of every model until stopped."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        *,
        interval_s: float,
        timeout_s: float,
        upstream: Upstream,
        kv: EngineKv | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_frozen: OnFrozen | None = None,
    ) -> None:
        """`upstream` provides connections.

        `kv` receives the engines' KV capacities. `clock` is the requests' clock. `on_frozen` is
        called at each probe while an engine is frozen.
        """
        self._on_frozen = on_frozen
        self._counted: dict[tuple[PoolState, int], Counted] = {}
        """(pool, worker) -> what a silent engine had counted at the last look."""
        self._kv = kv
        self._models = list(models)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._pages = EnginePages(upstream, timeout_s)
        self._background = TasksByKey()
        self._watch = LoopWatch()
        self._fitness = Fitness(self._pages, clock, interval_s)

    async def start(self) -> None:
        """Probe every engine once, then continue in the background."""
        self._watch.start()
        engines: list[_Which] = [
            (served, pool, ranks[0])
            for served in self._models
            for pool, state in enumerate(served.fleet.pools)
            for ranks in state.engines
        ]
        await self.look(engines)
        began_s = asyncio.get_running_loop().time()
        for number, which in enumerate(engines):
            at_s = began_s + self._interval_s * (1 + number / len(engines))
            self._start(which, at_s)

    async def look(self, engines: Sequence[_Which]) -> None:
        """Probe these engines once, PROBE_BATCH at a time."""
        left = iter(engines)

        async def some() -> None:
            for which in left:
                await self._probe(which)

        await asyncio.gather(*(some() for _ in range(min(PROBE_BATCH, len(engines)))))

    def tune(self, interval_s: float, timeout_s: float) -> None:
        """Probe at another interval, with another time limit."""
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._fitness.interval_s = interval_s
        self._pages.limit(timeout_s)

    def watch(self, served: ModelRuntime, pool: int, worker: int, delay_s: float = 0.0) -> None:
        """Probe a new engine in `delay_s` seconds, and from then on."""
        self._start((served, pool, worker), asyncio.get_running_loop().time() + delay_s)

    def forget(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Stop probing an engine that is gone, and forget what is known of it."""
        self.leave(served, pool, worker)
        state = served.fleet.pools[pool]
        self._counted.pop((state, worker), None)
        self._fitness.forget(served, pool, worker, gone=True)
        if self._kv is not None:
            for rank in state.siblings[worker]:
                self._kv.remove(served, pool, rank)

    def leave(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Stop probing an engine; what is known of it stays."""
        self._background.end((served.fleet.pools[pool], worker))

    def _start(self, which: _Which, at_s: float) -> None:
        served, pool, worker = which
        self._background.start((served.fleet.pools[pool], worker), self._run(which, at_s))

    async def close(self) -> None:
        self._watch.close()
        await self._background.close()

    async def probe(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Probe one worker and apply the verdict to its engine; returns whether it is healthy."""
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        late_s = self._watch.late_s
        refused, unfit, why = False, False, ""
        try:
            why, unfit = await self._fitness.look(served, pool, worker)
        except NOT_HAD as error:
            if getattr(error, "kind", "") == "local":  # this machine could not send the probe
                return state.up[worker]
            own_s = self._watch.late_s - late_s
            if _is_timeout(error) and own_s > OWN_SHARE * self._timeout_s:
                _log.info("no verdict on %s: this process stood still %.1f s", address.id, own_s)
                return state.up[worker]
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            why = self._reason_of(error)
        answers = state.progress.look(worker, self._clock(), self._watch.late_s)
        if why:
            self._fitness.forget(served, pool, worker)
        # `RotationLog` tells what a verdict changes.
        if unfit:
            fleet.unfit(state, worker, why)
        elif not why:
            fleet.probed(state, worker, ok=True)
        elif refused and not answers:
            fleet.unreachable(state, worker, why)
        else:
            fleet.missed(state, worker, why, answers=answers)
            if state.up[worker]:
                place = f"{served.name}/{state.name}"
                _log.info("worker %s of %s missed a probe: %s", address.id, place, why)
        await self._look_for_frost(served, pool, worker)
        if self._kv is not None:
            for rank in state.siblings[worker]:
                await self._kv.look(served, pool, rank, self._pages, healthy=not why)
        return not why

    async def _look_for_frost(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Check whether a silent engine still computes for other clients; report a frozen one."""
        state = served.fleet.pools[pool]
        place = (state, worker)
        if not state.progress.silent_s(worker):
            self._counted.pop(place, None)
        elif await self._counts(served, pool, worker):
            state.progress.got_on(worker)
        elif self._on_frozen is not None and state.progress.frozen(
            worker, served.fleet.health.stall_s
        ):
            _log.warning(
                "worker %s of %s/%s is frozen: %d requests wait, and for %.0f s nobody was given "
                "a token",
                served.fleet.workers[pool][worker].id,
                served.name,
                state.name,
                len(state.progress.waiting(worker)),
                state.progress.silent_s(worker),
            )
            self._on_frozen(served, pool, worker)

    async def _counts(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Whether an engine's own token counter moved since the last reading."""
        place = (served.fleet.pools[pool], worker)
        counted = await self._pages.counted(served.fleet.workers[pool][worker])
        if counted is None:
            return False
        before, self._counted[place] = self._counted.get(place), counted
        return before is not None and counted != before

    def _reason_of(self, error: Exception) -> str:
        if _is_timeout(error):
            return f"no answer to a probe within {self._timeout_s:g} s"
        # Compiled code sets no cause.
        if isinstance(error.__cause__ or error.__context__, ConnectionRefusedError):
            return "it refuses connections"
        return f"a probe failed: {error}"

    async def _probe(self, which: _Which) -> None:
        try:
            await self.probe(*which)
        except Exception:  # noqa: BLE001 - a defect must not end the probes, nor the start
            served, pool, worker = which
            _log.exception("probing worker %s failed", served.fleet.workers[pool][worker].id)

    async def _run(self, which: _Which, at_s: float) -> None:
        """Probe an engine at loop time `at_s` and every interval after it."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(at_s - loop.time())
            await self._probe(which)
            # A fixed schedule keeps engines spread; a probe that overruns skips its next turn.
            at_s += self._interval_s * (1 + max(0, floor((loop.time() - at_s) / self._interval_s)))


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or getattr(error, "kind", "") == "timeout"


class LoopWatch:
    """Adds up the stalls of the running loop, so that no engine is blamed for them.

    A timer fires ten times a second and notes its delay. While a long computation holds the loop,
    the gateway reads no response, however early it arrived.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._late_s = 0.0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set(self._loop)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop = None

    @property
    def late_s(self) -> float:
        """Seconds of stall so far; never falls."""
        if self._loop is None:
            return self._late_s
        late_s = self._loop.time() - self._due_s
        return self._late_s + (late_s if late_s > NOTED_S else 0.0)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + BEAT_S
        self._timer = loop.call_at(self._due_s, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._late_s = self.late_s
        self._set(loop)


class Verdict(NamedTuple):
    """Why an engine cannot serve; "" if it can."""

    why: str = ""
    unfit: bool = False
    """The engine says so itself: one word is enough, and nothing is sent there."""


class Fitness:
    """Whether an engine fits its pool, by its own pages: health, sleep, model names, adapters.

    An engine may change what it serves at any time: it sleeps, another model is swapped in,
    adapters are loaded. So its pages are read again, and at once where there is doubt.
    """

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
        if page is not None and page.status < 500:
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
