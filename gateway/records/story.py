"""The story of one request in sentences: what was decided at each step, and why.

Pure: a decision record in, text out. The dashboard, the tenant API and `sluice why` all tell it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.records.attempt import Attempt
from gateway.records.batch import BatchItem
from gateway.records.decision import DecisionRecord
from gateway.records.record import Record, plain

_MS: Final = 1000.0

PLANS: Final = {
    "only_pool": "the model's only one",
    "within_boundary": "because the total is within its boundary",
    "over_boundary": "because the total is over the smaller pool's boundary",
    "over_window": "because prompt and limit exceed the smaller pool's window",
    "largest_window_doubtful": "the largest, although the request may exceed even its window",
    "prefix_held": "because its workers have cached the beginning of this conversation",
    "within_gamma": "over the boundary by so little that compression may fit the smaller pool",
    "observed": "the one with most room, because the boundary is only observed",
    "would_refuse": "although enforced, the gateway would have refused the request as too long",
}
"""By `plan.reason`."""

REFUSALS: Final = {
    "keys_not_read": "its state store was away since the start, so revoked keys were unknown",
    "key_expired": "its API key has expired",
    "key_suspended": "its API key is suspended",
    "tenant_suspended": "its tenant is suspended",
    "missing_api_key": "it came without an API key",
    "invalid_api_key": "its API key is unknown",
    "entitlement_expired": "its entitlement has expired",
    "entitlement_suspended": "its entitlement is suspended",
    "entitlement_unknown": "its entitlement is unknown to the token pool",
    "entitlement_pending": "its pool, or the cluster that grants it, has no room for it yet",
    "entitlement_degraded": "its pool, or the cluster that grants it, lost the room for it",
    "model_not_entitled": "its key is for another model",
    "model_not_found": "no model has that name",
    "exceeds_entitlement": "it is larger than its limits allow, so waiting does not help",
    "tokens": "the entitlement's token rate is used up",
    "key_requests": "its key has made as many requests in the last minute as it may",
    "key_concurrency": "its key has as many sequences in flight as it may",
    "budget": "a budget of its tenant, entitlement or key is spent",
    "budget_reserved": "requests in flight hold the rest of a budget",
    "concurrency": "the entitlement has as many sequences in flight as it may",
    "kv": "the bytes of KV cache of the entitlement or of the pool are taken",
    "priority": "the pool is full of work of at least this priority",
    "evicted": "it gave way to a request with a reserved place",
    "context_length_exceeded": "it is too long for the largest window",
    "no_worker_ready": "no worker was in the rotation",
    "engine_busy": "the queue of every engine was full",
    "queue_full": "too many requests already waited in the gateway",
    "queue_timeout": "no worker became free within the time that a request may wait",
    "engine_error": "every attempt failed before the first byte",
    "engine_connection_broken": "every attempt failed before the first byte",
    "engine_timeout": "every attempt timed out before the first byte",
    "engine_stream_broken": "the engine's stream broke off, and an error event ended the answer",
    "engine_silent": "the engine's stream fell silent, and an error event ended the answer",
    "engines_ended": "two engines failed on the very same request a moment before",
    "state_unavailable": "the state store was away, and the gateway is told to refuse then",
    "gateway_exhausted": "the gateway's machine ran out of connections or memory",
    "too_many_leases": "another proxy holds too many leases without reporting their use",
}
"""By `reason` or `admission.would_deny`."""

COMPRESSION: Final = {
    "not_text": "it has no single text to cut",
    "category": "its kind of text is not compressed",
    "tools": "it defines tools",
    "several_prompts": "the request has several prompts",
    "not_busy": "the larger pool had room for it as it was",
    "not_requested": "the client did not ask for it",
    "not_retrieval": "it is no question over retrieved passages",
    "no_question": "it asks nothing that a passage could answer",
    "several_questions": "it asks several questions",
    "cross_lingual": "its question shares no words with the passages",
    "broad_question": "its question concerns most of the passages",
    "few_shot": "it shows examples, which the task needs",
    "echo": "the answer repeats the prompt",
    "suffix": "the answer goes into the middle of a text",
    "prompt_logprobs": "the answer rates each token of the prompt",
    "no_budget": "the answer leaves no room for it in the smaller pool",
    "refused_by_client": "the client refuses compression",
    "refused_by_entitlement": "the entitlement refuses compression",
    "cached_conversation": "an engine has cached this conversation as it came",
    "cached_prefix": "an engine has cached its beginning",
    "spilled": "the request spilled to another pool",
    "other_pool": "admission put it into the larger pool",
    "observed": "compression is only observed",
    "queue_full": "too many prompts already waited for the compressor",
    "timeout": "the compressor exceeded its time limit",
    "failed": "the compressor failed",
}
"""By `compression.not_compressed`; the compressor's own reasons are shown as they are."""

FAULTS: Final = {
    "connect": "refused the connection",
    "frozen": "was frozen",
    "reset": "broke the connection",
    "timeout": "timed out",
    "protocol": "answered with broken HTTP",
    "server_error": "answered with a server error",
    "out_of_memory": "ran out of memory",
    "busy": "was busy",
    "not_served": "did not serve the model",
    "overflow": "found the prompt too long",
    "empty": "answered nothing",
    "local": "could not be called from here",
    "handover": "did not take over the prompt",
}
"""By the `result` of an attempt."""

SKIPS: Final = {
    "short": "the prompt is short",
    "endpoint": "requests of its endpoint are not handed over",
    "sequences": "the request has more than one sequence",
    "no_prefill_worker": "no prefill worker could take it",
    "no_decode_worker": "no decode worker was there to compute it for",
    "not_handed_over": "the prefill worker kept nothing for it",
    "failed": "the prefill or the hand-over failed",
}
"""By `prefill.skipped`."""

OUTCOMES: Final = {
    "ok": "The request was served",
    "error": "The engine refused the request",
    "refused": "The request ended there",
    "fell_back": "The gateway asked another model instead",
    "evicted": "The request gave way to a request with a reserved place",
    "disconnected": "The client left before the end",
    "upstream_error": "The engines failed",
    "internal_error": "The gateway failed",
    "expired": "Another proxy never reported its use",
}
"""By `outcome`."""

ENDINGS: Final = {
    "refused": "The gateway refused the request with",
    "fell_back": "This model could not serve the request and would have answered",
    "evicted": "The gateway ended the request with",
    "upstream_error": "The client got",
    "error": "The client got the engine's refusal, with",
}
"""By `outcome`, of requests that ended with a reason; the status follows."""


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
    timing, queue = record.timing, record.timing.queue_ms
    compress = timing.compress_ms or 0.0
    start = decided = before = sent = None
    if timing.overhead_ms is not None:
        start, decided = 0.0, max(0.0, timing.overhead_ms - compress)
        before = decided + compress
        queue -= record.prefill.wait_ms
        sent = before + _prefilled_ms(record, before) + queue
    first = None if timing.ttft_s is None else timing.ttft_s * _MS
    end = None if timing.duration_s is None else timing.duration_s * _MS
    steps = (
        ("request", _request(record), 0.0, end),
        ("estimate", _estimate(record), start, decided),
        ("plan", _plan(record), start, decided),
        ("admission", _admission(record), start, decided),
        ("compression", _compression(record), decided, timing.compress_ms),
        ("phases" if record.prefill.skipped else "prefill", *_prefill(record, before)),
        ("queue", _queue(record), None if sent is None else sent - queue, queue),
        *_answer(record, sent, first, end),
        ("ending", _ending(record), end, 0.0),
        ("settle", _settle(record), end, 0.0),
    )
    return [
        Step(name=name, text=plain(text), start_ms=began, duration_ms=took)
        for name, text, began, took in steps
        if text
    ]


def _request(record: DecisionRecord) -> str:
    who = record.entitlement  # a refused request may have none
    if not who:
        who = f"The key {record.key} of {record.tenant}"
        who = "A client without a valid key" if record.key is None else who
    asked, request = record.asked_model, record.request
    alias = f" (as {asked})" if asked and record.model and asked != record.model else ""
    parts = [f"a body of {grouped(request.body_bytes)} bytes"]
    if request.messages:
        parts.append(_several(request.messages, "message"))
    if request.media_parts:
        parts.append(f"{grouped(request.media_parts)} images or sounds")
    return (
        f"{who} asked {record.model or asked or 'an unknown model'}{alias} for "
        f"{'a stream' if record.stream else 'a whole answer'} on the {record.endpoint} endpoint, "
        f"with {' and '.join(parts)}.{_item(record.batch)}"
    )


def _item(item: BatchItem | None) -> str:
    if item is None:
        return ""
    terms = "as its promised time is near" if item.urgent else "which gets leftover capacity only"
    return f" It was request {grouped(item.index + 1)} of the batch {item.batch}, {terms}."


def _estimate(record: DecisionRecord) -> str:
    known, cap, ratio = record.estimate, "", record.estimate.bytes_per_token_conservative
    if known.total_tokens is None:
        return ""
    if known.cap_tokens is not None:
        cap = f" (the client's limit is {grouped(known.cap_tokens)})"
    by = "" if ratio is None else f" at {ratio:.2f} bytes per token of {known.category} text"
    prompt, total = known.input_tokens or 0, known.total_tokens
    if record.compression.kept_share is not None:  # the record's estimate is of the shorter prompt
        before, _, after = record.compression.compressed.partition("->")
        prompt, total = prompt + int(before) - int(after), total + int(before) - int(after)
    times = f", {known.sequences} answers" if (known.sequences or 1) > 1 else ""
    return (
        f"The gateway estimated {grouped(prompt)} prompt tokens{by} and "
        f"{grouped(known.output_tokens or 0)} tokens of answer{cap}{times}: "
        f"{grouped(total)} in total."
    )


def _plan(record: DecisionRecord) -> str:
    plan = record.plan
    if plan.pool is None:
        return ""
    text = f"The plan was pool {plan.pool}, {_said(PLANS, plan.reason, 'for the reason')}."
    if plan.would_route is not None:
        text += f" The model is in observe mode; enforced, {plan.would_route} would have served it."
    return text


def _admission(record: DecisionRecord) -> str:
    known = record.admission
    if known.admitted_unix_s is None:  # it did not get so far, or its model has no limits
        return ""
    text = "Admission granted a lease"
    if known.service_class:
        text += f" as {known.service_class}"
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
        text += f" Enforced, admission would have refused it: {_said(REFUSALS, known.would_deny)}."
    return text


def _compression(record: DecisionRecord) -> str:
    known, took = record.compression, record.timing.compress_ms
    if known.kept_share is not None:
        before, _, after = known.compressed.partition("->")
        spent = "" if took is None else f" in {took:.0f} ms"
        return (
            f"The compressor shortened the prompt from {grouped(before)} to {grouped(after)} "
            f"tokens{spent} and kept {known.kept_share:.0%} of its text, so that it fits the "
            "smaller pool."
        )
    if not known.not_compressed:
        return ""
    why = _said(COMPRESSION, known.not_compressed)
    return f"The prompt could have been compressed and was not: {why}."


def _prefilled_ms(record: DecisionRecord, before: float) -> float:
    """How long the first of two phases took from `before` on, its wait and its failures as well."""
    first = record.prefill
    ends = [a.start_ms + a.duration_ms for a in record.attempts if a.pool == first.pool]
    return max(ends, default=before + first.wait_ms + (first.duration_ms or 0.0)) - before


def _prefill(
    record: DecisionRecord, before: float | None
) -> tuple[str, float | None, float | None]:
    """Text, start and duration of the first phase, where the pool has its prompts computed."""
    first, parts = record.prefill, []
    if first.pool is None:
        return "", None, None
    if first.wait_ms >= 1:
        parts.append(f"The request waited {_duration(first.wait_ms)} for a prefill worker.")
    failed = _failed([a for a in record.attempts if a.pool == first.pool])
    if first.duration_ms is not None:
        took = _duration(first.duration_ms)
        text = f"Worker {first.worker} of pool {first.pool} computed the prompt in {took}"
        if (rivals := len(first.candidates)) > 1:
            text += f", the best of {rivals} compared"
        if held := first.expected_hit_tokens:
            text += f": its prefix cache should hold {grouped(held)} tokens"
        parts.append(f"{text}.")
    elif first.worker is not None and not failed:
        parts.append(f"Worker {first.worker} of pool {first.pool} was to compute the prompt.")
    parts.append(failed)
    if first.skipped:
        why = _said(SKIPS, first.skipped)
        parts.append(f"The decode worker was left to compute the prompt: {why}.")
    whole = None if before is None else _prefilled_ms(record, before)
    return " ".join(filter(None, parts)), before, whole


def _queue(record: DecisionRecord) -> str:
    """How long the request waited, and which worker it waited for."""
    waited, known = record.timing.queue_ms - record.prefill.wait_ms, record.scheduling
    kind = "a worker" if record.prefill.pool is None else "a decode worker"
    text = f"The request did not wait in the gateway for {kind}."
    if waited >= 1:
        text = f"The request waited {_duration(waited)} in the gateway for {kind}."
    if record.worker is None:
        return text if waited else ""
    verb = "served it" if record.outcome == "ok" else "was chosen"
    text += f" Worker {record.worker} of pool {record.pool} {verb}"
    rivals = [name for name, _ in known.candidates if name != record.worker]
    if rivals:
        text += f", the best of {len(rivals) + 1} compared"
    facts = []
    if known.worker_active is not None:
        facts.append(f"{_several(known.worker_active, 'sequence')} ran there")
    if known.backlog_tokens:
        facts.append(f"{grouped(known.backlog_tokens)} tokens of prefill were ahead")
    if known.expected_hit_tokens:
        facts.append(f"its prefix cache should hold {grouped(known.expected_hit_tokens)} tokens")
    text += f": {_joined(facts)}." if facts else "."
    attempts = [a for a in record.attempts if a.pool != record.prefill.pool]
    if failed := _failed(attempts):
        text += f" {failed}"
    if record.rescued:
        text += " An engine had refused the prompt as too long, so a larger window took it."
    return text


def _failed(attempts: Sequence[Attempt]) -> str:
    failed = [f"{a.worker} ({FAULTS[a.result]})" for a in attempts if a.result in FAULTS]
    several = len(failed) < len(attempts)
    when = "Before that the gateway tried" if several else "The gateway tried in vain"
    return f"{when} {_joined(failed)}." if failed else ""


def _answer(
    record: DecisionRecord, sent: float | None, first: float | None, end: float | None
) -> Iterator[tuple[str, str, float, float | None]]:
    """Name, text, start and duration of the answer's steps."""
    if sent is None or first is None:
        return
    before, used, usage = max(0.0, first - sent), record.usage, ""
    phase = record.prefill
    apart = phase.pool is not None and not phase.skipped
    if used.prompt_tokens is not None:
        whose = "the prefill worker's" if apart else "its"
        cached = (
            f" ({grouped(used.cached_tokens)} from {whose} cache)" if used.cached_tokens else ""
        )
        source = "" if used.source == "engine" else ", as the gateway counted"
        ended = f", ending with {record.finish_reason}" if record.finish_reason else ""
        usage = (
            f", using {grouped(used.prompt_tokens)} prompt tokens{cached} and "
            f"{grouped(used.completion_tokens or 0)} of answer{source}{ended}"
        )
    if not record.stream:
        text = f"The engine answered in {_duration(before)} after it got the request"
        name = "hand-over and decode" if apart else "prefill and decode"
        yield name, f"{text}{usage}.", sent, before
        return
    guess, pace = record.scheduling.predicted_prefill_s, record.timing.tpot_s
    guess = phase.predicted_s if apart else guess
    said = "" if guess is None else f" (the predictor expected {_duration(guess * _MS)})"
    text = f"The first token came {_duration(first)} after the arrival{said}"
    if apart and phase.transfer_s is not None:
        text += f", {_duration(phase.transfer_s * _MS)} of that for the hand-over"
    yield "hand-over" if apart else "prefill", f"{text}.", sent, before
    rest = None if end is None else max(0.0, end - first)
    took = "" if rest is None else f" for {_duration(rest)}"
    speed = "" if pace is None else f" at {pace * _MS:.1f} ms per token"
    yield "decode", f"The engine streamed{took}{speed}{usage}.", first, rest


def _ending(record: DecisionRecord) -> str:
    """What the client was told instead of an answer; no other place tells it."""
    if record.reason is None:
        return ""
    text = f"{ENDINGS.get(record.outcome, ENDINGS['refused'])} {record.status}"
    text += f": {_said(REFUSALS, record.reason)}"
    if record.figures:
        text += f" ({record.figures})"
    if record.retry_after_s is not None and record.outcome != "fell_back":
        text += f"; it was told to try again in {record.retry_after_s:.0f} s"
    return f"{text}."


def _settle(record: DecisionRecord) -> str:
    text = OUTCOMES.get(record.outcome, f"The request ended as {record.outcome}")
    if record.outcome in {"error", "upstream_error", "internal_error"}:
        text += f" with status {record.status}"
    if record.admission.evicted and record.outcome != "evicted":
        text += " after its lease was evicted"
    charge = record.admission.charge_tokens
    if charge is not None:
        return f"{text}; {record.entitlement} was charged {grouped(charge)} tokens."
    return f"{text}." if record.usage.prompt_tokens is not None else f"{text}; nothing was charged."


def _said(words: Mapping[str, str], reason: str | None, before: str = "the reason is") -> str:
    return words.get(reason or "", f"{before} {reason or 'not recorded'}")


def _several(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{grouped(number)} {what}s"


def grouped(number: float | str) -> str:
    """A whole number with thousands apart; other text as it is."""
    text = str(number)
    return f"{int(text):,}" if text.isdecimal() else text


def _duration(ms: float) -> str:
    return f"{ms / _MS:.2f} s" if ms >= _MS else f"{ms:.0f} ms" if ms >= 1 else f"{ms:.1f} ms"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
