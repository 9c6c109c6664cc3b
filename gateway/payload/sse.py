"""Relay server-sent events with little parsing, and note usage, finish reasons and errors.

Rules:
- Only whole events are relayed. Holding a partial one delays nothing, for a client cannot use
  half an event. An event ends with an empty line; lines end with LF, CRLF or CR.
- Events pass unchanged. Dropped are only the usage chunk (empty `choices`) and the running usage of
  other chunks that the gateway asked for and the client did not, a byte order mark, and whatever
  follows the end of the stream.
- What was delivered is counted by its text from where the engine's own count ends
  (`gateway.payload.answers`), never by its events.
- Only events with a mark, a substring such as `"finish_reason":"`, are decoded (JSON strings
  cannot contain it unescaped). Then only the field at its proper place counts, so text that a
  client sent and an engine echoes never ends a stream.
- The result does not depend on how the bytes were cut into pieces; every byte is scanned a
  bounded number of times.
- A stream is complete when every choice has its finish mark, or when its own end came, as
  `gateway.payload.answers` lists them. A stream that ends earlier is an error, not a stop;
  a complete one without [DONE] gets it where clients wait for that.
- Comments and other lines without data are relayed but count neither as token nor as end.
"""

import re
from itertools import pairwise
from typing import Final

import msgspec

from gateway.payload.answers import (
    DECODED_BYTES,
    OTHER,
    Answer,
    begins_error,
    by_bytes,
    later_usage,
    read_answer,
    search_answer,
    stream_shape,
)
from gateway.records.attempt import Usage
from gateway.records.endpoint import Endpoint

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""A longer event is the engine's fault: the relay breaks off instead of holding it."""

_MAX_LINES: Final = 64
"""An event with more lines of data is not decoded."""
_TAIL_BYTES: Final = 8192
"""Kept of a body's pieces, so that usage is found where they are cut."""
_BOM: Final = b"\xef\xbb\xbf"
_ENDINGS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
_END: Final = re.compile(rb"\n\r?\n")
_END_WITH_CR: Final = re.compile(rb"\n\r?\n|\r\r")
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_RUNNING_USAGE: Final = re.compile(rb',\s*"usage"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_EMPTY_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_NAME: Final = re.compile(rb"(?:(?:id|retry|):[^\r\n]*[\r\n]+)*event: ?([a-zA-Z_.]{1,64})[\r\n]")
_DONE_DATA: Final = re.compile(rb"data: ?\[DONE\]\s")


class StreamMeter:
    """State of one relayed stream: `feed` takes the engine's bytes, returns those to send."""

    __slots__ = (
        *("_bytes_per_token", "_choices", "_counted", "_ends", "_finished", "_generates", "_held"),
        *("_shape", "_strip_running", "_strip_usage", "_text", "_usage", "_usage_events", "begun"),
        *("done", "events", "failed_in_band", "finish_reason", "opened"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        strip_usage: bool,
        strip_running: bool = False,
        choices: int = 1,
        bytes_per_token: float = 4.0,
    ) -> None:
        """`strip_usage`: drop the usage chunk, because the client did not ask for it.

        `strip_running`: drop usage from all other chunks, for the same reason. `choices`: how many
        the client asked for, over all prompts. `bytes_per_token`: of its tenant's texts.
        """
        self._shape = stream_shape(endpoint)
        self._ends = self._shape.ends.search
        self._generates = endpoint.generates
        self._strip_usage = strip_usage
        self._strip_running = strip_running
        self._bytes_per_token = bytes_per_token
        self._text = self._counted = (0, 0)
        """Bytes and pieces of text relayed; and of them those that the engine's usage counts."""
        self._choices = choices
        self._finished: set[int] = set()
        """Indices of choices that ended; `choices` of them at most."""
        self._held = bytearray()
        """Bytes of the event whose end has not arrived."""
        self._usage: Usage | None = None
        """Found already."""
        self._usage_events: list[bytes] = []
        """The first event with usage, where others count only what it does not, and the last."""
        self.opened = False
        """An event with data came."""
        self.begun = False
        """The first token came."""
        self.events = 0
        """Relayed events with data, from the first token on."""
        self.finish_reason: str | None = None
        """The finish reason of the choice that ended last."""
        self.done = False
        """The stream's own end was relayed: nothing follows."""
        self.failed_in_band = False
        """The engine sent an error event of its own."""

    def feed(self, data: bytes) -> bytes:
        """Take the engine's bytes; returns the whole events to send, or b""."""
        if not self._held and data.endswith(_ENDINGS):  # as nearly always
            whole = data
        else:
            whole = self._completed(data)
            if not whole:
                return b""
        if (
            not self.begun
            or self.done
            or len(whole) > DECODED_BYTES
            or self._ends(whole) is not None
            or b"error" in whole
            or b"[DONE]" in whole
            or (b'"usage"' in whole and _USAGE.search(whole) is not None)
        ):
            return self._without_running(whole) or self._noted(whole)
        count = _data_lines(whole)
        self.events += count
        if self._generates:
            self._deliver(whole, count)
        return whole

    def _without_running(self, whole: bytes) -> bytes:
        """What to send of one token's event that ends with the running usage, as nearly all do.

        Else b"": it is looked at closely.
        """
        at = whole.rfind(b',"usage":{"') if self._strip_running and self.begun else -1
        if (
            at < 0
            or self.done
            or not whole.endswith(b"}}\n\n")
            or whole.find(b"}", at) != len(whole) - 4
            or not whole.startswith(b"data: {")
            or whole.count(b"data:") > 1
            or self._ends(whole) is not None
            or b"error" in whole
            or b'"choices":[{' not in whole
        ):
            return b""
        self.events += 1
        self._deliver(whole, 1)
        self._counted = self._text
        self._usage_events[1:] = [whole]
        return whole[:at] + b"}\n\n"

    def _deliver(self, whole: bytes, count: int) -> None:
        size, pieces = self._shape.text.measure(whole, count)
        self._text = (self._text[0] + size, self._text[1] + pieces)

    def _completed(self, data: bytes) -> bytes:
        """The events that end in `data`, with their held bytes; the rest of `data` is held.

        Only the last two of the held bytes are searched again, because an end may be cut.
        """
        held = self._held
        edge = bytes(held[-2:])
        seen = edge + data
        ends = [at + len(e) for e in _ENDINGS if (at := seen.rfind(e)) >= 0]
        if not ends:
            held += data
            return b""
        end = max(ends) - len(edge)
        held += data[:end]
        self._held = bytearray(data[end:])
        return bytes(held)

    def _noted(self, whole: bytes) -> bytes:
        """Look at each event; returns those to send."""
        if not self.opened and whole.startswith(_BOM):
            whole = whole[len(_BOM) :]
        if b"data:" not in whole:
            return b"" if self.done else whole
        # Split into events, each with its end.
        ends = [end.end() for end in (_END_WITH_CR if b"\r\r" in whole else _END).finditer(whole)]
        passed_on: list[bytes] = []
        for start, end in pairwise(dict.fromkeys((0, *ends, len(whole)))):
            if self.done:
                break
            if sent := self._note(whole[start:end]):
                passed_on.append(sent)
        return passed_on[0] if len(passed_on) == 1 else b"".join(passed_on)

    def _note(self, event: bytes) -> bytes:
        """Note what an event says; returns what to send of it."""
        count = _data_lines(event)
        if not count:
            return event
        self.opened = True
        named = _NAME.match(event)
        name = "" if named is None else named[1].decode("ascii")
        at = _data_start(event)
        large = len(event) > DECODED_BYTES or count > _MAX_LINES
        if begins_error(event, at) or name == "error":
            self.failed_in_band = True
        elif not self.begun:
            preamble = self._shape.preamble
            said = b'"%b"' % name.encode() if large else event
            self.begun = preamble is None or preamble.search(said) is None
        if _DONE_DATA.match(event, at) is not None:
            self.done = True
        if large or self._ends(event) is not None:
            answer = _read(event, name)
            for index, self.finish_reason in answer.ends:
                if len(self._finished) < self._choices:
                    self._finished.add(index)
            self.done = self.done or answer.type in self._shape.last
        if self._generates and not large:
            self._deliver(event, count)
        if b'"usage"' in event and (large or _USAGE.search(event) is not None):
            self._usage_events[1:] = [event]
            self._counted = self._text
            closing = not large and _EMPTY_CHOICES.search(event) is not None
            if closing and self._strip_usage:
                return b""
            if self._strip_running and not closing and not large:
                event = _RUNNING_USAGE.sub(b"", event)
        self.events += count if self.begun else 0
        return event

    @property
    def overlong(self) -> bool:
        """Whether the held event grew past MAX_EVENT_BYTES."""
        return len(self._held) > MAX_EVENT_BYTES

    @property
    def empty(self) -> bool:
        """Whether the stream ended before it said anything."""
        return self.done and self.events <= 1 and not self._finished and not self.failed_in_band

    @property
    def complete(self) -> bool:
        """Whether the engine finished its answer."""
        if len(self._finished) >= self._choices:
            return True
        return self.done and not self.failed_in_band

    @property
    def whole(self) -> bool:
        """Whether the answer is whole, now that its body came to its end."""
        return self.complete or not (self._shape.must_end or self.failed_in_band)

    @property
    def emitted_tokens(self) -> int:
        """About the tokens relayed so far, however many an event has."""
        return max(self.events, int(self._text[0] / self._bytes_per_token))

    @property
    def counted_tokens(self) -> int:
        """Output tokens relayed that the engine has not reported."""
        if not self._generates:
            return 0
        size, pieces = self._text[0] - self._counted[0], self._text[1] - self._counted[1]
        if not self._text[1] and not self._usage_events:  # in a form that nobody here knows
            return max(0, self.events - self.done)
        return max(pieces, by_bytes(size, self._bytes_per_token))

    def closing(self) -> bytes:
        """The [DONE] that a complete stream still lacks where clients wait for it; else b""."""
        return DONE if self._shape.in_chunks and self.complete and not self.done else b""

    def usage(self) -> Usage | None:
        """The engine's usage and what it sent since; None if it sent none or an invalid one."""
        usage = self._usage
        for event in self._usage_events:
            usage = later_usage(usage, _read(event).usage)
        if usage is None or not (more := self.counted_tokens):
            return usage
        tokens = usage.completion_tokens
        # What is reported before any text, as in `message_start`, is not the answer's.
        tokens = tokens + more if self._counted[1] else max(tokens, more)
        return msgspec.structs.replace(usage, completion_tokens=tokens)


class BodyMeter(StreamMeter):
    """State of one relayed body that has no events, such as audio: all of it passes at once.

    Lines, where there are several, count as events (NDJSON). Usage is found wherever it stands.
    """

    __slots__ = ("_bytes", "_lines", "_tail")

    def __init__(self, endpoint: Endpoint, *, bytes_per_token: float = 4.0) -> None:
        super().__init__(endpoint, strip_usage=False, bytes_per_token=bytes_per_token)
        self._shape = OTHER
        self.opened = self.begun = True
        self._bytes = self._lines = 0
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Take the engine's bytes; returns them."""
        self.events += 1
        self._bytes += len(data)
        self._lines += data.count(b"\n")
        seen = self._tail + data
        answer = search_answer(seen)
        self._usage = answer.usage or self._usage
        self.finish_reason = answer.finish_reason or self.finish_reason
        self._tail = seen[-_TAIL_BYTES:]
        return data

    @property
    def counted_tokens(self) -> int:
        if self._usage is not None or not self._generates:
            return 0
        if self._lines > 1:
            return self._lines
        return by_bytes(self._bytes, self._bytes_per_token)


def _data_lines(events: bytes) -> int:
    """Lines of data: one in nearly every event."""
    count = events.count(b"\ndata:") + events.startswith(b"data:")
    return count + events.count(b"\rdata:") if b"\r" in events else count


def _data_start(event: bytes) -> int:
    """Where the first line of data begins."""
    if event.startswith(b"data:"):
        return 0
    starts = [at for end in (b"\ndata:", b"\rdata:") if (at := event.find(end)) >= 0]
    return min(starts) + 1


def _read(event: bytes, name: str = "") -> Answer:
    """What the data of an event says; one that takes too long to decode is searched."""
    if len(event) > DECODED_BYTES or _data_lines(event) > _MAX_LINES:
        return search_answer(event, name)
    end = event.find(b"\n")
    if event.startswith(b"data:") and len(event) - end <= 3:  # one line, as nearly always
        return read_answer(event[5:end])
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return read_answer(b"\n".join(lines))
