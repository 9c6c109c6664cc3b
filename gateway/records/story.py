"""The story of one request in sentences: what was decided at each step, and why.

Pure: a decision record in, text out. The dashboard, the tenant API and `sluice why` all tell it.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.records.decision import DecisionRecord
from gateway.records.plain_text import plain
from gateway.records.record import Record
from gateway.records.story_words import (
    COMPRESSION,
    ENDINGS,
    FAULTS,
    OUTCOMES,
    PLANS,
    REFUSALS,
    grouped,
)

_MS: Final = 1000.0


class Step(Record, frozen=True, kw_only=True):
    """One step of a request: when it ran, and what it did."""

    name: str
    text: str
    start_ms: float | None = None
    """From the arrival; None for a step that the request did not reach."""
    duration_ms: float | None = None


def story_of(record: DecisionRecord) -> list[str]:
    """The story as sentences, in the order of events."""
    return [step.text for step in steps_of(record)]


def steps_of(record: DecisionRecord) -> list[Step]:
    """The story by step: estimate, plan, admission, and so on until it settled."""
    timing = record.timing
    compress = timing.compress_ms or 0.0
    queue = timing.queue_ms
    decided = None if timing.overhead_ms is None else max(0.0, timing.overhead_ms - compress)
    sent = None if decided is None else decided + compress + queue
    first = None if timing.ttft_s is None else timing.ttft_s * _MS
    end = None if timing.duration_s is None else timing.duration_s * _MS
    start = None if decided is None else 0.0
    found = [Step(name="request", text=_request(record), start_ms=0.0, duration_ms=end)]
    for name, text in (
        ("estimate", _estimate(record)),
        ("plan", _plan(record)),
        ("admission", _admission(record)),
    ):
        if text:
            found.append(Step(name=name, text=text, start_ms=start, duration_ms=decided))
    if text := _compression(record):
        found.append(
            Step(name="compression", text=text, start_ms=decided, duration_ms=timing.compress_ms)
        )
    if text := _queue(record):
        before = None if decided is None else decided + compress
        found.append(Step(name="queue", text=text, start_ms=before, duration_ms=queue))
    found += _answer(record, sent, first, end)
    if text := _ending(record):
        found.append(Step(name="ending", text=text, start_ms=end, duration_ms=0.0))
    found.append(Step(name="settle", text=_settle(record), start_ms=end, duration_ms=0.0))
    return [msgspec.structs.replace(step, text=plain(step.text)) for step in found]


def _request(record: DecisionRecord) -> str:
    who = record.entitlement or _client(record)
    model = record.model or record.asked_model or "an unknown model"
    also = record.asked_model
    alias = f" (as {also})" if also and record.model and also != record.model else ""
    request = record.request
    parts = [f"a body of {grouped(request.body_bytes)} bytes"]
    if request.messages:
        parts.append(
            f"{grouped(request.messages)} messages" if request.messages > 1 else "1 message"
        )
    if request.media_parts:
        parts.append(f"{grouped(request.media_parts)} images or sounds")
    how = "a stream" if record.stream else "a whole answer"
    return (
        f"{who} asked {model}{alias} for {how} on the {record.endpoint} endpoint, "
        f"with {' and '.join(parts)}."
    )


def _estimate(record: DecisionRecord) -> str:
    known = record.estimate
    if known.total_tokens is None:
        return ""
    cap = (
        "" if known.cap_tokens is None else f" (the client's limit is {grouped(known.cap_tokens)})"
    )
    ratio = known.bytes_per_token_conservative
    by = "" if ratio is None else f" at {ratio:.2f} bytes per token of {known.category} text"
    several = known.sequences or 1
    prompt, total = known.input_tokens or 0, known.total_tokens
    if record.compression.kept_share is not None:  # the record's estimate is of the shorter prompt
        before, _, after = record.compression.compressed.partition("->")
        prompt, total = prompt + int(before) - int(after), total + int(before) - int(after)
    times = f", {several} answers" if several > 1 else ""
    return (
        f"The gateway estimated {grouped(prompt)} prompt tokens{by} and "
        f"{grouped(known.output_tokens or 0)} tokens of answer{cap}{times}: "
        f"{grouped(total)} in total."
    )


def _plan(record: DecisionRecord) -> str:
    plan = record.plan
    if plan.pool is None:
        return ""
    why = PLANS.get(plan.reason or "", f"for the reason {plan.reason}")
    text = f"The plan was pool {plan.pool}, {why}."
    if plan.would_route is not None:
        text += f" The model is in observe mode; enforced, {plan.would_route} would have served it."
    return text


def _admission(record: DecisionRecord) -> str:
    known = record.admission
    if known.admitted_unix_s is None:  # it did not get so far, or its model has no limits
        return ""
    as_class = f" as {known.service_class}" if known.service_class else ""
    text = f"Admission granted a lease{as_class}"
    if known.reserved_tokens is not None:
        text += f", reserving {grouped(known.reserved_tokens)} tokens"
    if known.priority is not None:
        text += f", at weight {known.priority:.4g}"
    text += "."
    if known.contended:
        text += " The pool was full at that moment."
    if known.spilled and record.pool:
        text += f" The request spilled out of its planned pool to {record.pool}."
    if known.would_deny:
        text += f" Enforced, admission would have refused it: {_why(known.would_deny)}."
    return text


def _why(reason: str | None) -> str:
    return REFUSALS.get(reason or "", f"the reason is {reason or 'not recorded'}")


def _compression(record: DecisionRecord) -> str:
    known = record.compression
    if known.kept_share is not None:
        before, _, after = known.compressed.partition("->")
        took = record.timing.compress_ms
        spent = "" if took is None else f" in {took:.0f} ms"
        return (
            f"The compressor shortened the prompt from {grouped(before)} to {grouped(after)} "
            f"tokens{spent} and kept {known.kept_share:.0%} of its text, so that it fits the "
            "smaller pool."
        )
    if known.not_compressed:
        why = COMPRESSION.get(known.not_compressed, f"the reason is {known.not_compressed}")
        return f"The prompt could have been compressed and was not: {why}."
    return ""


def _queue(record: DecisionRecord) -> str:
    if record.worker is None:
        return "" if not record.timing.queue_ms else _waited(record)
    return f"{_waited(record)} {_choice(record)}"


def _waited(record: DecisionRecord) -> str:
    waited = record.timing.queue_ms
    if waited < 1:
        return "The request did not wait in the gateway."
    return f"The request waited {_duration(waited)} in the gateway for a worker."


def _choice(record: DecisionRecord) -> str:
    known = record.scheduling
    failed = [f"{a.worker} ({FAULTS[a.result]})" for a in record.attempts if a.result in FAULTS]
    verb = "served it" if record.outcome == "ok" else "was chosen"
    text = f"Worker {record.worker} of pool {record.pool} {verb}"
    rivals = [name for name, _ in known.candidates if name != record.worker]
    if rivals:
        text += f", the best of {len(rivals) + 1} compared"
    facts = []
    if known.worker_active is not None:
        one = known.worker_active == 1
        ran = "1 sequence" if one else f"{grouped(known.worker_active)} sequences"
        facts.append(f"{ran} ran there")
    if known.backlog_tokens:
        facts.append(f"{grouped(known.backlog_tokens)} tokens of prefill were ahead")
    if known.expected_hit_tokens:
        facts.append(f"its prefix cache should hold {grouped(known.expected_hit_tokens)} tokens")
    text += f": {_joined(facts)}." if facts else "."
    if failed:
        several = len(failed) < len(record.attempts)
        when = "Before that the gateway tried" if several else "The gateway tried in vain"
        text += f" {when} {_joined(failed)}."
    if record.rescued:
        text += " An engine had refused the prompt as too long, so a larger window took it."
    return text


def _answer(
    record: DecisionRecord, sent: float | None, first: float | None, end: float | None
) -> Iterator[Step]:
    if sent is None or first is None:
        return
    known = record.scheduling
    before = max(0.0, first - sent)
    rest = None if end is None else max(0.0, end - first)
    if not record.stream:
        text = f"The engine answered in {_duration(before)} after it got the request"
        yield Step(
            name="prefill and decode",
            text=f"{text}{_usage(record)}.",
            start_ms=sent,
            duration_ms=before,
        )
        return
    guess = known.predicted_prefill_s
    said = "" if guess is None else f" (the predictor expected {_duration(guess * _MS)})"
    yield Step(
        name="prefill",
        text=f"The first token came {_duration(first)} after the arrival{said}.",
        start_ms=sent,
        duration_ms=before,
    )
    pace = record.timing.tpot_s
    speed = "" if pace is None else f" at {pace * _MS:.1f} ms per token"
    took = "" if rest is None else f" for {_duration(rest)}"
    yield Step(
        name="decode",
        text=f"The engine streamed{took}{speed}{_usage(record)}.",
        start_ms=first,
        duration_ms=rest,
    )


def _ending(record: DecisionRecord) -> str:
    """What the client was told instead of an answer; no other place tells it."""
    if record.reason is None:
        return ""
    text = f"{ENDINGS.get(record.outcome, ENDINGS['refused'])} {record.status}"
    text += f": {_why(record.reason)}"
    if record.figures:
        text += f" ({record.figures})"
    if record.retry_after_s is not None and record.outcome != "fell_back":
        text += f"; it was told to try again in {record.retry_after_s:.0f} s"
    return f"{text}."


def _usage(record: DecisionRecord) -> str:
    used = record.usage
    if used.prompt_tokens is None:
        return ""
    cached = f" ({grouped(used.cached_tokens)} from its cache)" if used.cached_tokens else ""
    source = "" if used.source == "engine" else ", as the gateway counted"
    ended = f", ending with {record.finish_reason}" if record.finish_reason else ""
    return (
        f", using {grouped(used.prompt_tokens)} prompt tokens{cached} and "
        f"{grouped(used.completion_tokens or 0)} of answer{source}{ended}"
    )


def _client(record: DecisionRecord) -> str:
    """Who asked, of a request for which no entitlement was chosen."""
    if record.key is None:
        return "A client without a valid key"
    return f"The key {record.key} of {record.tenant}"


def _settle(record: DecisionRecord) -> str:
    text = OUTCOMES.get(record.outcome, f"The request ended as {record.outcome}")
    if record.outcome in {"error", "upstream_error", "internal_error"}:
        text += f" with status {record.status}"
    if record.admission.evicted and record.outcome != "evicted":
        text += " after its lease was evicted"
    charge = record.admission.charge_tokens
    if charge is not None:
        return f"{text}; {record.entitlement} was charged {grouped(charge)} tokens."
    if record.usage.prompt_tokens is not None:
        return f"{text}."
    return f"{text}; nothing was charged."


def _duration(ms: float) -> str:
    return f"{ms / _MS:.2f} s" if ms >= _MS else f"{ms:.0f} ms" if ms >= 1 else f"{ms:.1f} ms"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
