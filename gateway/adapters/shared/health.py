"""What the parent has to know of the engines: which are available, and their KV cache.

Every worker process probes the engines itself. The one that leads tells the parent, whose token
pools go by it as if it had probed. An engine that an admin drains is drained in all of them, and
in those that are started later.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.adapters.engine_kv import EngineKv
from gateway.adapters.shared.hub import Hub, Session
from gateway.adapters.shared.leases import SharedLeases
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.wire import Op, packed
from gateway.adapters.store.keeper import STEP_S
from gateway.errors import StateFailure
from gateway.policy import fleet
from gateway.policy.ledger import RENEW_EVERY_S
from gateway.policy.served import ServedModel
from gateway.ports import PoolView

TELL_EVERY_S: Final = 1.0
"""How often a worker that has no news asks for the parent's."""
DRAIN: Final = "drain"

Health = dict[str, tuple[list[list[int]], list[list[int]]]]
"""Model -> by pool: the available workers, and every worker's KV bytes."""


class Reporter:
    """A worker's keeper: it reports, and renews leases; what is to be kept, the parent keeps."""

    def __init__(
        self,
        link: Link,
        store: SharedLeases,
        models: Mapping[str, ServedModel],
        kv: EngineKv,
        clock: Callable[[], float],
    ) -> None:
        """`models` by name; `clock` monotonic, the fleet's."""
        self.up = True
        """Whether the parent keeps what is to outlast it, as it said last."""
        self._link = link
        self._store = store
        self._models = models
        self._kv = kv
        self._clock = clock
        self._told: Health | None = None
        self._tell_at_s = clock()
        self._renew_at_s = clock() + RENEW_EVERY_S
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report what there is, then keep it current."""
        await self.step()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def entitlements_changed(self, model: str) -> None:
        """Nothing to do: the parent hears of every change itself."""

    async def pools(self, model: str) -> list[PoolView]:
        """A model's pools as the parent counts them. Raises StateFailure."""
        return await self._store.pools(model)

    async def step(self) -> None:
        """Report what changed and renew what is due. Never raises but for cancellation."""
        found, now_s = self._health(), self._clock()
        news = found if found != self._told else None
        if news is not None or now_s >= self._tell_at_s:
            with contextlib.suppress(StateFailure):  # the process is about to end
                # Engines that come or go are told at once, the parent's own state can wait.
                call = self._link.call_lazily if news is None else self._link.call
                self.up = bool(await call("health", news))
                self._told, self._tell_at_s = found, now_s + TELL_EVERY_S
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + RENEW_EVERY_S
            await self._store.renew()

    def _health(self) -> Health:
        now_s = self._clock()
        return {
            name: (
                [
                    list(fleet.available(pool, now_s) or fleet.last_resort(pool, refused=False))
                    for pool in served.pools
                ],
                [
                    [self._kv.of(name, index, worker) for worker in range(len(pool.workers))]
                    for index, pool in enumerate(served.pools)
                ],
            )
            for name, served in self._models.items()
        }

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            await self.step()


class Mirror:
    """The parent's view of the engines: that of the worker that leads."""

    def __init__(
        self,
        hub: Hub,
        models: Mapping[str, ServedModel],
        kv: EngineKv,
        up: Callable[[], bool],
    ) -> None:
        """`models` by name: the parent's own, whose pools nobody probes. `up`: see Reporter."""
        self._hub = hub
        self._models = models
        self._kv = kv
        self._up = up
        self._told: dict[str, Any] = {}
        """By session owner."""
        hub.serves("health", self._hear)
        hub.when_gone(self._gone)

    async def _hear(self, session: Session, value: Any) -> bool:
        if value is not None:
            self._told[session.owner] = value
            self._apply()
        return self._up()

    def _gone(self, session: Session) -> None:
        self._told.pop(session.owner, None)
        self._apply()

    def _apply(self) -> None:
        told = next(
            (self._told[s.owner] for s in self._hub.others(None) if s.owner in self._told), None
        )
        for name, (available, kv_bytes) in (told or {}).items():
            served = self._models.get(name)
            if served is None:
                continue
            for index, pool in enumerate(served.pools):
                sound = set(available[index])
                for worker in range(len(pool.workers)):
                    if worker in sound:
                        fleet.probed(pool, worker, ok=True)
                    elif pool.up[worker]:
                        fleet.unreachable(pool, worker)
                    self._kv.kv_bytes_by_worker[name, index, worker] = kv_bytes[index][worker]


class Drains:
    """The engines that an admin drains, as the parent remembers them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._on: dict[str, bool] = {}
        hub.serves(DRAIN, self._hear)
        hub.when_joined(self._joined)

    async def _hear(self, session: Session, value: Any) -> None:
        worker, on = value
        self._on.pop(worker, None)
        if on:
            self._on[worker] = True
        await self._hub.gather(DRAIN, packed((worker, on)), self._hub.others(session))

    def _joined(self, session: Session) -> None:
        for worker in self._on:
            session.wire.send(Op.TELL, 0, DRAIN, packed((worker, True)))
