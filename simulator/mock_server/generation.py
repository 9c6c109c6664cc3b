"""Run a job on the engine and write its output, with the requested faults."""

import asyncio
from typing import Protocol

import msgspec

from simulator.mock_server import transport
from simulator.mock_server.api import answers, problems
from simulator.mock_server.api.completions import OpenAIStream
from simulator.mock_server.api.dialects import FinishedSequence, ReportedUsage, StreamDialect
from simulator.mock_server.api.faults import Active
from simulator.mock_server.api.requests import CheckedRequest
from simulator.mock_server.driver import Driver, Ticket, Token, now
from simulator.mock_server.kv_transfer import KvLeg, KvTransfer
from simulator.mock_server.transport import Receive, Send

_HUGE = 1_000_000_000
_SETTLE_S = 0.02
"""Time for written data to reach the peer before a reset discards it."""


class MockExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request in progress: its driver and its client."""

    driver: Driver
    receive: Receive
    send: Send
    active: Active
    rank: int
    kv: KvTransfer
    leg: KvLeg
    address: tuple[str, int]
    """Of this engine."""
    session: tuple[str | None, bool]
    """As of `kv_events.session_of`."""


def submit(exchange: MockExchange, job: CheckedRequest, *, streams: bool) -> Ticket:
    """Queue the job; 503 when the engine's queue is full."""
    driver = exchange.driver
    bound = driver.config.max_num_queued
    if bound is not None and driver.waiting >= bound:
        raise problems.busy()
    leg = exchange.leg
    ticket = driver.submit(
        job.choices,
        rank=exchange.rank,
        streams=streams,
        priority=job.priority,
        remote=leg.remote,
        hold=leg.hold,
    )
    ticket.session = exchange.session
    metrics = ticket.rank.metrics
    for choice in job.choices:
        metrics.prompt_tokens.observe(choice.prompt_tokens)
        if job.limit is not None:
            metrics.max_tokens.observe(job.limit)
    ticket.watcher = asyncio.create_task(_watch(exchange, ticket))
    return ticket


async def _watch(exchange: MockExchange, ticket: Ticket) -> None:
    """Abort the ticket if the client leaves; ends by itself once the response is complete."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    exchange.driver.abort(ticket)


def _own_slow_factor(exchange: MockExchange) -> float:
    """Slowdown of this request alone; 1 if the whole engine is slowed."""
    slow = exchange.active.value("slow")
    return 1.0 if slow is None or exchange.driver.slow_factor > 1 else slow


async def wait_until_gone(ticket: Ticket) -> None:
    """Send nothing more until the client gives up."""
    if ticket.watcher is not None:
        await ticket.watcher


def _usage(
    exchange: MockExchange, job: CheckedRequest, ticket: Ticket, completion_tokens: int
) -> ReportedUsage | None:
    """The reported usage: the true one, unless a fault changes it."""
    active = exchange.active
    if "usage-none" in active:
        return None
    if "usage-zero" in active:
        return ReportedUsage(0, 0, 0)
    if "usage-huge" in active:
        return ReportedUsage(_HUGE, _HUGE, 0)
    cached = exchange.leg.cached_tokens
    if cached is None:
        cached = _cached(job, ticket)
    return ReportedUsage(job.prompt_tokens, completion_tokens, cached)


def _cached(job: CheckedRequest, ticket: Ticket) -> int:
    return sum(
        ticket.cached_tokens.get(choice, 0) for choice in range(0, len(job.choices), job.per_prompt)
    )


async def _hand_over(exchange: MockExchange, ticket: Ticket, dialect: object) -> None:
    """What a prefill does once its KV is complete and before it answers."""
    params = await exchange.kv.end(exchange.leg, ticket, exchange.active, exchange.address)
    if isinstance(dialect, OpenAIStream):
        dialect.kv_transfer_params = params


def _parts(job: CheckedRequest) -> list[FinishedSequence]:
    return [
        FinishedSequence(answers.text(choice.seed, choice.output_tokens), choice.finish_reason)
        for choice in job.choices
    ]


def _count_success(ticket: Ticket, job: CheckedRequest) -> None:
    for choice in job.choices:
        ticket.rank.metrics.success[choice.finish_reason] += 1


class Whole(Protocol):
    """An answer in one piece."""

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """Its JSON."""


async def run_whole(exchange: MockExchange, job: CheckedRequest, dialect: Whole) -> None:
    """A non-streaming answer."""
    ticket = submit(exchange, job, streams=False)
    if not await ticket.finish():
        return
    slow = _own_slow_factor(exchange)
    if slow > 1:
        await asyncio.sleep((slow - 1) * (ticket.due_s - ticket.arrival_s))
    if exchange.leg.hold:
        await _hand_over(exchange, ticket, dialect)
    _count_success(ticket, job)
    completion = sum(ticket.done_tokens.values())
    body = dialect.whole(_parts(job), _usage(exchange, job, ticket, completion))
    send, active = exchange.send, exchange.active
    stall = active.value("stall")
    if stall == 0:
        await wait_until_gone(ticket)
        return
    if stall is None and "reset-mid" not in active:
        await transport.answer(send, 200, body)
        exchange.driver.lag.observe(now() - ticket.due_s)
        return
    length = (b"content-length", b"%d" % len(body))
    await transport.start(send, 200, [transport.JSON_TYPE, length])
    await transport.write(send, body[: len(body) // 2])
    if stall is not None:
        await wait_until_gone(ticket)
        return
    await asyncio.sleep(_SETTLE_S)
    await transport.reset(exchange.receive, send)


class _Stream:
    """One streaming answer: turns tokens into bytes."""

    def __init__(
        self, exchange: MockExchange, job: CheckedRequest, ticket: Ticket, dialect: StreamDialect
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._ticket = ticket
        self._dialect = dialect
        self._started = False
        self._tokens = 0
        self._chunks = 0
        active = exchange.active
        stops = [v for name in ("stall", "reset-mid") if (v := active.value(name)) is not None]
        self._stop_after = min(stops) if stops else None
        self._no_finish = "no-finish" in active
        self._usage_every = "usage-every" in active
        self._slow = _own_slow_factor(exchange)
        self._interval = int(active.value("interval") or 1)
        self._pieces: dict[int, list[bytes]] = {}
        """Of the next event of each choice."""

    async def run(self) -> None:
        """Write until the last token, a fault, or the client's disconnect."""
        send, ticket = self._exchange.send, self._ticket
        if self._stop_after == 0 and "stall" in self._exchange.active:
            await wait_until_gone(ticket)
            return
        await transport.start(send, 200, transport.SSE_HEADERS)
        observe = self._exchange.driver.lag.observe
        while tokens := await ticket.read():
            if self._slow > 1:
                for token in tokens:
                    delayed_s = (token[2] - ticket.arrival_s) * self._slow
                    await asyncio.sleep(ticket.arrival_s + delayed_s - now())
                    await transport.write(send, self._render([token]))
            elif data := self._render(tokens):
                await transport.write(send, data)
                observe(now() - tokens[0][2])
            if self._stop_after is not None and self._chunks >= self._stop_after:
                await self._stop()
                return
        if not ticket.gone:
            _count_success(ticket, self._job)
            await transport.write(send, self._tail(), more=False)

    async def _stop(self) -> None:
        if "stall" in self._exchange.active:
            await wait_until_gone(self._ticket)
            return
        await asyncio.sleep(_SETTLE_S)
        await transport.reset(self._exchange.receive, self._exchange.send)

    def _render(self, tokens: list[Token]) -> bytes:
        out = []
        if not self._started:
            self._started = True
            out.append(self._dialect.head(len(self._job.choices), self._usage_at(0, head=True)))
        for choice, emission, _ in tokens:
            self._tokens += 1
            if self._stop_after is not None and self._chunks >= self._stop_after:
                break
            spec = self._job.choices[choice]
            piece = answers.piece_json(spec.seed, emission.index)
            if self._interval > 1:
                pieces = self._pieces.setdefault(choice, [])
                pieces.append(piece[1:-1])
                if len(pieces) < self._interval and not emission.finished:
                    continue
                piece = b'"%b"' % b"".join(self._pieces.pop(choice))
            if emission.finished and not self._no_finish:
                usage = self._usage_at(self._tokens, last=True)
                out.append(self._dialect.last(choice, piece, spec.finish_reason, usage))
            elif piece == answers.EMPTY_JSON:
                continue
            else:
                out.append(self._dialect.token(choice, piece, self._usage_at(self._tokens)))
            self._chunks += 1
        return b"".join(out)

    def _usage_at(
        self, tokens: int, *, head: bool = False, last: bool = False
    ) -> ReportedUsage | None:
        """Usage within a chunk, if requested or forced."""
        wanted = self._job.continuous_usage and self._job.include_usage
        forced = last and self._usage_every and not self._ticket.live
        always = head and self._dialect.usage_in_head
        if not (wanted or forced or always):
            return None
        return _usage(self._exchange, self._job, self._ticket, tokens)

    def _tail(self) -> bytes:
        if self._no_finish:
            return b""
        usage = _usage(self._exchange, self._job, self._ticket, self._tokens)
        done = "no-done" not in self._exchange.active
        return self._dialect.tail(_parts(self._job), usage, done=done)


async def run_stream(exchange: MockExchange, job: CheckedRequest, dialect: StreamDialect) -> None:
    """A streaming answer."""
    ticket = submit(exchange, job, streams=True)
    if exchange.leg.hold:
        if not await ticket.finish():
            return
        await _hand_over(exchange, ticket, dialect)
    await _Stream(exchange, job, ticket, dialect).run()
