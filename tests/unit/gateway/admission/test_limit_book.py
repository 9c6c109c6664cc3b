"""Windows of time begin and end where calendars say, also where clocks change."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.limit_book import CALENDAR, counted_s, span_of
from tests.histories import histories

ZONES = sorted(
    {"UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kolkata"} & available_timezones()
)
ODD = sorted(
    {"Australia/Lord_Howe", "America/Havana", "Africa/Cairo", "Pacific/Apia"}
    & available_timezones()
)


def unix(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("window", "at", "start", "end"),
    [
        ("day", "2026-06-10T13:30", "2026-06-10", "2026-06-11"),
        ("day", "2026-03-29T13:30", "2026-03-29", "2026-03-30"),
        ("day", "2026-10-25T12:00", "2026-10-25", "2026-10-26"),
        ("week", "2026-06-14T23:59", "2026-06-08", "2026-06-15"),
        ("week", "2026-06-15T00:00", "2026-06-15", "2026-06-22"),
        ("month", "2026-12-31T23:59", "2026-12-01", "2027-01-01"),
        ("month", "2028-02-29T12:00", "2028-02-01", "2028-03-01"),
        ("hour", "2026-06-10T13:30", "2026-06-10T13:00", "2026-06-10T14:00"),
    ],
)
def test_a_calendar_window_has_local_ends(window: str, at: str, start: str, end: str) -> None:
    span = span_of(window, "Europe/Berlin", unix(at))
    assert (span.start_s, span.next_s) == (unix(start), unix(end))


def test_a_midnight_that_clocks_skip_is_the_moment_at_which_they_do() -> None:
    span = span_of("day", "America/Sao_Paulo", unix("2018-11-04T12:00", "America/Sao_Paulo"))
    began = datetime.fromtimestamp(span.start_s, ZoneInfo("America/Sao_Paulo"))
    assert (began.hour, span.next_s - span.start_s) == (1, 23 * 3600)


@given(
    window=st.sampled_from((*CALENDAR, "minute", "30d", "7d", "90d")),
    zone=st.sampled_from(ZONES + ODD),
    when=st.datetimes(datetime(2001, 1, 1), datetime(2035, 1, 1)),  # noqa: DTZ001
    step_s=st.floats(0, 200_000),
)
@histories(400, steps=1)
def test_every_moment_is_in_exactly_one_slice(
    window: str, zone: str, when: datetime, step_s: float
) -> None:
    now_s = (when - datetime(1970, 1, 1)) / timedelta(seconds=1)  # noqa: DTZ001
    span = span_of(window, zone, now_s)
    assert span.start_s <= now_s < span.next_s
    later = span_of(window, zone, now_s + step_s)
    assert later.start_s == span.start_s or later.start_s >= span.next_s or window == "hour"
    assert span_of(window, zone, span.next_s).start_s == span.next_s or window == "hour"


@given(
    window=st.sampled_from((*CALENDAR, "minute", "1d", "30d", "90d")),
    zone=st.sampled_from(ZONES + ODD),
    when=st.datetimes(datetime(2001, 1, 1), datetime(2035, 1, 1)),  # noqa: DTZ001
)
@histories(200)
def test_no_slice_counts_for_longer_than_is_said(window: str, zone: str, when: datetime) -> None:
    span = span_of(window, zone, when.replace(tzinfo=ZoneInfo(zone)).timestamp())
    assert span.next_s + span.kept_s - span.start_s <= counted_s(window)
