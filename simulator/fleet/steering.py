"""Moving a simulated fleet's boundaries while it runs, as the gateway moves its own."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One pool up to now."""

    sent: int
    """Requests that were sent to an instance."""
    finished: int
    preemptions: int
    slots_used: float
    """Sequences over slots; above 1 while requests wait."""
    kv_used: float
    """Share of its KV cache."""


class Steer(Protocol):
    """Decides on the boundaries every `every_s` > 0 seconds."""

    every_s: float

    def step(self, now_s: float, pools: Sequence[Seen]) -> Sequence[int] | None:
        """New boundaries, one for each pool but the last; None to leave them."""
        ...
