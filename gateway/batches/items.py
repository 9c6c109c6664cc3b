"""Items of a batch: their lines, which are done, what comes of a try, and the lines of its output.

Pure. Items are named by their lines in the input file, from 0.
"""

from array import array
from collections.abc import Iterable
from math import inf
from typing import Final, Literal, NamedTuple

import msgspec
import orjson

from gateway.errors import Refusal
from gateway.records.batch import Batch, Part
from gateway.records.decision import DecisionRecord

MAX_TRIES: Final = 4
"""Failures of engines after which an item's last one is its answer."""
PART_BYTES: Final = 8 << 20
"""Output of which a part is made before its time."""
_KEY_BYTES: Final = 2048

Verdict = Literal["answered", "failed", "again", "later", "no_right"]
"""answered: a line of the output; failed: one of the errors; again: an engine failed on it; later:
no engine had it; no_right: the batch's creator may not ask now."""


class Item(NamedTuple):
    """A request of a batch."""

    line: int
    custom_id: str
    body: bytes
    tries: int = 0
    """That engines failed."""
    refused_s: float = inf
    """When it was first refused for want of rights."""


class Answer(NamedTuple):
    """What came of one try."""

    status: int
    body: bytes
    """JSON, of a refusal too."""
    refusal: Refusal | None
    request_id: str
    record: DecisionRecord | None
    """None where the gateway failed."""


class _Request(msgspec.Struct):
    """What a line of an input file says."""

    custom_id: str
    body: msgspec.Raw


_request: Final = msgspec.json.Decoder(_Request).decode


def read_lines(first: int, lines: Iterable[bytes], done: "Done") -> list[Item]:
    """The items in lines of a validated file, from line `first` on, that are not done."""
    items = []
    for line, text in enumerate(lines, first):
        if line not in done and text.strip():
            try:
                request = _request(text)
            except msgspec.DecodeError:  # not as it was validated: the pipeline refuses it
                request = _Request("", msgspec.Raw(text))
            items.append(Item(line, request.custom_id, bytes(request.body)))
    return items


def by_prefix(item: Item) -> bytes:
    """The sort key of an item: the beginning of its body, so that shared prefixes go together."""
    return item.body[:_KEY_BYTES]


class Done:
    """Which items have a line in the output or the errors: a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, line: int) -> bool:
        byte = line >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (line & 7) & 1)

    def add(self, packed: bytes) -> None:
        """Those of a part, as `Output.packed` has them."""
        lines = array("I")
        lines.frombytes(packed)
        for line in lines:
            missing = (line >> 3) + 1 - len(self._bits)
            if missing > 0:
                self._bits.extend(bytes(missing))
            self._bits[line >> 3] |= 1 << (line & 7)


def verdict(answer: Answer) -> Verdict:
    """What a try came to."""
    refusal, status = answer.refusal, answer.status
    if refusal is None:
        return "answered" if status == 200 else "failed"
    if refusal.reason == "evicted":
        return "later"
    if status in {401, 403}:
        return "no_right"
    if status < 500 and status != 429:
        return "failed"
    attempts = () if answer.record is None else answer.record.attempts
    broke = status not in {429, 503} and not attempts  # the gateway itself
    return "again" if broke or not _HARMLESS.issuperset(a.result for a in attempts) else "later"


_HARMLESS: Final = frozenset({"busy", "connect", "frozen", "local", "not_served"})
"""Results of attempts that no engine answered."""


def part_every_s(elapsed_s: float) -> float:
    """Seconds between two parts: few are lost by a kill, and few parts are made in a long time."""
    return min(max(2.0, elapsed_s / 100), max(60.0, elapsed_s / 1000))


class Output:
    """Lines that wait to become a part."""

    def __init__(self) -> None:
        self._items = array("I")
        self._lines: dict[str, list[bytes]] = {"out": [], "err": []}
        self.usage: list[bytes] = []
        """Lines for the ledger."""
        self.bytes = 0
        self.slot_s = 0.0
        """Seconds in which items held slots, tries that failed included."""
        self._input = self._cached = self._generated = 0

    def __len__(self) -> int:
        return len(self._items)

    def packed(self) -> bytes:
        """Which items these are."""
        return self._items.tobytes()

    def files(self) -> dict[str, bytes]:
        """What is stored of the part, by suffix; `use` is its usage."""
        files = {suffix: b"".join(lines) for suffix, lines in self._lines.items()}
        files |= {"idx": self.packed(), "use": b"\n".join(self.usage)}
        return {suffix: data for suffix, data in files.items() if data}

    def part(self, *, epoch: int, number: int, unposted: str) -> Part:
        """Its record; `unposted`: the ledger that has to get its usage."""
        out, err = self._lines["out"], self._lines["err"]
        return Part(
            epoch=epoch,
            number=number,
            lines=len(out),
            bytes=sum(map(len, out)),
            error_lines=len(err),
            error_bytes=sum(map(len, err)),
            input_tokens=self._input,
            cached_tokens=self._cached,
            output_tokens=self._generated,
            slot_s=self.slot_s,
            unposted=unposted if self.usage else "",
        )

    def take(self, batch: Batch, item: Item, answer: Answer) -> None:
        """Take an item's answer; into the errors if it is one."""
        body = answer.body
        if b"\n" in body or b"\r" in body:  # only between members: strings hold none
            body = body.replace(b"\n", b" ").replace(b"\r", b" ")
        request_id = orjson.dumps(answer.request_id)
        response = b'{"status_code":%d,"request_id":%b,"body":%b}'
        suffix = "out" if verdict(answer) == "answered" else "err"
        self._add(suffix, batch, item, response % (answer.status, request_id, body), b"null")
        if answer.record is not None:
            usage = answer.record.usage
            self._input += usage.prompt_tokens or 0
            self._cached += usage.cached_tokens or 0
            self._generated += usage.completion_tokens or 0

    def expire(self, batch: Batch, item: Item) -> None:
        """Take an item that was not done within the window."""
        self._add("err", batch, item, b"null", _EXPIRED)

    def _add(self, suffix: str, batch: Batch, item: Item, response: bytes, error: bytes) -> None:
        line = b'{"id":"batch_req_%b_%d","custom_id":%b,"response":%b,"error":%b}\n' % (
            batch.id.removeprefix("batch_").encode(),
            item.line,
            orjson.dumps(item.custom_id),
            response,
            error,
        )
        self._lines[suffix].append(line)
        self._items.append(item.line)
        self.bytes += len(line)


_EXPIRED: Final = orjson.dumps(
    {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
)
