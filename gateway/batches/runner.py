"""The batches of all tenants, as one process runs them: which it takes, and how many items at once.

Rules:
- A batch has one owner at a time, named in its document. Who sees the document of another owner
  unchanged for `SILENT_S` by its own clock takes it over; no clocks are compared.
- Of a model's batches those promised soonest get the slots first, of what live requests leave.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.background_task import BackgroundTasks
from gateway.batches.pace import Leftovers
from gateway.batches.run import Around, Fenced, Run, Stored, cancel, turn, wait
from gateway.errors import StateFailure
from gateway.fleet.fleet import PoolState, available
from gateway.ports import Changed
from gateway.records.batch import ENDED, LATE_S, Batch
from gateway.records.decision import DecisionRecord

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


class Runner:
    """Runs batches. One instance serves a process."""

    def __init__(self, around: Around, draining: Callable[[], bool]) -> None:
        """While `draining` it takes no batch and begins no item."""
        self._around = around
        self._draining = draining
        self._leftovers: dict[str, Leftovers] = {}
        """By the models' names, as batches name them."""
        self._runs: dict[str, Run] = {}
        """By batch."""
        self._seen: dict[str, _Seen] = {}
        self._look_now = asyncio.Event()
        self._tasks = BackgroundTasks()

    def start(self) -> None:
        """Begin to look for batches; call within the running loop."""
        self._tasks.start(self._watch(), self._give_way())

    async def close(self) -> None:
        """Commit what is done, and leave the batches to others."""
        await self._tasks.close()
        runs = list(self._runs.values())
        for run in runs:
            run.stopping = True
        if runs:
            await asyncio.wait([run.task for run in runs], timeout=_CLOSE_S)
            await cancel([run.task for run in runs])

    def poke(self) -> None:
        """A batch was created or cancelled: look at once."""
        self._look_now.set()
        for run in self._runs.values():
            run.poked.set()

    def note(self, record: msgspec.Struct) -> None:
        """A sink of decision records."""
        if isinstance(record, DecisionRecord) and record.batch is not None:
            run = self._runs.get(record.batch.batch)
            if run is not None:
                run.note(record)

    def running(self, model: str) -> int:
        """Items in flight here for a model, under any of its names."""
        return sum(
            len(run.leases)
            for run in self._runs.values()
            if any(served.name == model for served in self._around.models.known(run.batch.model))
        )

    def counts(self) -> list[tuple[str, int, int]]:
        """(model as batches name it, batches that run here, items in flight)."""
        of_models = [(name, self._of(name)) for name in self._leftovers]
        return [(name, len(runs), sum(len(run.leases) for run in runs)) for name, runs in of_models]

    def open(self) -> list[Batch]:
        """All tenants' open batches, those promised soonest first, as they were read last."""
        here = [run.batch for run in self._runs.values()]
        there = [each.batch for each in self._seen.values() if each.batch.status not in ENDED]
        return sorted([*here, *there], key=turn)

    # -- which batches

    async def _watch(self) -> None:
        while True:
            await wait(self._look_now, LOOK_S)
            try:
                if not self._draining():
                    await self._look()
            except StateFailure as error:
                _log.warning("batches wait: their state cannot be read: %s", error)
            except Exception:  # noqa: BLE001 - a defect of one batch must not end the others
                _log.exception("a look at the batches failed")

    async def _look(self) -> None:
        """Read what is open, and take what nobody runs, those promised soonest first."""
        store, before, now_s = self._around.store, self._seen, self._around.clock()
        self._seen = {}
        for name in await store.open_names(Batch):
            if name not in self._runs and (found := await store.get(Batch, name)) is not None:
                batch, version = found
                seen = before.get(name)
                same = seen is not None and seen.version == version
                self._seen[name] = seen if seen and same else _Seen(version, now_s, batch)
        for each in sorted(self._seen.values(), key=lambda each: turn(each.batch)):
            if each.batch.status in ENDED:
                await self._post_left(each)
            elif not each.batch.owner or now_s - each.since_s >= SILENT_S:
                await self._take(each)

    async def _take(self, seen: _Seen) -> None:
        """Become the owner of a batch, and run it."""
        around, batch, now_unix_s = self._around, seen.batch, self._around.wall_clock()
        if not (batch.is_over(now_unix_s) or self._has_place(batch)):
            return
        if batch.status == "validating":
            batch = batch.moved("in_progress", now_unix_s)
        batch = replace(batch, owner=around.owner, epoch=batch.epoch + 1)
        with contextlib.suppress(Changed):
            version = await around.store.put(batch, seen.version)
            del self._seen[batch.id]
            self._leftovers.setdefault(batch.model, Leftovers())
            self._runs[batch.id] = run = Run(around, batch, version, self._slots)
            run.task.add_done_callback(lambda _: self._ended(run))

    def _of(self, model: str) -> list[Run]:
        return [run for run in self._runs.values() if run.batch.model == model]

    def _has_place(self, batch: Batch) -> bool:
        """Whether a batch may run now; of those that do the last by `turn` makes way for it."""
        wall_s = self._around.wall_clock()
        runs = [r for r in self._of(batch.model) if not (r.rightless or r.batch.is_over(wall_s))]
        if len(runs) < MOST_RUNNING:
            return True
        last = max(runs, key=lambda run: turn(run.batch))
        if turn(batch) < turn(last.batch):
            last.stopping = True
        return False

    def _ended(self, run: Run) -> None:
        del self._runs[run.batch.id]
        if not self._of(run.batch.model):
            del self._leftovers[run.batch.model]
        if run.batch.status in ENDED:  # else it is taken up again, but not at once
            self._look_now.set()

    async def _post_left(self, seen: _Seen) -> None:
        """Have this process's ledger get what it lacks of a batch that ended.

        A ledger that is gone, such as that of a host, must not keep the batch open for ever.
        """
        batch = seen.batch
        stored = Stored(self._around, batch, seen.version)
        with contextlib.suppress(Changed, Fenced):
            give_up = batch.reached_unix_s[batch.status] + LATE_S < self._around.wall_clock()
            if give_up:
                _log.error("%s: no process has the ledger of its usage any more", batch.id)
            await stored.post_usage(give_up=give_up)

    # -- how many items

    def _slots(self, run: Run) -> int:
        """How many more items of a batch the free slots allow now."""
        if self._draining():
            return 0
        model, now_s = run.batch.model, self._around.clock()
        runs, slots, busy = self._of(model), 0, 0
        for pool in self._pools(model):
            slots += len(available(pool, now_s)) * pool.slots_per_worker
            busy += pool.inflight + pool.total_elsewhere
        item_s = max(each.item_s for each in runs)
        live = max(0, busy - sum(len(each.leases) for each in runs))
        left = self._leftovers[model].slots(slots, live, now_s, item_s)
        if run.batch.is_urgent:
            return slots - len(run.tries)
        earlier = [each for each in runs if turn(each.batch) < turn(run.batch)]
        return left - sum(len(each.tries) for each in runs) - sum(each.wants for each in earlier)

    def _pools(self, name: str) -> list[PoolState]:
        """Of the models that a name in a batch stands for."""
        return [pool for served in self._around.models.known(name) for pool in served.fleet.routed]

    async def _give_way(self) -> None:
        """Have items end at once, the youngest first, where live requests fill a pool beyond them.

        Live requests would wait at their engine for an item's end; the item is asked again.
        """
        while True:
            busy = any(run.leases for run in self._runs.values())
            await asyncio.sleep(_GIVE_WAY_S if busy else _IDLE_S)
            for name in self._leftovers:
                for pool in self._pools(name):
                    slots = sum(pool.present) * pool.slots_per_worker
                    if (over := pool.inflight - slots) > 0:
                        self._evict(self._of(name), pool, over)

    def _evict(self, runs: list[Run], pool: PoolState, over: int) -> None:
        pipeline = self._around.pipeline
        for run in sorted(runs, key=lambda run: turn(run.batch), reverse=True):
            for lease_id in () if run.batch.is_urgent else list(reversed(run.leases)):
                worker = pipeline.worker_of(lease_id)
                if worker is None or pool.active[worker] <= pool.slots_per_worker:
                    continue
                pipeline.evict(lease_id)
                over -= 1
                if not over:
                    return
