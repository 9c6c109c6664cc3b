"""Verdicts on budgets: a log's demand is counted against them, nothing is simulated."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.admission.limit_book import CALENDAR, DAY_S, days_of, span_of
from gateway.records.proof import Interval
from gateway.records.usage import NANO
from gateway.settings import Config
from gateway.settings.tenants import BudgetConfig
from simulator.fleet.traffic import Floats
from sluice.prove.verdict import Finding
from sluice.simulated.recorded import RecordedTraffic

USED: Final = 0.95
"""Largest share of a budget that surely lasts: requests in flight reserve all they may use."""
_PICO: Final = NANO * 1000


def budget_findings(
    config: Config, recorded: RecordedTraffic, served: Sequence[str], rate: float
) -> Iterator[Finding]:
    """On the budgets of entitlements and tenants; `served`: the model of each request.

    `rate`: how much faster the log's requests come.
    """
    owners = [
        (entitlement.name, {entitlement.name}, entitlement.budgets)
        for entitlement in config.entitlements
    ]
    for tenant in config.tenants:
        names = {
            entitlement.name
            for entitlement in config.entitlements
            if entitlement.tenant == tenant.name
        }
        owners.append((tenant.name, names, tenant.budgets))
    for name, names, budgets in owners:
        mine = np.array([owner in names for owner in recorded.entitlements], dtype=bool)
        for budget in budgets:
            unit = "tokens" if budget.money is None else "money"
            reason = f"{unit} by {budget.window}: the log does not say whose requests these are"
            subject = Finding(kind="budget", name=name, verdict="cannot tell", reason=reason)
            if recorded.entitlements:
                used = _used(config, recorded, served, mine, budget)
                subject = _judge(subject, budget, recorded, mine, used, rate)
            yield subject


def _used(
    config: Config,
    recorded: RecordedTraffic,
    served: Sequence[str],
    mine: NDArray[np.bool_],
    budget: BudgetConfig,
) -> tuple[Floats, Floats] | None:
    """What each request takes, if its prompt is cached and if it is not; None without prices."""
    prompts, answers = recorded.prompts[mine], recorded.answers[mine]
    if budget.money is None:
        return (prompts + answers).astype(np.float64), (prompts + answers).astype(np.float64)
    prices = {m.name: m.price.per_token() for m in config.models if m.price is not None}
    models = [served[i] for i in np.flatnonzero(mine).tolist()]
    if not prices.keys() >= set(models):
        return None
    cached = np.array([prices[name].cached_input_pico for name in models])
    fresh = np.array([prices[name].input_pico for name in models])
    output = answers * np.array([prices[name].output_pico for name in models])
    return (prompts * cached + output) / _PICO, (prompts * fresh + output) / _PICO


def _judge(
    subject: Finding,
    budget: BudgetConfig,
    recorded: RecordedTraffic,
    mine: NDArray[np.bool_],
    used: tuple[Floats, Floats] | None,
    rate: float,
) -> Finding:
    """Breaks if a window of the log goes beyond it, holds if none of that length could."""
    limit = float(budget.money or budget.tokens or 0)
    unit = "tokens" if budget.money is None else "money"
    if used is None:
        reason = f"money by {budget.window}: not every model has a price"
        return msgspec.structs.replace(subject, reason=reason)
    low, high = (rate * each for each in used)
    at_s = recorded.at_s[mine] * rate + recorded.first_unix_s  # as the log has them
    window_s, surely = _windows(budget, at_s, low)
    most, share = _most(at_s, high, window_s), surely / limit
    logged_s = float(recorded.at_s[-1]) * rate
    digits = 0 if budget.money is None else 2
    reason = f"{surely:,.{digits}f} {unit} are wanted in a {budget.window}, of {limit:,.{digits}f}"
    verdict = subject.verdict
    if surely > limit:
        verdict = "breaks"
    elif logged_s < window_s:
        reason += f"; the log has {logged_s / 3600:.3g} hours, and the window {window_s / 3600:.3g}"
    elif most <= USED * limit:
        verdict = "holds"
    else:
        reason += f", {most:,.{digits}f} at another time or without cached prompts"
    measures = {"share of the budget": Interval(value=share, low=share, high=share)}
    return msgspec.structs.replace(
        subject, verdict=verdict, reason=reason, requests=int(mine.sum()), measures=measures
    )


def _windows(budget: BudgetConfig, at_s: Floats, used: Floats) -> tuple[float, float]:
    """Length of the first window of the log, and the most that any of them has."""
    if not len(at_s):
        return 0.0, 0.0
    if budget.window not in CALENDAR:
        window_s = float(days_of(budget.window) * DAY_S)
        return window_s, _most(at_s, used, window_s)
    span = span_of(budget.window, budget.timezone, float(at_s[0]))
    window_s, edges = span.next_s - span.start_s, [span.next_s]
    while edges[-1] <= at_s[-1]:
        edges.append(span_of(budget.window, budget.timezone, edges[-1]).next_s)
    sums = np.bincount(np.searchsorted(edges, at_s, "right"), weights=used)
    return window_s, float(sums.max())


def _most(at_s: Floats, used: Floats, window_s: float) -> float:
    """The most within any stretch of this length."""
    if not len(at_s):
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(used)])
    begins = np.searchsorted(at_s, at_s - window_s, "right")
    return float((total[1:] - total[begins]).max())
