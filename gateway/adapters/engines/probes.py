"""Health probes: each worker's /health, the models it lists, its KV cache, its progress.

Each engine has one task; its ranks share the verdict. A probe changes only whether a worker is in
rotation, never its load. `gateway.policy.fleet.fleet` decides how many missed probes take a worker
out. A worker that refused a request's connection is probed at the next interval and returns by
itself. Probes are spread evenly over the interval, because thousands at once would block the
event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from math import floor
from typing import Final

from gateway.adapters.background_task import TasksByKey
from gateway.adapters.engines.fitness import Fitness
from gateway.adapters.engines.kv_capacity import EngineKv
from gateway.adapters.engines.pages import NOT_HAD, Counted, EnginePages
from gateway.adapters.loop_lag import LoopWatch
from gateway.policy.fleet import fleet
from gateway.policy.fleet.fleet import PoolState
from gateway.policy.model_runtime import ModelRuntime
from gateway.ports import Upstream

PROBE_BATCH: Final = 128
"""Engines probed concurrently before the first request is served."""
OWN_SHARE: Final = 0.25
"""Share of a probe's time limit. After a longer stall of the event loop, a time-out is ignored."""

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
        upstream: Upstream | None = None,
        kv: EngineKv | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_frozen: OnFrozen | None = None,
    ) -> None:
        """`upstream` provides connections; without it the prober opens its own.

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
        """Stop probing."""
        self._watch.close()
        await self._background.close()
        await self._pages.close()

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
        if unfit:
            self._set_unfit(served, pool, worker, why)
        else:
            self._apply(served, pool, worker, why, refused=refused, answers=answers)
        await self._look_for_frost(served, pool, worker)
        if self._kv is not None:
            for rank in state.siblings[worker]:
                if not state.up[rank]:
                    self._kv.forget(served, pool, rank)
                elif not why and self._kv.asks(served, pool, rank):
                    await self._kv.learn(served, pool, rank, self._pages)
        return not why

    def _apply(
        self,
        served: ModelRuntime,
        pool: int,
        worker: int,
        why: str,
        *,
        refused: bool,
        answers: bool,
    ) -> None:
        """Apply a verdict; `RotationLog` tells what it changes."""
        state = served.fleet.pools[pool]
        if not why:
            fleet.probed(state, worker, ok=True)
            return
        self._fitness.forget(served, pool, worker)
        if refused and not answers:
            fleet.unreachable(state, worker, why)
            return
        fleet.missed(state, worker, why, answers=answers)
        if state.up[worker]:
            name = served.fleet.workers[pool][worker].id
            _log.info("worker %s of %s/%s missed a probe: %s", name, served.name, state.name, why)

    def _set_unfit(self, served: ModelRuntime, pool: int, worker: int, why: str) -> None:
        """Take out an engine that says itself that it does not serve the model now."""
        self._fitness.forget(served, pool, worker)
        fleet.unfit(served.fleet.pools[pool], worker, why)

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
