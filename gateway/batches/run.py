"""One batch while this process runs it: its items through the pipeline, its output in parts.

Rules:
- What the batch's document does not name does not exist: a part's files are written first, then
  one compare-and-set names the part. Every change is a compare-and-set, so a runner that another
  one took over from changes nothing more.
- An item that is not in a part is asked anew by the next runner. So each has one line at last.
- A part's usage goes to the ledger after the part is named, and the document says so after that.
  Asked twice, the ledger counts it once.
- An item stops at its engine when it is cancelled here.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from gateway.batches.contents import ContentGone, Contents
from gateway.batches.items import (
    MAX_TRIES,
    PART_BYTES,
    Answer,
    Done,
    Item,
    Output,
    by_prefix,
    part_every_s,
    read_lines,
    verdict,
)
from gateway.batches.pace import Pace
from gateway.errors import Refusal, StateFailure
from gateway.metrics import Metrics
from gateway.payload.head import lines_of
from gateway.pipeline.pipeline import Pipeline
from gateway.ports import Changed, Documents, Lines
from gateway.records.batch import (
    ENDED,
    Batch,
    BatchItem,
    LineProblem,
    Part,
    Promise,
    Status,
    StoredFile,
)
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import ROUTES, Dialect
from gateway.records.request import Incoming, Principal, RequestHead
from gateway.tenancy.keyring import Keyring, creator
from gateway.usage.usage_export import UsageExport, usage_line

RENEW_S: Final = 4.0
"""Between two changes of a batch's document: other replicas see that it runs."""
UNSURE_S: Final = 10.0
"""Since the last change: from then on another replica may take over, and no item begins."""
LATE_S: Final = 7 * 86_400
"""How long a batch runs beyond its window that was accepted although it may be late."""
_BLOCK_BYTES: Final = 512 << 10
"""Of the input at a time, within which items are ordered."""
_PARSED: Final = 128
"""Lines parsed before others have their turn of the event loop."""
_STARTED: Final = 4
"""Items begun before others have it."""
_MOST_AGAIN: Final = 256
"""Items to be tried again while which no new ones begin."""
_POLL_S: Final = 0.02
_LONG_S: Final = 5.0
_LEARNED: Final = 0.1
"""Weight of the newest item's time."""
_CROWDED: Final = frozenset({"priority", "kv", "queue_full", "queue_timeout"})
"""Reasons of refusals whose waits are forecasts of capacity, which comes and goes."""
_IDLE_S: Final = 0.2
_MOST_PAUSE_S: Final = 1.0
_AGAIN_S: Final = 1.0
_REFUSED_S: Final = 5.0
"""After it an item is asked again whose creator had no right to it."""
_NOTED_TURNS: Final = 100
_FORECAST_S: Final = 60.0

_log = logging.getLogger("sluice.batches")
_encode: Final = msgspec.json.Encoder().encode
_INPUT_GONE: Final = LineProblem(code="file_not_found", message="The input file cannot be found.")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Around:
    """What batches need of the process that runs them."""

    pipeline: Pipeline
    keyring: Keyring
    store: Documents
    contents: Contents
    export: UsageExport | None
    metrics: Metrics
    error_body: Callable[[Refusal, Dialect], bytes]
    """A refusal as its endpoint's clients see it."""
    new_id: Callable[[], str]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    owner: str
    """This process, to others."""
    currency: str
    forecast: Callable[[Batch], Awaitable[Promise | None]]
    """When it will have ended, by what is done of it."""
    learn: Callable[[Batch], Awaitable[None]]
    """Told of a batch that was completed."""


class Fenced(Exception):
    """Another replica has the batch, or it was deleted."""


class Over(Exception):
    """The batch is over, and what failed is needed no more."""


class CollectingReply:
    """A ClientReply that keeps the answer."""

    def __init__(self) -> None:
        self.started = False
        self.status = 0
        self.refusal: Refusal | None = None
        self._pieces: list[bytes] = []

    def end(self) -> tuple[bytes, Refusal | None]:
        """What was answered; what is no JSON is an engine's failure."""
        body = b"".join(self._pieces)
        if self.refusal is None and not _is_json(body):
            self.refusal = Refusal("The engine did not answer with JSON.", reason="engine_error")
        return body, self.refusal

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def write_now(self, data: bytes) -> bool:
        self._pieces.append(data)
        return True

    async def drain(self) -> None:
        pass

    async def finish(self) -> None:
        pass

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        self.started, self.status = True, status
        self._pieces.append(body)

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        self.refusal = refusal

    async def break_off(self, refusal: Refusal) -> None:
        self.refusal = refusal


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


class Stored:
    """A batch's document, as its owner changes it."""

    def __init__(self, around: Around, batch: Batch, version: int) -> None:
        self.batch = batch
        self.lost = False
        """Whether another one owns it."""
        self.changed_s = around.clock()
        """When it last changed."""
        self.posted: set[tuple[int, int]] = set()
        """(epoch, number) of parts whose usage the ledger has, until the document says so."""
        self._around = around
        self._version = version
        self._changing = asyncio.Lock()

    async def change(self, changed: Callable[[Batch], Batch]) -> None:
        """Write a change, based on what is there. Raises Fenced, StateFailure."""
        async with self._changing:
            while not self.lost:
                noted = frozenset(self.posted)
                batch = _noted(changed(self.batch), noted)
                try:
                    self._version = await self._around.store.put(batch, self._version)
                except Changed:
                    await self._reread()
                    continue
                self.batch, self.changed_s = batch, self._around.clock()
                self.posted -= noted
                for epoch, number in noted:
                    await self._delete_usage(Part(epoch=epoch, number=number))
                return
            raise Fenced

    async def note_posted(self) -> None:
        """Note in a batch that ended what the ledger got. Raises Changed, StateFailure."""
        batch = _noted(self.batch, frozenset(self.posted))
        await self._around.store.put(batch, self._version)
        for epoch, number in self.posted:
            await self._delete_usage(Part(epoch=epoch, number=number))

    async def _reread(self) -> None:
        """A client cancelled it, an earlier change came through after all, or it is lost."""
        found, mine = await self._around.store.get(Batch, self.batch.id), self.batch
        if found is None or found[0].epoch != mine.epoch or found[0].status in ENDED:
            self.lost = True
        else:
            theirs, self._version = found
            if theirs.status == "cancelling":
                cancelling_s = theirs.cancelling_unix_s
                self.batch = replace(mine, status=theirs.status, cancelling_unix_s=cancelling_s)

    async def _delete_usage(self, part: Part) -> None:
        name = self.batch.part_name(part, "use")
        try:
            await self._around.contents.delete(name)
        except StateFailure as error:  # it goes with the batch
            _log.warning("%s is not deleted: %s", name, error)


def _noted(batch: Batch, posted: frozenset[tuple[int, int]]) -> Batch:
    if not posted:
        return batch
    parts = [replace(p, unposted="") if (p.epoch, p.number) in posted else p for p in batch.parts]
    return replace(batch, parts=tuple(parts))


class Run:
    """A batch that this process owns."""

    def __init__(
        self,
        around: Around,
        batch: Batch,
        version: int,
        slots: Callable[["Run"], int],
    ) -> None:
        """`slots`: how many more items leftovers allow it now; all of the model's if urgent."""
        self._around = around
        self.stored = Stored(around, batch, version)
        self.running: dict[asyncio.Task[None], int] = {}
        """Tries in flight, and their items' lines."""
        self.leases: dict[str, None] = {}
        """Of tries in flight, oldest first."""
        self.urgent = False
        self.rightless = False
        """Whether its creator may not ask now."""
        self._gone = False
        """Whether its input is."""
        self.item_s = _LONG_S
        """Seconds that an item took lately; `_LONG_S` until one has ended."""
        self._records: dict[int, DecisionRecord | None] = {}
        """The newest record of each item in flight."""
        self.stopping = False
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
        self._done = Done()
        self._waiting: deque[Item] = deque()
        self._again: list[tuple[float, Item]] = []
        """When to try again, soonest first."""
        self._offset = self._line = 0
        """Of the input: the bytes and lines that were read."""
        self._input_bytes = 0
        self._read_all = False
        self._output = Output()
        self._number = 0
        """Of the next part."""
        self._forecast_s = 0.0
        """When to forecast again."""
        self._committing: asyncio.Task[None] | None = None
        self._began_s = around.clock()
        self._part_s = self._began_s
        """When the first item of the next part was answered."""
        self._allowed_s = -inf
        """When the newest of the items was sent that were not refused for want of rights."""
        self._message = ""

    @property
    def batch(self) -> Batch:
        """As it is stored."""
        return self.stored.batch

    @property
    def wants(self) -> int:
        """Items that could begin now if there were slots."""
        if self.rightless or not (self._waiting or self._again or not self._read_all):
            return 0
        return self._pace.room(len(self.running), self._around.clock())

    def note(self, record: DecisionRecord, item: BatchItem) -> None:
        """What was decided about one of its items."""
        if item.index in self._records:
            self._records[item.index] = record

    def stop(self) -> None:
        """Have it commit what is done, and leave the batch to others."""
        self.stopping = True
        self.poked.set()

    async def run(self) -> None:
        """Run it until it ended, `stopping` is set, or another one has it."""
        renewing = asyncio.create_task(self._renew())
        try:
            answered = await self._answer_items()
            await self._abort()
            await self._commit_all()
            batch = self.batch
            if answered and batch.completed + batch.failed < batch.total:
                raise RuntimeError("items have no line")  # the next run asks them
            if answered or not self.stopping:
                await self._finish("completed" if answered else "expired")
        except Fenced:
            if self.stored.lost:
                _log.info("batch %s: another replica goes on with it", self.batch.id)
        finally:
            renewing.cancel()
            await self._abort()
            if self._committing is not None:
                self._committing.cancel()
                await asyncio.wait([self._committing])
        if self.batch.status not in ENDED and not self.stored.lost:
            await self.stored.change(lambda batch: replace(batch, owner="", message=""))

    # -- the document

    async def _begin(self) -> None:
        now_unix_s, batch_file = int(self._around.wall_clock()), self.batch.input_file

        def begun(batch: Batch) -> Batch:
            if batch.status != "validating":
                return batch
            return replace(batch, status="in_progress", in_progress_unix_s=now_unix_s)

        await self._insist(self.stored.change, begun)
        found = await self._insist(self._around.store.get, StoredFile, batch_file)
        self._gone = found is None
        self._input_bytes = 0 if found is None else found[0].bytes
        for part in self.batch.parts:
            name = self.batch.part_name(part, "idx")
            self._done.add(await self._insist(self._read, name, unless=self._cancelled))
        await self._post_left()

    async def _renew(self) -> None:
        """Show others that it runs, and hear whether it was cancelled."""
        while not self.stored.lost:
            await _wait(self.poked, RENEW_S)
            self.urgent = self.batch.is_urgent
            try:
                await self.stored.change(lambda batch: replace(batch, message=self._message))
            except (Fenced, StateFailure) as error:
                _log.warning("batch %s is not renewed: %r", self.batch.id, error)
            self._wake.set()

    async def _insist(
        self,
        work: Callable[..., Awaitable[_T]],
        *arguments: Any,
        unless: Callable[[Exception], bool] = lambda _: False,
    ) -> _T:
        """Work that storage or state may fail at: again until it is done. Raises Fenced.

        Raises Over at a failure of which `unless` says so.
        """
        while True:
            try:
                return await work(*arguments)
            except (Changed, StateFailure) as error:
                self._say("The state or the storage of batches fails.", error)
                if self.stopping or self.stored.lost:
                    raise Fenced from error
                if unless(error):
                    raise Over from error
            await asyncio.sleep(_AGAIN_S)

    def _say(self, message: str, error: Exception | None = None) -> None:
        """Tell clients why it waits; what failed, with its paths and hosts, is for the log."""
        if message and message != self._message:
            _log.warning("batch %s: %s %s", self.batch.id, message, error or "")
        self._message = message

    # -- items

    def _cancelled(self, _: Exception | None = None) -> bool:
        return self.batch.status == "cancelling"

    def _over(self, _: Exception | None = None) -> bool:
        if self.stopping or self.stored.lost or self._gone:
            return True
        return is_over(self.batch, self._around.wall_clock())

    async def _answer_items(self) -> bool:
        """Answer items until all are, which is True, or it is over."""
        try:
            await self._begin()
            return await self._answer_all()
        except Over:
            return False

    async def _answer_all(self) -> bool:
        while not self._over():
            few = not (self._waiting or self._read_all) and len(self._again) < _MOST_AGAIN
            if few and self._principal() is not None:  # who waits for rights holds no items
                await self._insist(self._refill, unless=self._over)
            ready = await self._start_some()
            self._commit_if_due()
            left = self._waiting or self._again or self.running
            if self._read_all and not left:
                return True
            if not ready:
                wait_s = self._pace.wait_s(self._around.clock())
                least_s = _POLL_S if self.running else _IDLE_S
                await _wait(self._wake, min(max(least_s, wait_s), _MOST_PAUSE_S))
        return False

    async def _refill(self) -> None:
        """Read the next items of the input."""
        size, block, at_end = _BLOCK_BYTES, b"", False
        while not (at_end or b"\n" in block):
            end = min(self._offset + size, self._input_bytes)
            block = await self._read(self.batch.input_file, self._offset, end)
            at_end, size = end == self._input_bytes, 2 * size
        if not at_end:
            block = block[: block.rindex(b"\n") + 1]
        lines = block.removesuffix(b"\n").split(b"\n") if block else []
        items: list[Item] = []
        for first in range(0, len(lines), _PARSED):
            items += read_lines(self._line + first, lines[first : first + _PARSED], self._done)
            await asyncio.sleep(0)
        self._offset += len(block)
        self._line += len(lines)
        self._read_all = at_end
        self._waiting.extend(sorted(items, key=by_prefix))

    async def _start_some(self) -> bool:
        """Begin a few items; whether there may be room for more."""
        now_s = self._around.clock()
        unsure = now_s - self.stored.changed_s > UNSURE_S
        if unsure or self._output.bytes >= PART_BYTES or not (self._waiting or self._again):
            return False
        room = min(self._pace.room(len(self.running), now_s), self._slots(self), _STARTED)
        if room <= 0:
            return False
        for _ in range(room):
            item = self._next(now_s)
            principal = None if item is None else self._principal()
            if item is None or principal is None:
                if item is not None:
                    self._waiting.appendleft(item)
                return False
            task = asyncio.create_task(self._try(item, principal))
            self.running[task] = item.line
            self._records[item.line] = None
            task.add_done_callback(self._tried)
        await asyncio.sleep(0)
        return room == _STARTED

    def _next(self, now_s: float) -> Item | None:
        if self._again and self._again[0][0] <= now_s:
            return heappop(self._again)[1]
        return self._waiting.popleft() if self._waiting else None

    def _principal(self) -> Principal | None:
        """Who asks, with the rights of now; None while that is nobody."""
        batch, now_s = self.batch, self._around.clock()
        try:
            principal = creator(
                self._around.keyring,
                batch.tenant,
                batch.entitlement,
                batch.key,
                self._around.wall_clock(),
            )
        except Refusal as refusal:
            self.rightless = True
            self._say(refusal.message)
            self._pace.refused(now_s, now_s, _AGAIN_S)
            return None
        self.rightless = False
        return principal

    def _tried(self, task: "asyncio.Task[None]") -> None:
        line = self.running.pop(task)
        del self._records[line]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("batch %s, line %d failed", self.batch.id, line + 1, exc_info=error)

    async def _try(self, item: Item, principal: Principal) -> None:
        sent_s = self._around.clock()
        answer = await self._ask(item, principal)
        now_s, said = self._around.clock(), verdict(answer)
        if answer.record is not None and answer.record.attempts:
            self._output.slot_s += now_s - sent_s
            self.item_s += (now_s - sent_s - self.item_s) * _LEARNED
        if said == "again" and item.tries + 1 < MAX_TRIES:
            self._around.metrics.batch_retries.add(self.batch.model)
            heappush(self._again, (now_s + 4.0**item.tries, item._replace(tries=item.tries + 1)))
        elif said == "no_right" and item.refused_s < self._allowed_s:
            self._take(item, answer)  # others may: this one asks for what its creator may not
        elif said in {"later", "no_right"} and answer.refusal is not None:
            if said == "later":
                self._waiting.appendleft(item)
            else:
                item = item._replace(refused_s=min(item.refused_s, now_s))
                heappush(self._again, (now_s + _REFUSED_S, item))
            reason, wait_s = answer.refusal.reason, answer.refusal.retry_after_s
            if reason != "evicted":  # it made way for one request, and others go on
                self._pace.refused(sent_s, now_s, None if reason in _CROWDED else wait_s)
            self._say(answer.refusal.message)
        else:
            self._allowed_s = max(self._allowed_s, sent_s)
            self._take(item, answer)

    def _take(self, item: Item, answer: Answer) -> None:
        """An item has its answer, whatever it is."""
        if not len(self._output):
            self._part_s = self._around.clock()
        self._output.take(self.batch, item, answer)
        if self._around.export is not None and answer.record is not None:
            line = usage_line(answer.record, self._around.currency)
            if line is not None:
                self._output.usage.append(_encode(line))
        self._pace.answered(len(self.running) - 1)
        self._say("")
        result = "completed" if answer.refusal is None and answer.status == 200 else "failed"
        self._around.metrics.batch_items.add(self.batch.model, result)

    async def _ask(self, item: Item, principal: Principal) -> Answer:
        around, lease_id, reply = self._around, self._around.new_id(), CollectingReply()
        which = BatchItem(
            batch=self.batch.id, custom_id=item.custom_id, index=item.line, urgent=self.urgent
        )
        incoming = Incoming(
            request_id=lease_id,
            lease_id=lease_id,
            endpoint=self._endpoint,
            head=self._head,
            body=item.body,
            received_s=around.clock(),
            received_unix_s=around.wall_clock(),
            batch=which,
            principal=principal,
        )
        record = None
        self.leases[lease_id] = None
        try:
            await around.pipeline.serve(incoming, reply)
            record = await self._record(item.line)
            body, refusal = reply.end()
        except Exception:  # noqa: BLE001 - a defect is this item's failure
            _log.exception("batch %s, line %d failed in the gateway", which.batch, item.line + 1)
            refusal = Refusal("The gateway failed on this request.", reason="internal_error")
        finally:
            del self.leases[lease_id]
        if refusal is None:
            return Answer(reply.status, body, None, lease_id, record)
        body = around.error_body(refusal, self._endpoint.dialect)
        return Answer(refusal.status, body, refusal, lease_id, record)

    async def _record(self, line: int) -> DecisionRecord | None:
        """The item's record, which may come a few turns of the event loop after its answer."""
        for _ in range(_NOTED_TURNS):
            record = self._records[line]
            if record is not None and record.outcome != "fell_back":
                return record
            await asyncio.sleep(0)
        return None

    async def _abort(self) -> None:
        """Cancel what is in flight, here and at its engines, and wait for that."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- output

    def _commit_if_due(self) -> None:
        now_s, committing = self._around.clock(), self._committing
        every_s = part_every_s(now_s - self._began_s)
        due = self._output.bytes >= PART_BYTES or now_s - self._part_s >= every_s
        if due and len(self._output) and (committing is None or committing.done()):
            self._committing = asyncio.create_task(self._commit())

    async def _commit_all(self) -> None:
        """Commit what is done, and what the ledger has to get."""
        if self._committing is not None:
            await self._committing
            self._committing = None
        if len(self._output):
            await self._commit()
        await self._post_left()

    async def _commit(self) -> None:
        """Make a part of what is done. Raises Fenced."""
        if self.stored.lost:
            raise Fenced
        output, self._output = self._output, Output()
        export, epoch = self._around.export, self.batch.epoch
        unposted = "" if export is None else export.id
        part = output.part(epoch=epoch, number=self._number, unposted=unposted)
        self._number += 1
        for suffix, data in output.files().items():
            name = self.batch.part_name(part, suffix)
            await self._insist(self._around.contents.write, name, data)

        def with_part(batch: Batch) -> Batch:
            if part in batch.parts:
                return batch
            return replace(
                batch,
                parts=(*batch.parts, part),
                completed=batch.completed + part.lines,
                failed=batch.failed + part.error_lines,
            )

        await self._insist(self.stored.change, with_part)
        self._done.add(output.packed())
        if part.unposted:
            await post(self._around, self.stored, part, output.usage)
        await self._forecast()

    async def _forecast(self) -> None:
        """Say now and then when it will have ended."""
        now_s = self._around.clock()
        if now_s < self._forecast_s:
            return
        self._forecast_s = now_s + _FORECAST_S
        try:
            forecast = await self._around.forecast(self.batch)
        except StateFailure:
            return  # the next one will do
        await self._insist(self.stored.change, lambda batch: replace(batch, forecast=forecast))

    async def _post_left(self) -> None:
        """Have the ledger get what it did not get before."""
        for part in unposted(self.batch, self._around.export):
            if (part.epoch, part.number) not in self.stored.posted:
                await post(self._around, self.stored, part, None)

    # -- the end

    async def _finish(self, status: Status) -> None:
        """It is over: say how, and expire what is left."""
        if status == "expired" and not self._cancelled():
            await self._expire_rest()
        now_unix_s = int(self._around.wall_clock())
        for file in self.batch.outputs(now_unix_s=now_unix_s):
            await self._insist(self._put_file, file)

        def ended(batch: Batch) -> Batch:
            final: Status = "failed" if self._gone else status
            final = "cancelled" if batch.status == "cancelling" else final
            times = {f"{final}_unix_s": now_unix_s, "finalizing_unix_s": now_unix_s}
            problems = (_INPUT_GONE,) if final == "failed" else ()
            return replace(batch, status=final, message="", problems=problems, **times)

        await self._insist(self.stored.change, ended)
        _count_promise(self._around.metrics, self.batch, now_unix_s)
        if self.batch.status == "completed":
            with contextlib.suppress(StateFailure):
                await self._around.learn(self.batch)

    async def _expire_rest(self) -> None:
        self._offset = self._line = 0
        self._read_all = False
        self._waiting.clear()
        while not (self._read_all or self.stored.lost or self._gone):
            try:
                await self._insist(self._refill, unless=self._ends_expiring)
            except Over as over:
                self._gone = isinstance(over.__cause__, ContentGone)
                return
            for item in self._waiting:
                self._output.expire(self.batch, item)
            self._around.metrics.batch_items.add(self.batch.model, "expired", by=len(self._waiting))
            self._waiting.clear()
            if self._output.bytes >= PART_BYTES or self._read_all:
                await self._commit_all()

    def _ends_expiring(self, error: Exception) -> bool:
        return self._cancelled() or isinstance(error, ContentGone)

    async def _put_file(self, file: StoredFile) -> None:
        """Write an output's record, over what an earlier runner may have written."""
        found = await self._around.store.get(StoredFile, file.id)
        await self._around.store.put(file, 0 if found is None else found[1])

    async def _read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return await self._around.contents.read(name, start, end)


async def _wait(event: asyncio.Event, most_s: float) -> None:
    """Wait until an event is set, so long at most; then it is not set any more."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await event.wait()
    event.clear()


def turn(batch: Batch) -> tuple[float, int]:
    """What the batches of a model are ordered by: those promised soonest, then the oldest."""
    return batch.promised_by_unix_s or inf, batch.created_unix_s


def is_over(batch: Batch, now_unix_s: float) -> bool:
    """Whether it is cancelled, or its time is over, whatever is left."""
    ends_unix_s = batch.expires_unix_s + (LATE_S if batch.accept_late else 0)
    return batch.status == "cancelling" or now_unix_s >= ends_unix_s


def _count_promise(metrics: Metrics, batch: Batch, now_unix_s: int) -> None:
    promised = batch.promised_by_unix_s
    if promised is not None and batch.status != "cancelled":
        kept = batch.status == "completed" and now_unix_s <= promised
        metrics.batch_promises.add(str(kept).lower())


# -- the ledger


def unposted(batch: Batch, export: UsageExport | None) -> list[Part]:
    """Parts whose usage this process's ledger has to get."""
    return [part for part in batch.parts if export is not None and part.unposted == export.id]


async def post(around: Around, stored: Stored, part: Part, lines: list[bytes] | None) -> None:
    """Have the ledger get a part's usage; None: as it is stored. A failure leaves it for later."""
    batch = stored.batch
    try:
        if lines is None:
            name = batch.part_name(part, "use")
            lines = (await around.contents.read(name)).splitlines()
        if around.export is not None:
            await around.export.post(f"{batch.id}/{part.epoch}-{part.number}", lines)
    except (OSError, StateFailure) as error:
        _log.error("batch %s: the usage of a part waits: %s", batch.id, error)
    else:
        stored.posted.add((part.epoch, part.number))
