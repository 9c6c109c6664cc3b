"""The actions of one hostile client."""

from typing import Literal

import msgspec

Step = bytes | float | Literal["half-close"]
"""Bytes to send, seconds to wait, or the end of what the client sends."""


class AttackCase(msgspec.Struct, frozen=True, kw_only=True):
    """One connection's life."""

    family: str
    steps: tuple[Step, ...]
    whole: bool = False
    """Whether a server must answer: one complete request, or a fault visible in what was sent."""
    read_bytes: int | None = None
    """How much of the answer is read before the client resets; None for all."""
