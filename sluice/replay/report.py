"""Results of a replay: times by pool, errors, and whether the SLO held."""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.replay.client import Answered
from sluice.replay.run import Replayed, commonest
from sluice.terminal import finite

MIN_JUDGED: Final = 100
"""Fewest answered requests for judging a pool's P99."""
_QUANTILES: Final = (0.5, 0.9, 0.99)


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one pool, or of all, after the warm-up; seconds, infinite for failed requests."""

    name: str
    requests: int
    share: float
    ttft_s: tuple[float, float, float]
    """P50, P90, P99 of all requests; failed ones count as infinite."""
    tpot_s: tuple[float, float, float]
    faults: tuple[str, ...] = ()
    """Why the SLO does not hold; empty if it holds or is not judged."""


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one entitlement after the warm-up."""

    name: str
    requests: int
    refused: int
    """Refused for load or for a limit (429, 503)."""
    failed: int
    """Failed otherwise."""
    attainment: float
    """Share of served requests with their first token within the SLO; NaN without any."""
    ttft_p99_s: float
    """Of served requests."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole replay's results."""

    url: str
    model: str
    sent: int
    judged: int
    """Requests due after the warm-up."""
    failed: int
    """Failed requests, warm-up included."""
    errors: tuple[tuple[str, int], ...]
    rate_per_s: float
    """Rate of requests sent."""
    duration_s: float
    compressed: int
    late_p99_s: float
    most_open: int
    stopped: bool
    prompt_ratio: float | None
    """Prompt tokens counted by engines, relative to those intended."""
    slo_ttft_s: float
    slo_tpot_s: float | None
    whole: PoolReport
    pools: tuple[PoolReport, ...]
    tenants: tuple[TenantReport, ...] = ()
    """By entitlement, where the log tells."""

    @property
    def holds(self) -> bool:
        """Whether the SLO held for all requests and in each pool with enough of them."""
        return not self.whole.faults and not any(pool.faults for pool in self.pools)

    @property
    def notes(self) -> list[str]:
        """Caveats about the figures."""
        found = []
        if self.stopped:
            found.append("stopped early")
        first_s = self.whole.ttft_s[2]
        if math.isfinite(first_s) and self.late_p99_s > 0.1 * first_s:
            found.append(
                f"requests were sent late, P99 {1000 * self.late_p99_s:.3g} ms: this machine or "
                "--most-open limits the load"
            )
        if self.prompt_ratio is not None and abs(self.prompt_ratio - 1) > 0.05:
            found.append(f"prompts had {self.prompt_ratio:.2f} times the tokens asked for")
        if self.judged < MIN_JUDGED:
            found.append(f"{self.judged} requests are too few for a P99")
        return found


def report(
    done: Replayed,
    *,
    url: str,
    model: str,
    slo_ttft_s: float,
    slo_tpot_s: float | None,
    warm_up: float,
) -> ReplayReport:
    """Evaluate a replay; `warm_up` is the share of the time whose requests are not judged."""
    span_s = done.asks[-1].at_s
    judged = [a for a in done.answers if a.due_s - done.started_s >= warm_up * span_s]
    whole = _part("all", judged, len(judged), slo_ttft_s, slo_tpot_s, least=1)
    names = sorted({a.pool for a in judged if a.pool})
    parts = [
        _part(n, [a for a in judged if a.pool == n], len(judged), slo_ttft_s, slo_tpot_s)
        for n in names
    ]
    ended = [(k, a) for k, a in zip(done.asks, done.answers, strict=True) if not a.error]
    plain = [(k, a) for k, a in ended if not a.compressed and a.prompt_tokens]
    asked = sum(k.prompt_tokens for k, _ in plain)
    return ReplayReport(
        url=url,
        model=model,
        sent=len(done.answers),
        judged=len(judged),
        failed=len(done.answers) - len(ended),
        errors=tuple(commonest(done.answers)),
        rate_per_s=(len(done.answers) - 1) / span_s if span_s > 0 else math.nan,
        duration_s=done.ended_s - done.started_s,
        compressed=sum(a.compressed for _, a in ended),
        late_p99_s=quantile(done.late_s, 0.99),
        most_open=done.most_open,
        stopped=done.stopped,
        prompt_ratio=sum(a.prompt_tokens for _, a in plain) / asked if asked else None,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        whole=whole,
        pools=tuple(parts),
        tenants=_tenants(done, judged, slo_ttft_s),
    )


def _tenants(done: Replayed, judged: Sequence[Answered], slo_s: float) -> tuple[TenantReport, ...]:
    """Every entitlement of the log."""
    kept = set(map(id, judged))
    by_name: dict[str, list[Answered]] = {}
    for ask, answer in zip(done.asks, done.answers, strict=True):
        if ask.entitlement and id(answer) in kept:
            by_name.setdefault(ask.entitlement, []).append(answer)
    return tuple(_tenant(name, answers, slo_s) for name, answers in sorted(by_name.items()))


def _tenant(name: str, answers: Sequence[Answered], slo_s: float) -> TenantReport:
    served = [a.ttft_s for a in answers if a.ttft_s is not None]
    refused = sum(answer.refused for answer in answers)
    within = sum(ttft_s <= slo_s for ttft_s in served)
    return TenantReport(
        name=name,
        requests=len(answers),
        refused=refused,
        failed=len(answers) - len(served) - refused,
        attainment=within / len(served) if served else math.nan,
        ttft_p99_s=quantile(served, 0.99),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of all values does not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def report_json(found: ReplayReport) -> dict[str, Any]:
    """The report as JSON; unknown and infinite values are null."""
    return {
        "url": found.url,
        "model": found.model,
        "holds": found.holds,
        "slo": {"ttft_p99_s": found.slo_ttft_s, "tpot_p99_s": found.slo_tpot_s},
        "requests": found.sent,
        "judged": found.judged,
        "failed": found.failed,
        "errors": [{"error": text, "count": count} for text, count in found.errors],
        "rate_per_s": finite(found.rate_per_s),
        "duration_s": found.duration_s,
        "compressed": found.compressed,
        "late_p99_s": finite(found.late_p99_s),
        "most_open": found.most_open,
        "stopped": found.stopped,
        "prompt_ratio": found.prompt_ratio,
        "all": _part_json(found.whole),
        "pools": {pool.name: _part_json(pool) for pool in found.pools},
        "tenants": {
            one.name: {
                "requests": one.requests,
                "refused": one.refused,
                "failed": one.failed,
                "attainment": finite(one.attainment),
                "ttft_p99_s": finite(one.ttft_p99_s),
            }
            for one in found.tenants
        },
        "notes": found.notes,
    }


def show(found: ReplayReport, console: Console) -> None:
    """Print a table, the verdict and caveats."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pool", "requests", "share", "TTFT P50", "P90", "P99", "TPOT P50", "P99"):
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    for part in (*found.pools, found.whole):
        cells = (*map(_ms, part.ttft_s), _ms(part.tpot_s[0]), _ms(part.tpot_s[2]))
        share = f"{100 * part.share:.1f} %"
        table.add_row(escape(part.name), str(part.requests), share, *cells)
    console.print(
        f"{found.sent} requests at {found.rate_per_s:.3g}/s to [bold]{escape(found.model)}[/], "
        f"{found.failed} failed, {found.compressed} compressed, {found.most_open} at once at most"
    )
    console.print(table)
    for one in found.tenants:
        attained = "" if math.isnan(one.attainment) else f"{100 * one.attainment:.1f} % in time, "
        console.print(
            f"{escape(one.name)}: {attained}P99 TTFT {_ms(one.ttft_p99_s)}, {one.requests} "
            f"requests, {one.refused} refused, {one.failed} failed"
        )
    slo = f"P99 TTFT {1000 * found.slo_ttft_s:g} ms"
    if found.slo_tpot_s is not None:
        slo += f", TPOT {1000 * found.slo_tpot_s:g} ms"
    console.print(f"SLO {slo}: " + ("[green]held[/]" if found.holds else "[red]violated[/]"))
    for part in (found.whole, *found.pools):
        for fault in part.faults:
            console.print(f"[red]{escape(part.name)}[/]: {escape(fault)}")
    for text, count in found.errors:
        console.print(f"[red]{count}[/] x {escape(text)}")
    for note in found.notes:
        console.print(f"[dim]-[/] {escape(note)}")


def _part(
    name: str,
    answers: Sequence[Answered],
    of: int,
    slo_ttft_s: float,
    slo_tpot_s: float | None,
    *,
    least: int = MIN_JUDGED,
) -> PoolReport:
    first = [math.inf if a.ttft_s is None else a.ttft_s for a in answers]
    between = [a.tpot_s for a in answers if a.tpot_s is not None]
    ttft = tuple(quantile(first, share) for share in _QUANTILES)
    tpot = tuple(quantile(between, share) for share in _QUANTILES)
    faults = []
    if len(answers) >= least and not ttft[2] <= slo_ttft_s:
        faults.append(f"P99 TTFT {_ms(ttft[2])} is over {_ms(slo_ttft_s)}")
    if slo_tpot_s is not None and len(between) >= least and not tpot[2] <= slo_tpot_s:
        faults.append(f"P99 TPOT {_ms(tpot[2])} is over {_ms(slo_tpot_s)}")
    if not answers and least == 1:
        faults.append("no request was judged")
    return PoolReport(
        name=name,
        requests=len(answers),
        share=len(answers) / of if of else 0.0,
        ttft_s=(ttft[0], ttft[1], ttft[2]),
        tpot_s=(tpot[0], tpot[1], tpot[2]),
        faults=tuple(faults),
    )


def _part_json(part: PoolReport) -> dict[str, Any]:
    def named(values: Sequence[float]) -> dict[str, float | None]:
        return dict(zip(("p50", "p90", "p99"), map(finite, values), strict=True))

    return {
        "requests": part.requests,
        "share": part.share,
        "ttft_s": named(part.ttft_s),
        "tpot_s": named(part.tpot_s),
        "faults": list(part.faults),
    }


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return ""
    return f"{1000 * seconds:.3g} ms" if math.isfinite(seconds) else "without end"
