"""Plots of `bench token-pools`, after figures 2 to 6 of the paper, for one seed.

Its queue without admission grows about as far as the published one.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.token_pools import protection, sharing
from bench.token_pools.lab import Lab
from bench.token_pools.records import SLOTS, quantile

_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
_COLOUR: Final = {
    "guaranteed-a": _BLUE,
    "guaranteed-c": _GREEN,
    "spot-b": _ORANGE,
    sharing.COPILOT: _BLUE,
    sharing.SYNTH: _ORANGE,
    sharing.REPORTS: _GREEN,
}
_SYSTEM_COLOUR: Final = dict(zip(protection.SYSTEMS, (_GREY, _ORANGE, _PINK, _BLUE), strict=True))
_SEED: Final = 2
_BIN_S: Final = 5.0
_WINDOW_S: Final = 10.0


def draw(folder: Path) -> list[Path]:
    """Write all five; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    first = {system: protection.experiment(system, _SEED) for system in protection.SYSTEMS}
    lab = sharing.experiment("paper", _SEED).lab
    assert lab is not None
    figures = {
        "queue": _queue(first),
        "latency": _latency(first),
        "slots": _slots(first["token pools"]),
        "priority": _priority(lab),
        "throughput": _throughput(lab),
    }
    files = []
    for name, figure in figures.items():
        files.append(folder / f"token-pools-{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


# -- Experiment 1


def _queue(first: dict[str, protection.ProtectionOutcome]) -> Figure:
    """Figure 2."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    names = {"token pools": "(a) token pools", "no admission": "(b) no admission control"}
    for ax, (system, title) in zip(axes, names.items(), strict=True):
        samples = first[system].samples
        at = [s.at_s for s in samples]
        ax.plot(at, [s.running for s in samples], color=_BLUE, lw=1.5, label="running")
        ax.plot(at, [s.waiting for s in samples], color=_ORANGE, lw=1.5, label="waiting")
        ax.axhline(SLOTS, color="black", lw=0.8, ls=":", label="slots")
        _phases(ax)
        ax.set(title=title, xlabel="seconds", xlim=(0, protection.END_S))
        ax.grid(alpha=0.3)
    axes[0].set(ylabel="requests in the engine", ylim=(0, None))
    axes[0].legend(loc="upper left")
    return figure


def _latency(first: dict[str, protection.ProtectionOutcome]) -> Figure:
    """Figure 3: guaranteed requests, to the first token and end to end."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for system, outcome in first.items():
        found = sorted(r for r in outcome.latency if r[1] in protection.GUARANTEED)
        at = [r[0] for r in found]
        for ax, column in zip(axes, (2, 3), strict=True):
            values = [r[column] for r in found]
            ax.plot(at, values, "o-", color=_SYSTEM_COLOUR[system], ms=3, lw=0.9, label=system)
    for ax, title in zip(axes, ("time to first token", "end to end"), strict=True):
        _phases(ax)
        ax.set(title=f"Guaranteed requests: {title}", xlabel="asked at, seconds")
        ax.set(ylabel="seconds", xlim=(0, protection.END_S), ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0].legend(loc="upper left")
    return figure


def _slots(outcome: protection.ProtectionOutcome) -> Figure:
    """Figure 4."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    ax = figure.add_subplot()
    names = ("guaranteed-a", "guaranteed-c", "spot-b")
    at = [s.at_s for s in outcome.samples]
    layers = [[s.inflight.get(name, 0) for s in outcome.samples] for name in names]
    ax.stackplot(at, *layers, labels=names, colors=[_COLOUR[n] for n in names], alpha=0.85)
    ax.axhline(SLOTS, color="black", lw=1, ls=":", label="slots")
    _phases(ax)
    ax.set(title="Requests in flight by entitlement, token pools", xlabel="seconds")
    ax.set(ylabel="requests", xlim=(0, protection.END_S), ylim=(0, SLOTS + 7))
    ax.legend(loc="upper center", ncols=4)
    return figure


def _phases(ax: Axes) -> None:
    for edge_s in (protection.PHASES[1][0], protection.PHASES[1][1]):
        ax.axvline(edge_s, color="black", lw=0.8, ls="--", alpha=0.6)


# -- Experiment 2


def _priority(lab: Lab) -> Figure:
    """Figure 5: in flight, debt and weight, admissions and denials, delay."""
    figure = Figure(figsize=(10, 12), layout="constrained")
    one, two, three, four = figure.subplots(4, 1, sharex=True)
    _panel_inflight(one, lab)
    _panel_debt(two, lab)
    _panel_rates(three, lab)
    _panel_delay(four, lab)
    for ax in (one, two, three, four):
        ax.axvspan(*sharing.OUTAGE, color="black", alpha=0.06, lw=0)
        ax.axvline(sharing.JOINS_S, color=_GREEN, lw=0.8, ls="--")
        ax.grid(alpha=0.3)
        ax.set_xlim(0, sharing.END_S)
    four.set_xlabel("seconds (grey: 8 slots instead of 16; dashed: elastic-reports joins)")
    return figure


def _panel_inflight(ax: Axes, lab: Lab) -> None:
    at = [s.at_s for s in lab.samples]
    layers = [[s.inflight.get(t, 0) for s in lab.samples] for t in sharing.TENANTS]
    colours = [_COLOUR[t] for t in sharing.TENANTS]
    ax.stackplot(at, *layers, labels=sharing.TENANTS, colors=colours, alpha=0.85)
    ax.plot(at, [s.slots for s in lab.samples], color="black", lw=1.2, label="slots")
    ax.set(title="(1) requests in flight", ylabel="requests", ylim=(0, 22))
    ax.legend(loc="upper center", ncols=4)


def _panel_debt(ax: Axes, lab: Lab) -> None:
    right = ax.twinx()
    for tenant in sharing.TENANTS:
        seen = [s for s in lab.samples if tenant in s.debt]
        at = [s.at_s for s in seen]
        ax.plot(at, [s.debt[tenant] for s in seen], color=_COLOUR[tenant], lw=1.8, label=tenant)
        right.plot(at, [s.weight[tenant] for s in seen], color=_COLOUR[tenant], lw=1, ls=":")
    ax.set(title="(2) service debt (lines) and weight (dots)", ylabel="debt", ylim=(-0.05, 1))
    right.set(ylabel="weight", ylim=(-9, 180))
    ax.legend(loc="upper right")


def _panel_rates(ax: Axes, lab: Lab) -> None:
    for tenant in sharing.TENANTS:
        let_in = [j.asked_s for j in lab.jobs if j.tenant == tenant]
        denied = [r.at_s for r in lab.refused if r.tenant == tenant]
        colour = _COLOUR[tenant]
        ax.step(*_rate(let_in), where="post", color=colour, lw=1.5, label=f"{tenant} let in")
        if denied:
            label = f"{tenant} denied"
            ax.step(*_rate(denied), where="post", color=colour, lw=1.2, ls=":", label=label)
    ax.set(title="(3) admissions and denials", ylabel="a second", ylim=(0, None))
    ax.legend(loc="upper right", ncols=2, fontsize="small")


def _rate(times: Sequence[float]) -> tuple[list[float], list[float]]:
    edges = [n * _BIN_S for n in range(int(sharing.END_S / _BIN_S))]
    return edges, [sum(e <= t < e + _BIN_S for t in times) / _BIN_S for e in edges]


def _panel_delay(ax: Axes, lab: Lab) -> None:
    """How long a thread was kept out, by its refusals: the sum of its waits before it got in."""
    for tenant in sharing.TENANTS:
        waits = [(r.at_s, min(r.retry_after_s, sharing.WAIT_CAP_S)) for r in lab.refused]
        of_tenant = [w for w, r in zip(waits, lab.refused, strict=True) if r.tenant == tenant]
        let_in = [j.asked_s for j in lab.jobs if j.tenant == tenant]
        edges, admitted = _rate(let_in)
        kept_out = [sum(w for t, w in of_tenant if e <= t < e + _BIN_S) for e in edges]
        delay = [
            k / (a * _BIN_S) if a else math.nan for k, a in zip(kept_out, admitted, strict=True)
        ]
        ax.step(edges, delay, where="post", color=_COLOUR[tenant], lw=1.5, label=tenant)
    ax.set(title="(4) mean wait outside for each request let in", ylabel="seconds")
    ax.set_ylim(0, None)
    ax.legend(loc="upper right")


def _throughput(lab: Lab) -> Figure:
    """Figure 6."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    edges = [n * _WINDOW_S for n in range(int(sharing.END_S / _WINDOW_S))]
    for tenant in sharing.TENANTS:
        jobs = [j for j in lab.jobs if j.tenant == tenant and j.first_s >= 0]
        p99 = [
            quantile([j.ttft_s for j in jobs if e <= j.asked_s < e + _WINDOW_S], 0.99)
            for e in edges
        ]
        top.step(edges, p99, where="post", color=_COLOUR[tenant], lw=1.5, label=tenant)
    top.axhline(0.5, color=_BLUE, lw=0.8, ls=":", label="SLO of elastic-copilot")
    top.set(title="(a) P99 time to first token, of 10 s each", ylabel="seconds", ylim=(0, None))
    top.legend(loc="upper right")
    made = [(s.at_s, s.generated) for s in lab.samples]
    by_time = {round(t, 3): n for t, n in made}
    rate = [(by_time[e + _BIN_S] - by_time[e]) / _BIN_S for e, _ in zip(*_rate([]), strict=True)]
    bottom.step(_rate([])[0], rate, where="post", color="black", lw=1.5, label="output tokens/s")
    slots = [s.slots / 16 * 120 for s in lab.samples]
    bottom.plot([t for t, _ in made], slots, color=_GREY, lw=1, ls=":", label="all slots busy")
    bottom.set(title="(b) throughput", ylabel="tokens/s", ylim=(0, None), xlabel="seconds")
    bottom.legend(loc="lower right")
    for ax in (top, bottom):
        ax.axvspan(*sharing.OUTAGE, color="black", alpha=0.06, lw=0)
        ax.axvline(sharing.JOINS_S, color=_GREEN, lw=0.8, ls="--")
        ax.grid(alpha=0.3)
        ax.set_xlim(0, sharing.END_S)
    return figure
