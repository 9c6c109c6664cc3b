"""Count the compressor's results of one model: its success p_c, its cost, and success by depth.

Depth is a request's total over the boundary that it shall fit under: from 1 up to gamma. A prompt
whose task needs its whole text says nothing of depths; it costs time all the same.
"""

from math import ceil
from typing import Final

from gateway.records.decision import CompressionSection

BINS: Final = 20
"""Depths are counted by steps of STEP, from 1 to 3."""
STEP: Final = 0.1
MEMORY: Final = 500
"""Results over which the success is averaged."""
BY_DEPTH: Final = frozenset(
    {
        "block_too_large",
        "cut_too_deep",
        "no_budget",
        "over_budget",
        "protected_too_large",
        "too_coarse",
    }
)
"""Reasons that a smaller cut would not have had."""
_TINY: Final = 1e-9


class CompressionWatch:
    """Totals since the start; whoever reads them takes differences."""

    __slots__ = ("compressed", "fitted", "judged", "seconds", "success", "tried", "tried_at")

    def __init__(self) -> None:
        self.tried = 0
        """Prompts given to the compressor."""
        self.compressed = 0
        self.seconds = 0.0
        """What they waited for it, together."""
        self.judged = 0
        """Prompts in the compression window, those refused before the compressor as well."""
        self.success: float | None = None
        """Share of the latest of these that were compressed, p_c; None before the first."""
        self.tried_at = [0] * BINS
        """Compressed ones and those refused for their depth, by depth."""
        self.fitted = [0] * BINS
        """Compressed ones, by depth."""

    def noted(self, reason: str, depth: float, seconds: float) -> None:
        """Count one result of the compressor; `reason` is "" for a compressed prompt."""
        done = not reason
        self.tried += 1
        self.compressed += done
        self.seconds += seconds
        if done or reason in BY_DEPTH:
            at = bin_of(depth)
            self.tried_at[at] += 1
            self.fitted[at] += done

    def settled(self, section: CompressionSection) -> None:
        """Count a settled request in p_c, if its prompt was in the window and looked at."""
        cut = section.cut
        if cut is None:
            return
        self.judged += 1
        known = 0.0 if self.success is None else self.success
        self.success = known + (float(cut) - known) / min(self.judged, MEMORY)


def bin_of(depth: float) -> int:
    """The step that ends with `depth` or beyond: 0 for depths up to 1.1."""
    return min(max(ceil((depth - 1) / STEP - _TINY) - 1, 0), BINS - 1)
