"""Windows of time that limits count in: by the calendar of a time zone, or the latest days.

A window is made of slices, each of which is counted apart. One by the calendar has one slice. The
latest 30 days have 31 slices, of a day each: a slice counts until all of it is too old, so that
no span of 30 days ever sees more than the amount.
"""

from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

CALENDAR: Final = ("hour", "day", "week", "month")
MINUTE_S: Final = 60
MINUTE_STEP_S: Final = 2
DAY_S: Final = 86_400
SLICES: Final = 30
"""Slices that the latest days consist of, beside the current one."""

_COUNTED_S: Final = {
    "minute": MINUTE_S + MINUTE_STEP_S,
    "hour": 2 * 3600,
    "day": 2 * DAY_S,
    "week": 8 * DAY_S,
    "month": 32 * DAY_S,
}
_LONGEST_S: Final = 100 * DAY_S


class Span(NamedTuple):
    """The current slice of a window."""

    start_s: float
    """Unix time."""
    next_s: float
    """Start of the next slice."""
    step_s: int
    """Length of all slices; 0 for those of the calendar."""
    kept_s: int
    """How long before the current slice's start another one may have started and still counts."""


class Spans:
    """The current slices of all windows in use, worked out once in each slice."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Span] = {}

    def at(self, window: str, zone: str, now_s: float) -> Span:
        """The slice that holds a time; `now_s` Unix seconds."""
        key = (window, zone)
        span = self._known.get(key)
        if span is None or not span.start_s <= now_s < span.next_s:
            span = self._known[key] = span_of(window, zone, now_s)
        return span


def span_of(window: str, zone: str, unix_s: float) -> Span:
    """The slice of a window that holds a time."""
    if window in CALENDAR:
        start_s, next_s = _calendar(window, _zone(zone), unix_s)
        return Span(start_s, next_s, 0, 0)
    if window == "minute":
        step_s, kept_s = MINUTE_STEP_S, MINUTE_S
    else:
        kept_s = days_of(window) * DAY_S
        step_s = kept_s // SLICES
    start_s = float(int(unix_s // step_s) * step_s)
    return Span(start_s, start_s + step_s, step_s, kept_s)


def days_of(window: str) -> int:
    """The number of a window such as `30d`."""
    return int(window.removesuffix("d"))


def counted_s(window: str) -> int:
    """How long after its start a slice of a window counts at most, whatever clocks are set to."""
    return _COUNTED_S.get(window, _LONGEST_S)


def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)  # which the library keeps


def _calendar(window: str, zone: tzinfo, unix_s: float) -> tuple[float, float]:
    here = datetime.fromtimestamp(unix_s, zone)
    if window == "hour":
        # Counted back from now: an hour that clocks repeat is an hour of its own.
        start_s = float(int(unix_s) - here.minute * 60 - here.second)
        return start_s, start_s + 3600.0
    first = last = here.date()
    if window == "day":
        last = first + timedelta(days=1)
    elif window == "week":
        first -= timedelta(days=first.weekday())
        last = first + timedelta(days=7)
    else:
        first = first.replace(day=1)
        last = (first + timedelta(days=32)).replace(day=1)
    return _midnight(first, zone), _midnight(last, zone)


def _midnight(day: date, zone: tzinfo) -> float:
    """When a day begins.

    Of a midnight that comes twice the first counts, and where clocks skip it, the moment at which
    they do.
    """
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()
