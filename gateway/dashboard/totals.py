"""Counters of all replicas in total, and how fast they rise."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.metrics import Metrics
from gateway.records.record import Record
from gateway.replicas.calls import ReplicaCalls

TOPIC: Final = "totals"
OVER_S: Final = 10.0
"""Rates are means over this time, or since figures were last read."""

Series = Mapping[tuple[str, ...], float]


class Totals(Record, frozen=True, kw_only=True):
    """Counts since the start, by the labels of their metric."""

    requests: Series
    """By (model, pool, outcome)."""
    admission: Series
    """By (entitlement, decision, reason)."""
    tokens: Series
    """By (model, entitlement, kind)."""
    compressions: Series
    """By (model, result)."""
    slo: Series = msgspec.field(default_factory=dict)
    """By (entitlement, met): true, false or refused."""
    kept: tuple[float, float] = (0.0, 0.0)
    """Compressed prompts, and the sum of their kept shares."""


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Totals).decode


def own_totals(metrics: Metrics) -> Totals:
    """The counts of this replica."""
    kept = metrics.kept_share.series.get((), [])
    return Totals(
        requests=metrics.requests.values,
        admission=metrics.admission.values,
        tokens=metrics.tokens.values,
        compressions=metrics.compressions.values,
        slo=metrics.slo_requests.values,
        kept=(sum(kept[:-1]), kept[-1]) if kept else (0.0, 0.0),
    )


def answer_totals(peers: ReplicaCalls, metrics: Metrics) -> None:
    """Tell other replicas the counts of this one."""
    peers.on(TOPIC, lambda _: _pack(own_totals(metrics)))


async def all_totals(peers: ReplicaCalls, metrics: Metrics) -> Totals:
    """The counts of all replicas that answer."""
    found = [own_totals(metrics)]
    for answer in await peers.ask(TOPIC):
        try:
            found.append(_unpack(answer))
        except (ValueError, msgspec.MsgspecError):
            continue  # a replica of another version
    if len(found) == 1:
        return found[0]
    return Totals(
        requests=_sum(each.requests for each in found),
        admission=_sum(each.admission for each in found),
        tokens=_sum(each.tokens for each in found),
        compressions=_sum(each.compressions for each in found),
        slo=_sum(each.slo for each in found),
        kept=(sum(each.kept[0] for each in found), sum(each.kept[1] for each in found)),
    )


def _sum(several: Any) -> Series:
    total: Counter[tuple[str, ...]] = Counter()
    for series in several:
        total.update(series)
    return total


def by_entitlement(totals: Totals) -> Mapping[str, Mapping[str, int]]:
    """Refusals of each entitlement, by reason."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for (entitlement, decision, reason), count in totals.admission.items():
        if decision == "denied":
            found[entitlement][reason] = int(count)
    return found


def attainment(totals: Totals) -> Mapping[str, float]:
    """Share of each entitlement's served requests within its target; refused ones do not count."""
    met, missed = (
        {name: count for (name, result), count in totals.slo.items() if result == wanted}
        for wanted in ("true", "false")
    )
    return {
        name: met.get(name, 0) / (met.get(name, 0) + missed.get(name, 0))
        for name in {*met, *missed}
    }


class Rates:
    """Requests, refusals and tokens per second, from totals of some seconds ago."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float, float]] = deque()

    def at(self, now_s: float, totals: Totals) -> dict[str, float | None]:
        """The rates now; None until there is something to compare with."""
        requests = sum(totals.requests.values())
        refused = sum(n for (_, _, how), n in totals.requests.items() if how == "refused")
        tokens = sum(n for (_, _, kind), n in totals.tokens.items() if kind == "output")
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= OVER_S:
            self._seen.popleft()
        names = ("requests_per_s", "refused_per_s", "output_tokens_per_s")
        rates: dict[str, float | None] = dict.fromkeys(names)
        if self._seen and now_s > self._seen[0][0]:
            then_s, *before = self._seen[0]
            for name, now, then in zip(names, (requests, refused, tokens), before, strict=True):
                rates[name] = max(0.0, now - then) / (now_s - then_s)
        self._seen.append((now_s, requests, refused, tokens))
        return {**rates, "requests_total": requests}
