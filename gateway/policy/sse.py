"""Relaying server-sent events without parsing them: usage, proper end, errors.

Rules:
- Only whole events are relayed; a partial one waits for its rest, which delays nothing, for
  a client cannot use half an event.
- Events pass as the bytes they came in. The one that is dropped is the usage chunk (empty
  `choices`) that the gateway asked for and the client did not.
- Nothing is decoded on the way but substrings; JSON text cannot contain an unescaped quote or
  line break, so a needle with a member's name and its value, or with a line's beginning,
  never matches content.
- What is found does not depend on how the bytes were cut into pieces.
- The last event with a usage object is kept and decoded once, at the end.
- A stream is complete when its finish mark was seen. One that ends without it is an error,
  not a stop; one that has it but lacks the closing [DONE] gets it.
"""

import re
from typing import Any

import orjson

from gateway.domain import MESSAGES, RESPONSES, Endpoint, Usage

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""A longer event is the engine's fault: the relay breaks off instead of holding it."""

# Marks that are cheap to look for, and what then tells the reason (an empty one is none).
_Finish = tuple[tuple[bytes, ...], re.Pattern[bytes]]
_FINISH: dict[str, _Finish] = {
    MESSAGES.name: (
        (b'"stop_reason":"', b'"stop_reason": "'),
        re.compile(rb'"stop_reason": ?"([^"]+)"'),
    ),
    RESPONSES.name: (
        (b'"response.completed"', b'"response.incomplete"', b'"response.failed"'),
        re.compile(rb'"type": ?"response\.(completed|incomplete|failed)"'),
    ),
}
_FINISH_OPENAI: _Finish = (
    (b'"finish_reason":"', b'"finish_reason": "'),
    re.compile(rb'"finish_reason": ?"([^"]+)"'),
)
_ERROR = re.compile(rb'(?:^|\n)(?:event: ?error\b|data: ?\{"error": ?(?!null))')
_DONE_ENDS = (DONE, b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n", b"data:[DONE]\r\n\r\n")
_USAGE = (b'"usage":{', b'"usage": {')
_EMPTY_CHOICES = (b'"choices":[]', b'"choices": []')


class StreamMeter:
    """State of one relayed stream. Feed it what arrives, send what it returns."""

    __slots__ = (
        "_endpoint",
        "_finish_marks",
        "_finish_pattern",
        "_openai",
        "_strip_usage",
        "_tail",
        "_usage_events",
        "done",
        "events",
        "failed_in_band",
        "finish_reason",
    )

    def __init__(self, endpoint: Endpoint, *, strip_usage: bool) -> None:
        """`strip_usage`: drop the usage chunk, because the client did not ask for it."""
        self._endpoint = endpoint.name
        self._openai = endpoint.name not in _FINISH
        self._finish_marks, self._finish_pattern = _FINISH.get(endpoint.name, _FINISH_OPENAI)
        self._strip_usage = strip_usage
        self._tail = b""
        self._usage_events: list[bytes] = []
        self.events = 0
        """Events relayed: about the tokens emitted, when an engine sends one a token."""
        self.finish_reason: str | None = None
        self.done = False
        """The closing [DONE] was relayed."""
        self.failed_in_band = False
        """The engine sent an error event of its own."""

    def feed(self, data: bytes) -> bytes:
        """Whole events ready to be sent, b"" when there are none yet."""
        if self._tail:
            data = self._tail + data
        if data.endswith(b"\n\n"):
            whole, self._tail = data, b""
        else:
            end = data.rfind(b"\n\n") + 2
            if end == 1:
                end = data.rfind(b"\r\n\r\n") + 4
                if end == 3:
                    self._tail = data
                    return b""
            whole, self._tail = data[:end], data[end:]
        first, second, *others = self._finish_marks
        if first in whole or second in whole or (others and others[0] in whole):
            self._note_finish(whole)
        if b'"usage"' in whole and (_USAGE[0] in whole or _USAGE[1] in whole):
            whole = self._keep_usage(whole)
        if (b'"error"' in whole or b"event: error" in whole) and _ERROR.search(whole):
            self.failed_in_band = True
        if whole:
            self.events += whole.count(b"\n\n") or whole.count(b"\r\n\r\n")
            if whole.endswith(_DONE_ENDS):
                self.done = True
        return whole

    def _note_finish(self, whole: bytes) -> None:
        if reasons := self._finish_pattern.findall(whole):
            self.finish_reason = reasons[-1].decode("ascii", "replace")

    def _keep_usage(self, whole: bytes) -> bytes:
        kept: list[bytes] = []
        separator = b"\n\n" if b"\n\n" in whole else b"\r\n\r\n"
        for event in whole.split(separator):
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
        return separator.join(kept)

    @property
    def overlong(self) -> bool:
        """Whether an event without an end grew past what is held."""
        return len(self._tail) > MAX_EVENT_BYTES

    @property
    def complete(self) -> bool:
        """Whether the engine finished its answer."""
        return self.finish_reason is not None

    def closing(self) -> bytes:
        """What a cleanly ended stream still lacks: the [DONE] of the OpenAI dialects."""
        return DONE if self._openai and self.complete and not self.done else b""

    def usage(self) -> Usage | None:
        """The engine's usage, decoded once; None when it sent none or nonsense."""
        prompt = completion = cached = None
        told = False
        for event in self._usage_events:
            found = _usage_of(event)
            if found is None:
                continue
            prompt = found.prompt_tokens or prompt
            completion = found.completion_tokens or completion
            cached = found.cached_tokens or cached
            told = told or found.cached_told
        if not self._usage_events or (prompt is None and completion is None):
            return None
        return Usage(
            prompt_tokens=prompt or 0,
            completion_tokens=completion or 0,
            cached_tokens=cached or 0,
            cached_told=told,
        )


def _usage_of(event: bytes) -> Usage | None:
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            try:
                decoded = orjson.loads(line[5:])
            except orjson.JSONDecodeError:
                continue
            return usage_from(decoded)
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
        cached_told=cached is not None,
    )


def _count(holder: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = holder.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def streams_usage_chunk(endpoint: Endpoint) -> bool:
    """Whether the endpoint sends usage only when stream_options asks for it."""
    return endpoint.name not in _FINISH and endpoint.generates
