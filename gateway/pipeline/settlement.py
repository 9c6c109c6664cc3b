"""Stage 10, settle: however a request ended, its lease once, then what is learned and recorded.

The lease is settled before the client sees the end, so that no limit counts it against what the
client asks next, wherever that is admitted. What is learned, counted and recorded waits until all
have ended that do so in this turn of the event loop: nobody waits for it, and done for one after
the other it finds its code and data in the processor's caches. Where requests end one at a time
nothing waits. Of those of one kind that end in one turn, one teaches the estimator: so many a
second tell it nothing more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, NamedTuple

import msgspec

from gateway.admission.leases import believed, beyond_window
from gateway.fleet.model_runtime import PRIORITY_FLAGS, ModelRuntime
from gateway.metrics import Metrics
from gateway.pipeline import decision_record
from gateway.pipeline import settle as stage_settle
from gateway.pipeline.dispatcher import require
from gateway.pipeline.request_progress import Released, RequestEnding, RequestProgress, Sending
from gateway.ports import LeaseStore, RecordSink
from gateway.records.attempt import Outcome, Usage
from gateway.records.decision import AdmissionSection, DecisionRecord
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Incoming

TOGETHER_S: Final = 0.001
"""Requests that begin, or end, within so long of one another do so together."""

_log = logging.getLogger("sluice.settling")

Lesson = tuple[str, str, str, str, str]
"""Model, endpoint, tenant, category, how it ended."""


class Settler:
    """Of all requests of a process."""

    def __init__(
        self,
        *,
        store: LeaseStore,
        metrics: Metrics,
        records: RecordSink,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log_prompts: bool,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._wall_clock = wall_clock
        self._log_prompts = log_prompts
        self._ended: list[_Settled] = []
        """Settled, and not noted yet; in order."""
        self._newest_s = -inf
        """When the last one was settled."""
        self._priorities_told: set[str] = set()
        """Models of which it was told that an engine refuses priorities."""

    def release(
        self,
        incoming: Incoming,
        progress: RequestProgress,
        outcome: Outcome,
        *,
        heard: bool = False,
    ) -> Awaitable[None] | None:
        """Settle the lease, if there is one, once; see LeaseStore for `heard` and the result."""
        if progress.released is not None:
            return None
        progress.timer.begin()
        served, attempts = progress.served, progress.attempts
        lease = None if progress.lease is None else progress.lease.current
        sending = progress.sending if attempts is None else attempts.sending
        estimate = progress.estimate if sending is None else sending.estimate
        if outcome.usage is not None and lease is not None and estimate and served is not None:
            outcome = self._believed(outcome, outcome.usage, estimate, served, lease)
        relay = None if attempts is None else attempts.relay
        if served is not None and relay is not None and relay.priority_refused:
            self._note_priority(served)
        now_unix_s = self._wall_clock()
        charged, cost_nano, arrival = None, None, None
        if lease is not None and estimate is not None:
            charged, cost_nano, arrival = stage_settle.settle(
                self._store,
                lease,
                outcome,
                estimate,
                served,
                dispatched=attempts is not None and attempts.sent,
                computes=incoming.endpoint.computes,
                unix_s=now_unix_s,
                slot_nano=0.0 if attempts is None else attempts.slot_nano,
                heard=heard,
            )
        progress.released = Released(outcome.usage, charged, cost_nano, now_unix_s)
        progress.timer.end("settle")
        return arrival

    def settle(self, incoming: Incoming, progress: RequestProgress, ending: RequestEnding) -> None:
        """Settle what is not settled yet, and note it. Raises nothing that a client could cause."""
        self.release(incoming, progress, ending.outcome)
        released, attempts = require(progress.released), progress.attempts
        sending = progress.sending if attempts is None else attempts.sending
        estimate = progress.estimate if sending is None else sending.estimate
        outcome = msgspec.structs.replace(ending.outcome, usage=released.usage)
        now_s = self._clock()
        settled = _Settled(incoming, progress, ending, sending, estimate, outcome, released, now_s)
        if self._ended:
            self._ended.append(settled)
        elif now_s - self._newest_s < TOGETHER_S:
            self._ended.append(settled)
            asyncio.get_running_loop().call_soon(self._note_all)
        else:
            self._note(settled, set())
        self._newest_s = now_s

    def _believed(
        self,
        outcome: Outcome,
        reported: Usage,
        estimate: LengthEstimate,
        served: ModelRuntime,
        lease: Lease,
    ) -> Outcome:
        """The outcome with usage that can be true; a window that is configured wrong is told."""
        pool = served.routing.pools[lease.pool]
        usage = believed(reported, estimate, pool.window_tokens)
        if usage is not reported:
            self._metrics.usage_rejected.add(pool.name)
            return msgspec.structs.replace(outcome, usage=usage)
        if beyond_window(usage, estimate.sequences, pool.window_tokens):
            self._note_window(served, lease.pool, usage)
        return outcome

    def _note_window(self, served: ModelRuntime, index: int, usage: Usage) -> None:
        """Keep the largest window seen beyond the configured one; the first is logged."""
        pool, state = served.routing.pools[index], served.fleet.pools[index]
        used = usage.prompt_tokens + usage.completion_tokens
        if not state.beyond_window_tokens:
            _log.warning(
                "model %s, pool %s: an engine served %d tokens, more than max_model_len (%d) in "
                "the configuration; set max_model_len to the engine's own",
                served.name,
                pool.name,
                used,
                pool.window_tokens,
            )
        state.beyond_window_tokens = max(state.beyond_window_tokens, used)

    def _note_priority(self, served: ModelRuntime) -> None:
        """Tell once that a model's engines refuse the priorities they are sent."""
        if served.scheduling.engine_priority == "none" or served.name in self._priorities_told:
            return
        self._priorities_told.add(served.name)
        _log.warning(
            "model %s: an engine refused a request because its priority scheduling is off: start "
            "every engine with %s, or set engine_priority: none",
            served.name,
            PRIORITY_FLAGS[served.scheduling.engine_priority],
        )

    def _note_all(self) -> None:
        ended, self._ended = self._ended, []
        taught: set[Lesson] = set()
        for settled in ended:
            try:
                self._note(settled, taught)
            except Exception:  # noqa: BLE001 - a bug must not take the others' records along
                request_id = settled.incoming.request_id
                _log.exception("request %s was settled, not recorded", request_id)

    def _note(self, settled: "_Settled", taught: set[Lesson]) -> None:
        """Learn from a settled request, count and record it."""
        progress = settled.progress
        progress.timer.begin()
        if progress.lease is not None:
            _learn(settled, taught)
        record = _record(settled, prompts=self._log_prompts)
        lease = None if progress.lease is None else progress.lease.current
        stage_settle.count(self._metrics, record, settled.estimate, progress.served, lease)
        principal = progress.principal
        if principal is not None and principal.slo_ms:
            stage_settle.count_slo(self._metrics, record, principal, admitted=lease is not None)
        self._records.append(record)
        progress.timer.end("record")


class _Settled(NamedTuple):
    """A request whose lease is settled, until it is recorded."""

    incoming: Incoming
    progress: RequestProgress
    ending: RequestEnding
    sending: Sending | None
    """What was sent last, or was to be."""
    estimate: LengthEstimate | None
    """Of that, or of the client's own prompt where it did not get so far."""
    outcome: Outcome
    """With usage that can be true."""
    released: Released
    ended_s: float
    """When its client had all, by the clock of durations."""


def _record(settled: _Settled, *, prompts: bool) -> DecisionRecord:
    """The request's line in the log."""
    incoming, progress, outcome = settled.incoming, settled.progress, settled.outcome
    sending, attempts = settled.sending, progress.attempts
    binding = None if attempts is None else attempts.binding
    relay = None if attempts is None else attempts.relay
    return decision_record.decision_record(
        incoming=incoming,
        principal=progress.principal,
        facts=progress.facts,
        served=progress.served,
        outcome=outcome,
        told=settled.ending.told,
        binding=binding,
        rescued=attempts is not None and attempts.rescued,
        estimate=decision_record.estimate_section(settled.estimate),
        plan=decision_record.plan_section(
            served=progress.served,
            planned=progress.planned,
            plan=progress.plan if sending is None else sending.plan,
        ),
        admission=_admission(settled),
        compression=decision_record.compression_section(
            progress.served, None if sending is None else sending.prompt
        ),
        scheduling=decision_record.scheduling_section(
            served=progress.served,
            binding=binding,
            job=None if attempts is None else attempts.job,
            first_s=None if relay is None else relay.first_s,
        ),
        attempts=() if attempts is None else tuple(attempts.done),
        usage=decision_record.usage_section(settled.released.charged, settled.released.cost_nano),
        timing=decision_record.timing_section(
            outcome=outcome,
            received_s=incoming.received_s,
            sent_s=None if attempts is None else attempts.sent_s,
            ended_s=settled.ended_s,
            queue_s=0.0 if attempts is None else attempts.queue_s,
            compress_s=progress.compress_s,
        ),
        prompts=prompts,
    )


def _admission(settled: _Settled) -> AdmissionSection:
    progress, lease_id = settled.progress, settled.incoming.lease_id
    lease, served = progress.lease, progress.served
    if lease is None or served is None:
        return AdmissionSection(lease_id=lease_id)
    return decision_record.admission_section(
        lease_id=lease_id,
        lease=lease.current,
        asked=lease.asked,
        taken=lease.taken,
        principal=progress.principal,
        served=served,
        charged=settled.released.charged,
        lease_changes=tuple(lease.changes),
        evicted=settled.ending.evicted,
        settled_unix_s=settled.released.ended_unix_s,
    )


def _learn(settled: _Settled, taught: set[Lesson]) -> None:
    """Teach what was sent; nothing where no prompt was ready to be."""
    progress, outcome, endpoint = settled.progress, settled.outcome, settled.incoming.endpoint
    facts, principal, served = progress.facts, progress.principal, progress.served
    sending, attempts = settled.sending, progress.attempts
    if facts is None or principal is None or served is None or sending is None:
        return
    lesson = (served.name, endpoint.name, principal.tenant, facts.measure.category, outcome.label)
    prompt = sending.prompt
    if lesson not in taught:
        taught.add(lesson)
        stage_settle.learn(
            served.estimator, endpoint, principal, facts, sending.estimate, prompt, outcome
        )
    entry = None if attempts is None else attempts.entry
    if attempts is not None and entry is not None and entry.expected and attempts.binding:
        stage_settle.note_cached(served.scheduling, attempts.binding, entry.expected, outcome)
    stage_settle.remember(served, endpoint, principal, facts, sending.prefix, prompt, outcome)
