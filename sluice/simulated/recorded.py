"""Read traces with arrival times, for `--arrivals recorded` and for replay."""

from pathlib import Path

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.readers.demand import read_demand
from planner.readers.fields import parse_field_map
from planner.readers.traces import records_of
from simulator.fleet.arrivals import recorded
from simulator.fleet.traffic import Floats, Ints


class RecordedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by time, refused ones included; columns of equal length."""

    at_s: Floats
    """Seconds from the first request."""
    prompts: Ints
    answers: Ints
    categories: tuple[str, ...]
    """Category of each request; empty if not known."""
    entitlements: tuple[str, ...] = ()
    """Entitlement of each request; empty if not known."""
    text_bytes: Floats | None = None
    """Bytes of each prompt's text, NaN if not known; None if no record tells."""
    asked: Floats | None = None
    """Limit that each request set for its answer, NaN for none; None if no record tells."""


_FIX = "name its fields: --fields prompt=FIELD,answer=FIELD,time=FIELD"


def scaled(found: RecordedTraffic, name: str, rate_per_s: float | None) -> Floats:
    """The recording's times, at another rate if one is given; raises PlanError for a bad one."""
    try:
        return recorded(found.at_s, rate_per_s=rate_per_s)
    except ValueError as error:
        raise PlanError(f"{name}: {error}", "give --rate above 0, or none") from None


def read_recorded(
    path: Path, *, fields: str | None = None, requests: int | None = None
) -> RecordedTraffic:
    """A trace's demand in order of time, from its first request on.

    Requests whose lengths or times are not known are left out. Raises PlanError if none is left.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}", "give a trace: CSV or JSON lines") from None
    mapped = parse_field_map(fields) if fields else None
    demand = read_demand(records_of(text, path.name), path.name, mapped)
    timed = [r for r in demand.requests if r.measured and np.isfinite(r.time_s)]
    if not timed:
        raise PlanError(f"{path.name} has no requests with lengths and times", _FIX)
    rows = sorted(timed, key=lambda r: (r.time_s, r.prompt, r.answer))[:requests]
    at_s = np.array([r.time_s for r in rows])
    categories = tuple(r.category for r in rows)
    entitlements = tuple(r.entitlement for r in rows)
    return RecordedTraffic(
        at_s=at_s - at_s[0],
        prompts=_tokens([r.prompt for r in rows]),
        answers=_tokens([r.answer for r in rows]),
        categories=categories if any(categories) else (),
        entitlements=entitlements if any(entitlements) else (),
        text_bytes=_known([r.text_bytes for r in rows]),
        asked=_known([r.asked for r in rows]),
    )


def _tokens(values: list[float]) -> Ints:
    return np.maximum(1, np.rint(values)).astype(np.int64)


def _known(values: list[float]) -> Floats | None:
    found = np.array(values)
    return found if np.isfinite(found).any() else None
