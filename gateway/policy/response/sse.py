"""Relay server-sent events with little parsing, and note usage, finish reasons and errors.

Rules:
- Only whole events are relayed. Holding a partial one delays nothing, for a client cannot use
  half an event. An event ends with an empty line; lines end with LF or CRLF, also mixed (a lone
  CR ends no line).
- Events pass unchanged. The only one dropped is the usage chunk (empty `choices`) that the
  gateway asked for and the client did not.
- Only events with a mark, a substring such as `"finish_reason":"`, are decoded (JSON strings
  cannot contain it unescaped). Then only the field at its proper place counts, so text that a
  client sent and an engine echoes never ends a stream.
- The result does not depend on how the bytes were cut into pieces; every byte is scanned a
  bounded number of times.
- The last event with a usage object is kept and decoded once, at the end.
- A stream is complete when every choice has its finish mark, or when one has and [DONE] came. A
  stream that ends earlier is an error, not a stop; a complete one without [DONE] gets it.
- Comments and other lines without data are relayed but count neither as token nor as end.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import orjson

from gateway.records.attempt import Usage
from gateway.records.endpoint import MESSAGES, RESPONSES, Endpoint
from gateway.records.request import BodyFacts

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""A longer event is the engine's fault: the relay breaks off instead of holding it."""

# Substrings that are cheap to find; every event that ends a choice contains one of them.
_FINISH_MARKS: Final[dict[str, tuple[bytes, ...]]] = {
    MESSAGES.name: (b'"stop_reason":"', b'"stop_reason": "'),
    RESPONSES.name: (b'"response.completed"', b'"response.incomplete"', b'"response.failed"'),
}
_FINISH_OPENAI: Final = (b'"finish_reason":"', b'"finish_reason": "')
_EVENT_END: Final = re.compile(rb"\n\r?\n")
_ERROR: Final = re.compile(rb'(?:^|\n)(?:event: ?error\b|data: ?\{"error": ?(?!null))')
_DONE_LINE: Final = re.compile(rb"(?:^|\n)data: ?\[DONE\]\r?\n")
_USAGE: Final = (b'"usage":{', b'"usage": {')
_EMPTY_CHOICES: Final = (b'"choices":[]', b'"choices": []')


class StreamMeter:
    """State of one relayed stream: `feed` takes the engine's bytes, returns those to send."""

    __slots__ = (
        "_choices",
        "_endpoint",
        "_finish_marks",
        "_finished",
        "_held",
        "_openai",
        "_strip_usage",
        "_usage_events",
        "done",
        "events",
        "failed_in_band",
        "finish_reason",
    )

    def __init__(self, endpoint: Endpoint, *, strip_usage: bool, choices: int = 1) -> None:
        """`strip_usage`: drop the usage chunk, because the client did not ask for it.

        `choices`: how many the client asked for, over all prompts.
        """
        self._endpoint = endpoint.name
        self._openai = endpoint.name not in _FINISH_MARKS
        self._finish_marks = _FINISH_MARKS.get(endpoint.name, _FINISH_OPENAI)
        self._strip_usage = strip_usage
        self._choices = choices
        self._finished: set[object] = set()
        """Indices of choices that ended; `choices` of them at most."""
        self._held = bytearray()
        """Bytes of the event whose end has not arrived."""
        self._usage_events: list[bytes] = []
        self.events = 0
        """Relayed events with data: about one for each token that the engine emitted."""
        self.finish_reason: str | None = None
        """The finish reason of the choice that ended last."""
        self.done = False
        """The closing [DONE] was relayed."""
        self.failed_in_band = False
        """The engine sent an error event of its own."""

    def feed(self, data: bytes) -> bytes:
        """Take the engine's bytes; returns the whole events to send, or b""."""
        if not self._held and data.endswith((b"\n\n", b"\r\n\r\n")):  # as nearly always
            whole = data
        else:
            whole = self._completed(data)
            if not whole:
                return b""
        marks = self._finish_marks
        if marks[0] in whole or marks[1] in whole or (len(marks) > 2 and marks[2] in whole):
            self._note_finish(whole)
        if b'"usage"' in whole and (_USAGE[0] in whole or _USAGE[1] in whole):
            whole = self._keep_usage(whole)
        if (b'"error"' in whole or b"event: error" in whole) and _ERROR.search(whole):
            self.failed_in_band = True
        if whole:
            self.events += whole.count(b"\ndata:") + whole.startswith(b"data:")
            if b"[DONE]" in whole and _DONE_LINE.search(whole):
                self.done = True
        return whole

    def _completed(self, data: bytes) -> bytes:
        """The events that end in `data`, with their held bytes; the rest of `data` is held.

        Only the last two of the held bytes are searched again, because an end may be cut.
        """
        held = self._held
        edge = bytes(held[-2:])
        seen = edge + data
        lf, crlf = seen.rfind(b"\n\n"), seen.rfind(b"\n\r\n")
        end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        if not end:
            held += data
            return b""
        end -= len(edge)
        held += data[:end]
        self._held = bytearray(data[end:])
        return bytes(held)

    def _note_finish(self, whole: bytes) -> None:
        events = _events(whole)
        for event in events:
            # Among several events usually only one has a mark: decode no other.
            if len(events) == 1 or any(mark in event for mark in self._finish_marks):
                decoded = _data_of(event)
                if isinstance(decoded, dict):
                    self._note_finish_of(decoded)

    def _note_finish_of(self, event: dict[str, Any]) -> None:
        """Note an event's finish reason from the one field where the endpoint puts it."""
        if self._openai:
            choices = event.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict):
                    index = choice.get("index")
                    self._end(choice.get("finish_reason"), index if type(index) is int else 0)
            return
        kind = event.get("type")
        if self._endpoint == MESSAGES.name:
            delta = event.get("delta")
            if kind == "message_delta" and isinstance(delta, dict):
                self._end(delta.get("stop_reason"), 0)
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self._end(kind.removeprefix("response."), 0)

    def _end(self, reason: object, index: int) -> None:
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
            if len(self._finished) < self._choices:
                self._finished.add(index)

    def _keep_usage(self, whole: bytes) -> bytes:
        kept: list[bytes] = []
        for event in _events(whole):
            if _USAGE[0] in event or _USAGE[1] in event:
                if self._endpoint == MESSAGES.name and self._usage_events:
                    # message_start has the prompt, each message_delta the running output.
                    self._usage_events = [self._usage_events[0], event]
                else:
                    self._usage_events = [event]
                if (
                    self._strip_usage
                    and self._openai
                    and (_EMPTY_CHOICES[0] in event or _EMPTY_CHOICES[1] in event)
                ):
                    continue
            kept.append(event)
        return b"".join(kept)

    @property
    def overlong(self) -> bool:
        """Whether the held event grew past MAX_EVENT_BYTES."""
        return len(self._held) > MAX_EVENT_BYTES

    @property
    def complete(self) -> bool:
        """Whether the engine finished its answer."""
        ended = len(self._finished)
        return ended >= self._choices or (self.done and ended > 0)

    def closing(self) -> bytes:
        """The [DONE] that a complete stream of an OpenAI dialect still lacks; else b""."""
        return DONE if self._openai and self.complete and not self.done else b""

    def usage(self) -> Usage | None:
        """The engine's usage, decoded once; None if it sent none or an invalid one."""
        prompt = completion = cached = None
        reported = False
        for event in self._usage_events:
            found = usage_from(_data_of(event))
            if found is None:
                continue
            prompt = found.prompt_tokens or prompt
            completion = found.completion_tokens or completion
            cached = found.cached_tokens or cached
            reported = reported or found.cached_reported
        if not self._usage_events or (prompt is None and completion is None):
            return None
        return Usage(
            prompt_tokens=prompt or 0,
            completion_tokens=completion or 0,
            cached_tokens=cached or 0,
            cached_reported=reported,
        )


def _events(whole: bytes) -> Sequence[bytes]:
    """Split bytes of whole events into events, each with its end."""
    ends = [end.end() for end in _EVENT_END.finditer(whole)]
    if len(ends) == 1 and ends[0] == len(whole):
        return (whole,)
    found = [whole[start:end] for start, end in pairwise([0, *ends])]
    if ends and ends[-1] < len(whole):  # one line break more
        found.append(whole[ends[-1] :])
    return found


def _data_of(event: bytes) -> Any:
    """The decoded JSON data of an event; None if it has none."""
    end = event.find(b"\n")
    if event.startswith(b"data:") and len(event) - end <= 3:  # one line, as nearly always
        data = event[5:end]
    else:
        lines = event.splitlines()
        data = b"\n".join([line[5:] for line in lines if line.startswith(b"data:")])
    try:
        return orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        return None


def usage_from(decoded: Any) -> Usage | None:
    """Find and read a usage object in a decoded body or event of any endpoint.

    Token counts that are not plain non-negative integers are read as absent.
    """
    if not isinstance(decoded, dict):
        return None
    usage = decoded.get("usage")
    for holder in ("response", "message"):
        if usage is None and isinstance(decoded.get(holder), dict):
            usage = decoded[holder].get("usage")
    if not isinstance(usage, dict):
        return None
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    if prompt is None and completion is None:
        prompt = _count(usage, "total_tokens")
        if prompt is None:
            return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = _count(usage, "cache_read_input_tokens")
    return Usage(
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        cached_tokens=cached or 0,
        cached_reported=cached is not None,
    )


def _count(holder: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = holder.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def choices_of(facts: BodyFacts) -> int:
    """How many choices a stream will have: `n` for each prompt; `best_of` adds none."""
    n = 1
    if facts.sequences_per_prompt > 1 and "n" in facts.members:
        raw = bytes(facts.members["n"])
        n = int(raw) if raw.isdigit() else 1
    return n * facts.measure.prompts


def streams_usage_chunk(endpoint: Endpoint) -> bool:
    """Whether the endpoint sends usage only when stream_options asks for it."""
    return endpoint.name not in _FINISH_MARKS and endpoint.generates
