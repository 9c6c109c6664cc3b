"""Figures of recent requests and of counters: times, lengths, compression, rates.

The ring keeps records as JSON. Each look decodes the records that are new since the last one, at
most MAX_NEW of a replica, so a busy gateway shows a sample of its requests.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log2
from typing import Any, Final

import msgspec

from gateway.control.peers import understood
from gateway.estimate.live_demand import HOUR_S
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.records.decision import (
    NO_ADMISSION,
    NO_COMPRESSION,
    NO_ESTIMATE,
    NO_PLAN,
    NO_PREFILL,
    NO_TIMING,
    NO_USAGE,
    AdmissionSection,
    CompressionSection,
    EstimateSection,
    PlanSection,
    PrefillSection,
    TimingSection,
    UsageSection,
)
from gateway.replicas.calls import ReplicaCalls

KEPT: Final = 2000
FIRST: Final = 500
"""Records read when somebody begins to look; reading takes some 5 us each."""
MAX_NEW: Final = 200
MAX_PER_PEER: Final = 50
WINDOW_S: Final = 60.0
"""Percentiles are of requests that arrived within this time."""
TOPIC: Final = "totals"
OVER_S: Final = 10.0
"""Rates are means over this time, or since figures were last read."""
SERIES: Final = (
    "requests",
    "admission",
    "tokens",
    "compressions",
    "slo_requests",
    "slo_tpot_requests",
)
"""Counters of `Metrics` that are added up."""
Totals = Mapping[str, Mapping[tuple[str, ...], float]]
"""Counts since the start, by counter, and by the labels of it."""
_FIRST_EDGE: Final = 64
_MAX_BUCKETS: Final = 48

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(dict[str, dict[tuple[str, ...], float]]).decode


class Brief(msgspec.Struct):
    """The part of a decision record that the dashboard lists or counts."""

    time_unix_s: float
    request_id: str
    outcome: str
    status: int
    model: str | None = None
    tenant: str | None = None
    entitlement: str | None = None
    stream: bool = False
    reason: str | None = None
    pool: str | None = None
    worker: str | None = None
    estimate: EstimateSection = NO_ESTIMATE
    plan: PlanSection = NO_PLAN
    admission: AdmissionSection = NO_ADMISSION
    compression: CompressionSection = NO_COMPRESSION
    prefill: PrefillSection = NO_PREFILL
    usage: UsageSection = NO_USAGE
    timing: TimingSection = NO_TIMING

    @property
    def served(self) -> bool:
        """Whether it was answered."""
        return self.outcome == "ok"

    @property
    def total_tokens(self) -> int | None:
        """Prompt plus answer as served; a compressed prompt counts with its original length."""
        if self.usage.prompt_tokens is None or not self.served:
            return None
        sent = self.compression.sent_tokens(self.usage.prompt_tokens)
        return sent + (self.usage.completion_tokens or 0)

    def matches(self, text: str) -> bool:
        """Whether a name or code of the request contains `text`, which is in lower case."""
        names = [
            *(self.request_id, self.model, self.tenant, self.entitlement, self.pool),
            *(self.worker, self.prefill.worker, self.outcome, self.reason, str(self.status)),
        ]
        if self.compression.kept_share is not None:
            names.append("compressed")
        if self.admission.spilled:
            names.append("spilled")
        return any(text in name.casefold() for name in names if name)


_brief_of: Final = msgspec.json.Decoder(Brief).decode
_briefs_of: Final = msgspec.json.Decoder(list[Brief]).decode


class RecentDecisions:
    """The newest decisions of all replicas in brief, newest first."""

    def __init__(self, latest: Callable[[int], list[msgspec.Raw]], peers: ReplicaCalls) -> None:
        """`latest` returns the newest records of this replica."""
        self._latest = latest
        self._peers = peers
        self._newest: deque[Brief] = deque(maxlen=KEPT)
        self._ids: set[tuple[str, float]] = set()

    @property
    def briefs(self) -> Sequence[Brief]:
        """What is known, newest first."""
        return self._newest

    async def look(self) -> None:
        """Read what is new."""
        count = MAX_NEW if self._newest else FIRST
        answers = await self._peers.ask("decisions", b"%d" % MAX_PER_PEER)
        new: list[Brief] = []
        for newest_first in (map(_brief_of, self._latest(count)), *understood(_briefs_of, answers)):
            for brief in newest_first:
                key = (brief.request_id, brief.time_unix_s)
                if key in self._ids:
                    break  # everything older was read before
                self._ids.add(key)
                new.append(brief)
        new.sort(key=lambda brief: brief.time_unix_s)
        self._newest.extendleft(new)
        if len(self._ids) > 2 * KEPT:
            self._ids = {(brief.request_id, brief.time_unix_s) for brief in self._newest}


def row(brief: Brief) -> dict[str, Any]:
    """A decision as a row of the list."""
    return {
        "id": brief.request_id,
        "time": brief.time_unix_s,
        "outcome": brief.outcome,
        "status": brief.status,
        "reason": brief.reason,
        "entitlement": brief.entitlement,
        "model": brief.model,
        "pool": brief.pool,
        "worker": brief.worker,
        "prefill_worker": brief.prefill.worker,
        "tokens": brief.estimate.total_tokens,
        "ttft": brief.timing.ttft_s,
        "queue_ms": brief.timing.queue_ms,
        "seconds": brief.timing.duration_s,
        "compressed": brief.compression.compressed,
        "spilled": brief.admission.spilled,
    }


def recent(briefs: Iterable[Brief], now_unix_s: float) -> list[Brief]:
    """Those of the last minute."""
    return [brief for brief in briefs if now_unix_s - brief.time_unix_s <= WINDOW_S]


def times(briefs: Sequence[Brief]) -> dict[str, Any]:
    """Nearest-rank percentiles of answers and of the gateway's own work; None of nothing."""
    ttft = sorted(b.timing.ttft_s for b in briefs if b.timing.ttft_s is not None and b.served)
    overhead = sorted(b.timing.overhead_ms for b in briefs if b.timing.overhead_ms is not None)
    percentiles: dict[str, Any] = {}
    for name, values, unit in (("ttft", ttft, 1), ("overhead", overhead, 1000)):
        for percent in (50, 99):
            at = min(len(values) - 1, int(percent / 100 * len(values)))
            percentiles[f"{name}_p{percent}_s"] = values[at] / unit if values else None
    return {**percentiles, "sampled": len(ttft)}


def lengths(served: ModelRuntime, briefs: Iterable[Brief]) -> dict[str, Any]:
    """Histogram of total tokens by pool, in half powers of two, with boundaries and plan."""
    shapes = served.routing.pools
    steps = round(2 * log2(max(shapes[-1].window_tokens, 2 * _FIRST_EDGE) / _FIRST_EDGE))
    edges = [round(_FIRST_EDGE * 2 ** (i / 2)) for i in range(min(steps, _MAX_BUCKETS) + 1)]
    counts = {shape.name: [0] * (len(edges) + 1) for shape in shapes}
    for brief in briefs:
        if brief.model != served.name or brief.pool not in counts:
            continue
        tokens = brief.total_tokens
        if tokens:
            counts[brief.pool][bisect_left(edges, tokens)] += 1
    drift = None if served.watch is None else served.watch.drift
    return {
        "edges": edges,
        "pools": [{"name": name, "counts": row} for name, row in counts.items()],
        "boundaries": [s.boundary_tokens for s in shapes if s.boundary_tokens is not None],
        "planned": None if drift is None else _shares(drift.planned, edges),
        "drift": None if drift is None else drift.distance,
    }


def _shares(planned: Sequence[tuple[int, float]], edges: Sequence[int]) -> list[float]:
    """The planned share of requests in each bucket; between two points it grows by the logarithm.

    Below the first point it grows from the lowest edge.
    """
    points = [(min(edges[0] / 2, planned[0][0] / 2), 0.0), *planned]

    def up_to(tokens: int) -> float:
        at = bisect_left(points, (tokens, 0.0))
        if at >= len(points):
            return points[-1][1]
        (low, share), (high, more) = points[max(at - 1, 0)], points[at]
        part = 1.0 if high == low else log2(tokens / low) / log2(high / low)
        return share + (more - share) * min(max(part, 0.0), 1.0)

    totals = [up_to(edge) for edge in edges]
    return [
        round(high - low, 6)
        for low, high in zip([0.0, *totals], [*totals, points[-1][1]], strict=True)
    ]


def plan(served: ModelRuntime) -> dict[str, Any]:
    """What says, beside the lengths, whether the plan still fits: this gateway's demand."""
    watch, hours = served.watch, served.demand.hours
    busiest = max(hours, key=lambda hour: hours[hour][0], default=None)
    return {
        "again": watch is not None and watch.drifted,
        "hours": len(hours),
        "busiest": None if busiest is None else [busiest * HOUR_S, *hours[busiest]],
    }


def compression(served: ModelRuntime, totals: Totals, briefs: Iterable[Brief]) -> dict[str, Any]:
    """How many prompts in the window were compressed, what was kept, and tokens saved."""
    results = {
        result: int(count)
        for (model, result), count in totals["compressions"].items()
        if model == served.name
    }
    done = results.pop("compressed", 0)
    candidates = done + sum(results.values())
    saved = shares = recent = 0.0
    for brief in briefs:
        share = brief.compression.kept_share
        if share is not None and brief.model == served.name:
            before, _, after = brief.compression.compressed.partition("->")
            recent, shares, saved = recent + 1, shares + share, saved + int(before) - int(after)
    return {
        "enabled": served.compression is not None,
        "compressed": done,
        "candidates": candidates,
        "kept_ratio": shares / recent if recent else None,
        "saved_tokens": int(saved),
        "recent": int(recent),
        "not_compressed": dict(sorted(results.items(), key=lambda item: -item[1])[:8]),
    }


# -- counters of all replicas


def own_totals(metrics: Metrics) -> Totals:
    """The counts of this replica."""
    return {name: getattr(metrics, name).values for name in SERIES}


def answer_totals(peers: ReplicaCalls, metrics: Metrics) -> None:
    """Tell other replicas the counts of this one."""
    peers.on(TOPIC, lambda _: _pack(own_totals(metrics)))


async def all_totals(peers: ReplicaCalls, metrics: Metrics) -> Totals:
    """The counts of all replicas that answer."""
    answers = await peers.ask(TOPIC)
    total = {name: Counter(series) for name, series in own_totals(metrics).items()}
    for other in understood(_unpack, answers):
        for name in total.keys() & other.keys():
            total[name].update(other[name])
    return total


def by_entitlement(
    totals: Totals,
) -> tuple[Mapping[str, Mapping[str, int]], Mapping[str, float]]:
    """Refusals of each entitlement by reason, and the share of what was served within its target.

    Refused requests do not count for that.
    """
    refused: dict[str, dict[str, int]] = defaultdict(dict)
    for (name, decision, reason), count in totals["admission"].items():
        if decision == "denied":
            refused[name][reason] = int(count)
    return refused, kept(totals, "slo_requests")


def kept(totals: Totals, series: str) -> dict[str, float]:
    """The share of each entitlement's judged requests that kept its target."""
    met: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    for (name, result), count in totals[series].items():
        if result != "refused":
            judged[name] += int(count)
            met[name] += int(count) if result == "true" else 0
    return {name: met[name] / count for name, count in judged.items()}


class Rates:
    """Requests, refusals and tokens per second, from totals of some seconds ago."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, float, float, float]] = deque()

    def at(self, now_s: float, totals: Totals) -> dict[str, float | None]:
        """The rates now; None until there is something to compare with."""
        requests = sum(totals["requests"].values())
        refused = sum(n for (_, _, how), n in totals["requests"].items() if how == "refused")
        tokens = sum(n for (_, _, kind), n in totals["tokens"].items() if kind == "output")
        while len(self._totals) > 1 and now_s - self._totals[1][0] >= OVER_S:
            self._totals.popleft()
        names = ("requests_per_s", "refused_per_s", "output_tokens_per_s")
        rates: dict[str, float | None] = dict.fromkeys(names)
        if self._totals and now_s > self._totals[0][0]:
            then_s, *before = self._totals[0]
            for name, now, then in zip(names, (requests, refused, tokens), before, strict=True):
                rates[name] = max(0.0, now - then) / (now_s - then_s)
        self._totals.append((now_s, requests, refused, tokens))
        return {**rates, "requests_total": requests}
