"""Moves a simulated fleet's boundaries while it runs, as the gateway moves its own."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class PoolObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's figures so far."""

    sent: int
    """Requests sent to an instance."""
    finished: int
    preemptions: int
    slots_used: float
    """Sequences over slots; above 1 while requests wait."""
    kv_used: float
    """Share of its KV cache in use."""


class Steer(Protocol):
    """Decides on the boundaries every `every_s` > 0 seconds."""

    every_s: float

    def step(self, now_s: float, pools: Sequence[PoolObservation]) -> Sequence[int] | None:
        """New boundaries, one for each pool but the last; None to keep the present ones."""
        ...
