"""The rate of requests that a trace's times state: over its busy time, or in its busiest windows.

Idle time is not averaged in: nights and weekends need no nodes, and the mean over them plans a
fleet that fails by day.
"""

from math import inf
from typing import Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.workload.workload import Floats

WINDOW_S: Final = 300.0
_FIX: Final = "give --rate, in requests/s"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, and what they are."""

    per_s: float
    said: str
    """In words, for readers of a plan."""


def rate_of(times_s: Floats, quantile: float | None = None) -> Rate:
    """The mean over busy five-minute windows, or a quantile of the windows' rates.

    Windows are of equal length, from the first request to the last; one is busy if a request came
    in it. Raises PlanError for a quantile outside 0 ... 1, and for times that state no rate.
    """
    if quantile is not None and not 0 < quantile <= 1:
        raise PlanError(f"a rate quantile of {quantile:g}", "give one above 0, at most 1")
    known = np.sort(times_s[np.isfinite(times_s)])
    span_s = float(known[-1] - known[0]) if len(known) else 0.0
    if not span_s > 0:
        raise PlanError("the workload has no times", _FIX)
    windows = max(1, round(span_s / WINDOW_S))
    counts, _ = np.histogram(known, bins=windows)
    each_s = span_s / windows
    busy = counts[counts > 0]
    if quantile is not None:
        per_s = float(np.quantile(busy / each_s, quantile))
        said = f"the {quantile:g} quantile of {len(busy)} busy five-minute windows"
        return Rate(per_s=per_s, said=said)
    mean = (len(known) - 1) / (len(busy) * each_s)
    if windows == 1:
        return Rate(per_s=mean, said=f"the mean over {span_s:,.0f} s")
    return Rate(per_s=mean, said=f"the mean over {len(busy)} busy five-minute windows of {windows}")


def given(per_s: float) -> Rate:
    """A rate that the caller states; raises PlanError unless it is above 0."""
    if not 0 < per_s < inf:
        raise PlanError(f"a rate of {per_s:g}/s", "give the requests/s to serve")
    return Rate(per_s=per_s, said="as given")
