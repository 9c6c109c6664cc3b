"""A quote: what would come of a request now, without sending it, reserving or learning anything.

Stages 1 to 3 are the request's own; admission is asked dry (`LeaseStore.quote`); the wait is the
outlook of the pool that would take it. A quote counts as one request in limits of requests a
minute, and in nothing else. Of other tenants it tells nothing but the wait.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from gateway.admission.denials import refusal_of
from gateway.admission.terms import Denial
from gateway.errors import ContextLengthExceeded, Refusal
from gateway.fleet import fleet
from gateway.payload.body import facts_of
from gateway.payload.schema import CountedBody, missing, undecodable
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.bind import job_of, no_worker
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.plan import Asked
from gateway.ports import LeaseStore
from gateway.records.endpoint import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Endpoint
from gateway.records.request import BodyFacts, Incoming, RequestHead
from gateway.records.usage import NANO, cost_nano
from gateway.routing.routing import window_plan
from gateway.scheduling.outlook import Forecast

MAX_BYTES: Final = 1 << 20
"""Of the body; longer prompts are quoted by their tokens."""
_LONGEST_S: Final = 1e9
"""Of a wait; calendars end."""
_ENDPOINTS: Final = {e.name: e for e in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)}
_Name = Literal["chat", "completions", "embeddings", "responses", "messages", ""]
_ABSENT: Final = msgspec.Raw(b"")
_UNKNOWN: Final = {"p50": None, "p95": None}


class _Shape(msgspec.Struct):
    """The fields by which the endpoint of a body is known."""

    endpoint: _Name = ""
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    input_tokens: msgspec.Raw = _ABSENT


class _Counted(CountedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The other form of the body."""

    endpoint: _Name = ""


def read(body: bytes) -> tuple[Endpoint, BodyFacts | None]:
    """The endpoint that a body is for, and what it says if it gives tokens. Raises BadRequest."""
    try:
        shape = _shape(body)
        counted = _counted(body) if bytes(shape.input_tokens) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(error) from None
    endpoint = _ENDPOINTS.get(shape.endpoint)
    if counted is not None:
        return endpoint or CHAT, facts_of(counted)
    shaped = ((shape.messages, CHAT), (shape.prompt, COMPLETIONS), (shape.input, EMBEDDINGS))
    endpoint = endpoint or next((each for given, each in shaped if bytes(given)), None)
    if endpoint is None:
        raise missing("messages")
    return endpoint, None


class Quoter(msgspec.Struct, frozen=True, kw_only=True):
    """Answers quotes, of every request of a process."""

    pipeline: Pipeline
    store: LeaseStore
    clock: Callable[[], float]
    """Monotonic, in seconds."""
    wall_clock: Callable[[], float]
    """Unix time, in seconds."""
    currency: str

    async def quote(self, head: RequestHead, body: bytes) -> dict[str, Any]:
        """The quote for a body. Raises what the request would be refused with at once."""
        endpoint, facts = read(body)
        incoming = Incoming(
            request_id=head.request_id or "",
            lease_id="",  # nothing is taken
            endpoint=endpoint,
            head=head,
            body=body,
            received_s=self.clock(),
            received_unix_s=self.wall_clock(),
        )
        asked = await self.pipeline.ask(incoming, facts)
        _, principal, facts, served, estimate = asked
        prefix = stage_plan.look_up(asked, facts.members, estimate.input_tokens_total)
        try:
            planned = stage_plan.plan(served, endpoint, estimate, prefix)
        except ContextLengthExceeded as too_long:
            return self._refused(asked, too_long, None)
        window = stage_plan.compression_window(asked, planned, prefix)
        decided = planned if isinstance(window, str) else window_plan(planned, window)
        plan = stage_plan.applied(served, estimate, decided)
        said = await stage_plan.quote(self.store, served, principal, estimate, plan)
        if isinstance(said, Denial):
            refusal = refusal_of(said, principal.entitlement, 0.0, principal.limits)
            return self._refused(asked, refusal, said.wait_s or refusal.retry_after_s)
        pools = [served.fleet.pools[at] for at in (said.pool, *plan.alternates)]
        now_s = self.clock()
        if not any(fleet.available(p, now_s) or fleet.last_resort(p, refused=True) for p in pools):
            lacking = no_worker(served, facts.adapter)
            return self._refused(asked, lacking, lacking.retry_after_s)
        phases = served.fleet.phases.get(said.pool)
        first = said.pool if phases is None else phases.prefill  # where it is bound first
        binds = served.fleet.pools[first]
        job = job_of(asked, estimate, said, now_s)
        job.match = prefix.match(first) if prefix.points else ()
        forecast = Forecast(job.priority_class, *binds.scheduler.forecast(job, now_s))
        wait, ttft = (dict(zip(_UNKNOWN, s, strict=True)) for s in binds.outlook.expect(forecast))
        place = {"pool": pools[0].name, "spilled": said.spilled, "wait_s": wait, "ttft_s": ttft}
        return self._answer(asked, admitted=True, **place)

    def _refused(self, asked: Asked, refusal: Refusal, wait_s: float | None) -> dict[str, Any]:
        why: dict[str, Any] = {"reason": refusal.reason, "message": refusal.message}
        if refusal.status != 400 and wait_s is not None:
            unix_s = self.wall_clock() + min(wait_s, _LONGEST_S)
            enters = datetime.fromtimestamp(round(unix_s + 0.5), UTC)
            why |= {"retry_after_s": refusal.retry_after_s, "enters_at": enters.isoformat()}
        return self._answer(asked, admitted=False, **why)

    def _answer(self, asked: Asked, **more: Any) -> dict[str, Any]:
        """Tokens are of all sequences, the cost in units of the currency."""
        served, estimate, price = asked.served, asked.estimate, asked.served.price
        longest = max(0, served.routing.pools[-1].window_tokens - estimate.input_tokens_lowest)
        if estimate.limit_tokens is not None:
            longest = min(longest, estimate.limit_tokens)
        input_tokens = estimate.input_tokens_total
        expected, most = (estimate.sequences * n for n in (estimate.output_tokens, longest))
        costs = [
            None if price is None else cost_nano(price, input_tokens, output_tokens) / NANO
            for output_tokens in (expected, most)
        ]
        return {
            "object": "sluice.quote",
            "reason": None,
            "message": None,
            "model": served.name,
            "pool": None,
            "spilled": False,
            "wait_s": _UNKNOWN,
            "ttft_s": _UNKNOWN,
            "tokens": {"input": input_tokens, "output_expected": expected, "output_most": most},
            "cost": {"expected": costs[0], "most": costs[1], "currency": self.currency},
            "retry_after_s": None,
            "enters_at": None,
            **more,
        }


_shape: Final = msgspec.json.Decoder(_Shape).decode
_counted: Final = msgspec.json.Decoder(_Counted).decode
