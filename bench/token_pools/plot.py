"""Figures 2 to 6 of the paper, for one seed whose queue grows about as far as the published one."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.common.plot import Line, Panel, draw
from bench.common.report import quantile
from bench.token_pools import protection, sharing
from bench.token_pools.lab import SLOTS, Lab

_SEED: Final = 2
_BIN_S: Final = 5.0
_WINDOW_S: Final = 10.0
_BINS: Final = [n * _BIN_S for n in range(int(sharing.END_S / _BIN_S))]
First = dict[str, protection.ProtectionOutcome]


def plots(folder: Path) -> list[str]:
    """Draw all five; their files."""
    first = {system: protection.experiment(system, _SEED) for system in protection.SYSTEMS}
    lab = sharing.experiment("paper", _SEED).lab
    assert lab is not None
    return [
        draw(folder, "token-pools-queue", list(_queue(first)), share=True),
        draw(folder, "token-pools-latency", list(_latency(first))),
        draw(folder, "token-pools-slots", [_slots(first["token pools"])]),
        draw(folder, "token-pools-priority", list(_priority(lab)), 1),
        draw(folder, "token-pools-throughput", list(_throughput(lab)), 1),
    ]


# -- Experiment 1


def _first(**more: object) -> Panel:
    span = (0, protection.END_S)
    return Panel(marks=protection.PHASES[1], xlabel="seconds", xlim=span, **more)  # type: ignore[arg-type]


def _queue(first: First) -> Iterator[Panel]:
    """Figure 2."""
    for system in ("token pools", "no admission"):
        samples = first[system].samples
        at = [s.at_s for s in samples]
        yield _first(
            title=f"{system}: requests in the engine",
            levels=(SLOTS,),
            lines=[
                Line(x=at, y=[s.running for s in samples], label="running"),
                Line(x=at, y=[s.waiting for s in samples], label="waiting"),
            ],
        )


def _latency(first: First) -> Iterator[Panel]:
    """Figure 3: guaranteed requests, to the first token and end to end."""
    for title, column in (("time to first token, s", 2), ("end to end, s", 3)):
        found = {
            system: sorted(r for r in outcome.latency if r[1] in protection.GUARANTEED)
            for system, outcome in first.items()
        }
        yield _first(
            title=f"Guaranteed requests: {title}",
            lines=[
                Line(x=[r[0] for r in all_], y=[float(r[column]) for r in all_], label=system)
                for system, all_ in found.items()
            ],
        )


def _slots(outcome: protection.ProtectionOutcome) -> Panel:
    """Figure 4."""
    names = (*protection.GUARANTEED, protection.SPOT)
    return _first(
        title="Requests in flight by entitlement, token pools",
        at=[s.at_s for s in outcome.samples],
        stack={name: [s.inflight.get(name, 0) for s in outcome.samples] for name in names},
        levels=(SLOTS,),
    )


# -- Experiment 2: grey 8 slots instead of 16, dashed elastic-reports joins


def _second(title: str, lines: Sequence[Line], **more: object) -> Panel:
    return Panel(
        title=title,
        lines=lines,
        spans=(sharing.OUTAGE,),
        marks=(sharing.JOINS_S,),
        xlim=(0, sharing.END_S),
        **more,  # type: ignore[arg-type]
    )


def _priority(lab: Lab) -> Iterator[Panel]:
    """Figure 5: in flight, debt, weight, admissions and denials, delay."""
    at = [s.at_s for s in lab.samples]
    yield _second(
        "(1) requests in flight",
        [Line(x=at, y=[s.slots for s in lab.samples], label="slots", colour=4)],
        at=at,
        stack={t: [s.inflight.get(t, 0) for s in lab.samples] for t in sharing.TENANTS},
    )
    for title, figure in (("(2) service debt", "debt"), ("(2) weight", "weight")):
        known = {t: [s for s in lab.samples if t in s.debt] for t in sharing.TENANTS}
        yield _second(
            title,
            [
                Line(x=[s.at_s for s in seen], y=[getattr(s, figure)[t] for s in seen], label=t)
                for t, seen in known.items()
            ],
        )
    let_in = {t: [j.asked_s for j in lab.jobs if j.tenant == t] for t in sharing.TENANTS}
    denied = {t: [r.at_s for r in lab.refused if r.tenant == t] for t in sharing.TENANTS}
    yield _second(
        "(3) admissions and denials a second",
        [
            Line(x=_BINS, y=_rate(times[t]), label=f"{t} {text}", style=style, colour=n, step=True)
            for text, times, style in (("let in", let_in, "-"), ("denied", denied, ":"))
            for n, t in enumerate(sharing.TENANTS)
        ],
    )
    yield _second(
        "(4) mean wait outside for each request let in, s",
        [
            Line(x=_BINS, y=_delays(lab, t, _rate(let_in[t])), label=t, step=True)
            for t in sharing.TENANTS
        ],
    )


def _rate(times: Sequence[float]) -> list[float]:
    return [sum(e <= t < e + _BIN_S for t in times) / _BIN_S for e in _BINS]


def _delays(lab: Lab, tenant: str, admitted: Sequence[float]) -> list[float]:
    """How long threads were kept out, by their refusals: the waits before they got in."""
    waits = [
        (r.at_s, min(r.retry_after_s, sharing.WAIT_CAP_S))
        for r in lab.refused
        if r.tenant == tenant
    ]
    kept_out = [sum(w for t, w in waits if e <= t < e + _BIN_S) for e in _BINS]
    return [k / (a * _BIN_S) if a else math.nan for k, a in zip(kept_out, admitted, strict=True)]


def _throughput(lab: Lab) -> Iterator[Panel]:
    """Figure 6."""
    edges = [n * _WINDOW_S for n in range(int(sharing.END_S / _WINDOW_S))]
    answered = {
        t: [j for j in lab.jobs if j.tenant == t and j.first_s >= 0] for t in sharing.TENANTS
    }
    yield _second(
        "(a) P99 time to first token, of 10 s each; dotted: SLO of elastic-copilot",
        [
            Line(
                x=edges,
                y=[
                    quantile([j.ttft_s for j in jobs if e <= j.asked_s < e + _WINDOW_S], 0.99)
                    for e in edges
                ],
                label=t,
                step=True,
            )
            for t, jobs in answered.items()
        ],
        levels=(0.5,),
    )
    made = {round(s.at_s, 3): s.generated for s in lab.samples}
    rate = [(made[e + _BIN_S] - made[e]) / _BIN_S for e in _BINS]
    busy = [s.slots / 16 * 120 for s in lab.samples]
    yield _second(
        "(b) output tokens/s",
        [
            Line(x=_BINS, y=rate, label="output tokens/s", step=True),
            Line(x=[s.at_s for s in lab.samples], y=busy, label="all slots busy", style=":"),
        ],
        xlabel="seconds",
    )
