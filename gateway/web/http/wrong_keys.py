"""Slows down guessing of API keys: after some wrong keys an address gets its refusals late.

Only refusals are delayed. Known keys are served at once from any address, so a client cannot lock
out others behind the same address, and known keys cost nothing extra.
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
MAX_ADDRESSES: Final = 10_000
"""Addresses remembered; the one with the oldest attempt is forgotten first."""


class WrongKeys:
    """Refused keys by client address; an IPv6 address counts as its /64 network."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._forgiven_at_s: dict[str, float] = {}
        """When all refusals of an address will be forgotten; oldest attempts first."""

    def delay_s(self, address: str) -> float:
        """Note a refused or missing key from `address`; returns the delay of the refusal (s)."""
        who = _network(address)
        now_s = self._clock()
        pending_s = max(0.0, self._forgiven_at_s.pop(who, now_s) - now_s)
        free = pending_s <= (FREE - 1) * FORGIVEN_EVERY_S
        self._forgiven_at_s[who] = now_s + pending_s + (FORGIVEN_EVERY_S if free else 0.0)
        if len(self._forgiven_at_s) > MAX_ADDRESSES:
            del self._forgiven_at_s[next(iter(self._forgiven_at_s))]
        return 0.0 if free else DELAY_S


def _network(address: str) -> str:
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else found.packed[:8].hex()
