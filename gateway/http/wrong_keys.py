"""Slows down guessing of API keys: after some wrong keys an address gets its refusals late.

Late refusals of one address come one after the other, so that many connections guess no faster
than a few. Only refusals are delayed. Known keys are served at once from any address, so a client
cannot lock out others behind the same address, and known keys cost nothing extra.
"""

import ipaddress
import time
from collections.abc import Callable
from typing import Final

FREE: Final = 10
"""Refusals that an address gets at once."""
FORGIVEN_EVERY_S: Final = 2.0
"""Seconds after which an address gets one more refusal at once."""
DELAY_S: Final = 1.0
"""Delay of a late refusal, if no other one waits."""
APART_S: Final = 0.1
"""Between two late refusals of one address."""
MAX_DELAY_S: Final = 10.0
"""Longest delay, however many wait."""
MAX_ADDRESSES: Final = 10_000
"""Addresses remembered; the one with the oldest attempt is forgotten first."""


class WrongKeys:
    """Refused keys by `network` of the client's address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._noted: dict[str, tuple[float, float]] = {}
        """When all refusals of an address will be forgotten, and when its last late one comes;
        oldest attempts first."""

    def delay_s(self, address: str) -> float:
        """Note a refused or missing key from `address`; returns the delay of the refusal (s)."""
        who, now_s = network(address), self._clock()
        forgiven_at_s, last_late_s = self._noted.pop(who, (now_s, 0.0))
        pending_s, delay_s = max(0.0, forgiven_at_s - now_s), 0.0
        if pending_s <= (FREE - 1) * FORGIVEN_EVERY_S:
            pending_s += FORGIVEN_EVERY_S
        else:
            delay_s = min(max(DELAY_S, last_late_s + APART_S - now_s), MAX_DELAY_S)
            last_late_s = now_s + delay_s
        self._noted[who] = now_s + pending_s, last_late_s
        if len(self._noted) > MAX_ADDRESSES:
            del self._noted[next(iter(self._noted))]
        return delay_s


def network(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else parsed.packed[:8].hex()
