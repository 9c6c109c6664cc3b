"""The engine model in real time.

Rules:
- Deadlines are absolute: an iteration begins where the previous one ended, however late the event
  loop is, so delays never add up. Only an idle engine starts at `now`.
- Model time is real time x speed; a change of speed re-anchors the two without a jump.
- Ranks step together (`simulator.engine.rank_group`): an iteration's tokens are out when the
  slowest rank's iteration ends.
- A ticket whose client left is aborted at once, in any phase. KV held for another engine stays.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from simulator.engine.engine import Emission, Engine, EngineRequest
from simulator.engine.rank_group import RankGroupEngine
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.kv_events import KvEventPublisher
from simulator.mock_server.metrics import Lag, RankMetrics

Token = tuple[int, Emission, float]
"""(choice, emission, the real time it was due)."""


# uvloop's own time() counts whole milliseconds only.
now = time.monotonic


class SequenceSpec(Protocol):
    """The fields of a sequence that the driver reads."""

    @property
    def prompt_tokens(self) -> int:
        """Its prompt, at least 1."""

    @property
    def output_tokens(self) -> int:
        """Where it stops, at least 1."""

    @property
    def block_hashes(self) -> tuple[int, ...]:
        """Hashes of its full prompt blocks."""


class Clock:
    """Model seconds as a function of real seconds."""

    def __init__(self, now_s: float, speed: float) -> None:
        self._real_s = now_s
        self._model_s = 0.0
        self.speed = speed

    def model_s(self, real_s: float) -> float:
        """Model time at a real time."""
        return self._model_s + (real_s - self._real_s) * self.speed

    def real_s(self, model_s: float) -> float:
        """Real time at a model time."""
        return self._real_s + (model_s - self._model_s) / self.speed

    def set_speed(self, now_s: float, speed: float) -> None:
        """Continue from here at another speed."""
        self._model_s, self._real_s, self.speed = self.model_s(now_s), now_s, speed


class Rank:
    """One engine of the group and its measurements."""

    __slots__ = ("engine", "index", "metrics")

    def __init__(self, index: int, engine: Engine) -> None:
        self.index = index
        self.engine = engine
        self.metrics = RankMetrics(engine.profile.max_model_len)


class Ticket:
    """The sequences of one HTTP request on the engine.

    A streaming ticket wakes its reader at each iteration, others only at the end.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "done_tokens",
        "due_s",
        "first_s",
        "gone",
        "held",
        "hold",
        "live",
        "prompts",
        "queue_s",
        "rank",
        "session",
        "streams",
        "tokens",
        "waiter",
        "watcher",
    )

    def __init__(self, rank: Rank, arrival_s: float, *, streams: bool, hold: bool = False) -> None:
        self.rank = rank
        self.arrival_s = arrival_s
        self.streams = streams
        self.live: dict[str, int] = {}
        self.session: tuple[str | None, bool] = (None, False)
        """As of `kv_events.session_of`."""
        self.prompts: list[tuple[int, ...]] = []
        """The blocks of each choice's prompt."""
        self.hold = hold
        self.held: dict[str, int] = {}
        """Ended sequences that hold their KV, and their prompt tokens."""
        self.tokens: list[Token] = []
        self.waiter: asyncio.Future[None] | None = None
        self.gone = False
        self.due_s = arrival_s
        self.first_s: dict[int, float] = {}
        self.queue_s: dict[int, float] = {}
        self.cached_tokens: dict[int, int] = {}
        self.done_tokens: dict[int, int] = {}
        self.watcher: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Wake the reader."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def read(self) -> list[Token]:
        """The tokens since the last read; empty once the ticket is gone or fully read."""
        while not self.tokens and self.live and not self.gone:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        tokens, self.tokens = self.tokens, []
        return tokens

    async def finish(self) -> bool:
        """Wait for the last token; False if the client left first."""
        while self.live and not self.gone:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return not self.gone


class KvCounts:
    """Transfers of an engine that did not go as they should."""

    def __init__(self) -> None:
        self.expired = 0
        """Held KV that nobody fetched in time."""
        self.late = 0
        """Fetches of KV that was held no more."""
        self.failed = 0
        """KV that did not come."""


class Driver:
    """Runs the ranks' engines against the monotonic clock."""

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self.group = RankGroupEngine(config.profile, config.dp_ranks)
        self.ranks = [Rank(index, engine) for index, engine in enumerate(self.group.engines)]
        self.events: KvEventPublisher | None = None
        if config.kv_events is not None:
            self.events = KvEventPublisher(config.kv_events, self.group.engines)
        self.lag = Lag()
        self.aborted_total = 0
        self.kv = KvCounts()
        self.on_held: Callable[[int, str, int], None] | None = None
        """Hears of the rank, id and prompt tokens of a sequence that holds its KV."""
        self._loop = asyncio.get_running_loop()
        self.slow_factor = 1.0
        self._clock = Clock(now(), config.speed)
        self._tickets: dict[str, Ticket] = {}
        self._next_id = 0
        self._stepping = False

    def slow_down(self, factor: float) -> None:
        """Run `factor` times slower than configured; 1 is the configured speed."""
        self.slow_factor = factor
        self._clock.set_speed(now(), self.config.speed / factor)

    @property
    def waiting(self) -> int:
        """Sequences queued, over all ranks."""
        return self.group.waiting

    def pick_rank(self) -> int:
        """The least loaded rank, a waiting sequence counting as four, as vLLM balances."""
        loads = [rank.engine.waiting * 4 + rank.engine.running for rank in self.ranks]
        return loads.index(min(loads))

    def submit(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        rank: int,
        streams: bool,
        priority: int = 0,
        remote: bool = False,
        hold: bool = False,
    ) -> Ticket:
        """Queue a request's sequences as choices 0, 1, ... of its ticket."""
        now_s = now()
        ticket = Ticket(self.ranks[rank], now_s, streams=streams, hold=hold)
        model_s = self._clock.model_s(now_s)
        for choice, spec in enumerate(sequences):
            self._next_id += 1
            sequence_id = str(self._next_id)
            self.group.submit(
                rank,
                EngineRequest(
                    id=sequence_id,
                    prompt_tokens=spec.prompt_tokens,
                    output_tokens=spec.output_tokens,
                    block_hashes=spec.block_hashes,
                    priority=priority,
                    remote=remote,
                    hold=hold,
                ),
                model_s,
            )
            ticket.live[sequence_id] = choice
            ticket.prompts.append(spec.block_hashes)
            if hold:
                ticket.held[sequence_id] = spec.prompt_tokens
            self._tickets[sequence_id] = ticket
        self._run()
        return ticket

    def _run(self) -> None:
        if not self._stepping:
            self._stepping = True
            # At the end of this loop iteration, so that requests that came together start together.
            self._loop.call_soon(self._start)

    def abort(self, ticket: Ticket) -> None:
        """Abort the running sequences of a ticket; harmless when it is complete."""
        if ticket.gone or not ticket.live:
            return
        ticket.gone = True
        for sequence_id in ticket.live:
            if self.group.abort(ticket.rank.index, sequence_id):
                self.aborted_total += 1
                ticket.rank.metrics.success["abort"] += 1
            self._tickets.pop(sequence_id, None)
            ticket.held.pop(sequence_id, None)
        ticket.live.clear()
        ticket.wake()
        self._run()  # others may fit now

    def release(self, rank: int, sequence_id: str) -> None:
        """Free what an ended sequence holds."""
        self.group.release(rank, sequence_id)
        self._run()

    def _start(self) -> None:
        self._step(self._clock.model_s(now()))

    def _step(self, model_s: float) -> None:
        """Begin the group's next iteration at a model time; stop if there is no work."""
        iteration = self.group.begin(model_s)
        if iteration is None:
            self._stepping = False
            return
        due_s = self._clock.real_s(iteration.end_s)
        self._loop.call_later(max(0.0, due_s - now()), self._end, iteration.end_s, due_s)

    def _end(self, end_s: float, due_s: float) -> None:
        for _, emission in self.group.finish():
            self._deliver(emission, due_s)
        self._step(end_s)

    def _deliver(self, emission: Emission, due_s: float) -> None:
        ticket = self._tickets.get(emission.id)
        if ticket is None:
            return
        choice = ticket.live[emission.id]
        if emission.index == 1:
            self._first(ticket, choice, emission, due_s)
        if emission.finished:
            del self._tickets[emission.id], ticket.live[emission.id]
            ticket.due_s = due_s
            ticket.done_tokens[choice] = emission.index
            if ticket.hold and self.on_held is not None:
                self.on_held(ticket.rank.index, emission.id, ticket.held[emission.id])
            self._last(ticket, choice, due_s)
        if ticket.streams:
            ticket.tokens.append((choice, emission, due_s))
            ticket.wake()
        elif not ticket.live:
            ticket.wake()

    def _first(self, ticket: Ticket, choice: int, emission: Emission, due_s: float) -> None:
        if self.events is not None:
            blocks = ticket.prompts[choice]
            cached = emission.cached_tokens // self.config.profile.block_tokens
            self.events.stored(ticket.rank.index, ticket.session, blocks, cached)
        metrics = ticket.rank.metrics
        queue_s = emission.queue_s / self._clock.speed
        ticket.first_s[choice] = due_s
        ticket.queue_s[choice] = queue_s
        ticket.cached_tokens[choice] = emission.cached_tokens
        ttft_s = due_s - ticket.arrival_s
        metrics.ttft_s.observe(ttft_s)
        metrics.queue_s.observe(queue_s)
        metrics.prefill_s.observe(max(0.0, ttft_s - queue_s))

    def _last(self, ticket: Ticket, choice: int, due_s: float) -> None:
        metrics = ticket.rank.metrics
        decode_s = due_s - ticket.first_s.get(choice, due_s)
        tokens = ticket.done_tokens[choice]
        metrics.e2e_s.observe(due_s - ticket.arrival_s)
        metrics.decode_s.observe(decode_s)
        metrics.generation_tokens.observe(tokens)
        if tokens > 1:
            metrics.tpot_s.observe(decode_s / (tokens - 1))
