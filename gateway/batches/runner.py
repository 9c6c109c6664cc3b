"""The batches of all tenants, as one process runs them: which it takes, and how many items at once.

Rules:
- A batch has one owner at a time, named in its document. Who sees the document of another owner
  unchanged for `SILENT_S` by its own clock takes it over; no clocks are compared.
- Of a model's batches those promised soonest get the slots first, of what live requests leave.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.background_task import BackgroundTasks
from gateway.batches.pace import Leftovers
from gateway.batches.run import LATE_S, Around, Run, Stored, is_over, post, turn, unposted
from gateway.errors import NotFound, StateFailure
from gateway.fleet.fleet import PoolState, available
from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.plan import find_model
from gateway.ports import Changed
from gateway.records.batch import ENDED, Batch
from gateway.records.decision import DecisionRecord
from gateway.routing.split_alias import SplitAlias

LOOK_S: Final = 3.0
"""Between two looks at the open batches."""
SILENT_S: Final = 15.0
"""After so long without a change an owner is taken to be gone."""
MOST_RUNNING: Final = 8
"""Batches of a model that a process runs at once, as each holds some MiB; but for those that wait
for their creators' rights or are over."""
_CLOSE_S: Final = 10.0
_GIVE_WAY_S: Final = 0.005
_IDLE_S: Final = 0.1

_log = logging.getLogger("sluice.batches")


class _Seen(NamedTuple):
    """A batch that this process does not run, as it was read last."""

    version: int
    since_s: float
    """When this version was seen first."""
    batch: Batch


@dataclass
class _Share:
    """What the running batches of a model share."""

    leftovers: Leftovers
    runs: list[Run]

    @property
    def running(self) -> int:
        """Items in flight."""
        return sum(len(run.running) for run in self.runs)

    @property
    def item_s(self) -> float:
        """Seconds that an item takes."""
        return max(run.item_s for run in self.runs)


class Runner:
    """Runs batches. One instance serves a process."""

    def __init__(
        self,
        around: Around,
        models: Mapping[str, ModelRuntime],
        splits: Mapping[str, SplitAlias],
        draining: Callable[[], bool],
    ) -> None:
        """`models` by name and alias; while `draining` it takes no batch and begins no item."""
        self._around = around
        self._models = models
        self._splits = splits
        self._draining = draining
        self._shares: dict[str, _Share] = {}
        """By the models' names, as batches name them."""
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        """By batch."""
        self._seen: dict[str, _Seen] = {}
        self._look_now = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._away = False

    def start(self) -> None:
        """Begin to look for batches; call within the running loop."""
        self._tasks.start(self._watch(), self._give_way())

    async def close(self) -> None:
        """Commit what is done, and leave the batches to others."""
        await self._tasks.close()
        tasks = [task for _, task in self._runs.values()]
        for run, _ in self._runs.values():
            run.stop()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)

    def poke(self) -> None:
        """A batch was created or cancelled: look at once."""
        self._look_now.set()
        for run, _ in self._runs.values():
            run.poked.set()

    def note(self, record: msgspec.Struct) -> None:
        """A sink of decision records."""
        if isinstance(record, DecisionRecord) and (item := record.batch) is not None:
            running = self._runs.get(item.batch)
            if running is not None:
                running[0].note(record, item)

    def running(self, model: str) -> int:
        """Items in flight here for a model, under any of its names."""
        shares = [
            share
            for name, share in self._shares.items()
            if any(served.name == model for served in self._served(name))
        ]
        return sum(share.running for share in shares)

    def counts(self) -> list[tuple[str, int, int]]:
        """(model as batches name it, batches that run here, items in flight)."""
        return [(name, len(share.runs), share.running) for name, share in self._shares.items()]

    def open(self) -> list[Batch]:
        """All tenants' open batches, those promised soonest first, as they were read last."""
        here = [run.batch for run, _ in self._runs.values()]
        there = [each.batch for each in self._seen.values() if each.batch.status not in ENDED]
        return sorted([*here, *there], key=turn)

    # -- which batches

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()
            self._look_now.clear()
            try:
                if not self._draining():
                    await self._look()
                self._away = False
            except StateFailure as error:
                if not self._away:
                    _log.error("batches wait: their state cannot be read: %s", error)
                self._away = True
            except Exception:  # noqa: BLE001 - a defect of one batch must not end the others
                _log.exception("a look at the batches failed")

    async def _look(self) -> None:
        """Read what is open, and take what nobody runs, those promised soonest first."""
        store = self._around.store
        names = [name for name in await store.open_names(Batch) if name not in self._runs]
        seen, now_s = self._seen, self._around.clock()
        self._seen = {}
        for name in names:
            found = await store.get(Batch, name)
            if found is None:
                continue
            before = seen.get(name)
            if before is None or before.version != found[1]:
                before = _Seen(found[1], now_s, found[0])
            self._seen[name] = before
        for each in sorted(self._seen.values(), key=lambda each: turn(each.batch)):
            if each.batch.status in ENDED:
                await self._post_left(each)
            elif not each.batch.owner or now_s - each.since_s >= SILENT_S:
                await self._take(each)

    async def _take(self, seen: _Seen) -> None:
        """Become the owner of a batch, and run it."""
        around, batch = self._around, seen.batch
        share = self._shares.setdefault(batch.model, _Share(Leftovers(), []))
        if not (is_over(batch, around.wall_clock()) or self._has_place(share, batch)):
            return
        mine = replace(batch, owner=around.owner, epoch=batch.epoch + 1)
        try:
            version = await around.store.put(mine, seen.version)
        except Changed:
            return
        self._seen.pop(batch.id)
        run = Run(around, mine, version, self._slots)
        task = asyncio.create_task(run.run())
        share.runs.append(run)
        self._runs[batch.id] = run, task
        task.add_done_callback(lambda task: self._ended(run, task))

    def _has_place(self, share: _Share, batch: Batch) -> bool:
        """Whether a batch may run now; of those that do the last by `turn` makes way for it."""
        wall_s = self._around.wall_clock()
        runs = [r for r in share.runs if not (r.rightless or is_over(r.batch, wall_s))]
        if len(runs) < MOST_RUNNING:
            return True
        last = max(runs, key=lambda run: turn(run.batch))
        if turn(batch) < turn(last.batch):
            last.stop()
        return False

    def _ended(self, run: Run, task: "asyncio.Task[None]") -> None:
        name, model = run.batch.id, run.batch.model
        del self._runs[name]
        share = self._shares[model]
        share.runs.remove(run)
        if not share.runs:
            del self._shares[model]
        self._look_now.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("batch %s stopped; it is taken up again", name, exc_info=error)

    async def _post_left(self, seen: _Seen) -> None:
        """Have this process's ledger get what it lacks of a batch that ended.

        A ledger that is gone, such as that of a host, must not keep the batch open for ever.
        """
        batch = seen.batch
        stored = Stored(self._around, batch, seen.version)
        for part in unposted(batch, self._around.export):
            await post(self._around, stored, part, None)
        if (batch.finalizing_unix_s or 0) + LATE_S < self._around.wall_clock():
            for part in batch.parts:
                if part.unposted and (part.epoch, part.number) not in stored.posted:
                    _log.error("%s: no process has the ledger of %s any more", batch.id, part)
                    stored.posted.add((part.epoch, part.number))
        if stored.posted:
            with contextlib.suppress(Changed):
                await stored.note_posted()

    # -- how many items

    def _slots(self, run: Run) -> int:
        """How many more items of a batch the free slots allow now."""
        if self._draining():
            return 0
        share, now_s = self._shares[run.batch.model], self._around.clock()
        slots = busy = 0
        for served in self._served(run.batch.model):
            for pool in served.fleet.routed:
                slots += len(available(pool, now_s)) * pool.slots_per_worker
                busy += pool.inflight + pool.total_elsewhere
        running = share.running
        free = share.leftovers.slots(slots, max(0, busy - running), now_s, share.item_s)
        free -= running
        if run.urgent:
            return slots - len(run.running)
        earlier = [each for each in share.runs if turn(each.batch) < turn(run.batch)]
        return free - sum(each.wants for each in earlier)

    async def _give_way(self) -> None:
        """Have items end at once, the youngest first, where live requests fill a pool beyond them.

        Live requests would wait at their engine for an item's end; the item is asked again.
        """
        while True:
            busy = any(run.running for run, _ in self._runs.values())
            await asyncio.sleep(_GIVE_WAY_S if busy else _IDLE_S)
            for name, share in self._shares.items():
                for served in self._served(name):
                    for pool in served.fleet.routed:
                        slots = sum(pool.present) * pool.slots_per_worker
                        if (over := pool.inflight - slots) > 0:
                            self._evict(share, pool, over)

    def _evict(self, share: _Share, pool: PoolState, over: int) -> None:
        pipeline = self._around.pipeline
        for run in sorted(share.runs, key=lambda run: turn(run.batch), reverse=True):
            for lease_id in () if run.urgent else list(reversed(run.leases)):
                worker = pipeline.worker_of(lease_id)
                if worker is None or pool.active[worker] <= pool.slots_per_worker:
                    continue
                pipeline.evict(lease_id)
                over -= 1
                if not over:
                    return

    def _served(self, name: str) -> list[ModelRuntime]:
        """The models that a name in a batch stands for; none while there is none."""
        split = self._splits.get(name)
        if split is not None:
            return [self._models[model] for model in split.models]
        try:
            return [find_model(self._models, name)]
        except NotFound:
            return []
