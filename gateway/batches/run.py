"""One batch while this process runs it: its items through the pipeline, its output in parts.

Rules:
- The parts that the batch's document names are the journal: what it does not name does not exist.
  A part's files are written first, then one compare-and-set names the part. Every change is a
  compare-and-set, so a runner that another one took over from changes nothing more.
- An item that is not in a part is asked anew by the next runner. So each has one line at last.
- A part's usage goes to the ledger after the part is named, and the document says so after that.
  Asked twice, the ledger counts it once.
- A step that state or storage fails at is done again, and may have taken effect before.
- An item stops at its engine when it is cancelled here.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from gateway.batches.contents import ContentGone, Contents
from gateway.batches.forecaster import Forecaster
from gateway.batches.items import (
    MAX_TRIES,
    PART_BYTES,
    Answer,
    Item,
    Output,
    by_prefix,
    mark,
    part_every_s,
    read_items,
)
from gateway.batches.pace import Pace
from gateway.batches.rights import BatchModels
from gateway.errors import Refusal, StateFailure
from gateway.metrics import Metrics
from gateway.payload.head import lines_of
from gateway.pipeline.pipeline import Pipeline
from gateway.ports import Documents
from gateway.records.batch import Batch, BatchItem, LineProblem, Status, StoredFile
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import ROUTES, Dialect
from gateway.records.request import Incoming, Principal, RequestHead
from gateway.tenancy.keyring import Keyring, creator
from gateway.usage.usage_export import UsageExport, usage_line

RENEW_S: Final = 4.0
"""Between two changes of a batch's document: other replicas see that it runs."""
UNSURE_S: Final = 10.0
"""Since the last change: from then on another replica may take over, and no item begins."""
_LOOK_S: Final = 0.1
"""Between two looks at what the document is due."""
_FORECAST_S: Final = 60.0
_BLOCK_BYTES: Final = 4 << 20
"""Of the input at a time, within which items are ordered."""
_PARSED: Final = 128
"""Lines parsed before others have their turn of the event loop."""
_STARTED: Final = 4
"""Items begun before others have it."""
_POLL_S: Final = 0.02
_IDLE_S: Final = 0.2
_AGAIN_S: Final = 1.0
_NOTED_S: Final = 1.0
"""After its answer, until an item's record must have come."""
_LONG_S: Final = 5.0
_LEARNED: Final = 0.1
"""Weight of the newest item's time."""
_AWAY: Final = "The state or the storage of batches fails."
_INPUT_GONE: Final = LineProblem(code="file_not_found", message="The input file cannot be found.")

_log = logging.getLogger("sluice.batches")


@dataclass(frozen=True, kw_only=True)
class Around:
    """What batches need of the process that runs them."""

    pipeline: Pipeline
    keyring: Keyring
    models: BatchModels
    store: Documents
    contents: Contents
    export: UsageExport | None
    forecaster: Forecaster
    metrics: Metrics
    error_body: Callable[[Refusal, Dialect], bytes]
    """A refusal as its endpoint's clients see it."""
    new_id: Callable[[], str]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    owner: str
    """This process, to others."""
    currency: str


class Fenced(Exception):
    """Another replica has the batch, or has to get it."""


class Stored:
    """A batch's document, as its owner changes it."""

    def __init__(self, around: Around, batch: Batch, version: int) -> None:
        self.batch = batch
        self.changed_s = around.clock()
        """When it last changed."""
        self._around = around
        self._version = version
        self._changing = asyncio.Lock()

    async def change(self, changed: Callable[[Batch], Batch]) -> None:
        """Write a change of what is there, which may be there already.

        Raises Fenced, StateFailure.
        """
        epoch = self.batch.epoch

        def by_owner(batch: Batch) -> Batch:
            if batch.epoch != epoch:
                raise Fenced
            return changed(batch)

        store = self._around.store
        async with self._changing:
            self.batch, self._version = await store.change(self.batch, self._version, by_owner)
            self.changed_s = self._around.clock()

    async def post_usage(self, *, give_up: bool = False) -> None:
        """Have this process's ledger get what it lacks of the batch's usage; failures are logged.

        `give_up`: no process has the other ledgers any more. Raises Fenced.
        """
        export, contents = self._around.export, self._around.contents
        for part in [part for part in self.batch.parts if part.unposted]:
            name = self.batch.part_name(part, "use")
            try:
                if export is not None and part.unposted == export.id:
                    lines = (await contents.read(name)).splitlines()
                    await export.post(f"{self.batch.id}/{part.epoch}-{part.number}", lines)
                elif not give_up:
                    continue
                await self.change(partial(Batch.posted, part=part))
                await contents.delete(name)
            except (OSError, StateFailure) as error:
                _log.error("%s: the usage of %s waits: %s", self.batch.id, part, error)


def turn(batch: Batch) -> tuple[float, int]:
    """The sort key of a model's batches: those promised soonest come first, then the oldest."""
    return batch.promised_by_unix_s or inf, batch.created_unix_s


async def wait(event: asyncio.Event, most_s: float) -> None:
    """Wait until an event is set, so long at most, and unset it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await event.wait()
    event.clear()


class Run:
    """A batch that this process owns."""

    def __init__(
        self, around: Around, batch: Batch, version: int, slots: Callable[["Run"], int]
    ) -> None:
        """Begin to run it until it ended, `stopping` is set, or another one has it.

        `slots`: how many more items leftovers allow it now; all of the model's if urgent.
        """
        self._around = around
        self.stored = Stored(around, batch, version)
        self.task = self._start(self._run())
        self.tries: dict[asyncio.Task[None], Item] = {}
        """Items that are being answered."""
        self.leases: dict[str, asyncio.Future[DecisionRecord]] = {}
        """Of requests in flight, oldest first, with what will have been decided."""
        self.rightless = False
        """Whether its creator may not ask now."""
        self.stopping = False
        """Set to have it commit what is done, and leave the batch to others."""
        self.item_s = _LONG_S
        """Seconds that an item took lately; `_LONG_S` until one has ended."""
        self.poked = asyncio.Event()
        """Set to have it look at its document at once."""
        self._wake = asyncio.Event()
        self._slots = slots
        self._endpoint = ROUTES[batch.endpoint]
        self._head = RequestHead(
            entitlement=batch.entitlement or None,
            forwarded=lines_of([(b"content-type", b"application/json")]),
        )
        self._pace = Pace()
        self._done = bytearray()
        """Items that are in the parts of earlier runs, a byte each."""
        self._waiting: deque[Item] = deque()
        self._offset = self._count = self._input_bytes = 0
        """Of the input: the bytes and items that were read, and all its bytes."""
        self._read_all = False
        self._expiring = False
        """Whether its time ended before its items had."""
        self._gone = False
        """Whether its input is."""
        self._output = Output()
        self._began_s = self._output_s = around.clock()
        """The run, and the first item of the next part."""
        self._message = ""

    @property
    def batch(self) -> Batch:
        """As it is stored."""
        return self.stored.batch

    @property
    def wants(self) -> int:
        """Items that could begin now if there were slots."""
        if self.rightless or (self._read_all and not self._waiting):
            return 0
        return self._pace.room(len(self.tries), self._around.clock())

    def note(self, record: DecisionRecord) -> None:
        """What was decided about one of its items."""
        noted = self.leases.get(record.request_id)
        if noted is not None and not noted.done() and record.outcome != "fell_back":
            noted.set_result(record)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """One of its tasks has; what a defect left undone is for the next run."""
        item = self.tries.pop(task, None)
        self._wake.set()
        if task.cancelled():
            if item is not None:
                self._waiting.appendleft(item)
        elif (error := task.exception()) is not None and not isinstance(error, Fenced):
            _log.error("batch %s failed in the gateway", self.batch.id, exc_info=error)
            self.stopping = True

    # -- the document

    async def _run(self) -> None:
        feeding, renewing = self._start(self._feed()), self._start(self._renew())
        try:
            while not (self.stopping or feeding.done() or self.batch.status == "cancelling"):
                await asyncio.sleep(_LOOK_S)
                now_s = self._around.clock()
                every_s = part_every_s(now_s - self._began_s)
                if self._output.size >= PART_BYTES or now_s - self._output_s >= every_s:
                    await self._commit()
            await cancel([feeding, *self.tries])
            await self._commit()
            await cancel([renewing])
            await self._insist(self._leave)
        except Fenced:
            _log.info("batch %s: another replica goes on with it", self.batch.id)
        finally:
            await cancel([feeding, renewing, *self.tries])

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work that state or storage may fail at: again until it is done. Raises Fenced."""
        while True:
            try:
                return await work()
            except StateFailure as error:
                self._say(_AWAY, error)
                if self.stopping:
                    raise Fenced from error
            await asyncio.sleep(_AGAIN_S)

    async def _commit(self) -> None:
        """Make a part of what is done, if anything is."""
        batch, export, output = self.batch, self._around.export, self._output
        if not output.size:
            return
        self._output = Output()
        ledger = "" if export is None else export.id
        part = output.part(epoch=batch.epoch, number=len(batch.parts), ledger=ledger)

        async def write() -> None:
            for suffix, data in output.files.items():
                if data:
                    name = batch.part_name(part, suffix)
                    await self._around.contents.write(name, bytes(data))
            await self.stored.change(partial(Batch.with_part, part=part))

        await self._insist(write)
        await self.stored.post_usage()

    async def _renew(self) -> None:
        """Show others that it runs, hear whether it was cancelled, and forecast its end."""
        around, forecast, forecast_s = self._around, self.batch.forecast, 0.0
        while True:
            await wait(self.poked, RENEW_S)
            renewed = partial(replace, message=self._message, forecast=forecast)
            try:
                await self.stored.change(renewed)
                if around.clock() >= forecast_s:
                    forecast = await around.forecaster.forecast(self.batch)
                    forecast_s = around.clock() + _FORECAST_S
            except Fenced:
                self.stopping = True
            except StateFailure as error:
                _log.warning("batch %s is not renewed: %s", self.batch.id, error)

    async def _leave(self) -> None:
        """Say how it ended; if it did not, leave it to the next run."""
        around, now_unix_s, end = self._around, int(self._around.wall_clock()), self._end()
        for file in self.batch.outputs(now_unix_s=now_unix_s) if end else ():
            await self._put(file)

        def left(batch: Batch) -> Batch:
            if end is None:
                return replace(batch, owner="", message="")
            status: Status = "cancelled" if batch.status == "cancelling" else end
            problems = (_INPUT_GONE,) if status == "failed" else ()
            batch = batch.moved("finalizing", now_unix_s).moved(status, now_unix_s)
            return replace(batch, problems=problems)

        await self.stored.change(left)
        batch, promised_unix_s = self.batch, self.batch.promised_by_unix_s
        if promised_unix_s is not None and batch.status in {"completed", "expired", "failed"}:
            kept = batch.status == "completed" and now_unix_s <= promised_unix_s
            around.metrics.batch_promises.add(str(kept).lower())
        if batch.status == "completed":
            with contextlib.suppress(StateFailure):
                await around.forecaster.learn(batch)

    async def _put(self, file: StoredFile) -> None:
        """Write an output's record, over what an earlier run may have written."""
        await self._around.store.change(file, 0, lambda _: file)

    def _end(self) -> Status | None:
        """How it ended; None: it did not."""
        batch = self.batch
        if batch.status == "cancelling":
            return "cancelled"
        if self._gone:
            return "failed"
        if batch.completed + batch.failed < batch.total:
            return None
        return "expired" if self._expiring else "completed"

    def _say(self, message: str, error: Exception | None = None) -> None:
        """Tell clients why it waits; what failed, with its paths and hosts, is for the log."""
        if message != self._message:
            _log.warning("batch %s: %s %s", self.batch.id, message, error or "")
        self._message = message

    # -- items

    async def _feed(self) -> None:
        """Answer items until all are, or the input is gone."""
        await self._insist(self._recall)
        while not (self._gone or self._all_answered() or self.batch.status == "cancelling"):
            if not self._expiring and self.batch.is_over(self._around.wall_clock()):
                self._expiring = True
                await cancel(self.tries)
            ready = False
            # Who waits for rights holds no items.
            if not (self._waiting or self._read_all) and (self._expiring or self._principal()):
                await self._insist(self._refill)
            if self._output.size < PART_BYTES:
                ready = self._expire() if self._expiring else self._start_some()
                await asyncio.sleep(0)
            if not ready:
                await wait(self._wake, _POLL_S if self.tries else _IDLE_S)

    async def _recall(self) -> None:
        """Find the input, and what is done of it."""
        around, batch = self._around, self.batch
        found = await around.store.get(StoredFile, batch.input_file)
        if found is None:
            self._gone = True
            return
        self._input_bytes = found[0].bytes
        for part in batch.parts:
            mark(self._done, await around.contents.read(batch.part_name(part, "idx")))

    async def _refill(self) -> None:
        """Read the next items of the input."""
        name, size, block, at_end = self.batch.input_file, _BLOCK_BYTES, b"", False
        while not (at_end or b"\n" in block):
            end = min(self._offset + size, self._input_bytes)
            try:
                block = await self._around.contents.read(name, self._offset, end)
            except ContentGone:
                self._gone = self.batch.is_over(self._around.wall_clock())
                if self._gone:
                    return
                raise
            at_end, size = end == self._input_bytes, 2 * size
        if not at_end:
            block = block[: block.rindex(b"\n") + 1]
        lines = [line for line in block.split(b"\n") if line.strip()]
        items: list[Item] = []
        for first in range(0, len(lines), _PARSED):
            items += read_items(lines[first : first + _PARSED], self._count + first, self._done)
            await asyncio.sleep(0)
        self._offset += len(block)
        self._count += len(lines)
        self._read_all = at_end
        self._waiting.extend(sorted(items, key=by_prefix))

    def _all_answered(self) -> bool:
        return self._read_all and not (self._waiting or self.tries)

    def _expire(self) -> bool:
        """End the items that wait as expired; True, since the input may have more."""
        for item in self._waiting:
            self._output.expire(self.batch, item)
        self._around.metrics.batch_items.add(self.batch.model, "expired", by=len(self._waiting))
        self._waiting.clear()
        return True

    def _start_some(self) -> bool:
        """Begin a few items; whether there may be room for more."""
        now_s = self._around.clock()
        if now_s - self.stored.changed_s > UNSURE_S or not self._waiting:
            return False
        room = min(self._pace.room(len(self.tries), now_s), self._slots(self), _STARTED)
        principal = self._principal() if room > 0 else None
        if principal is None:
            return False
        for _ in range(min(room, len(self._waiting))):
            item = self._waiting.popleft()
            self.tries[self._start(self._try(item, principal))] = item
        return room == _STARTED

    def _principal(self) -> Principal | None:
        """Who asks, with the rights of now; None while that is nobody."""
        around, batch = self._around, self.batch
        now_unix_s = around.wall_clock()
        try:
            principal = creator(
                around.keyring, batch.tenant, batch.entitlement, batch.key, now_unix_s
            )
            around.models.entitlement(principal, batch.model, batch.entitlement or None, now_unix_s)
        except Refusal as refusal:
            self.rightless = True
            self._say(refusal.message)
            return None
        self.rightless = False
        return principal

    async def _try(self, item: Item, principal: Principal) -> None:
        """Ask an item until it has an answer or has to wait, each time that engines fail later."""
        for tries in range(1, MAX_TRIES + 1):
            sent_s = self._around.clock()
            answer = await self._ask(item, principal)
            now_s, came_to = self._around.clock(), answer.verdict()
            if answer.record is not None and answer.record.attempts:
                self._output.slot_s += now_s - sent_s
                self.item_s += (now_s - sent_s - self.item_s) * _LEARNED
            if came_to != "again" or tries == MAX_TRIES:
                break
            self._around.metrics.batch_retries.add(self.batch.model)
            await asyncio.sleep(4.0 ** (tries - 1))
        refusal = answer.refusal
        if refusal is not None and (came_to == "later" or self._lost_rights(refusal)):
            self._waiting.appendleft(item)
            if refusal.reason != "evicted":  # it made way for one request, and others go on
                self._pace.refused(sent_s, now_s)
            self._message = refusal.message
        else:
            self._take(item, answer)

    def _lost_rights(self, refusal: Refusal) -> bool:
        """Whether the batch has, and not the item alone, as with a LoRA adapter that it names."""
        return refusal.status in {401, 403} and self._principal() is None

    def _take(self, item: Item, answer: Answer) -> None:
        """An item has its answer, whatever it is."""
        around, usage = self._around, None
        if not self._output.size:
            self._output_s = around.clock()
        if around.export is not None and answer.record is not None:
            usage = usage_line(answer.record, around.currency)
        self._output.take(self.batch, item, answer, usage)
        self._pace.answered(len(self.tries) - 1)
        self._message = ""
        result = "completed" if answer.is_good else "failed"
        around.metrics.batch_items.add(self.batch.model, result)

    async def _ask(self, item: Item, principal: Principal) -> Answer:
        around, lease_id, endpoint = self._around, self._around.new_id(), self._endpoint
        answer = Answer(lease_id)
        which = BatchItem(
            batch=self.batch.id,
            custom_id=item.custom_id,
            index=item.index,
            urgent=self.batch.is_urgent,
        )
        incoming = Incoming(
            request_id=lease_id,
            lease_id=lease_id,
            endpoint=endpoint,
            head=self._head,
            body=bytes(item.body),
            received_s=around.clock(),
            received_unix_s=around.wall_clock(),
            batch=which,
            principal=principal,
        )
        noted = self.leases[lease_id] = asyncio.get_running_loop().create_future()
        try:
            await around.pipeline.serve(incoming, answer)
            with contextlib.suppress(TimeoutError):
                answer.record = await asyncio.wait_for(noted, _NOTED_S)
        except Exception:  # noqa: BLE001 - a defect is this item's failure
            _log.exception("batch %s, request %d failed", which.batch, item.index + 1)
            message = "The gateway failed on this request."
            answer.refusal = Refusal(message, reason="internal_error")
        finally:
            del self.leases[lease_id]
        answer.end(lambda refusal: around.error_body(refusal, endpoint.dialect))
        return answer


async def cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel tasks, also at the engines that they ask, and wait for their end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if cancelled:
        await asyncio.wait(cancelled)
