"""Whether each entitlement and pool gets what it is promised, by counts of simulated runs.

Pure: counts in, verdicts out. A share holds if its whole interval lies at or above the promise,
breaks if all of it lies below, and else nobody can tell.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan, sqrt
from typing import Final, Literal

import msgspec

from gateway.records.proof import Claim, Interval, Kind, Verdict

Direction = Literal["better", "worse", "different"]

PROMISED: Final = 0.99
"""Share of an entitlement's demand that is served in time, and of a pool's that it serves."""
LIMIT_DOUBT: Final = 0.5
"""Relative doubt about refusals by own limits that the log has, too: clients may wait otherwise."""
_OVERDUE: Final = "perhaps cut off (first_byte_s, idle_s)"
LATE: Final = "late in "
"""Prefix of a loss: too slow, in that pool."""
CHANGE: Final = 0.1
"""Least relative change of a measure that is a difference."""
_Z: Final = 1.959964
_T: Final = {2: 12.706, 3: 4.303, 4: 3.182}
"""Two-sided 95 % quantiles of Student's t, by number of seeds."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """An entitlement or a pool in one run, after the warm-up; weighted where a log is sampled."""

    requests: float
    """Without those that a class is not promised."""
    simulated: int
    lost: Mapping[str, float]
    """Requests that were refused or late, by reason; without `limited`."""
    limited: float = 0.0
    """Refused by an entitlement's own limits."""
    limited_before: float = 0.0
    """Refused by its own limits when the log was written, or by the configuration in force."""
    overdue: float = 0.0
    """Served, if the file's time-outs towards engines do not cut them off."""
    doubt: float = LIMIT_DOUBT
    """How wrong `limited_before` may be, relatively."""
    per_s: float = 0.0
    """Requests per second."""
    unserved: float = 0.0
    """Share of all its requests that are not served, promised or not."""
    ttft_p99_s: float = nan
    slots: int = 0
    """Of a pool; of one that computes prompts alone, its engines."""
    unit: str = "slots"
    expected: float = nan
    """What of them the demand needs on average; NaN if nothing was served."""
    peak: float = nan
    """What it needs in its busiest five minutes."""


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one model."""

    entitlements: Mapping[str, Counts]
    pools: Mapping[str, Counts]
    window: int
    """Requests in the compression window."""
    guessed: int
    """Those of lengths for which the log does not say whether they can be cut."""


class Finding(Claim, frozen=True, kw_only=True):
    """The verdict on one subject, with what reports show besides."""

    requests: int = 0
    measures: Mapping[str, Interval] = {}
    """Further figures by which two configurations are compared; lower is better."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A subject for which two configurations differ."""

    kind: Kind
    name: str
    model: str
    direction: Direction
    words: str


def judge(
    subject: Finding,
    promise: str,
    runs: Sequence[Counts],
    *,
    limits: str = "",
    pools: Mapping[str, Sequence[Counts]],
) -> Finding:
    """The verdict on an entitlement or a pool; `runs` and `pools` have the counts of each seed.

    `promise` says in words what counts as kept, `limits` which limits are the entitlement's own.
    """
    requests = _over_seeds([run.requests for run in runs]).value
    if requests < 1:
        return msgspec.structs.replace(subject, reason="the log has no request for it")
    kept, needed = _kept(runs), _over_seeds([run.expected for run in runs])
    verdict: Verdict = "breaks" if kept.high < PROMISED else "cannot tell"
    # A pool that needs more slots than it has fills up, however long its queue holds out.
    slots = runs[0].slots
    if slots and needed.low > slots:
        verdict = "breaks"
    elif kept.low >= PROMISED and not needed.high >= (slots or float("inf")):
        verdict = "holds"
    lost: Counter[str] = Counter()
    own = f"refused by its own limits ({limits})"
    for run in runs:
        lost.update({cause: count / len(runs) for cause, count in run.lost.items()})
        excess = max(0.0, run.limited - run.limited_before) / len(runs)
        lost.update({own: excess, _OVERDUE: run.overdue / len(runs)})
    cause, count = lost.most_common(1)[0]
    pool = cause.removeprefix(LATE)
    if pool in pools:
        pool = _tightest({name: pools[name] for name in (pool, f"{pool}/prefill") if name in pools})
    why = f"; {_slots(runs)}" if slots else ""
    if pool in pools:
        why = f"; because {pool} has {_slots(pools[pool])}"
    elif count and kept.low < PROMISED:
        if pools and cause != own:
            pool = _tightest(pools)
            why = f"; {pool} has {_slots(pools[pool])}"
        why = f"; because {count:,.0f} were {cause}{why}"
    before = _over_seeds([run.limited_before for run in runs]).value
    less = f" (less {before:,.0f} that its limits refuse already)" if before >= 1 else ""
    measures = {
        "first token P99, s": _over_seeds([run.ttft_p99_s for run in runs]),
        "share not served": _over_seeds([run.unserved for run in runs]),
        "share of slots needed": _over_seeds([run.expected / (slots or nan) for run in runs]),
    }
    return msgspec.structs.replace(
        subject,
        verdict=verdict,
        reason=f"{promise} for {words_of(kept)} of {requests:,.0f} requests{less}, "
        f"{100 * PROMISED:g} % promised{why}",
        requests=round(requests),
        kept=kept,
        requests_per_s=_over_seeds([run.per_s for run in runs]).value,
        excused=_over_seeds([min(run.limited, run.limited_before) for run in runs]).value
        / requests,
        measures={name: each for name, each in measures.items() if not isnan(each.value)},
    )


def beside(new: Tally, old: Tally) -> Tally:
    """A run in which refusals by own limits count beyond those of the configuration in force."""
    counts = {
        name: msgspec.structs.replace(
            mine, limited_before=old.entitlements[name].limited, doubt=0.0
        )
        if name in old.entitlements
        else mine
        for name, mine in new.entitlements.items()
    }
    return msgspec.structs.replace(new, entitlements=counts)


def withheld(finding: Finding, doubts: Sequence[str]) -> Finding:
    """The finding without its verdict: what it rests on is not known."""
    if not doubts or finding.kept is None:
        return finding
    simulated = finding.reason
    if "(simulated: " not in simulated:
        simulated = f"(simulated: {simulated})"
    reason = f"{'; '.join(doubts)} {simulated}"
    return msgspec.structs.replace(finding, verdict="cannot tell", reason=reason)


def overall(findings: Sequence[Finding]) -> Verdict:
    """Breaks if anything breaks, else cannot tell if anything is not known."""
    verdicts = {finding.verdict for finding in findings}
    if "breaks" in verdicts:
        return "breaks"
    return "holds" if verdicts == {"holds"} else "cannot tell"


def changes(before: Sequence[Finding], after: Sequence[Finding]) -> Iterator[Change]:
    """Subjects whose verdict or figures differ, in the order of `after`; then those that went."""
    old = {(was.kind, was.model, was.name): was for was in before}
    for new in after:
        was = old.pop((new.kind, new.model, new.name), None)
        said = list(_differences(was, new))
        if said:
            directions = {direction for direction, _ in said}
            direction: Direction = "worse" if "worse" in directions else said[0][0]
            words = "; ".join(words for _, words in said)
            yield Change(
                kind=new.kind, name=new.name, model=new.model, direction=direction, words=words
            )
    for was in old.values():
        yield Change(
            kind=was.kind, name=was.name, model=was.model, direction="different", words="gone"
        )


def _differences(was: Finding | None, new: Finding) -> Iterator[tuple[Direction, str]]:
    if was is None:
        yield ("worse" if new.verdict == "breaks" else "different"), f"new, {new.verdict}"
        return
    if was.verdict != new.verdict:
        order = ("breaks", "cannot tell", "holds")
        up = order.index(new.verdict) > order.index(was.verdict)
        yield ("better" if up else "worse"), f"{was.verdict} -> {new.verdict}"
    if was.kept and new.kept and not _overlap(was.kept, new.kept):
        up = new.kept.value > was.kept.value
        yield ("better" if up else "worse"), f"kept {words_of(was.kept)} -> {words_of(new.kept)}"
    for name, now in new.measures.items():
        then = was.measures.get(name, now)
        if not _overlap(then, now) and abs(now.value - then.value) > CHANGE * then.value:
            words = f"{name} {then.value:.3g} -> {now.value:.3g}"
            yield ("worse" if now.value > then.value else "better"), words


def _overlap(a: Interval, b: Interval) -> bool:
    return a.low <= b.high and b.low <= a.high


def _kept(runs: Sequence[Counts]) -> Interval:
    """The share that is kept, of the demand without what its own limits refused before.

    How much they would refuse again is in doubt: clients of the log may come back otherwise. So is
    what becomes of requests that may outlast a time-out: a stream's head may come at once.
    """
    bounds = []
    for sign in (0, -1, 1):
        shares = []
        for run in runs:
            excused = min(run.limited, run.limited_before * (1 + sign * run.doubt))
            lost = sum(run.lost.values()) + run.limited - excused
            lost += run.overdue if sign < 0 else 0.0
            shares.append(1 - lost / max(run.requests - excused, 1.0))
        bounds.append(_interval(shares, min(run.simulated for run in runs)))
    middle, strict, mild = bounds
    return Interval(value=middle.value, low=strict.low, high=mild.high)


def _interval(shares: Sequence[float], count: int) -> Interval:
    """A share's bounds (95 %): Wilson's of one seed, or those over the seeds if they are wider."""
    seeds = _over_seeds(shares)
    p, n = min(1.0, max(0.0, seeds.value)), max(count, 1)
    one = wilson(p, n)
    low, high = min(seeds.low, one.low), max(seeds.high, one.high)
    return Interval(value=p, low=max(0.0, low), high=min(1.0, high))


def wilson(share: float, count: float) -> Interval:
    """Wilson's interval (95 %) of a share of at least one request."""
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def _over_seeds(values: Sequence[float]) -> Interval:
    k, mean = len(values), sum(values) / len(values)
    spread = sqrt(sum((value - mean) ** 2 for value in values) / (k - 1)) if k > 1 else 0.0
    half = _T[k] * spread / sqrt(k) if spread else 0.0
    return Interval(value=mean, low=mean - half, high=mean + half)


def _tightest(pools: Mapping[str, Sequence[Counts]]) -> str:
    """The pool of whose slots most are needed."""
    use = {name: each[0].peak / each[0].slots for name, each in pools.items()}
    return max(use, key=lambda name: -1.0 if isnan(use[name]) else use[name])


def _slots(runs: Sequence[Counts]) -> str:
    peak = _over_seeds([run.peak for run in runs]).value
    slots, unit = runs[0].slots, runs[0].unit
    unit = unit.removesuffix("s") if slots == 1 else unit
    return f"{slots} {unit} for {peak:.3g} expected in its busiest 5 minutes"


def words_of(kept: Interval) -> str:
    """A share as people read it."""
    low, high = 100 * kept.low, 100 * kept.high
    return f"{100 * kept.value:.1f} % ({low:.1f} to {high:.1f})"
