"""Stage 9, forward: one call to one worker, and its answer to the client.

Rules:
- No byte reaches the client before the engine's first body byte, so everything that fails
  until then can be tried elsewhere (`Fault`). An answer in JSON is read whole first, for the same
  reason, up to HELD_BYTES. Everything else is relayed as it comes, no faster than it is read.
- Who waits for it hears of the answer (`on_end`) before its last bytes are sent.
- Once a stream has started, a failure is an in-band error event, never a faked stop; in a body
  that has no events, the connection is cut.
- What an engine does after the end of its stream is no failure: the answer is whole.
- The response is always aborted or read to its end: an engine does not generate for nobody.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from gateway.errors import EngineRefusal, Refusal, UpstreamFailure
from gateway.metrics import UNTIMED, StageTimer
from gateway.payload.answers import (
    Answer,
    begins_events,
    begins_whole,
    by_bytes,
    is_event_stream,
    is_json,
    read_answer,
    response_id,
    stream_shape,
)
from gateway.payload.sse import BodyMeter, StreamMeter
from gateway.ports import ClientReply, Lines, Upstream, UpstreamCall, UpstreamResponse
from gateway.records.attempt import Outcome, Usage, WorkerAddress
from gateway.records.endpoint import RESPONSES, Dialect
from gateway.records.request import BodyFacts, Incoming
from gateway.routing.overflow import (
    DROPPED,
    engine_message,
    has_error_shape,
    in_band_error,
    in_band_status,
    is_busy,
    is_not_served,
    overflow_of,
    refuses_priority,
)
from gateway.routing.retry import Fault

HELD_BYTES = 256 * 1024
"""Of an answer that is not a stream, before any of it is sent."""


class Relay:
    """One attempt: `run` it, or ask `cut_short` what it came to when the client left."""

    __slots__ = (
        *("_answered", "_bytes_per_token", "_call", "_clock", "_end_bytes", "_endpoint"),
        *("_facts", "_last_s", "_lines", "_meter", "_reply", "_response_id", "_started_s"),
        *("_strip_running", "_strip_usage", "_timer", "_window_tokens", "broke", "first_s"),
        *("held_bytes", "on_end", "on_first", "priority_refused", "sent"),
    )

    def __init__(
        self,
        incoming: Incoming,
        facts: BodyFacts,
        reply: ClientReply,
        clock: Callable[[], float],
        call: UpstreamCall,
        lines: Lines,
        *,
        strip_usage: bool,
        strip_running: bool,
        bytes_per_token: float,
        window_tokens: int,
        timer: StageTimer = UNTIMED,
    ) -> None:
        """`facts`: what the client asked for; `lines`: of the answer's head.

        `window_tokens`: of the pool as configured.

        `strip_usage`, `strip_running`, `bytes_per_token`: see `StreamMeter`.
        """
        self._endpoint = incoming.endpoint
        self._facts = facts
        self._reply = reply
        self._clock = clock
        self._call = call
        self._lines = lines
        self._started_s = incoming.received_s
        self.first_s: float | None = None
        """When the answer's first byte came (of a whole answer: all of it)."""
        self.priority_refused = False
        """Whether the engine refused for the priority it was sent."""
        self.on_first: Callable[[float], None] | None = None
        """Told when a stream's first token came."""
        self.on_end: Callable[[Outcome], Awaitable[None]] | None = None
        """Awaited with what the answer comes to, before the client sees its end."""
        self._end_bytes = b""
        """The end of a stream, until that was done."""
        self._last_s: float | None = None
        self._strip_usage = strip_usage
        self._strip_running = strip_running
        self._bytes_per_token = bytes_per_token
        self._window_tokens = window_tokens
        self._timer = timer
        self._meter: StreamMeter | None = None
        self._response_id: str | None = None
        self._answered: Outcome | None = None
        """What an answer comes to whose end is being sent."""
        self.held_bytes = HELD_BYTES
        self.sent = False
        """The request reached an engine (or may have)."""
        self.broke: Refusal | None = None
        """What the event said that ended a broken stream."""

    async def run(self, upstream: Upstream, worker: WorkerAddress) -> Outcome | Fault:
        """Forward the call; an Outcome when the client was answered, else a Fault."""
        self.sent = True
        response: UpstreamResponse | None = None
        try:
            response = await upstream.open(worker, self._call)
            status, encoding = response.status, _header(response.headers, b"content-encoding")
            if status < 400 and status != 200:  # a redirect, no content: no engine should
                return Fault(kind="protocol", message=f"it answered with status {status}")
            if encoding and encoding.lower() != b"identity":  # it could not be metered
                name = encoding[:32].decode("latin-1")
                return Fault(kind="protocol", message=f"its answer is compressed ({name}), unasked")
            kind = _header(response.headers, b"content-type", b"application/json")
            events, first = is_event_stream(kind), b""
            if status == 200 and not events:
                if self._reply.started:  # the client was sent an earlier engine's comments
                    return Fault(kind="protocol", message="it answered with no stream")
                in_pieces = self._facts.stream or stream_shape(self._endpoint).is_data
                sized = _header(response.headers, b"content-length")
                if not is_json(kind) or (in_pieces and not sized):
                    first = await response.read()
                    events = self._facts.stream and begins_events(first)
                    if not events and not (is_json(kind) and begins_whole(self._endpoint, first)):
                        return await self._large(response, kind, first)
            if status == 200 and events:
                return await self._stream(response, kind, first)
            return await self._whole(response, kind, first)
        except UpstreamFailure as failure:  # before a byte was sent
            self.sent = response is not None or failure.kind not in ("local", "connect")
            return Fault(kind=failure.kind, message=str(failure))
        finally:
            if response is not None:
                response.abort()

    def cut_short(self) -> Outcome:
        """What was served when the client left: the tokens delivered so far."""
        if self._answered is not None:  # all were
            return msgspec.structs.replace(self._answered, label="disconnected", status=499)
        meter = self._meter
        usage = None
        if meter is not None and meter.events:
            usage = meter.usage() or _counted(meter.counted_tokens)
        return Outcome(label="disconnected", status=499, usage=usage, ttft_s=self._ttft_s())

    @property
    def opened(self) -> bool:
        """Whether the client was sent any part of the answer: no other engine can give it."""
        return self.first_s is not None if self._meter is None else self._meter.opened

    def emitted(self) -> int:
        """About the tokens of a stream that were relayed so far."""
        return 0 if self._meter is None else self._meter.emitted_tokens

    # -- streams

    async def _stream(
        self, response: UpstreamResponse, kind: bytes, data: bytes
    ) -> Outcome | Fault:
        """A stream of events, or the fault that came instead of the first; `data` was read already.

        Comments before its first events pass with the head, for the client counts the time without
        a byte. They are no part of an answer: another worker can still take over. They keep an
        engine from its idle deadline, not from beginning in the time for its first byte.
        """
        self._meter = meter = StreamMeter(
            self._endpoint,
            strip_usage=self._strip_usage,
            strip_running=self._strip_running,
            bytes_per_token=self._bytes_per_token,
            choices=self._facts.choices_per_prompt * self._facts.measure.prompts,
        )
        head = self._stream_head(kind)
        until_s = self._clock() + self._call.timeouts.first_byte_s
        while True:
            data = data or await response.read()
            ready = meter.feed(data)
            if meter.empty or not data:
                return Fault(kind="empty", message="the engine sent an empty stream", status=200)
            if ready and meter.opened:
                break
            if ready:
                if not self._reply.started:
                    await self._reply.start(200, head)
                await self._reply.write(ready)
            data = b""
            if meter.overlong:
                return Fault(kind="protocol", message="an event is too long")
            if self._clock() > until_s:
                return Fault(kind="timeout", message="the engine sent comments and no event")
        if meter.failed_in_band:  # an error of the client's own is the engine's answer
            error = in_band_error(ready)
            fault = overflow_of(400, error, self._facts, self._call.size, self._window_tokens)
            if fault is not None:
                return fault
            if (status := in_band_status(error)) >= 500:
                message = f"its stream began with error {status}"
                return Fault(kind="server_error", message=message, status=status, body=error)
        if self._endpoint is RESPONSES:
            self._response_id = response_id(ready)
        return await self._relay(response, head, meter, ready)

    async def _relay(
        self, response: UpstreamResponse, head: Lines, meter: StreamMeter, first: bytes
    ) -> Outcome:
        """Send what was read first, then everything as it comes."""
        self._timer.begin()
        if meter.begun:
            self._note_first()
        if not self._reply.started:
            await self._reply.start(200, head, events=not isinstance(meter, BodyMeter))
        if meter.done:
            self._end_bytes = first
        elif first:
            await self._reply.write(first)
        self._timer.end("forward")
        try:
            await self._pass_on(response, meter, first)
        except UpstreamFailure as failure:
            if self._answered is None and not meter.complete:
                return await self._break_off(failure, meter)
        if not meter.whole and not meter.failed_in_band:
            return await self._break_off(
                UpstreamFailure("reset", "the stream ended unfinished", head_received=True), meter
            )
        outcome = await self._end(meter, first)
        await self._reply.finish()
        return outcome

    async def _pass_on(self, response: UpstreamResponse, meter: StreamMeter, first: bytes) -> None:
        """Relay the rest of a body. Raises UpstreamFailure."""
        write_now, feed = self._reply.write_now, meter.feed

        def take(data: bytes) -> bool:
            ready = feed(data)
            if self.first_s is None and meter.begun:
                self._note_first()
            if meter.done:
                self._end_bytes += ready
                return False
            return write_now(ready) if ready else not meter.overlong

        while meter.done or not await response.relay(take):
            if meter.overlong:
                raise UpstreamFailure("protocol", "an event is too long", head_received=True)
            await self._reply.drain()
            if meter.done:
                await self._end(meter, first)
                response.expect_end()
                await response.relay(take)  # what follows the end is left
                break

    async def _end(self, meter: StreamMeter, first: bytes) -> Outcome:
        """What a stream came to, whose last bytes are sent once that was heard. Idempotent.

        `first`: its first events.
        """
        if self._answered is None:
            self._last_s = self._clock()
            outcome = self._metered(meter, completed=meter.whole)
            if meter.failed_in_band and in_band_status(in_band_error(first)) < 500:
                outcome = msgspec.structs.replace(outcome, label="error")
            self._answered = outcome
            if self.on_end is not None:
                await self.on_end(outcome)
            if ending := self._end_bytes + meter.closing():
                await self._reply.write(ending)
        return self._answered

    def _note_first(self) -> None:
        """The first token came."""
        self.first_s = self._clock()
        if self.on_first is not None:
            self.on_first(self.first_s)

    async def _break_off(self, failure: UpstreamFailure, meter: StreamMeter) -> Outcome:
        self._last_s = self._clock()
        slow = failure.kind == "timeout"
        reason = "engine_silent" if slow else "engine_stream_broken"
        self.broke = Refusal(
            f"The engine's stream broke off: {failure}. What was sent so far is incomplete.",
            reason=reason,
        )
        outcome = self._metered(meter, completed=False)
        outcome = msgspec.structs.replace(outcome, status=504 if slow else 502)
        if self.on_end is not None:
            await self.on_end(outcome)
        await self._reply.break_off(self.broke)
        return outcome

    # -- whole answers

    async def _whole(
        self, response: UpstreamResponse, kind: bytes, first: bytes
    ) -> Outcome | Fault:
        """An answer that is sent when all of it is there, unless it is too large to hold.

        `first` was read of it already.
        """
        body = None if first else response.take_whole()
        if body is None:
            body, ended = await _read_some(response, first, self.held_bytes)
            if response.status == 200 and not ended:
                return await self._large(response, kind, body)
        status, answer = response.status, Answer()
        if status == 200:
            answer = read_answer(body)
            status = in_band_status(in_band_error(body)) if answer.is_error else status
        if status >= 400:
            self.priority_refused = refuses_priority(status, body)
            fault = overflow_of(status, body, self._facts, self._call.size, self._window_tokens)
            fault = fault or _fault_of(status, kind, body, response.headers)
            if fault is not None:
                return fault
        self.first_s = self._clock()
        if self.on_first is not None and status < 400 and not self._facts.stream:
            self.on_first(self.first_s)  # a prefill's first token, which is all that was asked
        self._timer.begin()
        anthropic = self._endpoint.dialect is Dialect.ANTHROPIC
        if status < 400:
            usage = answer.usage
            if usage is None and self._endpoint.generates:
                usage = _counted(by_bytes(answer.generated_bytes, self._bytes_per_token))
            self._response_id = answer.id if self._endpoint is RESPONSES else None
            self._answered = outcome = self._outcome(usage, answer.finish_reason, completed=True)
        else:
            outcome = Outcome(label="error", status=status, ttft_s=self._ttft_s())
        if self.on_end is not None:
            await self.on_end(outcome)
        shaped = not self._reply.started and has_error_shape(body, anthropic=anthropic)
        if status >= 400 and not shaped:
            message = engine_message(body) or f"The engine refused with status {status}."
            await self._reply.refuse(EngineRefusal(status, message), self._lines)
        else:
            await self._reply.send(status, b"content-type: %b\r\n%b" % (kind, self._lines), body)
        self._timer.end("forward")
        return outcome

    async def _large(self, response: UpstreamResponse, kind: bytes, first: bytes) -> Outcome:
        """An answer that is too large to hold; `first` is its beginning."""
        self._meter = meter = BodyMeter(self._endpoint, bytes_per_token=self._bytes_per_token)
        meter.feed(first)
        if self._endpoint is RESPONSES:
            self._response_id = response_id(first)
        return await self._relay(response, self._stream_head(kind), meter, first)

    def _stream_head(self, kind: bytes) -> Lines:
        return b"content-type: %b\r\ncache-control: no-cache\r\n%b" % (kind, self._lines)

    # -- figures

    def _ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self._started_s

    def _metered(self, meter: StreamMeter, *, completed: bool) -> Outcome:
        usage = meter.usage() or _counted(meter.counted_tokens)
        return self._outcome(usage, meter.finish_reason, completed=completed)

    def _outcome(
        self, usage: Usage | None, finish_reason: str | None, *, completed: bool
    ) -> Outcome:
        completed = completed and finish_reason != "failed"
        tpot_s = None
        if self.first_s is not None and self._last_s is not None:
            tokens = 0 if usage is None else usage.completion_tokens
            tpot_s = (self._last_s - self.first_s) / (tokens - 1) if tokens > 1 else None
        return Outcome(
            label="ok" if completed else "upstream_error",
            status=200,
            usage=usage,
            finish_reason=finish_reason,
            completed=completed,
            ttft_s=self._ttft_s(),
            tpot_s=tpot_s,
            response_id=self._response_id,
        )


def _counted(tokens: int) -> Usage:
    """Of an engine that reports none: the tokens counted as they went by."""
    return Usage(prompt_tokens=0, completion_tokens=tokens, source="counted")


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes, other: bytes = b"") -> bytes:
    for name, value in headers:
        if name == wanted:
            return value
    return other


async def _read_some(response: UpstreamResponse, first: bytes, most: int) -> tuple[bytes, bool]:
    """What fits into `most` bytes, or a little more, and whether that is all."""
    first = first or await response.read()
    chunks = [first]
    size = len(first)
    while size <= most and chunks[-1]:
        chunks.append(await response.read())
        size += len(chunks[-1])
    return first if len(chunks) == 1 else b"".join(chunks), not chunks[-1]


def _fault_of(
    status: int, kind: bytes, body: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> Fault | None:
    """The fault behind an engine's error status; None when it is the client's own."""
    dropped = _header(headers, DROPPED)
    if is_busy(status, body, dropped):
        wait = _header(headers, b"retry-after")  # a date or nonsense says nothing
        return Fault(
            kind="busy",
            message=dropped[:64].decode("latin-1") or "busy",
            status=503,
            content_type=kind,
            body=body,
            retry_after_s=min(float(wait), _MAX_WAIT_S)
            if wait.isdigit() and len(wait) < 10
            else None,
        )
    if is_not_served(status, body):
        return Fault(kind="not_served", message="it does not serve the model", body=body)
    if status >= 500 or status in (401, 403):  # a refused worker key is ours to answer for
        return Fault(
            kind="server_error",
            message=f"status {status}",
            status=status,
            content_type=kind,
            body=b"" if status < 500 else body,
        )
    return None


_MAX_WAIT_S = 60.0
"""The longest Retry-After of an engine that is believed."""
