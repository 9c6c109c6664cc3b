"""Which conversations were served as they came: their next turn begins with the same bytes.

A turn's messages are the beginning of the next turn's. Kept are digests of whole prompts; the
next turn has a point where this one ended (`prefix_points`), so it is asked for at its points
and nothing is compared. Bounded: between half and all of `kept`, the longest unused go first.
"""

from typing import Final

from gateway.policy.scheduling.scheduler import Points

KEPT: Final = 20_000


class Conversations:
    """Prompts that engines were sent unchanged, of one model."""

    __slots__ = ("_before", "_half", "_recent")

    def __init__(self, kept: int = KEPT) -> None:
        """At most `kept` (>= 2) prompts."""
        self._half = kept // 2
        self._recent: set[int] = set()
        self._before: set[int] = set()

    def __len__(self) -> int:
        return len(self._recent | self._before)

    def remember(self, tenant: str, points: Points) -> None:
        """Note a prompt that was served as it came, by its points."""
        if not points:
            return
        self._recent.add(hash((tenant, points[-1][1])))
        if len(self._recent) >= self._half:
            self._before, self._recent = self._recent, set()

    def continues(self, tenant: str, points: Points) -> bool:
        """Whether an earlier turn of this conversation, or the same, was served as it came."""
        keys = [hash((tenant, digest)) for _, digest in points]
        return not (self._recent.isdisjoint(keys) and self._before.isdisjoint(keys))
