"""One poll of each engine: health, sleep, models, KV cache, metrics, and its progress.

Each engine has one task; its ranks share its pages and the verdict. A probe changes only whether a
worker is in rotation, never its load. `gateway.fleet.fleet` decides how many missed probes take a
worker out. A worker that refused a request's connection is probed at the next interval and returns
by itself. Probes are spread evenly over the interval, because thousands at once would block the
event loop.

Where a model's decisions use its engines' metrics, their pages are read about once a second,
between the probes. With many engines the interval grows, because reading pages shares the event
loop with requests, but it stays below the age at which a sample becomes stale. Requests never wait
for a page.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import floor, inf
from typing import Final

from gateway.background_task import BackgroundTasks
from gateway.fleet import fleet
from gateway.fleet.engine_metrics import (
    ALIASES,
    EngineModel,
    adapters,
    is_asleep,
    missing,
    not_served,
    read_adapters,
    read_kv_tokens,
    read_models,
    read_page,
)
from gateway.fleet.engine_pages import NOT_HAD, Counted, EnginePages
from gateway.fleet.engine_telemetry import STALE_S, EngineSample, record
from gateway.fleet.fleet import PoolState
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
PAGES_EVERY_S: Final = 1.0
MAX_PAGES_PER_S: Final = 128.0
"""Limit over all engines, unless samples would become stale."""
JITTER: Final = 0.1
MAX_INTERVAL_S: Final = 0.8 * STALE_S
"""Between two metrics pages; with jitter and response time, this stays below STALE_S."""
BEAT_S: Final = 0.1
NOTED_S: Final = 0.05
"""A shorter delay of the event loop is a busy loop, not a stall."""
_MAX_PAUSE_S: Final = 60.0
_SHOWN: Final = 5
"""Most adapters named in a line of the log."""

_log = logging.getLogger("sluice.probes")
_telemetry_log = logging.getLogger("sluice.telemetry")

OnFrozen = Callable[[ModelRuntime, int, int], None]
"""Called with (model, pool, worker) of a frozen engine, which gives no token to any client."""
_Which = tuple[ModelRuntime, int, int]
"""Model, pool, the first worker of an engine."""


class _Known:
    """What is known of an engine between two probes."""

    __slots__ = ("counted", "kv_read", "models_read_s", "sleepless")

    def __init__(self) -> None:
        self.counted: Counted | None = None
        """What it had counted at the last look, while it is silent."""
        self.kv_read = False
        """Whether it was asked for its KV cache since it came up."""
        self.models_read_s = -inf
        """When its model list was read last; never since it came up: -inf."""
        self.sleepless = False
        """It has no /is_sleeping."""


class Prober:
    """Polls every engine of every model until stopped."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        *,
        interval_s: float,
        timeout_s: float,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
        on_frozen: OnFrozen | None = None,
    ) -> None:
        """`upstream` provides connections; `clock` is the requests' clock.

        `on_frozen` is called at each probe while an engine is frozen.
        """
        self._on_frozen = on_frozen
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._pages = EnginePages(upstream, timeout_s)
        self._background = BackgroundTasks()
        self._watch = LoopWatch()
        self._known: dict[tuple[PoolState, int], _Known] = {}
        """By pool and the engine's first worker."""
        self._told: set[tuple[str, str]] = set()
        """(model, what): of which a line in the log told; once for a model."""
        self._served: dict[PoolState, tuple[ModelRuntime, int]] = {}
        """Pool -> the model that has it now, and its place there."""
        self.follow(models)

    def follow(self, models: Iterable[ModelRuntime]) -> None:
        """Poll the pools' engines for these models from now on."""
        self._served |= {
            state: (served, pool)
            for served in models
            for pool, state in enumerate(served.fleet.pools)
        }

    async def start(self) -> None:
        """Probe every engine once, then continue in the background."""
        self._watch.start()
        engines = [
            (served, pool, engine.ranks[0])
            for state, (served, pool) in self._served.items()
            for engine in state.engines
        ]
        await self.look(engines)
        for number, which in enumerate(engines):
            self.watch(*which, delay_s=self._interval_s * (1 + number / len(engines)))

    async def look(self, engines: Sequence[_Which]) -> None:
        """Probe these engines once, PROBE_BATCH at a time."""
        left = iter(engines)

        async def some() -> None:
            for which in left:
                await self._safely(self.probe, *which)

        await asyncio.gather(*(some() for _ in range(min(PROBE_BATCH, len(engines)))))

    def tune(self, interval_s: float, timeout_s: float) -> None:
        """Probe at another interval, with another time limit."""
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._pages.limit(timeout_s)

    def watch(self, served: ModelRuntime, pool: int, worker: int, delay_s: float = 0.0) -> None:
        """Probe a new engine in `delay_s` seconds, and poll it from then on."""
        state = served.fleet.pools[pool]
        at_s = asyncio.get_running_loop().time() + delay_s
        self._background.start(self._run(state, worker, at_s), key=(state, worker))

    def leave(self, pool: PoolState, worker: int) -> None:
        """Stop polling an engine; what is known of it stays."""
        self._background.end((pool, worker))

    def forget(self, pool: PoolState, worker: int) -> None:
        """Stop polling an engine that is gone, and forget what is known of it."""
        self.leave(pool, worker)
        self._known.pop((pool, worker), None)

    def drop(self, pool: PoolState) -> None:
        """Forget a pool that is gone, with its engines."""
        for engine in pool.engines:
            self.forget(pool, engine.ranks[0])
        self._served.pop(pool, None)

    async def close(self) -> None:
        self._watch.close()
        await self._background.close()

    @property
    def page_interval_s(self) -> float:
        """Seconds between two metrics pages of an engine that responds, by their number."""
        pages = sum(len(p.engines) for p, (m, _) in self._served.items() if m.fleet.telemetry)
        return max(PAGES_EVERY_S, min(pages / MAX_PAGES_PER_S, MAX_INTERVAL_S))

    async def _run(self, state: PoolState, worker: int, probe_at_s: float) -> None:
        """Probe an engine at that time of the loop and every interval after it; read its pages."""
        loop = asyncio.get_running_loop()
        pause_s = self.page_interval_s
        # Spread over the first interval, so that the pages do not arrive all at once.
        read_at_s = loop.time() + random.uniform(0, pause_s)
        while True:
            reads = self._served[state][0].fleet.telemetry and read_at_s < probe_at_s
            await asyncio.sleep((read_at_s if reads else probe_at_s) - loop.time())
            served, pool = self._served[state]
            if not reads:
                await self._safely(self.probe, served, pool, worker)
                # A fixed schedule keeps engines spread; a probe that overruns skips its next turn.
                overrun_s = max(0.0, loop.time() - probe_at_s)
                probe_at_s += self._interval_s * (1 + floor(overrun_s / self._interval_s))
                continue
            # Who missed the last probe is not asked: its page would delay the next one.
            asked = not state.engine_of[worker].why_down
            if asked and await self._safely(self.read, served, pool, worker):
                pause_s = self.page_interval_s
            else:
                for rank in state.engine_of[worker].ranks:
                    fleet.heard(state, rank, 0)
                pause_s = max(min(2 * pause_s, _MAX_PAUSE_S) if asked else 0, self.page_interval_s)
            read_at_s = loop.time() + pause_s * random.uniform(1 - JITTER, 1 + JITTER)

    async def _safely(
        self,
        work: Callable[[ModelRuntime, int, int], Awaitable[bool]],
        served: ModelRuntime,
        pool: int,
        worker: int,
    ) -> bool:
        try:
            return await work(served, pool, worker)
        except Exception:  # noqa: BLE001 - a defect must end neither the polls nor the start
            _log.exception("probing worker %s failed", served.fleet.workers[pool][worker].id)
            return False

    async def probe(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Probe one worker and apply the verdict to its engine; returns whether it is healthy."""
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        known = self._known.setdefault((state, worker), _Known())
        late_s = self._watch.late_s
        refused, unfit = False, False
        try:
            why, unfit = await self._ails(served, pool, worker, known)
        except NOT_HAD as error:
            # Compiled code sets no cause.
            refused = isinstance(error.__cause__ or error.__context__, ConnectionRefusedError)
            why = self._reason_of(error, address, late_s)
            if not why:
                return state.engine_of[worker].up
        answers = state.engine_of[worker].progress.look(self._clock(), self._watch.late_s)
        if why:
            known.models_read_s = -inf
        # `RotationLog` tells what a verdict changes.
        if unfit:
            fleet.unfit(state, worker, why)
        elif not why:
            fleet.probed(state, worker, ok=True)
        elif refused and not answers:
            fleet.unreachable(state, worker, why)
        else:
            fleet.missed(state, worker, why, answers=answers)
            if state.engine_of[worker].up:
                place = f"{served.name}/{state.name}"
                _log.info("worker %s of %s missed a probe: %s", address.id, place, why)
        await self._look_for_frost(served, pool, worker, known)
        if not state.engine_of[worker].up:
            known.kv_read = False  # it may come back with another capacity
        elif not why and not known.kv_read:
            await self._read_kv(served, pool, worker, known)
        return not why

    def _reason_of(self, error: Exception, address: WorkerAddress, late_s: float) -> str:
        """What a probe that failed says of the engine; "" if this process is to blame."""
        kind = getattr(error, "kind", "")
        if kind == "local":  # this machine could not send the probe
            return ""
        if isinstance(error, TimeoutError) or kind == "timeout":
            own_s = self._watch.late_s - late_s
            if own_s > OWN_SHARE * self._timeout_s:
                _log.info("no verdict on %s: this process stood still %.1f s", address.id, own_s)
                return ""
            return f"no answer to a probe within {self._timeout_s:g} s"
        if isinstance(error.__cause__ or error.__context__, ConnectionRefusedError):
            return "it refuses connections"
        return f"a probe failed: {error}"

    async def _ails(
        self, served: ModelRuntime, pool: int, worker: int, known: _Known
    ) -> tuple[str, bool]:
        """Why an engine cannot serve, "" if it can; and whether it says so itself.

        Where it says itself that it does not fit, one word is enough, and nothing is sent there.
        Raises the exceptions in `NOT_HAD`.
        """
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        page, path = await self._pages.get(address, "/health"), "/health"
        if page is not None and page.status == 404:  # not every engine has /health
            page, path = await self._pages.get(address, "/v1/models"), "/v1/models"
            if page is not None and page.status == 404:
                return "/health and /v1/models answered 404: is the URL's path right?", False
        if page is None or page.status >= 500:
            return f"{path} answered {'too much' if page is None else page.status}", False
        # An engine without the page is asked again when it comes back.
        if not known.sleepless or not state.engine_of[worker].up:
            page = await self._pages.get(address, "/is_sleeping")
            if page is not None and page.status == 200:
                known.sleepless = False
                if is_asleep(page.body):  # vLLM's sleep mode, where requests would hang
                    return "it sleeps: wake it with POST /wake_up", True
            elif page is not None and page.status in (404, 405):
                known.sleepless = True
        return await self._misfit(served, pool, worker, known)

    async def _misfit(
        self, served: ModelRuntime, pool: int, worker: int, known: _Known
    ) -> tuple[str, bool]:
        """Whether an engine's model list matches. Asks now and then, and in doubt.

        An engine may change what it serves at any time: another model is swapped in, adapters are
        loaded.
        """
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        doubt = not state.engine_of[worker].up or (state, worker) in served.adapters.doubted
        if not doubt and self._clock() - known.models_read_s < MODELS_EVERY * self._interval_s:
            return "", False
        try:
            page = await self._pages.get(address, "/v1/models")
        except NOT_HAD:
            return "", False  # it is healthy; the next probe asks again
        if page is not None and page.status in (401, 403):
            what = "wants a key" if address.api_key is None else "refuses the key"
            said = f"/v1/models answered {page.status}, it {what}: set the worker's `api_key`"
            return said, False
        models = [] if page is None or page.status != 200 else read_models(page.body)
        if why := not_served(models, address.served_model or served.name):
            return why, True
        known.models_read_s = self._clock()
        self._compare_window(served, pool, worker, models)
        if models:
            self._note_adapters(served, pool, worker, adapters(models))
        return "", False

    async def _look_for_frost(
        self, served: ModelRuntime, pool: int, worker: int, known: _Known
    ) -> None:
        """Check whether a silent engine still computes for other clients; report a frozen one."""
        state, address = served.fleet.pools[pool], served.fleet.workers[pool][worker]
        progress = state.engine_of[worker].progress
        if not progress.silent_s:
            known.counted = None
            return
        counted = await self._pages.counted(address)
        if counted is not None:
            before, known.counted = known.counted, counted
            if before is not None and counted != before:
                progress.got_on()
                return
        if self._on_frozen is not None and progress.frozen(served.fleet.health.stall_s):
            _log.warning(
                "worker %s of %s/%s is frozen: %d requests wait, and for %.0f s nobody was given "
                "a token",
                address.id,
                served.name,
                state.name,
                len(progress.waiting()),
                progress.silent_s,
            )
            self._on_frozen(served, pool, worker)

    async def _read_kv(self, served: ModelRuntime, pool: int, worker: int, known: _Known) -> None:
        """Read a healthy engine's KV capacity, once since it came up, if KV matters.

        Of an engine that does not report it, limits apply only if the configuration states it.
        """
        state, bytes_a_token = served.fleet.pools[pool], served.admission.kv_bytes_per_token
        if not bytes_a_token and not served.fleet.telemetry:
            return
        known.kv_read = True
        body = await self._pages.metrics(served.fleet.workers[pool][worker])
        for rank in state.engine_of[worker].ranks:
            address = served.fleet.workers[pool][rank]
            tokens = 0 if body is None else read_kv_tokens(body, address.rank)
            if bytes_a_token and tokens and tokens != state.kv_tokens.get(rank):
                _log.info(
                    "worker %s has a KV cache of %d tokens, %.1f GiB",
                    address.id,
                    tokens,
                    tokens * bytes_a_token / (1 << 30),
                )
            state.kv_tokens[rank] = tokens

    async def read(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Read an engine's metrics page into the pool's view; False if that could not be.

        No response of an engine makes it raise.
        """
        state, view = served.fleet.pools[pool], served.fleet.telemetry[pool]
        body = await self._pages.metrics(served.fleet.workers[pool][worker])
        if body is None:
            return False
        known, running = False, read_adapters(body)
        for rank in state.engine_of[worker].ranks:
            address = served.fleet.workers[pool][rank]
            sample = read_page(body, address.rank)
            if sample == EngineSample():
                if self._once(served, "metrics"):
                    _telemetry_log.warning(
                        "worker %s of %s tells no metrics known here", address.id, served.name
                    )
                continue
            known = True
            if running is not None:
                served.adapters.running(state, rank, running.names, running.most)
            for field in missing(sample):
                if self._once(served, field):
                    _telemetry_log.warning(
                        "worker %s of %s does not tell %s (none of %s)",
                        *(address.id, served.name, field, ", ".join(ALIASES[field])),
                    )
            fleet.heard(state, rank, (sample.running or 0) + (sample.waiting or 0))
            if record(view, rank, sample, self._clock()):
                _telemetry_log.info(
                    "worker %s restarted: its prefix cache is taken to be empty", address.id
                )
                prefixes = served.scheduling.prefixes
                if prefixes and (index := prefixes[pool]) is not None:
                    index.forget(rank)
        return known

    def _once(self, served: ModelRuntime, what: str) -> bool:
        """Whether this is told of a model for the first time."""
        new = (served.name, what) not in self._told
        self._told.add((served.name, what))
        return new

    def _note_adapters(
        self, served: ModelRuntime, pool: int, worker: int, listed: list[str]
    ) -> None:
        """Note the LoRA adapters that an engine lists; log new and ignored ones."""
        known, aliases, state = served.adapters, served.aliases, served.fleet.pools[pool]
        named = (*known.named, *aliases)
        taken = [n for n in listed if known.discovers or any(matches(a, n) for a in named)]
        met, new = set(known.names), list[str]()
        for rank in state.engine_of[worker].ranks:
            new = known.listed(state, rank, taken)
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
        if ignored and self._once(served, "adapters"):
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
            if state.engine_of[worker].remark != remark:
                _log.warning("worker %s %s", served.fleet.workers[pool][worker].id, remark)
        state.engine_of[worker].remark = remark


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
