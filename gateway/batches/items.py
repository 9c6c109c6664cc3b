"""Items of a batch: their lines, which are done, what comes of a try, and the lines of its output.

Pure. Items are named by their index among the requests of the input file, from 0.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec
import numpy as np
import orjson

from gateway.errors import Refusal
from gateway.ports import Lines
from gateway.records.batch import Batch, Part
from gateway.records.decision import DecisionRecord
from gateway.records.usage import UsageLine

MAX_TRIES: Final = 4
"""Failures of engines after which an item's last one is its answer."""
PART_BYTES: Final = 8 << 20
"""Output of which a part is made before its time."""
_KEY_BYTES: Final = 2048

Verdict = Literal["ended", "again", "later"]
"""ended: this is its answer; again: an engine failed on it; later: no engine had it."""
_HARMLESS: Final = frozenset({"busy", "connect", "frozen", "local", "not_served"})
"""Results of attempts that no engine answered."""
_EXPIRED: Final = orjson.dumps(
    {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
)


class Item(msgspec.Struct):
    """A request of a batch, as a line of the input file has it."""

    custom_id: str = ""
    body: msgspec.Raw = msgspec.Raw(b"")
    index: int = 0


class Answer:
    """What comes of one try: a ClientReply that keeps it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started = False
        self.status = 0
        self.body = bytearray()
        self.refusal: Refusal | None = None
        self.record: DecisionRecord | None = None
        """None where the gateway failed."""

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes) -> None:
        self.body += data

    def write_now(self, data: bytes) -> bool:
        self.body += data
        return True

    async def drain(self) -> None: ...

    async def finish(self) -> None: ...

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        self.started, self.status = True, status
        self.body += body

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        self.refusal = refusal

    async def break_off(self, refusal: Refusal) -> None:
        self.refusal = refusal

    def end(self, error_body: Callable[[Refusal], bytes]) -> None:
        """It is whole, and its body JSON; what is none is an engine's failure."""
        try:
            if self.refusal is None:
                msgspec.json.decode(self.body, type=msgspec.Raw)
        except msgspec.DecodeError:
            message = "The engine did not answer with JSON."
            self.refusal = Refusal(message, reason="engine_error")
        if self.refusal is not None:
            self.status, self.body = self.refusal.status, bytearray(error_body(self.refusal))

    @property
    def is_good(self) -> bool:
        """Whether it is a line of the output, and not of the errors."""
        return self.refusal is None and self.status == 200

    def verdict(self) -> Verdict:
        """What the try came to."""
        refusal, status = self.refusal, self.status
        if refusal is None or (status < 500 and status != 429):
            return "ended"
        if refusal.reason == "evicted":
            return "later"
        attempts = () if self.record is None else self.record.attempts
        broke = status not in {429, 503} and not attempts  # the gateway itself
        return "again" if broke or not _HARMLESS.issuperset(a.result for a in attempts) else "later"


_item: Final = msgspec.json.Decoder(Item).decode


def read_items(lines: Iterable[bytes], first: int, done: bytes | bytearray) -> list[Item]:
    """The requests, counted from `first`, in lines of a validated file, but for those `done`."""
    items = []
    for index, text in enumerate(lines, first):
        if index >= len(done) or not done[index]:
            try:
                item = _item(text)
            except msgspec.DecodeError:  # not as it was validated: the pipeline refuses it
                item = Item(body=msgspec.Raw(text))
            item.index = index
            items.append(item)
    return items


def mark(done: bytearray, packed: bytes) -> None:
    """Note in `done`, a byte for each item, those of a part (`Output.files["idx"]`)."""
    indices = np.frombuffer(packed, "<u4")
    if len(indices):
        done.extend(bytes(max(0, int(indices.max()) + 1 - len(done))))
        np.frombuffer(done, np.uint8)[indices] = 1


def by_prefix(item: Item) -> bytes:
    """The sort key of an item: the beginning of its body, so that shared prefixes go together."""
    return bytes(memoryview(item.body)[:_KEY_BYTES])


def part_every_s(elapsed_s: float) -> float:
    """Seconds between two parts: few are lost by a kill, and few parts are made in a long time."""
    return min(max(2.0, elapsed_s / 100), max(60.0, elapsed_s / 1000))


class Output:
    """Lines that wait to become a part."""

    def __init__(self) -> None:
        self.files = {suffix: bytearray() for suffix in ("out", "err", "idx", "use")}
        """Of the part, by suffix: output, errors, which items, and lines for a ledger."""
        self.slot_s = 0.0
        """Seconds in which items held slots, tries that failed included."""
        self._counts = Counter[str]()

    @property
    def size(self) -> int:
        """Bytes of its output and its errors; 0 of an empty one."""
        return len(self.files["out"]) + len(self.files["err"])

    def part(self, *, epoch: int, number: int, ledger: str) -> Part:
        """Its record; `ledger` has to get its usage."""
        return Part(
            epoch=epoch,
            number=number,
            bytes=len(self.files["out"]),
            error_bytes=len(self.files["err"]),
            slot_s=self.slot_s,
            unposted=ledger if self.files["use"] else "",
            **self._counts,
        )

    def take(self, batch: Batch, item: Item, answer: Answer, usage: UsageLine | None) -> None:
        """Take an item's answer; into the errors if it is one."""
        body = answer.body
        if b"\n" in body or b"\r" in body:  # only between members: strings hold none
            body = body.replace(b"\n", b" ").replace(b"\r", b" ")
        request_id = orjson.dumps(answer.request_id)
        response = b'{"status_code":%d,"request_id":%b,"body":%b}'
        suffix = "out" if answer.is_good else "err"
        self._add(suffix, batch, item, response % (answer.status, request_id, body), b"null")
        if answer.record is not None:
            used = answer.record.usage
            self._counts["input_tokens"] += used.prompt_tokens or 0
            self._counts["cached_tokens"] += used.cached_tokens or 0
            self._counts["output_tokens"] += used.completion_tokens or 0
        if usage is not None:
            self.files["use"] += msgspec.json.encode(usage) + b"\n"

    def expire(self, batch: Batch, item: Item) -> None:
        """Take an item that was not done within the window."""
        self._add("err", batch, item, b"null", _EXPIRED)

    def _add(self, suffix: str, batch: Batch, item: Item, response: bytes, error: bytes) -> None:
        self.files[suffix] += (
            b'{"id":"batch_req_%b_%d","custom_id":%b,"response":%b,"error":%b}\n'
            % (
                batch.id.removeprefix("batch_").encode(),
                item.index,
                orjson.dumps(item.custom_id),
                response,
                error,
            )
        )
        self.files["idx"] += item.index.to_bytes(4, "little")
        self._counts["lines" if suffix == "out" else "error_lines"] += 1
