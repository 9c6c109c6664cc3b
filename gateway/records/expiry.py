"""The one reading of `expires_at`, for the file and the admin API."""

from datetime import UTC, datetime
from typing import Final

FIRST_YEAR: Final = 1971
LAST_YEAR: Final = 9998
"""Years in UTC. Beyond them a time zone leads out of the calendar; 0 in Unix seconds is none."""
INSTANT: Final = f"a date and time in the years {FIRST_YEAR} to {LAST_YEAR}"


def in_utc(at: datetime | str) -> datetime | None:
    """A time (ISO 8601) in UTC, which it is in without an offset; None for one out of range."""
    try:
        if isinstance(at, str):
            at = datetime.fromisoformat(at)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return at if FIRST_YEAR <= at.year <= LAST_YEAR else None
