"""A quote: what would come of a request now, without sending it, reserving or learning anything.

Stages 1 to 3 are the request's own; admission is asked dry (`LeaseStore.quote`); the wait is the
outlook of the pool that would take it. A quote counts as one request in limits of requests a
minute, and in nothing else. Of other tenants it tells nothing but the wait.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.admission.denials import refusal_of
from gateway.admission.terms import Denial
from gateway.errors import ContextLengthExceeded, Refusal
from gateway.fleet import fleet
from gateway.payload.body import MAX_CHOICES, MAX_MODEL_CHARS
from gateway.payload.schema import invalid, missing, undecodable
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.bind import job_of, no_worker
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.plan import Asked
from gateway.ports import LeaseStore
from gateway.records.endpoint import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Endpoint
from gateway.records.record import Record
from gateway.records.request import BodyFacts, Incoming, Measure, RequestHead
from gateway.records.usage import NANO, cost_nano
from gateway.routing.routing import window_plan
from gateway.scheduling.outlook import UNKNOWN, Forecast, Quantiles

MAX_BYTES: Final = 1 << 20
"""Of the body; longer prompts are quoted by their tokens."""
_NAMED: Final = {e.name: e for e in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)}
_ABSENT: Final = msgspec.Raw(b"")
_Tokens = Annotated[int, Meta(ge=0, le=2_147_483_647)]


class Counted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request by its tokens alone: the other form of the body."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
    input_tokens: _Tokens
    max_tokens: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    endpoint: str = ""


class _Shape(msgspec.Struct):
    endpoint: str = ""
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    input_tokens: msgspec.Raw = _ABSENT


class QuoteTokens(Record, frozen=True, kw_only=True):
    """Tokens, of all sequences."""

    input: int
    output_expected: int
    output_most: int


class QuoteCost(Record, frozen=True, kw_only=True):
    """Cost in units of the currency; null where the model's tokens have no price."""

    expected: float | None
    most: float | None
    currency: str


class Quote(Record, frozen=True, kw_only=True):
    """The answer. `reason` and `message` are those that the request would be refused with."""

    object: str = "sluice.quote"
    admitted: bool
    reason: str | None = None
    message: str | None = None
    model: str
    pool: str | None = None
    spilled: bool = False
    wait_s: Quantiles = UNKNOWN
    ttft_s: Quantiles = UNKNOWN
    tokens: QuoteTokens
    cost: QuoteCost
    retry_after_s: float | None = None
    enters_at: str | None = None
    """When the same request is expected to enter, in UTC; null where waiting does not help."""


def read(body: bytes) -> tuple[Endpoint, BodyFacts | None]:
    """The endpoint that a body is for, and what it says if it gives tokens. Raises BadRequest."""
    try:
        shape = _shape(body)
        if shape.endpoint and shape.endpoint not in _NAMED:
            raise invalid("endpoint", f"one of {', '.join(_NAMED)} was expected.")
        if bytes(shape.input_tokens):
            counted = _counted(body)
            return _NAMED.get(counted.endpoint, CHAT), _facts(counted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(error) from None
    shaped = {"messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS}
    found = (e for name, e in shaped.items() if bytes(getattr(shape, name)))
    endpoint = _NAMED.get(shape.endpoint) or next(found, None)
    if endpoint is None:
        raise missing("messages")
    return endpoint, None


def _facts(counted: Counted) -> BodyFacts:
    tokens = counted.input_tokens
    return BodyFacts(
        model=counted.model,
        measure=Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=tokens,
            longest_exact_tokens=tokens,
        ),
        cap_tokens=counted.max_tokens,
        sequences_per_prompt=counted.n,
        stream=True,
    )


class Quoter:
    """Answers quotes. One instance serves every request of a process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        store: LeaseStore,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        currency: str,
    ) -> None:
        """`clock` monotonic, `wall_clock` Unix time, in seconds."""
        self._pipeline = pipeline
        self._store = store
        self._new_id = new_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._currency = currency

    async def quote(self, head: RequestHead, body: bytes) -> Quote:
        """The quote for a body. Raises what the request would be refused with at once."""
        endpoint, facts = read(body)
        incoming = Incoming(
            request_id=head.request_id or "",
            lease_id=self._new_id(),
            endpoint=endpoint,
            head=head,
            body=body,
            received_s=self._clock(),
            received_unix_s=self._wall_clock(),
        )
        asked = await self._pipeline.ask(incoming, facts)
        _, principal, facts, served, estimate = asked
        prefix = stage_plan.look_up(asked, facts.members, estimate.input_tokens_total)
        try:
            planned = stage_plan.plan(served, endpoint, estimate, prefix)
        except ContextLengthExceeded as too_long:
            return self._refused(asked, too_long, None)
        window = stage_plan.compression_window(asked, planned, prefix)
        decided = planned if isinstance(window, str) else window_plan(planned, window)
        plan = stage_plan.applied(served, estimate, decided)
        lease_id = incoming.lease_id
        said = await stage_plan.quote(self._store, served, principal, lease_id, estimate, plan)
        if isinstance(said, Denial):
            refusal = refusal_of(said, principal.entitlement, 0.0, principal.limits)
            return self._refused(asked, refusal, said.wait_s or refusal.retry_after_s)
        pools = [served.fleet.pools[at] for at in (said.pool, *plan.alternates)]
        now_s = self._clock()
        if not any(fleet.available(p, now_s) or fleet.last_resort(p, refused=True) for p in pools):
            lacking = no_worker(served, facts.adapter)
            return self._refused(asked, lacking, lacking.retry_after_s)
        pool, phases = served.fleet.pools[said.pool], served.fleet.phases.get(said.pool)
        first = said.pool if phases is None else phases.prefill  # where it is bound first
        binds = served.fleet.pools[first]
        job = job_of(asked, estimate, said, now_s)
        job.match = prefix.match(first) if prefix.points else ()
        forecast = Forecast(job.priority_class, *binds.scheduler.forecast(job, now_s))
        wait, ttft = (Quantiles(p50=p50, p95=p95) for p50, p95 in binds.outlook.expect(forecast))
        return self._of(
            asked, admitted=True, pool=pool.name, spilled=said.spilled, wait_s=wait, ttft_s=ttft
        )

    def _refused(self, asked: Asked, refusal: Refusal, wait_s: float | None) -> Quote:
        told = {"reason": refusal.reason, "message": refusal.message}
        if refusal.status == 400 or wait_s is None:
            return self._of(asked, admitted=False, **told)
        enters = datetime.fromtimestamp(round(self._wall_clock() + wait_s + 0.5), UTC)
        after_s, at = refusal.retry_after_s, enters.isoformat()
        return self._of(asked, admitted=False, retry_after_s=after_s, enters_at=at, **told)

    def _of(self, asked: Asked, **more: Any) -> Quote:
        served, estimate = asked.served, asked.estimate
        each = max(0, served.routing.pools[-1].window_tokens - estimate.input_tokens_lowest)
        if estimate.limit_tokens is not None:
            each = min(each, estimate.limit_tokens)
        tokens = QuoteTokens(
            input=estimate.input_tokens_total,
            output_expected=estimate.sequences * estimate.output_tokens,
            output_most=estimate.sequences * each,
        )
        expected, dearest = (
            None if (price := served.price) is None else cost_nano(price, tokens.input, n) / NANO
            for n in (tokens.output_expected, tokens.output_most)
        )
        cost = QuoteCost(expected=expected, most=dearest, currency=self._currency)
        return Quote(model=served.name, tokens=tokens, cost=cost, **more)


_shape: Final = msgspec.json.Decoder(_Shape).decode
_counted: Final = msgspec.json.Decoder(Counted).decode
