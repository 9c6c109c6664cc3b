"""The mean token rate of a model's entitlements: what a client's share compares with."""

from typing import Final

LEAST_SHARE: Final = 0.05
MOST_SHARE: Final = 20.0


class MeanRate:
    """Of the entitlements that state a rate; kept by adding and taking away."""

    __slots__ = ("count", "total_tokens_per_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_tokens_per_s = 0.0

    def add(self, tokens_per_s: float) -> None:
        """An entitlement states this rate; 0 for none."""
        if tokens_per_s > 0:
            self.count += 1
            self.total_tokens_per_s += tokens_per_s

    def remove(self, tokens_per_s: float) -> None:
        """What `add` was told no longer holds."""
        if tokens_per_s > 0:
            self.count -= 1
            self.total_tokens_per_s = max(0.0, self.total_tokens_per_s - tokens_per_s)

    def share(self, tokens_per_s: float) -> float:
        """A rate over the mean one, within [LEAST_SHARE, MOST_SHARE]; 1 where none is stated."""
        if tokens_per_s <= 0 or not self.count or self.total_tokens_per_s <= 0:
            return 1.0
        share = tokens_per_s * self.count / self.total_tokens_per_s
        if LEAST_SHARE <= share <= MOST_SHARE:
            return share
        return LEAST_SHARE if share < LEAST_SHARE else MOST_SHARE
