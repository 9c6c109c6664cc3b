"""Batches in virtual time: the gateway's admission, scheduler and promises before engine models."""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np
from msgspec.structs import replace

from gateway.batches.promise import HOUR_S, Demand, FreeSlots, Profile, Work, with_hour, work
from simulator.pipeline.records import EVICTED, Gateway, TenantTraffic
from simulator.pipeline.run import Run

FORECAST_EVERY_S = 300.0
_STEP_S = 60.0
_SPOT, _ELASTIC = 1, 2
"""Entitlements of items: on leftovers, and urgent."""


class Batch(msgspec.Struct, kw_only=True):
    """A batch that a client submits, and what becomes of it. Times are seconds of the run."""

    at_s: float
    window_s: float
    """As first asked for."""
    first: int
    """Index of its first request."""
    items: int
    planned_slot_s: float
    refused: bool = False
    """Whether that window was not promised: it came back with the earliest that was named."""
    by_s: float = inf
    """When it is promised."""
    p50_s: float = inf
    p95_s: float = inf
    """As told when it was taken, from then on."""
    todo: deque[int] = msgspec.field(default_factory=deque)
    ends_s: list[float] = msgspec.field(default_factory=list)
    """When its items ended."""
    used_slot_s: float = 0.0
    wasted_slot_s: float = 0.0
    """Of these, by items that were evicted."""
    urgent: bool = False
    oracle_keeps: bool = False
    """Whether one that knew all would have kept the window that was first asked for."""

    @property
    def took_s(self) -> float:
        """From its submission to its end."""
        return self.ends_s[-1] - self.at_s

    @property
    def kept(self) -> bool:
        """Whether its promise was kept."""
        return self.ends_s[-1] <= self.by_s

    def left_slot_s(self, at_s: float) -> float:
        """Its work that was left at a time."""
        if not self.at_s < at_s < self.ends_s[-1]:
            return 0.0
        return self.used_slot_s * (1 - bisect(self.ends_s, at_s) / self.items)


class BatchRun(Run):
    """A run with batches that take what is left; it ends with the last of them."""

    tick_every_s = look_every_s = 5.0

    def __init__(
        self,
        gateway: Gateway,
        requests: TenantTraffic,
        batches: Sequence[Batch],
        profile: Profile,
        start_unix_s: float,
        *,
        live: int,
    ) -> None:
        """`live`: requests that arrive by themselves; the others are the batches' items."""
        super().__init__(gateway, requests, seed=0, called=len(requests) - live)
        assert gateway.terms is not None
        self._slots, self._headroom = sum(gateway.terms.slots), gateway.terms.headroom
        self._pool = self.served.fleet.pools[0]
        self._start_unix_s = start_unix_s
        self._submitted = deque(batches)
        self._all: list[Batch] = []
        self._open: list[Batch] = []
        self._running: dict[int, tuple[Batch, float]] = {}
        self._refused_until_s, self._forecast_s, self._seen_s = 0.0, FORECAST_EVERY_S, 0.0
        self.profile = profile
        self._demand = Demand(profile, int(start_unix_s // HOUR_S))
        self._live_s = self._backlog_s = self._used_s = 0.0
        self._free = [0.0]
        """Slot-seconds that live requests left, by _STEP_S."""

    def goes_on(self, *, arriving: bool) -> bool:
        """Until all batches have ended."""
        return bool(self._open or self._submitted)

    def after(self, now_s: float) -> None:
        """See what ended, and give what is left to the batches."""
        self._observe(now_s)
        for index in [i for i in self._running if i not in self.serving.flights]:
            self._ended(index, now_s)
        while self._submitted and self._submitted[0].at_s <= now_s:
            self._decide(self._submitted.popleft(), now_s)
        if now_s >= self._forecast_s:
            self._forecast_s = now_s + FORECAST_EVERY_S
            works = [self._work(batch) for batch in self._open]
            left = self._leftovers(now_s) if works else None
            for at, batch in enumerate(self._open):
                ends = left.ends(works[at], works[:at] + works[at + 1 :]) if left else (0.0, 0.0)
                batch.urgent = now_s + sum(ends) / 2 > batch.by_s
        if now_s >= self._refused_until_s:
            self._fill(now_s)

    def judge(self, batch: Batch) -> None:
        """Note whether one that knew all had kept its window, and the promises of the others.

        It has what live requests left from then on, and the work that open batches still took.
        """
        at_s = batch.at_s
        free = np.concatenate([[0.0], np.cumsum(self._free[int(at_s / _STEP_S) :])])
        others = [other for other in self._all if other is not batch]
        due = [(batch.window_s, batch.used_slot_s)]
        due += [(other.by_s - at_s, other.left_slot_s(at_s)) for other in others]
        due_s, slot_s = np.array(sorted(due)).T
        steps = np.clip(due_s / _STEP_S, 0, len(free) - 1).astype(np.int64)
        batch.oracle_keeps = bool((np.cumsum(slot_s) <= free[steps])[slot_s > 0].all())

    # -- what the gateway sees

    def _observe(self, now_s: float) -> None:
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        items = len(self._running)
        live = self._pool.inflight - items
        self._live_s += live * passed_s
        self._backlog_s += passed_s if self._open else 0.0
        self._used_s += items * passed_s
        self._free += [0.0] * (int(now_s / _STEP_S) + 1 - len(self._free))
        self._free[-1] += max(0.0, self._slots - self._headroom - live) * passed_s
        hour = int((self._start_unix_s + now_s) // HOUR_S)
        if hour != self._demand.hour:
            mean = self._live_s / HOUR_S
            left = max(0.0, self._slots - self._headroom - mean) * self._backlog_s
            self.profile = replace(
                with_hour(self.profile, self._demand.hour, mean),
                left_slot_s=self.profile.left_slot_s + left,
                used_slot_s=self.profile.used_slot_s + self._used_s,
            )
            self._demand = Demand(self.profile, hour)
            self._live_s = self._backlog_s = self._used_s = 0.0

    def _leftovers(self, now_s: float) -> FreeSlots:
        passed_s = now_s % HOUR_S
        now_live = float(self._pool.inflight - len(self._running))
        live = self._live_s / passed_s if passed_s > 60 else now_live
        slots = self._slots - self._headroom
        return FreeSlots(self._demand, slots, live, self._start_unix_s + now_s)

    def _work(self, batch: Batch) -> Work:
        return work(
            self.profile,
            batch.planned_slot_s,
            items=batch.items,
            done=len(batch.ends_s),
            used_slot_s=batch.used_slot_s,
            by_unix_s=self._start_unix_s + batch.by_s,
        )

    def _decide(self, batch: Batch, now_s: float) -> None:
        """Promise; who is refused comes back with the window that was named."""
        left, others = self._leftovers(now_s), [self._work(other) for other in self._open]
        batch.by_s = now_s + batch.window_s
        decided = left.decide(self._work(batch), others)
        if not decided.promised:
            batch.refused, batch.by_s = True, now_s + decided.earliest_s
            decided = left.decide(self._work(batch), others)
        batch.p50_s, batch.p95_s = decided.p50_s, decided.p95_s
        batch.todo.extend(range(batch.first, batch.first + batch.items))
        self._open = sorted([*self._open, batch], key=lambda each: each.by_s)
        self._all.append(batch)

    # -- what the runner does

    def _fill(self, now_s: float) -> None:
        for batch in self._open:
            while batch.todo:
                headroom = 0 if batch.urgent else self._headroom
                if self._slots - self._pool.inflight - headroom < 1:
                    return
                index = batch.todo.popleft()
                self.intake.owners[index] = _ELASTIC if batch.urgent else _SPOT
                self._running[index] = batch, now_s
                self.arrive(index, now_s)
                if index not in self.serving.flights:
                    del self._running[index]
                    batch.todo.appendleft(index)
                    self._refused_until_s = now_s + 1.0
                    return

    def _ended(self, index: int, now_s: float) -> None:
        batch, since_s = self._running.pop(index)
        batch.used_slot_s += now_s - since_s
        if reason := self.serving.columns.reasons[index]:
            batch.wasted_slot_s += now_s - since_s if reason == EVICTED else 0.0
            batch.todo.appendleft(index)
            return
        batch.ends_s.append(now_s)
        if len(batch.ends_s) == batch.items:
            self._open.remove(batch)
