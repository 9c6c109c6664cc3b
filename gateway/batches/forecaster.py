"""Observes live demand, keeps a profile of it by model, and promises batches by it.

All replicas write a model's profile: each adds its own part of an hour's mean once the hour is
over. Where there is none, the request log seeds it.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, inf, log
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from gateway.batches.pace import HEADROOM
from gateway.batches.promise import (
    HOUR_S,
    RATIOS,
    Demand,
    FreeSlots,
    Profile,
    Work,
    with_hour,
    work,
)
from gateway.batches.rights import BatchModels
from gateway.errors import Refusal, StateFailure
from gateway.estimate.learners import TwoTermFit
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Changed, Documents
from gateway.records.batch import ENDED, Batch, Promise, StoredFile
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import ROUTES
from gateway.records.request import BodyFacts, Measure
from gateway.records.usage import cost_nano

_T = TypeVar("_T")
OBSERVE_S: Final = 5.0
SEED_BYTES: Final = 256 << 20
"""Of the request log's end, to seed a profile."""
_KEEP: Final = 0.9
"""Of what was learned of the leftovers used, after another hour with batches."""
_ENVELOPE_BYTES: Final = 120
"""Of a line of an input file, beside the request's text."""
_log = logging.getLogger("sluice.batches")
_record: Final = msgspec.json.Decoder(DecisionRecord).decode


class _Seen:
    """Of one model, since this hour began or since the start."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.demand: Demand | None = None
        """Of this hour."""
        self.since_s = self.live_s = self.backlog_s = self.used_s = 0.0
        """Seconds observed in this hour, of live sequences, with batches, and of their items."""
        self.others = 0.0
        """Live sequences that other replicas had in the last hour."""
        self.seconds = TwoTermFit(profile.seconds, (0.001, 0.05), (0.1, 5.0))


class Forecaster:
    """Promises for every model of a process. A RecordSink, too: it learns what tokens take."""

    def __init__(
        self,
        *,
        models: BatchModels,
        store: Documents,
        running: Callable[[str], int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        request_log: Path | None = None,
    ) -> None:
        """`running`: sequences of batches in flight here, by model."""
        self._models, self._store, self._running = models, store, running
        self._clock, self._wall_clock = clock, wall_clock
        self._request_log = request_log
        self._seen: dict[str, _Seen] = {}
        self._hour = int(wall_clock() // HOUR_S)
        self._observed_s = clock()
        self._computing = asyncio.Lock()

    async def run(self) -> None:
        """Observe for ever, on top of what is known from before."""
        await self.begin()
        while True:
            await asyncio.sleep(OBSERVE_S)
            await self._observe()

    async def begin(self) -> None:
        """Read the profiles; where there are none, the request log begins them."""
        for name in self._by_name():
            seen = self._seen_of(name)
            with contextlib.suppress(StateFailure):
                if stored := await self._store.get(Profile, name):
                    seen.profile, _ = stored
            seen.seconds.a, seen.seconds.b = seen.profile.seconds
        if self._request_log is not None and not any(s.profile.hours for s in self._seen.values()):
            logged = await asyncio.to_thread(hours_of_log, self._request_log, self._hour)
            for name in self._by_name().keys() & logged.keys():
                await self._change(name, partial(_with_hours, hours=logged[name]))

    def __call__(self, record: msgspec.Struct) -> None:
        """Learn from a served request how long its tokens held a slot."""
        if not isinstance(record, DecisionRecord) or record.model not in self._seen:
            return
        usage, took_s = record.usage, record.timing.duration_s
        if record.outcome != "ok" or took_s is None or usage.prompt_tokens is None:
            return
        took_s -= record.timing.queue_ms / 1000
        variance = 0.01 + (0.3 * took_s) ** 2
        tokens = usage.prompt_tokens, usage.completion_tokens or 0
        self._seen[record.model].seconds.add(*tokens, took_s, variance)

    # -- promises

    async def promise(self, batch: Batch, file: StoredFile) -> Batch:
        """The batch with its promise. Raises Refusal (422) where its window cannot hold it."""
        served = self._served(batch)
        if served is None and batch.accept_late:
            return batch
        if served is None:
            raise _cannot_promise(batch, f"'{batch.model}' stands for several models.")
        planned_slot_s, cost = self._planned(served, batch, file)
        batch = msgspec.structs.replace(batch, planned_slot_s=planned_slot_s)
        left, others = await self._around(served, batch)
        by_unix_s: int | None = batch.expires_unix_s
        decided = await self._apart(left.decide, self._work(served.name, batch, by_unix_s), others)
        if not decided.promised:
            if not batch.accept_late:
                why = "It expects to have no capacity left for batches."
                if (earliest_s := decided.earliest_s) < inf:
                    why = f"The earliest window that it can promise is {earliest_s // 60:.0f}m."
                raise _cannot_promise(batch, why)
            by_unix_s = None
            decided = await self._apart(left.decide, self._work(served.name, batch, None), others)
        end = self._end(decided.p50_s, decided.p95_s, cost, by_unix_s)
        return msgspec.structs.replace(batch, forecast=end, promise=end if by_unix_s else None)

    async def forecast(self, batch: Batch) -> Promise | None:
        """When a batch will have ended as it stands now; None where that is never, or not known."""
        served, by_unix_s = self._served(batch), batch.promised_by_unix_s
        if served is None:
            return None
        left, others = await self._around(served, batch)
        rest = self._work(served.name, batch, by_unix_s)
        p50_s, p95_s = await self._apart(left.ends, rest, others)
        cost = 0 if batch.forecast is None else batch.forecast.cost_nano
        return self._end(p50_s, p95_s, cost, by_unix_s)

    async def learn(self, batch: Batch) -> None:
        """Learn from a completed batch how far its work was from what was planned."""
        used_slot_s, served = _used_slot_s(batch), self._served(batch)
        if served is not None and used_slot_s > 0 and batch.planned_slot_s > 0:
            ratio = log(used_slot_s / batch.planned_slot_s)

            def learned(profile: Profile) -> Profile:
                ratios = (*profile.ratios, ratio)[-RATIOS:]
                return msgspec.structs.replace(profile, ratios=ratios)

            await self._change(served.name, learned)

    def _planned(self, served: ModelRuntime, batch: Batch, file: StoredFile) -> tuple[float, int]:
        """Slot-seconds that a file's requests are expected to take, and their cost."""
        lines = max(1, file.lines)
        size = max(1, file.bytes // lines - _ENVELOPE_BYTES)
        measure = Measure(text_bytes=size, longest_text_bytes=size, messages=1)
        facts = BodyFacts(model=served.name, measure=measure)
        expected = served.estimator.estimate(ROUTES[batch.endpoint], facts, batch.tenant)
        limited = min(file.output_tokens, expected.output_tokens * (lines - file.unlimited))
        output = limited + expected.output_tokens * file.unlimited
        prompt = expected.input_tokens_total * lines
        price = served.price
        cost = 0 if price is None else cost_nano(price, prompt, output)
        return self._seen_of(served.name).seconds.value(prompt, output), cost

    def _work(self, name: str, batch: Batch, by_unix_s: int | None) -> Work:
        return work(
            self._seen_of(name).profile,
            batch.planned_slot_s,
            items=batch.total,
            done=batch.completed + batch.failed,
            used_slot_s=_used_slot_s(batch),
            by_unix_s=by_unix_s,
        )

    async def _around(self, served: ModelRuntime, batch: Batch) -> tuple[FreeSlots, list[Work]]:
        """The capacity that live requests leave, and the other open batches that use it."""
        names = [other for other in await self._store.open_names(Batch) if other != batch.id]
        others = [stored[0] for i in names if (stored := await self._store.get(Batch, i))]
        seen, now_unix_s = self._seen_of(served.name), self._wall_clock()
        hour = int(now_unix_s // HOUR_S)
        if (demand := seen.demand) is None or demand.hour != hour:
            demand = seen.demand = await self._apart(Demand, seen.profile, hour)
        live = seen.live_s / seen.since_s if seen.since_s else float(self._live(served))
        slots, live = self._slots(served), live + seen.others
        return await self._apart(FreeSlots, demand, slots, live, now_unix_s), [
            self._work(served.name, other, other.promised_by_unix_s)
            for other in others
            if other.status not in ENDED
            and [model.name for model in self._models.known(other.model)] == [served.name]
        ]

    def _served(self, batch: Batch) -> ModelRuntime | None:
        """Its model; None for a name of several, of which it is not known which one answers."""
        models = self._models.known(batch.model)
        return models[0] if len(models) == 1 else None

    async def _apart(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Compute in a thread, one at a time: it takes up to 0.3 s, and live requests go on."""
        async with self._computing:
            return await asyncio.to_thread(work, *arguments)

    def _end(self, p50_s: float, p95_s: float, cost: int, by: int | None) -> Promise | None:
        if p95_s == inf:
            return None
        now = self._wall_clock()
        return Promise(
            finish_p50_unix_s=ceil(now + p50_s),
            finish_p95_unix_s=ceil(now + p95_s),
            cost_nano=cost,
            promised_by_unix_s=by,
        )

    # -- what is observed

    def _by_name(self) -> dict[str, ModelRuntime]:
        return {served.name: served for served in self._models.by_name.values()}

    def _slots(self, served: ModelRuntime) -> int:
        """What batches and live requests may take together."""
        slots = sum(fleet.ready_slots(pool, self._clock()) for pool in served.fleet.routed)
        return max(0, slots - HEADROOM)

    def _seen_of(self, name: str) -> _Seen:
        return self._seen.setdefault(name, _Seen(Profile(id=name)))

    def _live(self, served: ModelRuntime) -> int:
        return max(0, sum(p.inflight for p in served.fleet.routed) - self._running(served.name))

    async def _observe(self) -> None:
        now_s, hour = self._clock(), int(self._wall_clock() // HOUR_S)
        passed_s, self._observed_s = now_s - self._observed_s, now_s
        over, self._hour = self._hour, hour
        for name, served in self._by_name().items():
            seen, items = self._seen_of(name), self._running(name)
            seen.since_s += passed_s
            seen.live_s += self._live(served) * passed_s
            seen.backlog_s += passed_s if items else 0.0
            seen.used_s += items * passed_s
            if hour > over:
                await self._hour_over(served, seen, over)

    async def _hour_over(self, served: ModelRuntime, seen: _Seen, hour: int) -> None:
        live = seen.live_s / max(seen.since_s, 1.0)
        left_s = max(0.0, self._slots(served) - live - seen.others) * seen.backlog_s
        used_s, keep = seen.used_s, _KEEP if seen.used_s else 1.0
        seen.since_s = seen.live_s = seen.backlog_s = seen.used_s = 0.0

        def added(profile: Profile) -> Profile:
            return msgspec.structs.replace(
                with_hour(profile, hour, live),
                left_slot_s=keep * profile.left_slot_s + left_s,
                used_slot_s=keep * profile.used_slot_s + used_s,
                seconds=(seen.seconds.a, seen.seconds.b),
            )

        await self._change(served.name, added)
        seen.others = max(0.0, seen.profile.hours[-1] - live)

    async def _change(self, name: str, changed: Callable[[Profile], Profile]) -> None:
        """Change a profile as it is in the store now; here alone while the store is away."""
        seen = self._seen_of(name)
        try:
            stored = await self._store.get(Profile, name) or (seen.profile, 0)
            seen.profile, _ = await self._store.change(*stored, changed)
        except (Changed, StateFailure) as error:
            _log.warning("the profile of %s was not stored: %r", name, error)
            seen.profile = changed(seen.profile)
        seen.demand = None


def _cannot_promise(batch: Batch, why: str) -> Refusal:
    return Refusal(
        f"The gateway cannot promise to end this batch within {batch.completion_window}. {why} "
        'With "sluice": {"accept_late": true} it is taken without a promise.',
        reason="cannot_promise",
        param="completion_window",
    )


def _used_slot_s(batch: Batch) -> float:
    return sum(part.slot_s for part in batch.parts)


def _with_hours(profile: Profile, hours: Mapping[int, float]) -> Profile:
    for hour, live in () if profile.hours else sorted(hours.items()):  # another replica was first
        profile = with_hour(profile, hour, live)
    return profile


def hours_of_log(path: Path, until_hour: int) -> Mapping[str, Mapping[int, float]]:
    """Mean live sequences by model and hour, from the end of a request log; {} without one."""
    hours: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    try:
        with path.open("rb") as lines:
            lines.seek(max(0, path.stat().st_size - SEED_BYTES))
            for line in lines:
                try:
                    record = _record(line)
                except msgspec.MsgspecError:
                    continue
                hour = int(record.time_unix_s // HOUR_S)
                if record.model and record.batch is None and hour < until_hour:
                    hours[record.model][hour] += (record.timing.duration_s or 0.0) / HOUR_S
    except OSError as error:
        _log.warning("the request log does not seed the forecast: %s", error)
    return hours
