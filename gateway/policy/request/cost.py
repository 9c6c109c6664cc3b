"""How long reading a body takes at most, from the number of its separators and its length.

Counting costs a thousandth of reading. The weights are what the slowest bodies took on one
processor of 2026, interpreted; separators inside of texts count like others, so a text of code
is estimated at several times what it takes.
"""

from typing import Final

LOOP_US: Final = 5_000.0
"""What the event loop may spend on one body; another process reads what takes longer."""
LIGHT_BYTES: Final = 64 * 1024
"""A body whose members are all known takes less than that, whatever is in it."""
HEAVY_BYTES: Final = 1024 * 1024
"""A larger body is not even counted on the event loop."""


def of_known_us(raw: bytes) -> float:
    """Of a body whose messages and parts have no unknown members."""
    return 3.0 * raw.count(b"{") + 0.25 * (raw.count(b",") + raw.count(b"[")) + 0.004 * len(raw)


def of_any_us(raw: bytes) -> float:
    """Of a body that may have unknown members, each of which is looked at."""
    return of_known_us(raw) + 1.2 * raw.count(b":")


def is_heavy(raw: bytes, *, form: bool) -> bool:
    """Whether the event loop should leave a body to another process before it looks into it.

    Of a form only what is large is: the rest of what is read of one is bounded.
    """
    size = len(raw)
    if size <= LIGHT_BYTES or form:
        return size > 4 * HEAVY_BYTES
    return size > HEAVY_BYTES or of_known_us(raw) > LOOP_US
