"""Stage 10, settle: however a request ended, its lease once, then what is learned and recorded.

The lease is settled at once. What is learned, counted and recorded waits until all have ended
that do so in this turn of the event loop: nobody waits for it, and done for one after the other
it finds its code and data in the processor's caches. Where requests end one at a time nothing
waits. Of those of one kind that end in one turn, one teaches the estimator: so many a second
tell it nothing more.
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Final

import msgspec

from gateway.metrics import Metrics
from gateway.pipeline.walk import Walk
from gateway.policy.admission import charging
from gateway.policy.model_runtime import PRIORITY_FLAGS, ServedModel
from gateway.ports import LeaseStore, RecordSink
from gateway.records.attempt import Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Incoming
from gateway.stages import decision_record, request_metrics
from gateway.stages import settle as stage_settle

TOGETHER_S: Final = 0.001
"""Requests that begin, or end, within so long of one another do so together."""

_log = logging.getLogger("sluice.settling")

Lesson = tuple[str, str, str, str, str]
"""Model, endpoint, tenant, category, how it ended."""


class Settling:
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
        self._ended: list[tuple[Incoming, Walk, Outcome]] = []
        """Settled, and not noted yet; in order."""
        self._newest_s = -inf
        """When the last one was settled."""
        self._priorities_told: set[str] = set()
        """Models of which it was told that an engine refuses priorities."""

    def settle(self, incoming: Incoming, walk: Walk) -> None:
        """Settle the lease, if there is one. Raises nothing that a client could cause."""
        walk.outcome = outcome = walk.outcome or Outcome(label="internal_error", status=500)
        lease, served, estimate = walk.lease, walk.served, walk.estimate
        if outcome.usage is not None and lease is not None and estimate and served is not None:
            walk.outcome = outcome = self._believed(outcome, outcome.usage, estimate, served, lease)
        if served is not None and walk.relay is not None and walk.relay.priority_refused:
            self._note_priority(served)
        walk.ended_s, walk.ended_unix_s = now_s, now_unix_s = self._clock(), self._wall_clock()
        if lease is not None and estimate is not None and served is not None:
            walk.charged = stage_settle.settle(
                self._store,
                lease,
                outcome,
                estimate,
                # What no model computed is charged nothing.
                dispatched=walk.dispatched and incoming.endpoint.computes,
                unix_s=now_unix_s,
            )
        if self._ended:
            self._ended.append((incoming, walk, outcome))
        elif now_s - self._newest_s < TOGETHER_S:
            self._ended.append((incoming, walk, outcome))
            asyncio.get_running_loop().call_soon(self._note_all)
        else:
            self._note(incoming, walk, outcome, set())
        self._newest_s = now_s

    def _believed(
        self,
        outcome: Outcome,
        reported: Usage,
        estimate: LengthEstimate,
        served: ServedModel,
        lease: Lease,
    ) -> Outcome:
        """The outcome with usage that can be true; a window that is configured wrong is told."""
        pool = served.routing.pools[lease.pool]
        usage = charging.believed(reported, estimate, pool.window_tokens)
        if usage is not reported:
            self._metrics.usage_rejected.add(pool.name)
            return msgspec.structs.replace(outcome, usage=usage)
        beyond = charging.beyond_window(usage, estimate.sequences, pool.window_tokens)
        if beyond:
            self._note_window(served, lease.pool, usage)
        return outcome

    def _note_window(self, served: ServedModel, index: int, usage: Usage) -> None:
        """Keep the largest window seen beyond the configured one; the first is logged."""
        pool, state = served.routing.pools[index], served.pools[index]
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

    def _note_priority(self, served: ServedModel) -> None:
        """Tell once that a model's engines refuse the priorities they are sent."""
        if served.engine_priority == "none" or served.name in self._priorities_told:
            return
        self._priorities_told.add(served.name)
        _log.warning(
            "model %s: an engine refused a request because its priority scheduling is off: start "
            "every engine with %s, or set engine_priority: none",
            served.name,
            PRIORITY_FLAGS[served.engine_priority],
        )

    def _note_all(self) -> None:
        ended, self._ended = self._ended, []
        taught: set[Lesson] = set()
        for incoming, walk, outcome in ended:
            try:
                self._note(incoming, walk, outcome, taught)
            except Exception:  # noqa: BLE001 - a bug must not take the others' records along
                _log.exception("request %s was settled, not recorded", incoming.request_id)

    def _note(self, incoming: Incoming, walk: Walk, outcome: Outcome, taught: set[Lesson]) -> None:
        """Learn from a settled request, count and record it."""
        served, estimate, lease = walk.served, walk.estimate, walk.lease
        if lease is not None and estimate is not None and served is not None:
            _learn(incoming, walk, outcome, served, estimate, taught)
        record = self._record(incoming, walk, outcome)
        request_metrics.count(self._metrics, record, estimate, served, lease)
        self._records.append(record)
        # What they hold, tracebacks and frames, holds this walk: a circle that would stay.
        walk.task = walk.refusal = None

    def _record(self, incoming: Incoming, walk: Walk, outcome: Outcome) -> DecisionRecord:
        asked, taken = walk.admitted or (None, None)
        relay = walk.relay
        return decision_record.decision_record(
            incoming=incoming,
            principal=walk.principal,
            facts=walk.facts,
            served=walk.served,
            outcome=outcome,
            refusal=walk.refusal,
            binding=walk.binding,
            rescued=walk.rescued,
            estimate=decision_record.estimate_section(walk.estimate),
            plan=decision_record.plan_section(
                served=walk.served, planned=walk.planned, plan=walk.plan
            ),
            admission=decision_record.admission_section(
                lease_id=incoming.lease_id,
                lease=walk.lease,
                asked=asked,
                taken=taken,
                principal=walk.principal,
                served=walk.served,
                charged=walk.charged,
                lease_changes=tuple(walk.lease_changes),
                evicted=walk.evicted,
                settled_unix_s=walk.ended_unix_s,
            ),
            compression=decision_record.compression_section(walk.prompt),
            scheduling=decision_record.scheduling_section(
                binding=walk.binding,
                job=walk.job,
                first_s=None if relay is None else relay.first_s,
            ),
            attempts=tuple(walk.attempts),
            usage=decision_record.usage_section(walk.charged),
            timing=decision_record.timing_section(
                outcome=outcome,
                received_s=incoming.received_s,
                sent_s=walk.sent_s,
                ended_s=walk.ended_s,
                queue_s=walk.queue_s,
                compress_s=walk.compress_s,
            ),
            prompts=self._log_prompts,
        )


def _learn(
    incoming: Incoming,
    walk: Walk,
    outcome: Outcome,
    served: ServedModel,
    estimate: LengthEstimate,
    taught: set[Lesson],
) -> None:
    facts, principal, prompt = walk.facts, walk.principal, walk.prompt
    if facts is None or principal is None or prompt is None:
        return
    endpoint = incoming.endpoint
    lesson = (served.name, endpoint.name, principal.tenant, facts.measure.category, outcome.label)
    if lesson not in taught:
        taught.add(lesson)
        stage_settle.learn(served, endpoint, principal, facts, estimate, prompt, outcome)
    if walk.expected and walk.binding:
        stage_settle.note_cached(served, walk.binding, walk.expected, outcome)
    stage_settle.remember(served, endpoint, principal, facts, walk.prefix, prompt, outcome)
