"""Who tries keys waits: after some wrong ones an address gets its refusals late.

Only refusals wait. A known key is served at once from whatever address, so nobody can lock out
others behind the same one, and the key of who is served costs nothing more.
"""

import ipaddress
import time
from collections.abc import Callable
from typing import Final

FREE: Final = 10
"""Refusals that an address gets at once."""
FORGIVEN_EVERY_S: Final = 2.0
"""And one more after so long."""
DELAY_S: Final = 1.0
MOST_ADDRESSES: Final = 10_000
"""Those that tried longest ago are forgotten first."""


class WrongKeys:
    """Refused keys by client address; an IPv6 address counts as its /64 network."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._forgiven_at_s: dict[str, float] = {}
        """When the last of an address's refusals will be forgotten; oldest tries first."""

    def delay_s(self, address: str) -> float:
        """Note a refused key, or none, from `address`: how long its refusal is to wait."""
        who = _network(address)
        now_s = self._clock()
        owed_s = max(0.0, self._forgiven_at_s.pop(who, now_s) - now_s)
        free = owed_s <= (FREE - 1) * FORGIVEN_EVERY_S
        self._forgiven_at_s[who] = now_s + owed_s + (FORGIVEN_EVERY_S if free else 0.0)
        if len(self._forgiven_at_s) > MOST_ADDRESSES:
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
