"""Requests of pools in phases: one engine computes the prompt, another one the answer.

- vLLM: the prefill engine gets the client's request for one token, and answers with the place of
  the prompt's KV cache, which it holds until somebody fetches it. Only then a decode engine is
  bound, and sent the client's request with that place.
- SGLang: both engines are bound, and get the same request with a room in which they meet. What the
  prefill engine answers is left.
- The first phase is an attempt like any other: a worker of its pool, that pool's scheduler, load,
  health, and a line in the record. It has no lease of its own.
- A vLLM decode engine can compute a prompt itself. It does where that is cheaper, where the
  request cannot be handed over, and where the first phase or the hand-over failed. One of SGLang
  cannot.
- A place of KV cache goes to one decode engine: a second one would read whatever is there by then,
  and no engine would notice. Only where a connection was refused is it sent to another.
- KV cache that nobody will fetch is given back (vLLM). Engines do that themselves where a request
  is refused or its connection closed.
- In observe mode, too, requests go through both phases: what a bare relay would send, such engines
  could not answer. Short prompts skip the first as configured.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import orjson

from gateway.errors import EngineRefusal, Refusal, Unavailable, UpstreamFailure
from gateway.fleet import fleet
from gateway.fleet.model_runtime import Phases
from gateway.payload.answers import handed_over
from gateway.pipeline.request_progress import Attempts, PrefillPhase, require
from gateway.ports import ClientReply, Lines, Upstream, UpstreamCall
from gateway.records.attempt import Binding, Handover, Outcome, PhaseTimeouts, WorkerAddress
from gateway.records.request import BodyFacts
from gateway.routing.overflow import engine_message, in_band_error, in_band_status
from gateway.routing.retry import Fault

PREFILLED_BYTES: Final = 8 * 1024 * 1024
"""Of a prefill's answer: it lists the prompt's blocks."""
HELD_S: Final = 25.0
"""How long a prefill engine is trusted to hold a KV cache; vLLM's lease is 30 s."""
_PARAMS: Final = "kv_transfer_params"
_ASKED: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ENDPOINTS: Final = frozenset({"chat", "completions"})
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_OF_ANSWERS: Final = (*_LIMITS, "min_tokens", "stream", "stream_options")
_FINAL: Final = frozenset({"overflow", "empty", "local"})
"""Faults of prefill that decode would meet, too."""
_END_S: Final = 1.0
"""From the end of an answer to that of SGLang's prefill."""
_RELEASES: Final = 3
"""Decode engines that are asked to have a KV cache freed, one after the other."""
_RELEASE_S: Final = 10.0
_RELEASE_TIMEOUTS: Final = PhaseTimeouts(connect_s=2.0, first_byte_s=_RELEASE_S, idle_s=2.0)
_MOST_BESIDE: Final = 256
"""Tasks left behind by requests; beyond that, KV cache is held until its lease ends."""

Tried = list[tuple[int, int]]
Attempting = Callable[[ClientReply, Attempts, Binding], Awaitable[Outcome | Fault]]
Binds = Callable[[Attempts, Tried, tuple[int, int] | None, Fault | None], Awaitable[Binding]]


class Unheard:
    """The reply of a prefill (a ClientReply): the client hears at most of its own mistake."""

    started = False

    def __init__(self) -> None:
        self.body = self._begins = b""
        self._status, self._lines = 0, b""
        self._refusal: Refusal | None = None

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None: ...

    async def write(self, data: bytes) -> None:
        self._begins = self._begins or data  # it may be an error of the client's own

    def write_now(self, data: bytes) -> bool:
        return True

    async def drain(self) -> None: ...

    async def finish(self) -> None: ...

    async def break_off(self, refusal: Refusal) -> None: ...

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        self._status, self._lines, self.body = status, lines, body

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        self._refusal, self._lines = refusal, lines

    async def pass_on(self, reply: ClientReply) -> None:
        """Tell the client what was kept."""
        refusal = self._refusal
        if refusal is None and (reply.started or not self._status):
            # The client was told of its wait, or the engine told this in a stream.
            body = self.body or in_band_error(self._begins)
            status = self._status or in_band_status(body)
            message = engine_message(body) or f"The engine refused with {status}."
            refusal = EngineRefusal(status, message)
        if refusal is not None:
            await reply.refuse(refusal, self._lines)
        else:
            await reply.send(self._status, self._lines, self.body)


class PhaseRunner:
    """Runs the first phase, and what binds it to the second. One serves every request."""

    def __init__(
        self,
        *,
        attempt: Attempting,
        bind: Binds,
        unbind: Callable[[Attempts], None],
        upstream: Upstream,
        clock: Callable[[], float],
    ) -> None:
        """`attempt`, `bind`, `unbind`: the dispatcher's, for either phase."""
        self._attempt = attempt
        self._bind = bind
        self._unbind = unbind
        self._upstream = upstream
        self._clock = clock
        self._beside: set[asyncio.Task[Any]] = set()
        """Tasks that outlive their requests, for a bounded time."""

    async def prefill(self, reply: ClientReply, attempts: Attempts) -> Outcome | Fault | None:
        """Have the prompt computed where that comes before decode is bound.

        None: decode is next. An Outcome: the client was told its mistake. Raises Refusal.
        """
        served, pool = attempts.served, attempts.lease.current.pool
        phases, phase = served.fleet.phases.get(pool), attempts.prefill
        if phase is None:
            if phases is None:
                return None
            phase = attempts.prefill = PrefillPhase()
        if phase.pool != pool:
            self.give_back(attempts)
            phase.begin(pool, phases)
            phase.skipped = "" if phases is None else _skips(attempts, phases)
        if phases is None or phases.kind == "sglang" or phase.skipped or phase.handover is not None:
            return None
        if not fleet.available(served.fleet.pools[pool], self._clock()):
            return None  # it may come to another pool
        return await self._prefill(reply, attempts, phase)

    async def _prefill(
        self, reply: ClientReply, attempts: Attempts, phase: PrefillPhase
    ) -> Outcome | Fault | None:
        """Ask one prefill engine after the other, within the request's attempts."""
        while len(phase.tried) < attempts.served.fleet.max_attempts and self._left(attempts):
            asks = Handover(
                engine_id=new_engine_id(attempts), members={_PARAMS: _ASKED}, prefills=True
            )
            side, unheard = _side(attempts, asks), Unheard()
            side.task = attempts.task
            result: Outcome | Fault | None = None
            try:
                side.binding = await self._bind(side, phase.tried, None, None)
                result = await self._attempt(unheard, side, side.binding)
            except Unavailable:  # none is left
                pass
            finally:
                _join(attempts, side)
            if result is None:
                break
            if isinstance(result, Outcome) and result.label != "error":
                self._computed(attempts, side, result)
                if place := handed_over(unheard.body):
                    phase.handover = Handover(engine_id=asks.engine_id, members={_PARAMS: place})
                else:
                    phase.skipped = "not_handed_over"
                return None
            ended = await _failed(reply, attempts, side, unheard, result)
            if isinstance(ended, Outcome) or attempts.guilty or ended.kind in _FINAL:
                return ended
        phase.skipped = "failed" if phase.tried else "no_prefill_worker"
        return None

    async def decode(
        self, reply: ClientReply, attempts: Attempts, binding: Binding
    ) -> Outcome | Fault:
        """An attempt of the second phase, with what the first one came to."""
        phase, sent_s = require(attempts.prefill), self._clock()
        if phase.phases is not None and phase.phases.kind == "sglang" and not phase.skipped:
            return await self._pair(reply, attempts, binding, phase)
        handover, phase.handover = phase.handover, None
        if handover is not None and sent_s > require(phase.answered_s) + HELD_S:
            handover, phase.skipped = None, "failed"
        if handover is None and phase.phases is not None and not phase.skipped:
            phase.skipped = "no_decode_worker"  # there was none to compute it for
        attempts.handover = handover
        try:
            result = await self._attempt(reply, attempts, binding)
        except asyncio.CancelledError:
            if not require(attempts.relay).opened:
                phase.handover = handover  # perhaps no engine has heard of it
            raise
        finally:
            attempts.handover = None
        if handover is None:
            return result
        if isinstance(result, Outcome):
            _learn(attempts, result, sent_s)
            return result
        if result.kind == "overflow":  # an engine gives it back as it refuses
            return result
        phase.handover = handover
        if result.kind == "handover":
            phase.skipped = "failed"
        if result.kind != "connect":  # it may not have read what it was told of
            self.give_back(attempts)
        return result

    async def _pair(
        self, reply: ClientReply, attempts: Attempts, binding: Binding, phase: PrefillPhase
    ) -> Outcome | Fault:
        """Both phases at once; the second one ends when the first fails."""
        served = attempts.served
        if not self._left(attempts):
            raise Unavailable(
                f"No prefill engine of the model '{served.name}' is ready. Try again shortly.",
                reason="no_worker_ready",
                retry_after_s=2.0,
            )
        side, unheard = _side(attempts, None), Unheard()
        try:
            side.binding = bound = await self._bind(side, phase.tried, None, None)
        finally:
            _join(attempts, side)
        address = served.fleet.pools[bound.pool].addresses[bound.worker]
        room = {
            "bootstrap_host": orjson.dumps(address.host),
            "bootstrap_port": b"%d" % require(phase.phases).bootstrap_port,
            "bootstrap_room": b"%d" % secrets.randbits(63),
        }
        both = Handover(engine_id=new_engine_id(attempts), members=room)
        attempts.handover = side.handover = both
        phase.answered_s, sent_s, answered = None, self._clock(), False
        first = asyncio.ensure_future(self._attempt(unheard, side, bound))
        side.task = first
        first.add_done_callback(partial(self._met, attempts, side))
        try:
            result = await self._attempt(reply, attempts, binding)
            answered = isinstance(result, Outcome) and result.completed
        finally:
            attempts.handover = None
            if answered:
                self._leave(first, _END_S)
            else:
                first.cancel()
                await asyncio.wait([first])
            _join(attempts, side)
        if isinstance(result, Outcome):
            _learn(attempts, result, sent_s)
            return result
        if not first.cancelled() and phase.answered_s is None:
            return await _failed(reply, attempts, side, unheard, first.result())
        if result.kind == "handover":  # either may be to blame
            phase.tried.append((bound.pool, bound.worker))
            result = replace(result, kind="server_error")
        return result

    def _met(
        self, attempts: Attempts, side: Attempts, first: "asyncio.Task[Outcome | Fault]"
    ) -> None:
        """The first of two phases at once has ended: without it, the second need not wait."""
        if first.cancelled():
            return
        result = first.result()
        if isinstance(result, Outcome) and result.label != "error":
            attempts.handover = None  # it is done
            self._computed(attempts, side, result)
            return
        opened = attempts.relay is not None and attempts.relay.opened
        if attempts.task is not None and attempts.awaits and not (attempts.stopped or opened):
            attempts.stopped = Fault(kind="handover", message="its prefill failed")
            attempts.task.cancel()

    def _left(self, attempts: Attempts) -> bool:
        """Whether there is a prefill engine to ask: where decode can do it, only a sound one."""
        phase, now_s = require(attempts.prefill), self._clock()
        phases = require(phase.phases)
        pool = attempts.served.fleet.pools[phases.prefill]
        workers = fleet.available(pool, now_s)
        if phases.kind == "sglang":
            return bool(workers)
        tried = {worker for place, worker in phase.tried if place == phases.prefill}
        return any(pool.engine_of[w].ejected_until_s <= now_s for w in workers if w not in tried)

    def _computed(self, attempts: Attempts, side: Attempts, result: Outcome) -> None:
        """A prompt was computed."""
        phase, binding = require(attempts.prefill), require(side.binding)
        side.relay = None  # it holds the prompt
        phase.answered_s, phase.usage = self._clock(), result.usage
        if side.entry is not None:
            pool = attempts.served.fleet.pools[binding.pool]
            side.entry.correct(pool, binding.worker, result.usage)

    # What is left behind

    def ended(self, attempts: Attempts) -> None:
        """The request is over: nobody waits for a prefill worker, or will fetch a KV cache."""
        for side in () if attempts.prefill is None else attempts.prefill.sides:
            side.tell = None
            if not side.awaits:
                self._unbind(side)
        self.give_back(attempts)

    def _leave(self, task: "asyncio.Task[Any]", limit_s: float) -> None:
        """Have a task end on its own within a time."""
        if not task.done():
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)
            asyncio.get_running_loop().call_later(limit_s, task.cancel)

    def give_back(self, attempts: Attempts) -> None:
        """Have the prefill engine free a KV cache that nobody will fetch, if there is one."""
        phase, served = attempts.prefill, attempts.served
        if phase is None or phase.handover is None:
            return
        handover, phase.handover = phase.handover, None
        late = self._clock() > require(phase.answered_s) + HELD_S  # it frees itself
        if not late and len(self._beside) < _MOST_BESIDE:
            pool = served.fleet.pools[phase.pool]
            workers = sorted(fleet.available(pool, self._clock()), key=pool.active.__getitem__)
            addresses = [pool.addresses[worker] for worker in workers[:_RELEASES]]
            work = self._release(addresses, served.name, handover.members[_PARAMS])
            self._leave(asyncio.ensure_future(work), _RELEASE_S)

    async def _release(self, workers: list[WorkerAddress], model: str, place: bytes) -> None:
        """Ask decode engines in turn for one token of any prompt, as if it were handed over.

        Who is told of a KV cache has it freed; engines have no request for that alone.
        """
        for worker in workers:
            name = orjson.dumps(worker.served_model or model)
            call = UpstreamCall(
                method="POST",
                path="/v1/completions",
                lines=b"content-type: application/json\r\n",
                body=b'{"model":%b,"prompt":"a","max_tokens":1,"%b":%b}'
                % (name, _PARAMS.encode(), place),
                timeouts=_RELEASE_TIMEOUTS,
            )
            with contextlib.suppress(UpstreamFailure):
                response = await self._upstream.open(worker, call)
                response.abort()
                if response.status < 500:
                    return


def _skips(attempts: Attempts, phases: Phases) -> str:
    """Why decode computes the prompt, as it may where it can; "" if it does not."""
    endpoint, estimate = attempts.incoming.endpoint, attempts.sending.estimate
    if phases.kind == "sglang":
        return "" if endpoint.generates and not endpoint.multipart else "endpoint"
    if endpoint.name not in _ENDPOINTS:
        return "endpoint"
    if estimate.sequences > 1:
        return "sequences"
    return "short" if estimate.input_tokens_total < phases.skip_below_tokens else ""


def _side(attempts: Attempts, asks: Handover | None) -> Attempts:
    """The first phase as a request of its own, under the same lease; `asks`: of vLLM."""
    served, sending, facts = attempts.served, attempts.sending, attempts.facts
    phase = require(attempts.prefill)
    phases = require(phase.phases)
    estimate = msgspec.structs.replace(sending.estimate, output_tokens=1, cap_tokens=1)
    if asks is not None:
        facts = msgspec.structs.replace(facts, stream=False)
    asked = attempts.asked._replace(facts=facts)
    side = Attempts(asked, attempts.lease, sending._replace(estimate=estimate))
    side.pools, side.handover, side.done = (phases.prefill,), asks, attempts.done
    side.queue_s, side.moved, side.blamed = attempts.queue_s, attempts.moved, attempts.blamed
    prior = 0.0
    if phases.bytes_per_second:
        prior = served.admission.kv_bytes_per_token / phases.bytes_per_second
    transfer = served.fleet.pools[phase.pool].transfer
    side.after_s = transfer.predict(estimate.input_tokens_total, prior)
    side.tell = attempts.tell
    phase.sides.append(side)
    return side


def _join(attempts: Attempts, side: Attempts) -> None:
    """Note of the request what is known of its first phase. Idempotent."""
    require(attempts.prefill).wait_s += max(0.0, side.queue_s - attempts.queue_s)
    attempts.queue_s = max(attempts.queue_s, side.queue_s)
    attempts.moved = attempts.moved or side.moved
    attempts.guilty = attempts.guilty or side.guilty
    attempts.blamed = tuple(dict.fromkeys((*attempts.blamed, *side.blamed)))
    if attempts.sent_s is None:
        attempts.sent_s, attempts.waited_s = side.sent_s, side.waited_s


async def _failed(
    reply: ClientReply,
    attempts: Attempts,
    side: Attempts,
    unheard: Unheard,
    result: Outcome | Fault,
) -> Outcome | Fault:
    """A prompt was not computed: the client hears that it is its own mistake, or the fault."""
    if isinstance(result, Outcome):
        if attempts.over is not None:
            await attempts.over(result)
        await unheard.pass_on(reply)
        return result
    phase, binding = require(attempts.prefill), require(side.binding)
    phase.tried.append((binding.pool, binding.worker))
    phase.sent += side.relay is not None and side.relay.sent
    return replace(result, at_prefill=True)


def _learn(attempts: Attempts, result: Outcome, sent_s: float) -> None:
    """Note how long the first token took, once the prompt was computed and decode was asked."""
    phase, first_s = require(attempts.prefill), require(attempts.relay).first_s
    answered_s, tokens = phase.answered_s, attempts.sending.estimate.input_tokens_total
    streamed = attempts.facts.stream and result.label != "error"
    if streamed and first_s is not None and answered_s is not None:
        phase.transfer_s = max(0.0, first_s - max(sent_s, answered_s))
        transfer = attempts.served.fleet.pools[phase.pool].transfer
        transfer.learn(max(0.0, sent_s - answered_s), phase.transfer_s, tokens)


def new_engine_id(attempts: Attempts) -> str:
    """A new id for a request at its engines.

    Their logs are searched by the part that is the lease's. Engines that refuse an id in use, or
    abort by id, would let whoever knows another's id in advance end its requests. So it is never
    the client's, and nobody can predict it.
    """
    return f"{attempts.incoming.lease_id}-{secrets.token_hex(8)}"


def in_phase(
    handover: Handover, facts: BodyFacts, insert: dict[str, bytes], remove: tuple[str, ...]
) -> tuple[str, ...]:
    """Add to `insert` what a call in phases says; the members that it must not have."""
    insert.update(handover.members)
    if not handover.prefills:
        return remove
    insert["stream"] = b"false"
    for name in _LIMITS:  # completions know the first one only
        if name == _LIMITS[0] or name in facts.members:
            insert[name] = b"1"
    return (*remove, *_OF_ANSWERS)


def judged(attempts: Attempts, answer: Outcome | Fault) -> Outcome | Fault:
    """What decode came to: its error while a hand-over is due says nothing of its own health."""
    if attempts.pools or not isinstance(answer, Fault) or answer.kind != "server_error":
        return answer
    return replace(answer, kind="handover") if answer.status >= 500 else answer
