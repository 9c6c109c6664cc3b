"""The control plane's process: what is known -> the plan -> calls, over and over.

Level-triggered: a pass looks at everything, whatever woke it, so that a lost or repeated wake-up
does no harm, and a controller that was killed anywhere goes on from what the cluster holds. All
state is in the cluster. Only the holder of the Lease makes passes; the others keep their copy of
the cluster current.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from typing import Final

from prometheus_client import CollectorRegistry

from controller.election import Election, Superseded
from controller.health import Figures
from controller.kube import ApiFailure, Away, KubeApi
from controller.mirror import Mirror
from controller.plan import Allocator, plan
from controller.publisher import Publisher
from controller.records import Plan
from controller.writes import Writes
from gateway.store.redis.cluster import ClusterStore

LEASE: Final = "sluice-controller"
"""Name of the Lease that the acting controller holds."""
TOGETHER_S: Final = 0.1
"""Changes that come within this time make one pass."""
NOT_YET_S: Final = 1.0
PLAN_PAUSE_S: Final = 5.0
"""After a plan that failed."""
RESYNC_S: Final = 60.0
"""There is a pass at least so often."""
WRITING_S: Final = 3.0
"""A pass that takes longer leaves its other calls to the next one, where there is news."""
OWN_PASSES: Final = 20
"""After so many passes in a row that changed something, there is a pause: they seem not to end."""
STUCK_S: Final = 300.0
"""A leader whose passes get on so little is not healthy."""
NODE_BEAT_S: Final = 10.0
_log = logging.getLogger("sluice.controller")


class Controller:
    """One replica of the control plane."""

    def __init__(
        self, api: KubeApi, store: ClusterStore, *, allocator: Allocator, identity: str
    ) -> None:
        """`identity` differs between all processes that ever ran."""
        self.figures = Figures()
        self._allocator: Allocator = allocator
        self._changed = asyncio.Event()
        self._mirror = Mirror(
            api,
            virtual_nodes=allocator == "virtual-node",
            on_change=self._changed.set,
        )
        self._publisher = Publisher(
            store,
            age_s=self.age_s,
            on_demand=self._changed.set,
            figures=self.figures,
        )
        self._election = Election(api, name=LEASE, identity=identity, unix_s=time.time)
        self._writes = Writes(
            api,
            may_write=self._may_write,
            written=self._mirror.written,
            figures=self.figures,
            identity=identity,
        )
        self._planned_s: float | None = None
        """Since when plans fail; None: they do not."""
        self._plan_s = 0.0
        """How long the last one took to make."""
        self._own_passes = 0
        """Passes in a row that changed something."""
        self._write_until_s = 0.0
        """Then a pass makes way for news."""
        self._away_logged = False

    async def run(self) -> None:
        """Run until cancelled; the leadership is given back then."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._mirror.run())
            tasks.create_task(self._election.run(self._lead))

    # -- what the port shows

    def healthy(self) -> bool:
        """Whether passes get on, where this replica makes them."""
        stuck_s = asyncio.get_running_loop().time() - self._writes.progress_s
        return not self._election.leads or stuck_s < STUCK_S

    def ready(self) -> bool:
        """Whether the cluster was read once, and the Redis is not another namespace's."""
        return self._mirror.world(time.time()) is not None and not self._publisher.refused

    def age_s(self) -> float:
        """How old the knowledge is by which the last plan was made, in seconds."""
        failing_s = 0.0
        if self._planned_s is not None:
            failing_s = asyncio.get_running_loop().time() - self._planned_s
        return max(self._mirror.age_s(), failing_s)

    def metrics(self) -> CollectorRegistry:
        """The metrics, brought up to date."""
        self.figures.leading.set(self._election.leads)
        self.figures.epoch.set(self._election.epoch or 0)
        self.figures.age.set(self.age_s())
        return self.figures.registry

    # -- while this replica leads

    async def _lead(self, epoch: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publisher.run(epoch))
                tasks.create_task(self._passes())
                tasks.create_task(self._writes.send_events())
                if self._allocator == "virtual-node":
                    tasks.create_task(self._beats())
        except ExceptionGroup as failed:
            superseded = failed.subgroup(Superseded)
            raise failed if superseded is None else superseded.exceptions[0] from None
        finally:
            self.figures.entitlements.clear()  # they are the next leader's to tell

    async def _passes(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            began_s = self._writes.progress_s = loop.time()
            try:
                again_s = await self._pass()
                self._away_logged = False
            except Away as error:
                again_s = max(TOGETHER_S, self._writes.retry_s())
                if not self._away_logged:
                    self._away_logged = True
                    _log.warning("the pass is left for later: %s", error)
            self.figures.pass_seconds.observe(loop.time() - began_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._changed.wait()
            await asyncio.sleep(max(TOGETHER_S, self._plan_s))  # at most half of a core

    async def _pass(self) -> float:
        """One pass; returns after how many seconds the next one is due without a change."""
        now_unix_s = time.time()
        world = self._mirror.world(now_unix_s, self._publisher.demand)
        if world is None:
            return NOT_YET_S
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            # In a thread, so that the Lease is renewed meanwhile.
            planned = await asyncio.to_thread(plan, world, self._allocator)
        except Exception:  # noqa: BLE001 - a defect must not end the heartbeats
            if self._planned_s is None:
                _log.exception("the plan failed; gateways keep the last one")
                self._planned_s = began_s
            self.figures.passes.labels("failed").inc()
            return PLAN_PAUSE_S
        self._planned_s, self._plan_s = None, loop.time() - began_s
        self._publisher.publish(planned.entitlements)
        self._count(planned)
        self._write_until_s = loop.time() + max(WRITING_S, self._plan_s)
        try:
            succeeded = await self._writes.carry_out(planned.calls)
        finally:
            self._writes.tell(planned.events)
        self.figures.passes.labels("done").inc()
        self._own_passes = self._own_passes + 1 if succeeded else 0
        if succeeded and self._own_passes < OWN_PASSES:  # what was written may lead to more
            return 0.0
        next_s = math.inf if planned.next_unix_s is None else planned.next_unix_s - time.time()
        return max(0.0, min(RESYNC_S, next_s, self._writes.retry_s()))

    def _may_write(self) -> bool:
        late = asyncio.get_running_loop().time() > self._write_until_s and self._changed.is_set()
        return self._election.leads and not late

    async def _beats(self) -> None:
        failing = False
        while True:
            world = self._mirror.world(time.time())
            try:
                if world is not None:
                    await self._writes.beat(world.nodes.values())
                failing = False
            except ApiFailure as error:
                if not failing:
                    _log.warning("virtual nodes send no heartbeat: %s", error)
                failing = True
            await asyncio.sleep(NODE_BEAT_S)

    def _count(self, planned: Plan) -> None:
        states = Counter(granted.verdict or "bound" for granted in planned.entitlements.values())
        for state in ("bound", "pending", "degraded"):
            self.figures.entitlements.labels(state).set(states[state])
